"""The mean difference of two arms on the same examples, with a valid confidence interval.

An arm is one evaluation, or several of one recipe, with a row of values per run and a column per
example.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolltree.values.estimate import CONFIDENCE, Bounds, Estimate, student_t

Values: TypeAlias = NDArray[np.float64]
"""`[runs, examples]`: an example's mean over its rollouts, in each run."""

NUM_RESAMPLES = 5_000
_BOOTSTRAP_EXAMPLES = (10, 1_000)
_DRAWS_AT_ONCE = 2_000_000


def paired_difference(
    a: Values,
    b: Values,
    *,
    same_runs: bool = False,
    confidence: float = CONFIDENCE,
    bounds: Bounds | None = None,
) -> Estimate:
    """Return the mean of B - A over examples, with its interval.

    `bounds` are those of the values, None: `Bounds.seen` of them.

    With one run per arm it is a bootstrap over examples. Its quantiles are those at which a
    bootstrap of normal data gives the t interval (Hesterberg 2015, section 5.3), since a plain
    percentile interval is too short: by a factor sqrt((n - 1) / n), and by its normal quantile.
    With fewer than 10 examples (a bootstrap cannot go beyond their extremes) or more than 1,000,
    it is the t interval itself. If the values are bounded, three examples are added first: half of
    one that falls and half of one that rises by all that the bounds allow, and one that stays
    (Agresti and Min 2005), so that "no example changed" does not mean "nothing can change".

    With several runs per arm it is a t interval, since a bootstrap of two or three runs hardly
    shows their spread. The variance is that of a two-way layout of runs and examples (examples +
    runs - residual), with the degrees of freedom of Welch and Satterthwaite. An arm with one run
    gets the spread between runs from the other arm. `same_runs` says that row i of both arms is the
    same run, as before and after training; then the runs are paired, too.
    """
    change = b.mean(axis=0) - a.mean(axis=0)
    num = len(change)
    num_values = num * (len(a) + len(b))
    mean = float(change.mean())
    if num < 2:
        return Estimate(mean, None, None, "none", num, num_values)
    if bounds is None:
        bounds = Bounds.seen((*a, *b))
    method: Literal["t", "bootstrap"] = "t"
    if max(len(a), len(b)) > 1:
        low, high = _over_runs(a, b, change, same_runs, confidence)
    else:
        low, high, method = _over_examples(change, bounds, confidence)
    most = bounds.most - bounds.least + bounds.cut
    return Estimate(mean, low, high, method, num, num_values).within(-most, most)


def _over_examples(
    change: Values, bounds: Bounds, confidence: float
) -> tuple[float, float, Literal["t", "bootstrap"]]:
    """Return the interval if each arm has one run, and its method."""
    num, most = len(change), bounds.most - bounds.least
    points: Values = change
    weights: Values = np.ones(num)
    if bounds.weight:
        points = np.concatenate([change, (most, -most, 0.0)])
        weights = np.concatenate([weights, bounds.weight * np.array((0.5, 0.5, 1.0))])
    points, place = np.unique(points, return_inverse=True)
    weights = np.bincount(place.ravel(), weights).astype(np.float64)
    size = float(weights.sum())
    center = float(weights @ points) / size
    error = math.sqrt(float(weights @ (points - center) ** 2) / (size - 1) / size)
    quantile = student_t(num - 1, confidence)
    if not _BOOTSTRAP_EXAMPLES[0] <= num <= _BOOTSTRAP_EXAMPLES[1]:
        return center - quantile * error, center + quantile * error, "t"
    tail = NormalDist().cdf(-quantile * math.sqrt(size / (size - 1)))
    low, high = np.quantile(_resampled(points, weights / size, round(size)), (tail, 1 - tail))
    return float(low), float(high), "bootstrap"


def _resampled(points: Values, shares: Values, size: int) -> Values:
    """Return the means of `NUM_RESAMPLES` samples with replacement; the same in every call."""
    # A fixed seed, so that comparing the same two runs again gives the same verdict.
    random = np.random.default_rng(0)
    # In parts, since all draws for 1,000 examples at once would take 40 MB.
    rows = max(1, _DRAWS_AT_ONCE // len(points))
    sums = [
        random.multinomial(size, shares, size=min(rows, NUM_RESAMPLES - first)) @ points
        for first in range(0, NUM_RESAMPLES, rows)
    ]
    return np.concatenate(sums) / size


def _over_runs(
    a: Values, b: Values, change: Values, same_runs: bool, confidence: float
) -> tuple[float, float]:
    """Return the interval if an arm has several runs."""
    layouts = [b - a] if same_runs and len(a) == len(b) else [a, b]
    spreads = [(_run_variances(layout), 1 / len(layout)) for layout in layouts]
    known = [(found, share) for found, share in spreads if found is not None]
    # An arm with one run gets the other arm's spread.
    if len(known) == 1:
        known = [(known[0][0], sum(share for _, share in spreads))]
    num = len(change)
    # Variance, degrees of freedom.
    parts = [(float(change.var(ddof=1)) / num, num - 1)]
    parts += [(between * share, degrees) for (between, _, degrees), share in known]
    runs = sum(part for part, _ in parts[1:])
    rest = sum(left * share for (_, left, _), share in known)
    examples = parts[0][0]
    variance = max(examples + runs - rest, examples, runs)
    scale = sum(part**2 / degrees for part, degrees in parts)
    degrees = max(1, math.floor((examples + runs) ** 2 / scale)) if scale else num - 1
    half = student_t(degrees, confidence) * math.sqrt(variance)
    mean = float(change.mean())
    return mean - half, mean + half


def _run_variances(layout: Values) -> tuple[float, float, int] | None:
    """Return the variance of the runs' means, its residual part, and its degrees of freedom."""
    num_runs, num = layout.shape
    if num_runs < 2:
        return None
    means = layout.mean(axis=1)
    left = layout - means[:, None] - layout.mean(axis=0) + layout.mean()
    degrees = (num_runs - 1) * (num - 1)
    return float(means.var(ddof=1)), float((left**2).sum()) / degrees / num, num_runs - 1
