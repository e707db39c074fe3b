"""What became of an episode after its last call, compared with the recording of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolltree.records.recorded import Difference, Tape, Track
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result
from rolltree.tokens import peek
from rolltree.types import ErrorRecord, Messages, RolloutResult, State

ENDING = ("is_completed", "stop_condition", "terminated", "truncated", "truncation_reason")


def outcome_difference(tape: Tape, live: RolloutResult, *, score: bool) -> Difference | None:
    """Return the first difference of two episodes that made the same calls, if there is one.

    Both are compared as they are stored. In order: calls that were not made again, what was said
    after the last call, the world's steps, how each rollout ended, its rewards and metrics.
    """
    for track in tape.tracks:
        for index in track.unused()[:1]:
            recorded = peek(track.steps[index], "prompt")
            asked = recorded[-1] if isinstance(recorded, list) and recorded else recorded
            return _at(track, "missing call", index, "the model is not asked again", asked, None)
    states = [state for row in encode_result(live) for state in decode_rollout(row).states]
    if len(states) != len(tape.tracks):
        num = (len(tape.tracks), len(states))
        return Difference("rollouts", "", 0, None, "how many rollouts the episode has", *num)
    pairs = list(zip(tape.tracks, states, strict=True))
    for track, state in pairs:
        if track.agent != str(state.get("agent") or ""):
            return _at(track, "rollouts", None, "whose it is", track.agent, state.get("agent"))
    for compare in (_said, _world, _ended, _scored if score else _nothing):
        for track, state in pairs:
            for found in compare(tape, track, state):
                return found
    return None


def _at(
    track: Track, kind: str, call: int | None, where: str, recorded: Any, live: Any
) -> Difference:
    return Difference(kind, track.agent, track.index, call, where, recorded, live)


def _nothing(tape: Tape, track: Track, state: State) -> Iterator[Difference]:
    yield from ()


def _said(tape: Tape, track: Track, state: State) -> Iterator[Difference]:
    recorded: Messages | None = track.state.get("completion")
    live: Messages | None = state.get("completion")
    if tape.is_same(recorded, live):
        return
    where = "the completion"
    one: Any = recorded
    other: Any = live
    if isinstance(recorded, list) and isinstance(live, list):
        at, one, other = tape.first_message(recorded, live)
        role = (other or one or {}).get("role", "?")
        where = f"message {at} of the completion ({role})"
    yield _at(track, "completion", None, where, one, other)


def _world(tape: Tape, track: Track, state: State) -> Iterator[Difference]:
    recorded: Sequence[Mapping[str, Any]] = track.state.get("environment_steps") or ()
    live: Sequence[Mapping[str, Any]] = state.get("environment_steps") or ()
    for number in range(max(len(recorded), len(live))):
        one = recorded[number] if number < len(recorded) else None
        other = live[number] if number < len(live) else None
        if one is None or other is None:
            yield _at(track, "world", None, f"step {number} of the world", one, other)
            return
        for name in one:
            if not _equal(tape, one[name], other.get(name)):
                where = f"{name} of the world's step {number}"
                yield _at(track, "world", None, where, one[name], other.get(name))


def _ended(tape: Tape, track: Track, state: State) -> Iterator[Difference]:
    errors = [_failure(each.get("error")) for each in (track.state, state)]
    if not tape.is_same(*errors):
        yield _at(track, "error", None, "how the rollout failed", *errors)
    for name in ENDING:
        if track.state.get(name) != state.get(name):
            yield _at(track, "ending", None, name, track.state.get(name), state.get(name))


def _scored(tape: Tape, track: Track, state: State) -> Iterator[Difference]:
    recorded, live = track.state.get("metrics") or {}, state.get("metrics") or {}
    for name in dict.fromkeys((*recorded, *live)):
        if not _equal(tape, recorded.get(name), live.get(name)):
            yield _at(track, "metric", None, name, recorded.get(name), live.get(name))
    one, other = track.state.get("reward"), state.get("reward")
    if not _equal(tape, one, other):
        yield _at(track, "reward", None, "reward", one, other)
    for index, (step, again) in enumerate(zip(track.steps, state["trajectory"], strict=False)):
        one, other = step.get("reward"), again.get("reward")
        if not _equal(tape, one, other):
            yield _at(track, "reward", index, f"reward of call {index}", one, other)


def _failure(error: Any) -> str | None:
    """Return type and message; messages may name times and addresses, which `ignore` takes out."""
    if isinstance(error, ErrorRecord):
        return f"{error.type}: {error.message}"
    return None if error is None else str(error)


def _equal(tape: Tape, one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12) or one == other
    return tape.is_same(one, other)
