"""Stored runs with one planted problem each, for what must find it: the narrator and the page.

`plant(folder, "drift")` writes a run of ten steps. Its other numbers are those of a healthy run,
which `plant(folder, None)` writes.
"""

import random

import rolltree as rt
import step_kit
from rolltree.rollouts.record import encode_result
from rolltree.store import Run

PROBLEMS = {
    "zero_variance": "No group had reward variance in steps 6 to 10",
    "breaks": "the chat template strips the reasoning of earlier turns",
    "empty_answers": "Empty answers earn reward",
    "drift": "drift from the trainer's since step 6",
    "timeouts": "The tool search times out",
}
"""Kind of sentence to a part of it."""
NUM_STEPS, GROUPS, SIZE = 10, 4, 4


def plant(folder, problem):
    """Write a training run with a problem of `PROBLEMS`, or None for none."""
    draw = random.Random(0)
    with Run.create(folder, kind="train", config={"model": {"name": "none"}}) as run:
        for step in range(1, NUM_STEPS + 1):
            add_step(run, draw, step, problem)
    return folder


def add_step(run, draw, step, problem=None):
    """Store a step with its rollouts."""
    flat = problem == "zero_variance" and step > 5
    rows = [
        _played(problem, draw, step, group, index, flat)
        for group in range(GROUPS)
        for index in range(SIZE)
    ]
    for row in rows:
        run.add_rollouts(encode_result(row))
    rewards = [row.states[0]["reward"] for row in rows]
    drift = 0.4 if problem == "drift" and step > 5 else 0.001
    run.add_step(
        step,
        {
            "reward/mean": sum(rewards) / len(rewards),
            "train/frac_reward_zero_std": float(flat),
            "train/grad_norm": 0.0 if flat else 1.0,
            "train/sampling/sampling_logp_difference/mean": drift,
            "samples/breaks/reasoning_stripped": float(problem == "breaks"),
        },
    )


def _played(problem, draw, step, group, index, flat):
    """Return a rollout of two calls; later steps are right more often."""
    is_empty = problem == "empty_answers" and index == 0
    is_late = problem == "timeouts" and index % 2 == 0
    right = index == 0 or (index < 3 and draw.random() < step / NUM_STEPS)
    said = "" if is_empty else str(10 + index)
    question = {"role": "user", "content": f"What is 5 + {5 + index}?"}
    first = {"role": "assistant", "content": "<think>Add.</think> I look it up."}
    result = "search took longer than 5 s and was stopped." if is_late else "found"
    told = {"role": "user", "content": result}
    last = {"role": "assistant", "content": said}
    opened, thought, spoke = [1, 2, 3 + index], [20, 21, 22, 23], [30, 31, 32, 40 + index, 33]
    kept = spoke if problem == "breaks" else [*thought, *spoke]
    answer = [33] if is_empty else [50 + draw.randrange(10), 51, 33]
    calls = [
        (opened, [*thought, *spoke], [question], first),
        ([*opened, *kept, 8, 9], answer, [question, first, told], last),
    ]
    steps = [
        step_kit.step(
            prompt_ids,
            completion_ids,
            prompt=prompt,
            completion=[message],
            policy_version=step - 1,
            finish_reason="stop",
            turn=turn,
        )
        for turn, (prompt_ids, completion_ids, prompt, message) in enumerate(calls)
    ]
    name = f"train/{step:06}/g{group:02}"
    request = rt.RolloutRequest(
        request_id=f"{name}/{index}",
        env_id="sums",
        input={"prompt": [question], "example_id": group, "task": "adding"},
        seed=0,
        sampling_seed=index,
        group_id=name,
        index_in_group=index,
        sampling=rt.SamplingParams(),
        phase="train",
        train_step=step,
    )
    error = {
        "tool": "search",
        "type": "ToolTimeLimit",
        "message": result,
        "traceback": "Traceback (most recent call last): ...",
        "phase": "environment",
    }
    state = rt.State(
        input=request.input,
        trajectory=rt.Trajectory(steps),
        reward=0.0 if flat else float(right),
        metrics={"right": float(right)},
        completion=[first, told, last],
        is_completed=True,
        tool_errors=[error] if is_late else [],
    )
    return rt.RolloutResult(request, (state,), None, 1)
