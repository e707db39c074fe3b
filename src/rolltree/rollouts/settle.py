"""`settle_state`: a state can be scored and stored, whatever other people's code left in it.

Environments and agents may write anything into a state, perhaps only after some answers. A value
that nobody can score, train or store is replaced, and the rollout says so in its
`environment_errors`: it neither loses its reward nor ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from rolltree.tokens import Trajectory, is_plain_step
from rolltree.values.state import INPUT_FIELDS, RAISED
from rolltree.values.steps import MAX_REWARD
from rolltree.values.types import RolloutTiming, State

TEXTS = ("agent", "rollout_id", "parent_rollout", "stop_condition", "truncation_reason")
NUMBERS = ("reward", "advantage", "bootstrap_value")
FLAGS = ("is_completed", "terminated", "truncated", "has_step_rewards")
TIMES = tuple(RolloutTiming.__annotations__)
_INPUTS = frozenset(INPUT_FIELDS)


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


def settle_states(
    states: Sequence[State], row: Mapping[str, Any] | None = None, *, are_settled: bool = False
) -> None:
    """Settle the states of one episode, unless each `are_settled` alone already."""
    for state in states:
        if not are_settled:
            settle_state(state, row)
        # A word of the environment's own: as a delegated rollout, it would count in no mean.
        if state.parent_rollout is not None and not any(
            each is not state and each.get("rollout_id") == state.parent_rollout for each in states
        ):
            state.parent_rollout = None


class KeptParts:
    """What a state has before reward functions get it, in case that they lose it."""

    __slots__ = ("_calls", "_completion", "_row", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._calls = dict.get(state, "trajectory")
        self._completion = dict.get(state, "completion")
        source: Any = dict.get(state, "input")
        # A state that was played has been settled; one that was made by hand is left as it is.
        is_whole = isinstance(source, dict) and _is_whole(state, source) and _is_plain(state)
        self._row = {**source} if is_whole else None

    def settle(self) -> None:
        """Restore what is gone, and replace what is odd."""
        if self._row is None:
            return
        settle_state(self._state, self._row, self._calls)
        if self._completion is not None:
            self._state.setdefault("completion", self._completion)


# Exact types, since a class of an environment's author may raise when it is read.
_DICT = frozenset([dict])
_LISTS = (Trajectory, list)
_NONE = type(None)
_PLAIN_TYPES = {
    **dict.fromkeys(("error", "final_env_response", *RAISED), (_NONE,)),
    **dict.fromkeys(NUMBERS, (float, _NONE)),
    **dict.fromkeys(TEXTS, (str, _NONE)),
    "depth": (int, _NONE),
    **dict.fromkeys(FLAGS, (bool, _NONE)),
    "metrics": (dict, _NONE),
    "completion": (str, list, _NONE),
    "cleaned_up": (bool, _NONE),
}


@lru_cache(1024)
def _are_plain(types: tuple[type, ...]) -> bool:
    """Whether the values of `_PLAIN_TYPES` have types that need no repair."""
    return all(found in plain for found, plain in zip(types, _PLAIN_TYPES.values(), strict=True))


def _is_plain(state: State) -> bool:
    """Whether a state needs no repair; False if only the longer look can tell."""
    get = partial(dict.get, state)
    if not _are_plain(tuple(map(type, map(get, _PLAIN_TYPES)))):
        return False
    metrics = get("metrics")
    # Lone surrogates are written to the columns as other characters than to the record.
    for text in (*map(get, TEXTS), *(metrics or ())):
        if text is not None and (type(text) is not str or not text.isascii()):
            return False
    for number in (*map(get, NUMBERS), *(metrics.values() if metrics else ())):
        if number is not None and (type(number) is not float or not abs(number) <= MAX_REWARD):
            return False
    said = get("completion")
    if type(said) is list and not _DICT.issuperset(map(type, said)):
        return False
    steps: Any = get("trajectory")
    return type(steps) in _LISTS and all(map(is_plain_step, steps))


def _is_whole(state: State, row: Mapping[str, Any]) -> bool:
    """Whether a state still has the inputs of its row, and its times."""
    source, timing = dict.get(state, "input"), dict.get(state, "timing")
    return (
        type(source) is dict
        and type(timing) is dict
        and source.keys() >= _INPUTS & row.keys()
        and type(source.get("prompt")) is type(row.get("prompt"))
        and all(type(time) in _NUMBER and is_finite(time) for time in map(timing.get, TIMES))
    )


_NUMBER = (float, int)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float holds, neither infinite nor NaN."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
