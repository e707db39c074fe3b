"""What became of an episode after its last call, compared with the recording of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolltree.records.recorded import Difference, RecordedRollout, ReplaySession
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result
from rolltree.tokens import peek
from rolltree.types import ErrorRecord, Messages, RolloutResult, State

ENDING = ("is_completed", "stop_condition", "terminated", "truncated", "truncation_reason")


def outcome_difference(
    session: ReplaySession, live: RolloutResult, *, score: bool
) -> Difference | None:
    """Return the first difference of two episodes that made the same calls, if there is one.

    Both are compared as they are stored. In order: calls that were not made again, what was said
    after the last call, the world's steps, how each rollout ended, its rewards and metrics.
    """
    for rollout in session.rollouts:
        for index in rollout.unused()[:1]:
            recorded = peek(rollout.steps[index], "prompt")
            asked = recorded[-1] if isinstance(recorded, list) and recorded else recorded
            return _at(rollout, "missing call", index, "the model is not asked again", asked, None)
    # Through the codec, as the recording went: tuples, objects and floats are what storing makes
    # of them on both sides.
    states = [state for row in encode_result(live) for state in decode_rollout(row).states]
    if len(states) != len(session.rollouts):
        num = (len(session.rollouts), len(states))
        return Difference("rollouts", "", 0, None, "how many rollouts the episode has", *num)
    pairs = list(zip(session.rollouts, states, strict=True))
    for rollout, state in pairs:
        if rollout.agent != str(state.get("agent") or ""):
            return _at(rollout, "rollouts", None, "whose it is", rollout.agent, state.get("agent"))
    # The cause before its effects: another answer of the world explains another reward.
    for compare in (_said, _world, _ended, _scored if score else _nothing):
        for rollout, state in pairs:
            for found in compare(session, rollout, state):
                return found
    return None


def _at(
    rollout: RecordedRollout, kind: str, call: int | None, where: str, recorded: Any, live: Any
) -> Difference:
    return Difference(kind, rollout.agent, rollout.index, call, where, recorded, live)


def _nothing(
    session: ReplaySession, rollout: RecordedRollout, state: State
) -> Iterator[Difference]:
    yield from ()


def _said(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded: Messages | None = rollout.state.get("completion")
    live: Messages | None = state.get("completion")
    if session.is_same(recorded, live):
        return
    where = "the completion"
    one: Any = recorded
    other: Any = live
    if isinstance(recorded, list) and isinstance(live, list):
        at, one, other = session.first_message(recorded, live)
        role = (other or one or {}).get("role", "?")
        where = f"message {at} of the completion ({role})"
    yield _at(rollout, "completion", None, where, one, other)


def _world(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded: Sequence[Mapping[str, Any]] = rollout.state.get("environment_steps") or ()
    live: Sequence[Mapping[str, Any]] = state.get("environment_steps") or ()
    for number in range(max(len(recorded), len(live))):
        one = recorded[number] if number < len(recorded) else None
        other = live[number] if number < len(live) else None
        if one is None or other is None:
            yield _at(rollout, "world", None, f"step {number} of the world", one, other)
            return
        for name in one:
            if not _equal(session, one[name], other.get(name)):
                where = f"{name} of the world's step {number}"
                yield _at(rollout, "world", None, where, one[name], other.get(name))


def _ended(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    errors = [_failure(each.get("error")) for each in (rollout.state, state)]
    if not session.is_same(*errors):
        yield _at(rollout, "error", None, "how the rollout failed", *errors)
    for name in ENDING:
        if rollout.state.get(name) != state.get(name):
            yield _at(rollout, "ending", None, name, rollout.state.get(name), state.get(name))


def _scored(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded, live = rollout.state.get("metrics") or {}, state.get("metrics") or {}
    for name in dict.fromkeys((*recorded, *live)):
        if not _equal(session, recorded.get(name), live.get(name)):
            yield _at(rollout, "metric", None, name, recorded.get(name), live.get(name))
    one, other = rollout.state.get("reward"), state.get("reward")
    if not _equal(session, one, other):
        yield _at(rollout, "reward", None, "reward", one, other)
    for index, (step, again) in enumerate(zip(rollout.steps, state["trajectory"], strict=False)):
        one, other = step.get("reward"), again.get("reward")
        if not _equal(session, one, other):
            yield _at(rollout, "reward", index, f"reward of call {index}", one, other)


def _failure(error: Any) -> str | None:
    """Return type and message; messages may name times and addresses, which `ignore` takes out."""
    if isinstance(error, ErrorRecord):
        return f"{error.type}: {error.message}"
    return None if error is None else str(error)


def _equal(session: ReplaySession, one: Any, other: Any) -> bool:
    # Rewards are sums: another order of addition is not another reward.
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or one == other
    return session.is_same(one, other)
