"""The four scopes: which calls share a sample, and which advantage each call trains with.

One function per scope in the table `SCOPES`. Knows grouping, flat and tree samples. Leaves out
cutting and counting (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rolltree.samples.flat import flat_sample
from rolltree.samples.forest import forest_sample
from rolltree.samples.grouping import Group, by_prefix, turn_calls
from rolltree.samples.rollout import Rollout
from rolltree.tokens import Break, TokenTree
from rolltree.types import Sample

Openers = Mapping[tuple[int, int], Break]


@dataclass(frozen=True, slots=True)
class Thread:
    """Calls that may extend each other: a whole rollout, or in scope `turn` one turn of it.

    `groups` are the calls whose exact prefix holds; `credit` is the turn's, unused elsewhere.
    """

    groups: list[Group]
    credit: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One rollout to make samples of: `factor` scales its weights, `key` names its group."""

    rollout: Rollout
    threads: list[Thread]
    factor: float
    key: Hashable


def threads_of(rollout: Rollout, scope: str) -> list[Thread]:
    """Return the calls of a rollout grouped by exact prefix, per turn in scope `turn`."""
    if scope != "turn":
        return [Thread(by_prefix(rollout, rollout.calls))]
    return [Thread(by_prefix(rollout, calls), credit) for calls, credit in turn_calls(rollout)]


def _step(plans: Sequence[Plan], openers: Openers) -> list[Sample]:
    return [
        flat_sample(plan.rollout, [call], "step", [call.advantage], plan.factor, openers)
        for plan in plans
        for call in plan.rollout.calls
    ]


def _interleave(plans: Sequence[Plan], openers: Openers) -> list[Sample]:
    return [
        flat_sample(
            plan.rollout,
            group,
            "interleave",
            [call.advantage for call in group],
            plan.factor,
            openers,
        )
        for plan in plans
        for thread in plan.threads
        for group in thread.groups
    ]


def _turn(plans: Sequence[Plan], openers: Openers) -> list[Sample]:
    samples = []
    for plan in plans:
        for thread in plan.threads:
            made = [
                flat_sample(
                    plan.rollout, group, "turn", [thread.credit] * len(group), plan.factor, openers
                )
                for group in thread.groups
            ]
            if any(np.isnan(sample.records.logprob).any() for sample in made):
                made = [_without_logprobs(sample) for sample in made]
            samples.extend(made)
    return samples


def _without_logprobs(sample: Sample) -> Sample:
    unknown = np.full(len(sample.records), np.nan, np.float32)
    return replace(sample, records=replace(sample.records, logprob=unknown))


def _tree(plans: Sequence[Plan], openers: Openers) -> list[Sample]:
    groups: dict[Hashable, list[Plan]] = {}
    for plan in plans:
        if plan.rollout.calls:
            groups.setdefault(plan.key, []).append(plan)
    samples = []
    for members in groups.values():
        tree, rollouts = share_tree([plan.rollout for plan in members])
        parts = [(rollout, rollout.calls) for rollout in rollouts]
        samples.append(forest_sample(tree, parts, [plan.factor for plan in members]))
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


SCOPES: dict[str, Callable[[Sequence[Plan], Openers], list[Sample]]] = {
    "step": _step,
    "turn": _turn,
    "interleave": _interleave,
    "tree": _tree,
}
