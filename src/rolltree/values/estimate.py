"""Means with confidence intervals when rollouts come in clusters, and pass@k.

Rollouts of one example are not independent, so the example is the unit: an example's value is the
mean of its rollouts, the estimate is the mean of the examples' values, and the interval comes from
their spread. `Estimate.method` names the interval (design/0024 has its coverage):

- `"bounded"`: for values between two bounds, such as rewards of 0 to 1. A t interval over the
  example means and one more example at each bound (for shares: Agresti and Caffo 2000), cut at the
  bounds. So 20 of 20 is not "exactly 1", and neither is 0.99 of 20.
- `"t"`: mean +- t(n - 1) * s / sqrt(n), over the n example means with standard deviation s.
- `"bootstrap"`: for paired differences, see `evaluation.paired`.
- `"none"`: a single example without bounds; `low` and `high` are None.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, Self

CONFIDENCE = 0.95


class Bounds(NamedTuple):
    """The least and the largest value that a measure can have.

    `weight` is how much an example at each bound counts in an interval: 0 if there is no bound.
    """

    least: float
    most: float
    weight: float = 1.0
    cut: float = 0.0
    """How far beyond the bounds an interval may reach."""

    @classmethod
    def seen(cls, clusters: Iterable[Iterable[float]]) -> Self:
        """Return the bounds of a measure of which only values are known: 0 and 1, or none.

        Both lose their effect gradually as values leave [0, 1], and have none from a distance of 1
        on, so that the interval does not jump with a value that is 1.01.
        """
        values = [value for each in clusters for value in each]
        beyond = max(0.0, -min(values, default=0.0), max(values, default=1.0) - 1.0)
        weight = max(0.0, 1.0 - beyond)
        return cls(0.0, 1.0, weight, beyond / weight if weight else math.inf)

    def within(self, estimate: Estimate) -> Estimate:
        """Return an estimate of a mean with its interval cut at the bounds."""
        return estimate.within(self.least - self.cut, self.most + self.cut)


SHARE = Bounds(0.0, 1.0)
COUNT = Bounds(0.0, math.inf, weight=0.0)
"""The bounds of counts, tokens and times."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples with an interval that contains it.

    Example: `Estimate(0.8, 0.46, 0.95, "bounded", num_examples=10, num_values=10)`.
    """

    mean: float
    low: float | None
    high: float | None
    method: Literal["t", "bounded", "bootstrap", "none"]
    num_examples: int
    num_values: int

    def __post_init__(self) -> None:
        # By rounding, a bound can lie 1e-17 beyond the mean, which would give an error bar of
        # negative length, and plotting libraries refuse that. The interval of 0 of 2 begins above
        # the mean, too, since its examples at the bounds pull it to the middle.
        if self.low is not None and self.high is not None:
            object.__setattr__(self, "low", min(self.low, self.mean))
            object.__setattr__(self, "high", max(self.high, self.mean))

    def within(self, least: float, most: float) -> Estimate:
        """Return the estimate with its interval cut at the bounds of possible means."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-ready data."""
        return asdict(self)


def mean(values: Iterable[float]) -> float:
    """Return the mean, computed from an exactly rounded sum; finite if the values are."""
    values = list(values)
    if len(values) == 1:
        return values[0]
    try:
        return math.fsum(values) / len(values)
    # No float holds the sum.
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def estimate(
    clusters: Mapping[Hashable, Sequence[float]],
    *,
    confidence: float = CONFIDENCE,
    bounds: Bounds | None = None,
) -> Estimate | None:
    """Estimate a mean from values per example; None if there are no values.

    `clusters` maps an example to the values of its rollouts. Examples without values are left
    out. `bounds` are those of the measure, None: `Bounds.seen` of the values.

    >>> str(estimate({0: [1.0], 1: [2.0], 2: [3.0]}))
    '2.000 [-0.484, 4.484]'
    """
    filled = [values for values in clusters.values() if values]
    if not filled:
        return None
    bounds = Bounds.seen(filled) if bounds is None else bounds
    return _over_examples(list(map(mean, filled)), bounds, confidence, sum(map(len, filled)))


