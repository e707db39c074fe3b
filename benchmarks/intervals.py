"""How often the interval of a mean and of a comparison cover the truth, in simulated evaluations.

    python benchmarks/intervals.py            the tables of design page 24
    python benchmarks/intervals.py --check    exit 1 when a bar is missed
    python benchmarks/intervals.py --num 300  fewer simulations per row

Each row draws pairs of evaluations whose true difference is known, and counts how often the 95 %
interval of `paired_difference` holds it. Next to it is the interval that one would write down
first: the mean difference and 1.96 standard errors of all examples, the runs of an arm pooled.

The second table has `estimate`'s interval of one mean, and next to it the t interval of the
examples' means, cut at 0 and 1.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from verdict import Bar, conclude, make_parser

from rolltree.evaluation.paired import Values, paired_difference
from rolltree.values.estimate import estimate, student_t

Draw = Callable[[np.random.Generator], tuple[Values, Values]]
LEAST = {"seeds": 0.92, "tail": 0.9, "": 0.93}
"""Of a nominal 0.95, by a word in the row's name; 1,000 simulations have an error of 0.007."""


def fifth(num: int, num_rollouts: int) -> Draw:
    """Examples of different difficulty; B solves a fifth of what A misses: +0.1."""

    def draw(random: np.random.Generator) -> tuple[Values, Values]:
        chance = random.beta(0.5, 0.5, num)
        a, b = (
            random.binomial(num_rollouts, p, num)[None] / num_rollouts
            for p in (chance, chance + 0.2 * (1 - chance))
        )
        return a, b

    return draw


def rare(num: int, size: float = 1.0) -> Draw:
    """Five of 100 examples are won and two are lost, each by `size`: +0.03 times `size`."""

    def draw(random: np.random.Generator) -> tuple[Values, Values]:
        change = random.choice([1.0, -1.0, 0.0], (1, num), p=[0.05, 0.02, 0.93])
        return size * (change < 0), size * (change > 0)

    return draw


def heavy(num: int) -> Draw:
    """Rewards with a long tail: B's are A's plus an exponential one of mean 0.5."""

    def draw(random: np.random.Generator) -> tuple[Values, Values]:
        a = random.normal(0, 1, (1, num))
        return a, a + random.exponential(0.5, (1, num))

    return draw


def seeds(num_runs: int, spread: float, *, num: int = 50) -> Draw:
    """Several seeds per arm, whose means differ by `spread`: +0.5."""

    def draw(random: np.random.Generator) -> tuple[Values, Values]:
        base = random.normal(0, 1, num)
        a, b = (
            base
            + gain
            + random.normal(0, spread, (num_runs, 1))
            + random.normal(0, 1, (num_runs, num))
            for gain in (0.0, 0.5)
        )
        return a, b

    return draw


CASES: dict[str, tuple[Draw, float]] = {
    **{
        f"{num} examples, {many} rollout{'s' if many > 1 else ''} each": (fifth(num, many), 0.1)
        for num in (8, 25, 60, 200)
        for many in (1, 4)
    },
    **{f"7 % of {num} examples flip": (rare(num), 0.03) for num in (10, 25, 100)},
    **{f"7 % of {num} examples change by 0.8": (rare(num, 0.8), 0.024) for num in (10, 25, 100)},
    **{f"long tail, {num} examples": (heavy(num), 0.5) for num in (12, 50)},
    **{
        f"{runs} seeds an arm, spread {spread}": (seeds(runs, spread), 0.5)
        for runs in (2, 3, 5)
        for spread in (0.0, 0.1, 0.3)
    },
}


