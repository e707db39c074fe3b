"""Where a sample's calls lie in it, and which rollouts they came from. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltree.samples.rollout import Call, Rollout
from rolltree.types import SampleOrigin


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Sampled tokens of one call: packed positions `start` to `end`, of rollout and call.

    In a flat sample the range is exactly the call's tokens. In a tree sample other branches may
    lie between the first and the last of them; the records say which tokens are whose.
    `finish_reason`, `terminated` and `truncated` are the step's own, as its `extras` gave them;
    the episode's are in the sample's origins.
    """

    rollout: int
    call: int
    start: int
    end: int
    finish_reason: str | None
    terminated: bool
    truncated: bool

    @classmethod
    def of(cls, rollout: Rollout, call: Call, start: int, end: int) -> CallSpan:
        """Return the span of a call."""
        return cls(
            rollout.index,
            call.step,
            start,
            end,
            call.finish_reason,
            call.terminated,
            call.truncated,
        )


def group_origins(
    parts: Sequence[tuple[Rollout, Sequence[Call]]],
) -> tuple[tuple[SampleOrigin, ...], tuple[int, ...]]:
    """Return one origin per rollout and agent, in order of first call, and their rollouts."""
    origins: list[SampleOrigin] = []
    rollouts: list[int] = []
    for rollout, calls in parts:
        by_agent: dict[str, list[Call]] = {}
        for call in calls:
            by_agent.setdefault(call.agent, []).append(call)
        origins.extend(rollout.origin(group) for group in by_agent.values())
        rollouts.extend([rollout.index] * len(by_agent))
    return tuple(origins), tuple(rollouts)
