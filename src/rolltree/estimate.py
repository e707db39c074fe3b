"""Means with confidence intervals when rollouts come in clusters, and pass@k.

Rollouts of one example are not independent, so the example is the unit: an example's value is the
mean of its rollouts, the estimate is the mean of the examples' values, and the interval comes from
their spread. `Estimate.method` names the interval:

- `"t"`: mean +- t(n - 1) * s / sqrt(n), over the n example means with standard deviation s; cut at
  0 and 1 when all values lie between them.
- `"wilson"`: for shares (every value 0 or 1, or declared so), Wilson's score interval (Wilson 1927)
  at the effective sample size p(1 - p) / SE^2 with SE = s / sqrt(n), at most the number of values
  (Korn and Graubard 1998), or n if all example means are equal. It stays inside [0, 1], and
  20 of 20 is not "exactly 1".
- `"bootstrap"`: for paired differences, see `evaluation.paired`.
- `"none"`: a single example whose values are not shares; `low` and `high` are None.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over examples with an interval that contains it.

    Example: `Estimate(0.8, 0.49, 0.94, "wilson", num_examples=10, num_values=10)`.
    """

    mean: float
    low: float | None
    high: float | None
    method: Literal["t", "wilson", "bootstrap", "none"]
    num_examples: int
    num_values: int

    def __post_init__(self) -> None:
        # By rounding, a bound can lie 1e-17 beyond the mean, which would give an error bar of
        # negative length, and plotting libraries refuse that.
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


def mean(values: Sequence[float]) -> float:
    """Return the mean, computed from an exactly rounded sum."""
    return values[0] if len(values) == 1 else math.fsum(values) / len(values)


def estimate(
    clusters: Mapping[Hashable, Sequence[float]],
    *,
    confidence: float = CONFIDENCE,
    are_shares: bool | None = None,
) -> Estimate | None:
    """Estimate a mean from values per example; None if there are no values.

    `clusters` maps an example to the values of its rollouts. Examples without values are left
    out. `are_shares` says whether values are shares of a whole, in [0, 1] (True: pass@k), or not
    (False: differences). None decides by the values: if each is 0 or 1, the interval is Wilson's;
    if all lie between, as for partial credit, the interval is cut at 0 and 1.

    >>> str(estimate({0: [1.0], 1: [2.0], 2: [3.0]}))
    '2.000 [-0.484, 4.484]'
    """
    filled = [values for values in clusters.values() if values]
    if not filled:
        return None
    means = list(map(mean, filled))
    center, num = mean(means), len(means)
    squares = math.fsum((value - center) ** 2 for value in means)
    spread = math.sqrt(squares / (num - 1)) if num > 1 else 0.0
    num_values = sum(map(len, filled))
    in_unit = are_shares is None and all_in_unit(filled)
    if are_shares is None:
        are_shares = in_unit and all(value in (0.0, 1.0) for values in filled for value in values)
    if are_shares:
        error = spread / math.sqrt(num)
        size = center * (1.0 - center) / error**2 if error > 0.0 else float(num)
        size = min(size, float(num_values))
        low, high = wilson(center, size, confidence)
        return Estimate(center, low, high, "wilson", num, num_values)
    if num < 2:
        return Estimate(center, None, None, "none", num, num_values)
    half = student_t(num - 1, confidence) * spread / math.sqrt(num)
    found = Estimate(center, center - half, center + half, "t", num, num_values)
    return found.within(0.0, 1.0) if in_unit else found


def episodes_estimate(clusters: Mapping[Hashable, Sequence[float]]) -> Estimate | None:
    """Estimate the mean over all values, with the cluster as the unit of the interval.

    Clusters that lost episodes are smaller, so the mean over episodes differs from the mean of the
    clusters' means: a cluster counts by its size (the linearized ratio estimator; Cochran, Sampling
    Techniques, chapter 2.11). Clusters of equal size count equally.
    """
    filled = {name: values for name, values in clusters.items() if values}
    num = sum(map(len, filled.values()))
    if not num:
        return None
    center, share = math.fsum(map(math.fsum, filled.values())) / num, len(filled) / num
    # The average of [center + share * n_g * (mean_g - center)] over groups is `center`, the mean
    # over episodes, and the spread of these values gives the standard error of that mean.
    weighed = {
        name: [center + share * len(values) * (mean(values) - center)] * len(values)
        for name, values in filled.items()
    }
    are_shares = all(value in (0.0, 1.0) for values in filled.values() for value in values)
    found = estimate(weighed, are_shares=are_shares)
    return found.within(0.0, 1.0) if found and all_in_unit(filled.values()) else found


def all_in_unit(clusters: Iterable[Iterable[float]]) -> bool:
    """Whether no value lies outside [0, 1], so that they may be shares."""
    return all(0.0 <= value <= 1.0 for values in clusters for value in values)


def wilson(mean: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval for a share `mean` seen in `size` trials (may be fractional).

    With z the normal quantile: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    scale = 1.0 + z * z / size
    center = (mean + z * z / (2 * size)) / scale
    half = z * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size)) / scale
    return max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided t quantile, exact for 1 and 2 degrees of freedom.

    From 3 degrees on, it is the expansion in 1/degrees of Abramowitz and Stegun 26.7.5, within
    0.2 % of the exact value for confidences up to 0.95 (0.9 % at 0.99 and 3 degrees).
    """
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
