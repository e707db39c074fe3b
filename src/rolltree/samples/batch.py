"""`build_samples`: trajectories to training samples in one of four scopes, with a report.

Pure: reads states, never changes them. Knows every stage of this room and calls them in order:
resolve, group, build, cut, count. Leaves out packing (`packing.py`) and where advantages come from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rolltree.errors import ConfigError, did_you_mean
from rolltree.samples.flat import flat_sample
from rolltree.samples.forest import forest_sample
from rolltree.samples.grouping import by_prefix, by_step, by_turn
from rolltree.samples.rollout import Rollout, resolve
from rolltree.tokens import TokenTree
from rolltree.types import Sample, Scope, State, TrajectoryStep

GroupKey = Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """What `build_samples` returns: samples and `report`, a flat dict of metrics."""

    samples: list[Sample]
    report: dict[str, float] = field(default_factory=dict)


def _step_samples(rollouts: Sequence[Rollout], _: object) -> list[Sample]:
    return [
        flat_sample(r, group, "step", [group[0].advantage], float(r.trains))
        for r in rollouts
        for group in by_step(r)
    ]


def _turn_samples(rollouts: Sequence[Rollout], _: object) -> list[Sample]:
    return [
        flat_sample(r, group, "turn", [credit] * len(group), float(r.trains))
        for r in rollouts
        for group, credit in by_turn(r)
    ]


def _interleaved_samples(rollouts: Sequence[Rollout], _: object) -> list[Sample]:
    return [
        flat_sample(r, group, "interleave", [c.advantage for c in group], float(r.trains))
        for r in rollouts
        for group in by_prefix(r)
    ]


def _tree_samples(rollouts: Sequence[Rollout], keys: Sequence[Hashable]) -> list[Sample]:
    groups: dict[Hashable, list[Rollout]] = {}
    for rollout, key in zip(rollouts, keys, strict=True):
        if rollout.calls:
            groups.setdefault(key, []).append(rollout)
    samples = []
    for members in groups.values():
        tree, shared = share_tree(members)
        parts = [(rollout, rollout.calls) for rollout in shared]
        samples.append(forest_sample(tree, parts, [float(r.trains) for r in shared]))
    return samples


def share_tree(rollouts: Sequence[Rollout]) -> tuple[TokenTree, list[Rollout]]:
    """Return one tree that holds all calls of the rollouts, and the rollouts on it."""
    if all(rollout.tree is rollouts[0].tree for rollout in rollouts):
        return rollouts[0].tree, list(rollouts)
    merged = TokenTree()
    first: dict[int, int] = {}
    shared = []
    for rollout in rollouts:
        if id(rollout.tree) not in first:
            first[id(rollout.tree)] = merged.merge(rollout.tree)
        shift = first[id(rollout.tree)]
        calls = tuple(replace(call, handle=call.handle + shift) for call in rollout.calls)
        shared.append(replace(rollout, tree=merged, calls=calls))
    return merged, shared


_SCOPES: dict[str, Callable[[Sequence[Rollout], Sequence[Hashable]], list[Sample]]] = {
    "step": _step_samples,
    "turn": _turn_samples,
    "interleave": _interleaved_samples,
    "tree": _tree_samples,
}


def build_samples(
    trajectories: Sequence[State | Sequence[TrajectoryStep]],
    scope: Scope = "interleave",
    *,
    group_key: GroupKey | None = None,
) -> SampleBatch:
    """Turn trajectories into training samples.

    Args:
        trajectories: states, or plain lists of spec-1 steps.
        scope: `step`, `turn`, `interleave` or `tree`.
        group_key: for `tree`: trajectories with equal keys share one sample.

    Raises:
        ConfigError: an unknown scope.
        TokenError: a step's tokens contradict themselves.
    """
    if scope not in _SCOPES:
        raise ConfigError(
            f"{scope!r} is not a scope of training samples.{did_you_mean(scope, _SCOPES)}"
        )
    rollouts = [resolve(index, trajectory) for index, trajectory in enumerate(trajectories)]
    keys: list[Hashable] = [
        index if group_key is None else ("group", group_key(trajectory))
        for index, trajectory in enumerate(trajectories)
    ]
    samples = _SCOPES[scope](rollouts, keys)
    return SampleBatch([sample for sample in samples if len(sample.records)])