Means = Callable[[np.random.Generator, tuple[int, ...]], Values]
MEANS: dict[str, tuple[Means, float]] = {
    "0 or 1, 10 % are 1": (lambda random, size: random.binomial(1, 0.1, size), 0.1),
    "0 or 1, half are 1": (lambda random, size: random.binomial(1, 0.5, size), 0.5),
    "8 rollouts of 0 or 1, mean 0.5": (
        lambda random, size: random.binomial(8, random.beta(0.5, 0.5, size)) / 8,
        0.5,
    ),
    "8 rollouts of 0 or 1, mean 0.9": (
        lambda random, size: random.binomial(8, random.beta(1.8, 0.2, size)) / 8,
        0.9,
    ),
    "uniform": (lambda random, size: random.random(size), 0.5),
    "0.45 to 0.55": (lambda random, size: 0.45 + random.random(size) / 10, 0.5),
    "0.9, and 5 % are 0": (lambda random, size: 0.9 * random.binomial(1, 0.95, size), 0.855),
    "1, and 10 % are uniform": (
        lambda random, size: 1 - random.binomial(1, 0.1, size) * random.random(size),
        0.95,
    ),
}
SIZES = (4, 8, 25, 100)


def simulated_mean(draw: Means, true: float, size: int, num: int) -> dict[str, float]:
    """Return the coverage and the mean width of `estimate`'s interval and of the t interval."""
    random = np.random.default_rng(24)
    held = held_plain = width = width_plain = 0.0
    for means in draw(random, (num, size)).astype(float):
        found = estimate(dict(enumerate(means[:, None].tolist())))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= true <= found.high
        width += found.high - found.low
        half = student_t(size - 1) * float(means.std(ddof=1)) / math.sqrt(size)
        low, high = max(0.0, means.mean() - half), min(1.0, means.mean() + half)
        held_plain += low <= true <= high
        width_plain += high - low
    return {
        "coverage": held / num,
        "width": width / num,
        "plain_coverage": held_plain / num,
        "plain_width": width_plain / num,
    }


def plain(a: Values, b: Values) -> tuple[float, float]:
    """Return the mean difference -/+ 1.96 standard errors, runs pooled."""
    change = b.mean(axis=0) - a.mean(axis=0)
    half = 1.96 * float(change.std(ddof=1)) / math.sqrt(len(change))
    return float(change.mean()) - half, float(change.mean()) + half


def simulated(draw: Draw, true: float, num: int) -> dict[str, float]:
    """Return the coverage and the mean width of both intervals."""
    random = np.random.default_rng(24)
    held = held_plain = width = width_plain = 0.0
    for _ in range(num):
        a, b = draw(random)
        found = paired_difference(a, b)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= true <= found.high
        width += found.high - found.low
        low, high = plain(a, b)
        held_plain += low <= true <= high
        width_plain += high - low
    return {
        "coverage": held / num,
        "width": width / num,
        "plain_coverage": held_plain / num,
        "plain_width": width_plain / num,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=1_000, help="simulations per row")
    options = parser.parse_args()
    began = time.process_time()
    rows = {name: simulated(draw, true, options.num) for name, (draw, true) in CASES.items()}
    means = {
        f"{name}; {size} examples": simulated_mean(draw, true, size, options.num)
        for name, (draw, true) in MEANS.items()
        for size in SIZES
    }
    lowest: dict[str, float] = {}
    for name, row in rows.items():
        kind = next(word for word in LEAST if word in name)
        lowest[kind] = min(lowest.get(kind, 1.0), row["coverage"])
    results: dict[str, Any] = {"rows": rows, "means": means, "cpu_s": time.process_time() - began}
    what = {"seeds": "several seeds an arm", "tail": "a long tail", "": "rewards of 0 to 1"}
    bars = [
        Bar.at_least(f"lowest coverage of a 95 % interval, {what[kind]}", value, LEAST[kind])
        for kind, value in lowest.items()
    ]
    least = min(row["coverage"] for row in means.values())
    bars.append(Bar.at_least("lowest coverage of a 95 % interval of one mean", least, 0.93))

    def print_tables() -> None:
        print_table(rows, "1.96 standard errors")
        print()
        print_table(means, "t interval")

    return conclude(options, bars, results, print_tables)


def print_table(rows: dict[str, dict[str, float]], other: str) -> None:
    print(f"| simulated | coverage | width | {other} | width |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        cells = (row["coverage"], row["width"], row["plain_coverage"], row["plain_width"])
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")


if __name__ == "__main__":
    sys.exit(main())
