"""`settle_state`: a state can be scored and stored, whatever other people's code left in it.

Environments and agents may write anything into a state, perhaps only after some answers. A value
that nobody can score, train or store is replaced, and the rollout says so in its
`environment_errors`: it neither loses its reward nor ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from rolltree.tokens import is_plain_step
from rolltree.values.state import INPUT_FIELDS, RAISED
from rolltree.values.steps import MAX_REWARD
from rolltree.values.types import RolloutTiming, State

TEXTS = ("agent", "parent_rollout", "stop_condition", "truncation_reason")
NUMBERS = ("reward", "advantage", "bootstrap_value")
TIMES = tuple(RolloutTiming.__annotations__)


def settle_state(
    state: State, row: Mapping[str, Any] | None = None, calls: list[Any] | None = None
) -> None:
    """Replace the values of a state that are not what their key takes, in place.

    Args:
        state: the state of a rollout that has ended.
        row: the rollout's row; with it, a lost input, trajectory and timing are restored as well.
        calls: the model calls that the environment recorded, in case the state has lost them.
    """
    # This runs several times for every rollout, and nearly every one has nothing odd.
    if (row is None or _is_whole(state, row)) and _is_plain(state):
        return
    from rolltree.rollouts.repair import repair_state

    repair_state(state, row, calls)


_NONE = type(None)
_PLAIN_TYPES = (
    *((key, frozenset([_NONE])) for key in ("error", "final_env_response", *RAISED)),
    *((key, frozenset([float, _NONE])) for key in NUMBERS),
    *((key, frozenset([str, _NONE])) for key in TEXTS),
    ("depth", frozenset([int, _NONE])),
    ("metrics", frozenset([dict, _NONE])),
    ("completion", frozenset([str, list, _NONE])),
)


def _is_plain(state: State) -> bool:
    """Whether a state needs no repair; False if only the longer look can tell."""
    get = dict.get
    for key, types in _PLAIN_TYPES:
        if type(get(state, key)) not in types:
            return False
    metrics = get(state, "metrics")
    for number in (*map(partial(get, state), NUMBERS), *(metrics.values() if metrics else ())):
        if number is not None and (type(number) is not float or not abs(number) <= MAX_REWARD):
            return False
    steps = get(state, "trajectory")
    return isinstance(steps, list) and all(map(is_plain_step, steps))


def _is_whole(state: State, row: Mapping[str, Any]) -> bool:
    """Whether a state still has the inputs of its row, and its times."""
    source, timing = dict.get(state, "input"), dict.get(state, "timing")
    return (
        isinstance(source, dict)
        and isinstance(timing, dict)
        and all(key in source for key in INPUT_FIELDS if key in row)
        and type(source.get("prompt")) is type(row.get("prompt"))
        and all(is_finite(timing.get(key)) for key in TIMES)
    )


def is_finite(value: Any) -> bool:
    """Whether a value is a number that is neither infinite nor NaN."""
    return isinstance(value, int | float) and math.isfinite(value)
