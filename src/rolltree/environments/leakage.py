"""Evaluation questions that are also training questions."""

from __future__ import annotations

import json
from typing import Any

from rolltree.environments.environment import Environment

MAX_ROWS = 2000
"""Rows of a split that are looked at."""


def shared_questions(env: Environment) -> tuple[list[str], int]:
    """Return the evaluation questions that are also training questions, and the number checked."""
    train_rows, eval_rows = env.own_rows("train"), env.own_rows("eval")
    if train_rows is None or eval_rows is None:
        return [], 0
    train = {_prompt(row) for row in train_rows[:MAX_ROWS]}
    tested = [_prompt(row) for row in eval_rows[:MAX_ROWS]]
    if len(train) == 1 and set(tested) == train:
        # Worlds: their episodes differ by the seed, not by the row.
        return [], len(tested)
    return [prompt for prompt in tested if prompt in train], len(tested)


def _prompt(row: Any) -> str:
    return json.dumps(row["prompt"], sort_keys=True, default=str)
