"""Baselines per role: what a role has usually earned, as an exponential moving average.

Pure: the averages go in and come out, and whoever calls keeps them (a training run in its
checkpoint). It knows roles and numbers. It leaves out baselines from a group's other members,
which are `credit`'s, and value functions.

The average that is subtracted was made by earlier steps, so it does not depend on this step's
actions and the gradient stays unbiased. A role that was never met has no average yet: its episodes
are compared with the other episodes of the step, which does not depend on their own actions either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Averages = Mapping[str, float]
"""Role to what it usually earns."""


@dataclass(frozen=True, slots=True)
class Earned:
    """What one rollout is credited with per call, the role that played it, and its episode."""

    role: str
    owner: Hashable
    values: Sequence[float]


def subtract_averages(
    rollouts: Sequence[Earned], averages: Averages, decay: float
) -> tuple[list[list[float]], dict[str, float]]:
    """Return each rollout's values minus its role's average, and the averages after this step.

    An average moves to `decay * old + (1 - decay) * new`, where new is the mean over episodes of
    the mean over an episode's rollouts of their mean value; a first one is new itself. Rollouts
    without calls do not count. Episodes are counted once however many rollouts a role has in them.

    >>> subtract_averages([Earned("a", 0, [1.0]), Earned("a", 1, [0.0])], {"a": 0.5}, 0.9)
    ([[0.5], [-0.5]], {'a': 0.5})
    """
    levels: defaultdict[str, defaultdict[Hashable, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rollout in rollouts:
        if rollout.values:
            levels[rollout.role][rollout.owner].append(fmean(rollout.values))
    means = {
        role: {owner: fmean(values) for owner, values in owners.items()}
        for role, owners in levels.items()
    }
    result = []
    for rollout in rollouts:
        baseline = averages.get(rollout.role)
        if baseline is None:
            others = [
                mean
                for owner, mean in means.get(rollout.role, {}).items()
                if owner != rollout.owner
            ]
            baseline = fmean(others) if others else 0.0
        result.append([value - baseline for value in rollout.values])
    after = dict(averages)
    for role, owners in means.items():
        new = fmean(owners.values())
        after[role] = decay * averages[role] + (1 - decay) * new if role in averages else new
    return result, after
