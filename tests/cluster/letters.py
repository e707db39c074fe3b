"""An environment for runs on several processes: answers in the lower half of the alphabet score.

Each question may take several turns, more of them the higher the answers are, so rollouts differ in
length.
"""

import asyncio

import rolltree as rt


class Letters(rt.MultiTurnEnv):
    """Turns until an answer begins low in the alphabet."""

    pause_s = 0.0

    async def env_response(self, messages, state):
        await asyncio.sleep(self.pause_s)
        return [{"role": "user", "content": "again"}]

    @rt.stop
    async def is_low(self, state):
        steps = state["trajectory"]
        return bool(steps) and low(steps[-1]["completion"][-1]["content"] or "") > 0.5


def low(text):
    return sum(ord(c) < 80 for c in text) / max(1, len(text))


@rt.run_inline
def score(state):
    """The share of low characters in all answers, less for more turns."""
    texts = [step["completion"][-1]["content"] or "" for step in state["trajectory"]]
    return sum(map(low, texts)) / max(1, len(texts)) - 0.1 * len(texts)


def load_environment(num_train: int = 6, pause_s: float = 0.0):
    def rows(split, number):
        return [{"question": f"{split} {n}", "answer": ""} for n in range(number)]

    env = Letters(
        dataset=rows("train", num_train),
        eval_dataset=rows("eval", 4),
        rubric=rt.Rubric([score]),
        max_turns=3,
    )
    env.pause_s = pause_s
    return env
