"""The interval of a step's mean reward as rolltree computed it before `estimate.Bounds`.

An audit of a stored run compares with it, since its numbers are those of the version that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, stdev

from rolltree.values.estimate import CONFIDENCE, cluster_values, mean, student_t


def older_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the ends of the interval from the rewards of each group; None if there was none.

    Wilson's score interval (Wilson 1927) if all rewards are 0 or 1, else a t interval, which is cut
    at 0 and 1 if all rewards lie between them.
    """
    values, num = cluster_values(groups), len(groups)
    center = mean(values)
    error = stdev(values) / math.sqrt(num) if num > 1 else 0.0
    rewards = [reward for group in groups for reward in group]
    if all(reward in (0.0, 1.0) for reward in rewards):
        size = center * (1.0 - center) / error**2 if error > 0.0 else float(num)
        return _wilson(center, min(size, float(len(rewards))))
    if num < 2:
        return None
    half = student_t(num - 1) * error
    if all(0.0 <= reward <= 1.0 for reward in rewards):
        return max(0.0, center - half), min(1.0, center + half)
    return center - half, center + half


def _wilson(center: float, size: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    scale = 1.0 + z * z / size
    middle = (center + z * z / (2 * size)) / scale
    half = z * math.sqrt(center * (1 - center) / size + z * z / (4 * size * size)) / scale
    return max(0.0, min(center, middle - half)), min(1.0, max(center, middle + half))
