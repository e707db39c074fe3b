"""Finds where a share or a level changes over the steps of a run, and whether a reward rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from rolltree.values.estimate import CONFIDENCE, mean, student_t

Trend: TypeAlias = Literal["rises", "falls", "is flat"]
_CLEAR_RATIO = 6.0
LEAST_STEPS = 8
"""The number of steps from which quarters of a run are compared, instead of halves."""


def since(pairs: Sequence[tuple[int, int]]) -> int:
    """Return the index from which a share is clearly different; 0 if it is the same throughout.

    `pairs` has hits and trials. The index is the split with the greatest log-likelihood ratio, if
    that is over 6 nats.
    """
    whole = _likelihood(sum(hits for hits, _ in pairs), sum(trials for _, trials in pairs))
    total_hits, total = sum(hits for hits, _ in pairs), sum(trials for _, trials in pairs)
    # Many splits are tried, and the best of them looks good by chance; hence 6 nats instead of the
    # 2 of a single test at 95 %.
    best, at, hits, trials = _CLEAR_RATIO, 0, 0, 0
    for index, (more_hits, more) in enumerate(pairs[:-1]):
        hits, trials = hits + more_hits, trials + more
        rest = _likelihood(total_hits - hits, total - trials)
        ratio = _likelihood(hits, trials) + rest - whole
        if ratio > best:
            best, at = ratio, index + 1
    return at


def _likelihood(hits: int, trials: int) -> float:
    """Return the log-likelihood of `hits` in `trials` at their own share."""
    if not 0 < hits < trials:
        return 0.0
    share = hits / trials
    return hits * math.log(share) + (trials - hits) * math.log(1 - share)


def ratio_of(pairs: Sequence[tuple[int, int]]) -> float:
    """Return hits over trials; 0 without trials."""
    trials = sum(number for _, number in pairs)
    return sum(hits for hits, _ in pairs) / trials if trials else 0.0


def jump(values: Sequence[float]) -> int:
    """Return the split (0: none) that minimizes the squares around the means of both sides."""
    total, size = sum(values), len(values)
    best, at, done = 0.0, 0, 0.0
    for index in range(1, size):
        done += values[index - 1]
        one, other = done / index, (total - done) / (size - index)
        gain = index * (size - index) / size * (one - other) * (one - other)
        if gain > best:
            best, at = gain, index
    return at


class Growth(NamedTuple):
    """Values that became larger for good: from `at` on, with the levels before and after."""

    at: int
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times as large they became."""
        return self.after / self.before


def growth(values: Sequence[float], *, factor: float) -> Growth | None:
    """Return where positive values became at least `factor` times as large, if they stayed so.

    A jump must be six times the spread of the values on both sides; steady growth must end above
    all values of the first quarter. Everything is in logarithms: growth from 1 to 10 counts like
    growth from 10 to 100.
    """
    logs, count = [math.log(max(value, 1e-12)) for value in values], len(values)
    at, (size, end) = jump(logs), ends(count)
    if 2 <= at <= count - 2:
        sides = logs[:at], logs[at:]
        low, high = map(median, sides)
        noise = 1.48 * median(
            abs(value - mid) for side, mid in zip(sides, (low, high), strict=True) for value in side
        )
        if high - low >= max(math.log(factor), 6 * noise):
            return Growth(at, math.exp(low), math.exp(high))
    # Two larger values of two may be chance; three of three, and by a factor, hardly are.
    if size < 3 or min(logs[end:]) <= max(logs[:size]):
        return None
    few = max(2, count // 8)
    low, high = median(logs[:few]), median(logs[-few:])
    if high - low < math.log(factor):
        return None
    at = next(index for index, value in enumerate(logs) if value > (low + high) / 2)
    return Growth(at, math.exp(low), math.exp(high))


def ends(count: int) -> tuple[int, int]:
    """Return the size of a run's first part, a quarter or half, and the index of its last part."""
    size = count // (4 if count >= LEAST_STEPS else 2)
    return size, count - size


def level_change(values: Sequence[float]) -> tuple[float, float, tuple[float, float, float]]:
    """Return the mean at the beginning, at the end, and their difference with its interval."""
    size, last = ends(len(values))
    sides = values[:size], values[last:]
    before, after = ([[value] for value in side] for side in sides)
    return mean(sides[0]), mean(sides[1]), mean_change(before, after)


def consecutive(steps: Sequence[int], known: Sequence[int]) -> list[tuple[int, int]]:
    """Return spans of steps that are consecutive among the known ones, as first and last."""
    order = {step: index for index, step in enumerate(sorted(known or steps))}
    spans: list[tuple[int, int]] = []
    for step in sorted(steps):
        if spans and order.get(step, -1) == order.get(spans[-1][1], -3) + 1:
            spans[-1] = spans[-1][0], step
        else:
            spans.append((step, step))
    return spans


def mean_change(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    confidence: float = CONFIDENCE,
) -> tuple[float, float, float]:
    """Return the difference of two means over groups with its interval (Welch)."""
    sides = [[mean(group) for group in groups] for groups in (before, after)]
    means = [mean(side) for side in sides]
    change = means[1] - means[0]
    if min(map(len, sides)) < 2:
        return change, -math.inf, math.inf
    # Welch with the degrees of freedom of the smaller side, which is at most too wide.
    variances = [
        sum((value - level) * (value - level) for value in side) / (len(side) - 1) / len(side)
        for side, level in zip(sides, means, strict=True)
    ]
    half = student_t(min(map(len, sides)) - 1, confidence) * math.sqrt(sum(variances))
    return change, change - half, change + half


def trend(change: tuple[float, float, float]) -> Trend:
    """Return the trend that a change with its interval shows."""
    _, low, high = change
    return "rises" if low > 0 else "falls" if high < 0 else "is flat"
