"""Follow a ball under five cups through five swaps, one written step for each.

    user       c: ab ce ad be cd
    assistant  ceebb

The verifier reads the whole derivation, not only its end: each letter has to follow from the one
before it. A right end by chance, one in five, earns nothing.
"""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import rolltree as rt

CUPS = "abcde"
SWAPS = ["".join(pair) for pair in combinations(CUPS, 2)]
NUM_SWAPS = 5


def after(cup: str, swap: str) -> str:
    """Return where a ball under `cup` is after the swap of two cups."""
    return swap[1 - swap.index(cup)] if cup in swap else cup


def read(question: str) -> tuple[str, list[str]]:
    """Return the first cup and the swaps of a question."""
    cup, swaps = question.split(": ")
    return cup, swaps.split()


def said(state: rt.State) -> str:
    return state["trajectory"][-1]["completion"][-1]["content"] or ""


@rt.run_inline
def verified(state: rt.State) -> float:
    """1 if every step of the derivation is right."""
    return float(said(state) == state["answer"])


@rt.run_inline
def right_end(state: rt.State) -> float:
    """1 if the last cup is right, however it was found."""
    return float(said(state)[-1:] == state["answer"][-1])


def row(rng: random.Random) -> dict[str, Any]:
    cup, swaps = rng.choice(CUPS), rng.choices(SWAPS, k=NUM_SWAPS)
    return {"question": f"{cup}: {' '.join(swaps)}", "answer": derive(cup, swaps)}


def derive(cup: str, swaps: list[str]) -> str:
    """Return where the ball is after each swap."""
    found = ""
    for swap in swaps:
        cup = after(cup, swap)
        found += cup
    return found


def load_environment(num_train: int = 1000, num_eval: int = 200) -> rt.Environment:
    """Return the environment; no question of evaluation is one of training."""
    rng = random.Random(0)
    held_out = [row(rng) for _ in range(num_eval)]
    known = {each["question"] for each in held_out}
    rubric = rt.Rubric([verified])
    rubric.add_metric(right_end)
    return rt.SingleTurnEnv(
        dataset=[
            each for each in (row(rng) for _ in range(num_train)) if each["question"] not in known
        ],
        eval_dataset=held_out,
        rubric=rubric,
    )


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who follows the ball, with a mistake in one step of four."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> str:
        cup, swaps = read(messages[-1]["content"])
        found = ""
        for swap in swaps:
            cup = rng.choice(CUPS) if rng.random() < 0.25 else after(cup, swap)
            found += cup
        return found

    return play


WARM_UP = {"num_games": 980, "num_steps": 400, "batch_size": 32, "lr": 2e-3}
