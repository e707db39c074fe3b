"""Sort four letters; a model with random weights never does, so it is first shown how.

    user       gbha
    assistant  abgh

Only a whole right answer is rewarded. The teacher is right in two games of three; the model learns
from its stored games that earned 1.
"""

from __future__ import annotations

import random
from typing import Any

import rolltree as rt

LETTERS = "abcdefghij"
NUM_LETTERS = 4


@rt.run_inline
def sorted_right(completion: rt.Messages, answer: str) -> float:
    """1 if the answer is the sorted letters."""
    return float(completion[-1]["content"] == answer)


def row(rng: random.Random) -> dict[str, Any]:
    letters = rng.sample(LETTERS, NUM_LETTERS)
    return {"question": "".join(letters), "answer": "".join(sorted(letters))}


def load_environment(num_train: int = 1000, num_eval: int = 200) -> rt.Environment:
    """Return the environment; no question of evaluation is one of training."""
    rng = random.Random(0)
    held_out = [row(rng) for _ in range(num_eval)]
    known = {each["question"] for each in held_out}
    rows = [each for each in (row(rng) for _ in range(num_train)) if each["question"] not in known]
    return rt.SingleTurnEnv(dataset=rows, eval_dataset=held_out, rubric=rt.Rubric([sorted_right]))


def teacher(seed: int) -> Any:
    """Return a player who changes the places of two letters in one game of three."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> str:
        letters = sorted(messages[-1]["content"])
        if rng.random() < 1 / 3:
            first, second = rng.sample(range(NUM_LETTERS), 2)
            letters[first], letters[second] = letters[second], letters[first]
        return "".join(letters)

    return play


WARM_UP = {"num_games": 120, "num_steps": 40, "batch_size": 16, "lr": 1e-3, "keep": 1.0}
CONTROL = {"warm": False}
