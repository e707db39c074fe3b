"""What became of an episode after its last call, compared with the recording of another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from rolltree.records.recorded import Difference, RecordedRollout, ReplaySession
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result
from rolltree.tokens import peek
from rolltree.types import ErrorRecord, RolloutResult, State

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
            where = "the model is not asked again"
            return rollout.difference("missing call", index, where, asked, None)
    # Through the codec, as the recording went: tuples, objects and floats are what storing makes
    # of them on both sides.
    states = [state for row in encode_result(live) for state in decode_rollout(row).states]
    if len(states) != len(session.rollouts):
        num = (len(session.rollouts), len(states))
        return Difference("rollouts", "", 0, None, "how many rollouts the episode has", *num)
    pairs = list(zip(session.rollouts, states, strict=True))
    for rollout, state in pairs:
        agent = str(state.get("agent") or "")
        if rollout.agent != agent:
            return rollout.difference("rollouts", None, "whose it is", rollout.agent, agent)
    # The cause before its effects: another answer of the world explains another reward.
    compared = (_said, _world, _ended, _scored)
    for compare in compared if score else compared[:-1]:
        for rollout, state in pairs:
            for found in compare(session, rollout, state):
                return found
    return None


def _said(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded, live = rollout.state.get("completion"), state.get("completion")
    if not session.is_same(recorded, live):
        yield session.in_messages("completion", rollout, None, recorded, live)


def _world(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    sides = [each.get("environment_steps") or () for each in (rollout.state, state)]
    for number, (one, other) in enumerate(zip_longest(*sides)):
        if one is None or other is None:
            yield rollout.difference("world", None, f"step {number} of the world", one, other)
            return
        for name in one:
            if not _equal(session, one[name], other.get(name)):
                where = f"{name} of the world's step {number}"
                yield rollout.difference("world", None, where, one[name], other.get(name))


def _ended(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    errors = [_failure(each.get("error")) for each in (rollout.state, state)]
    if not session.is_same(*errors):
        yield rollout.difference("error", None, "how the rollout failed", *errors)
    for name in ENDING:
        one, other = rollout.state.get(name), state.get(name)
        if one != other:
            yield rollout.difference("ending", None, name, one, other)


def _scored(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded, live = rollout.state.get("metrics") or {}, state.get("metrics") or {}
    values: list[tuple[str, int | None, str, Any, Any]] = [
        ("metric", None, name, recorded.get(name), live.get(name))
        for name in dict.fromkeys((*recorded, *live))
    ]
    values.append(("reward", None, "reward", rollout.state.get("reward"), state.get("reward")))
    values += [
        ("reward", index, f"reward of call {index}", step.get("reward"), again.get("reward"))
        for index, (step, again) in enumerate(zip(rollout.steps, state["trajectory"], strict=False))
    ]
    for kind, call, where, one, other in values:
        if not _equal(session, one, other):
            yield rollout.difference(kind, call, where, one, other)


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
