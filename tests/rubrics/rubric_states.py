"""States to score, made by hand."""

from rolltree.values.types import State


def a_step(text="4", reward=None, advantage=None):
    return {
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "completion": [{"role": "assistant", "content": text}],
        "response": None,
        "tokens": None,
        "reward": reward,
        "advantage": advantage,
        "extras": {},
    }


def a_state(text="4", answer="4", steps=None, **more):
    steps = [a_step(text)] if steps is None else steps
    state = State(
        input={
            "prompt": [{"role": "user", "content": "2 + 2?"}],
            "answer": answer,
            "task": "sum",
            "info": {"level": 1},
            "example_id": 7,
        },
        trajectory=steps,
        completion=[{"role": "assistant", "content": text}],
        reward=None,
        advantage=None,
        metrics=None,
        error=None,
        timing={"start_time": 0.0, "generation_ms": 5.0, "scoring_ms": 0.0, "total_ms": 5.0},
    )
    state.update(more)
    return state