def episodes_estimate(clusters: Mapping[Hashable, Sequence[float]]) -> Estimate | None:
    """Estimate the mean over all values, with the cluster as the unit of the interval.

    Clusters that lost episodes are smaller, so the mean over episodes differs from the mean of the
    clusters' means: a cluster counts by its size (the linearized ratio estimator; Cochran, Sampling
    Techniques, chapter 2.11). Clusters of equal size count equally.
    """
    filled = [values for values in clusters.values() if values]
    if not filled:
        return None
    num_values, own = sum(map(len, filled)), cluster_values(filled)
    if not all(map(math.isfinite, own)):
        return Estimate(mean(chain(*filled)), None, None, "none", len(filled), num_values)
    return _over_examples(own, Bounds.seen(filled), CONFIDENCE, num_values)


def cluster_values(clusters: Sequence[Sequence[float]]) -> list[float]:
    """Return a value per cluster: their mean is that of all values, their spread gives its error.

    They are center + n_g * (mean_g - center) * G / N for G clusters of N values.
    """
    num = sum(map(len, clusters))
    center, share = mean(chain(*clusters)), len(clusters) / num
    return [center + share * len(values) * (mean(values) - center) for values in clusters]


def _over_examples(
    means: Sequence[float], bounds: Bounds, confidence: float, num_values: int
) -> Estimate:
    """Return the estimate of a mean from the examples' means."""
    center, num, weight = mean(means), len(means), bounds.weight
    if num - 1 + 2 * weight < 1:
        return Estimate(center, None, None, "none", num, num_values)
    ends = (bounds.least, bounds.most) if weight else ()
    size = num + weight * len(ends)
    try:
        middle = (math.fsum(means) + weight * math.fsum(ends)) / size
        squares = math.fsum((value - middle) ** 2 for value in means)
        squares += weight * math.fsum((end - middle) ** 2 for end in ends)
    # No float holds the sum, or a square.
    except OverflowError:
        return Estimate(center, None, None, "none", num, num_values)
    half = student_t(size - 1, confidence) * math.sqrt(squares / (size - 1) / size)
    method: Literal["bounded", "t"] = "bounded" if weight else "t"
    result = Estimate(center, middle - half, middle + half, method, num, num_values)
    return bounds.within(result)


def student_t(degrees: float, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided t quantile for 1 degree of freedom or more, exact for 1 and 2.

    From 3 degrees on, it is the expansion in 1/degrees of Abramowitz and Stegun 26.7.5, within
    0.2 % of the exact value for confidences up to 0.95 (0.9 % at 0.99 and 3 degrees). Between
    whole numbers it is interpolated in 1/degrees.
    """
    below = math.floor(degrees)
    if degrees != below:
        left, right = student_t(below, confidence), student_t(below + 1, confidence)
        share = (1 / below - 1 / degrees) / (1 / below - 1 / (below + 1))
        return left + share * (right - left)
    upper = 0.5 + confidence / 2
    if degrees == 1:
        return math.tan(math.pi * (upper - 0.5))
    if degrees == 2:
        return (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    z = NormalDist().inv_cdf(upper)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def pass_at_k(num: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of "at least one of k samples passes".

    1 - C(n - c, k) / C(n, k) from n samples with c passes (Chen et al. 2021, equation 1).

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: there are fewer than k samples, or more passes than samples.
    """
    _check_passes("pass@", num, num_passed, k)
    return 1.0 - math.comb(num - num_passed, k) / math.comb(num, k)


def pass_hat_k(num: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of "all of k samples pass", written pass^k.

    C(c, k) / C(n, k) from n samples with c passes (Yao et al. 2024, tau-bench, section 3).

    >>> pass_hat_k(4, 2, 2)
    0.16666666666666666

    Raises:
        ValueError: as in `pass_at_k`.
    """
    _check_passes("pass^", num, num_passed, k)
    return math.comb(num_passed, k) / math.comb(num, k)


def _check_passes(name: str, num: int, num_passed: int, k: int) -> None:
    if not 1 <= k <= num or not 0 <= num_passed <= num:
        raise ValueError(
            f"{name}{k} cannot be estimated from {num_passed} passes in {num} samples; it needs "
            "1 <= k <= samples and no more passes than samples."
        )
