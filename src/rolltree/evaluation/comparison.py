"""Compares two arms example by example: reward, pass@k and pass^k, failures, tokens and times.

An arm is the report of one evaluation, or those of several runs of the same recipe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import NormalDist
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from rolltree.evaluation.paired import paired_difference
from rolltree.evaluation.reducers import (
    ExampleKey,
    by_example,
    metric_columns,
    passes_by_example,
    rewards_by_example,
    values,
)
from rolltree.evaluation.report import EvalReport
from rolltree.store.weights import task_environment
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.estimate import (
    CONFIDENCE,
    COUNT,
    SHARE,
    Bounds,
    Estimate,
    estimate,
    mean,
    pass_at_k,
    pass_hat_k,
)

Arm: TypeAlias = EvalReport | Sequence[EvalReport]
Clusters: TypeAlias = Mapping[Hashable, Sequence[float]]
"""The values of the rollouts of each example, in one run."""

_POWER = 0.8
_PASSES = re.compile(r"pass([@^])(\d+)")
_SHARES = ("failed", "truncated")
_COUNTED = ("num_calls", "num_prompt_tokens", "num_completion_tokens", "total_ms")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean of a measure in A and B on their common examples, and the paired difference B - A.

    `before` is A's mean and `after` B's; `evaluation.paired` gives the interval of `difference`.
    `num_only_a` and `num_only_b` count examples left out because some run lacks them.
    `num_runs` counts the runs of A and B.

    Example: reward 0.14 before, 0.87 after, difference `0.730 [0.640, 0.820]` over 100 examples.
    """

    before: Estimate
    after: Estimate
    difference: Estimate
    num_only_a: int
    num_only_b: int
    confidence: float = CONFIDENCE
    num_runs: tuple[int, int] = (1, 1)

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the difference excludes zero, over enough examples to tell."""
        return self.verdict in ("higher", "lower")

    @property
    def verdict(self) -> Literal["higher", "lower", "noise", "too few examples"]:
        """The conclusion about B against A.

        Chance alone gives n differences of one sign in 2^(1 - n) of all cases, so with n <= 5 no
        difference is significant at 95 %, whatever the interval is.
        """
        low, high = self.difference.low, self.difference.high
        if (
            low is None
            or high is None
            or 2.0 ** (1 - self.difference.num_examples) > (1 - self.confidence)
        ):
            return "too few examples"
        return "higher" if low > 0.0 else "lower" if high < 0.0 else "noise"

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that such a comparison detects 4 times out of 5."""
        low, high = self.difference.low, self.difference.high
        if low is None or high is None:
            return None
        quantile = NormalDist().inv_cdf(0.5 + self.confidence / 2)
        return (high - low) / 2 * (1 + NormalDist().inv_cdf(_POWER) / quantile)

    def sentence(self, a: str = "A", b: str = "B", measure: str = "reward") -> str:
        """Return the difference as a sentence that says whether it is noise."""
        gain = self.difference
        size = f"{gain.mean:+.3f}"
        if gain.low is not None:
            size += f" [{gain.low:+.3f}, {gain.high:+.3f}]"
        over = f"{size} over {gain.num_examples} examples"
        if max(self.num_runs) > 1:
            over += f" and {self.num_runs[0]} against {self.num_runs[1]} runs"
        if self.verdict == "too few examples":
            return (
                f"The {measure} of {b} differs from that of {a} by {over}: too few examples to "
                "tell it from noise. Evaluate both on more."
            )
        if self.is_significant:
            return f"The {measure} of {b} is {self.verdict} than that of {a}, {over}: not noise."
        said = (
            f"The {measure} of {b} differs from that of {a} by {over}: noise, the interval "
            "contains 0."
        )
        if not self.detectable:
            return said
        said += f" Such a comparison finds differences above about {self.detectable:.2g}."
        if gain.mean and max(self.num_runs) == 1:
            needed = gain.num_examples * (self.detectable / gain.mean) ** 2
            if needed < 1e6:
                said += f" To find {abs(gain.mean):.2g} takes about {_rounded(needed):,} examples."
        return said

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return asdict(self) | {
            "num_runs": list(self.num_runs),
            "verdict": self.verdict,
            "is_significant": self.is_significant,
            "detectable": self.detectable,
        }


def _rounded(number: float) -> int:
    """Return a number with two significant digits."""
    digits = max(0, math.floor(math.log10(number)) - 1)
    return int(round(number / 10**digits) * 10**digits)


def compare_reports(
    a: Arm, b: Arm, *, measure: str = "reward", confidence: float | None = None
) -> Comparison:
    """Compare two arms example by example, at A's confidence unless one is given.

    `measure` is one of `measure_names`: `reward`, `pass@4`, `pass^4`, `failed`, `truncated`,
    `num_calls`, `num_prompt_tokens`, `num_completion_tokens`, `total_ms`, `metric/NAME`, and for
    each environment of a group `env/NAME/reward`, `env/NAME/metric/NAME`.

    Several reports make an arm of several runs; if both arms have the same runs in the same order
    (two phases of each), the runs are paired too.

    Raises:
        ConfigError: the arms have no scored example in common, or the measure is unknown.
    """
    reports_a, reports_b = as_arm(a), as_arm(b)
    first = reports_a[0]
    if measure not in (names := measure_names((*reports_a, *reports_b))):
        raise ConfigError(f"evaluations have no measure {measure!r}.{did_you_mean(measure, names)}")
    found = compare_values(
        [measured(report, measure) for report in reports_a],
        [measured(report, measure) for report in reports_b],
        confidence=first.settings.confidence if confidence is None else confidence,
        own_confidence=first.settings.confidence,
        bounds=_bounds_of(measure),
        same_runs=are_same_runs(reports_a, reports_b),
    )
    if found is None:
        raise ConfigError(
            f"the evaluations {first.phase!r} and {reports_b[0].phase!r} have no scored example in "
            "common, so their difference would compare the examples, not the models. Evaluate both "
            "on the same split with the same num_examples."
        )
    return found


def compare_environments(a: EvalReport, b: EvalReport) -> dict[str, Comparison]:
    """Compare the reward of each environment of a group that both scored."""
    found = {}
    for name in a.environments:
        measure = f"env/{name}/reward"
        if measure in _environment_measures((a, b)):
            # Nothing to compare if the two have no example in common.
            with suppress(ConfigError):
                found[name] = compare_reports(a, b, measure=measure)
    return found


def as_arm(arm: Arm) -> tuple[EvalReport, ...]:
    """Return the reports of an arm."""
    return (arm,) if isinstance(arm, EvalReport) else tuple(arm)


def are_same_runs(a: Sequence[EvalReport], b: Sequence[EvalReport]) -> bool:
    """Whether both arms' reports are stored in the same runs, in order."""
    paths = [report.run_path for report in a]
    return None not in paths and paths == [report.run_path for report in b]


def compare_values(
    a: Sequence[Clusters],
    b: Sequence[Clusters],
    *,
    confidence: float = CONFIDENCE,
    own_confidence: float = CONFIDENCE,
    bounds: Bounds | None = None,
    same_runs: bool = False,
) -> Comparison | None:
    """Compare values by example, with one mapping per run; None without a common example.

    `bounds` are those of the measure, None: `Bounds.seen` of the values.

    The means of the arms have intervals at `own_confidence`, as in their reports; `confidence` may
    be raised for several comparisons, which leaves these intervals alone.
    """
    runs = (*a, *b)
    # Only examples that every run scored can be paired; the others are counted.
    common = [key for key in runs[0] if all(run.get(key) for run in runs)]
    if not common:
        return None
    rows_a, rows_b = (
        np.array([[mean(run[key]) for key in common] for run in arm]) for arm in (a, b)
    )
    zeros = np.zeros_like
    if bounds is None:
        bounds = Bounds.seen(run[key] for run in runs for key in common)
    before, after = (
        estimate({key: arm[0][key] for key in common}, confidence=own_confidence, bounds=bounds)
        if len(arm) == 1
        else bounds.within(
            paired_difference(
                zeros(rows), rows, same_runs=True, confidence=own_confidence, bounds=bounds
            )
        )
        for arm, rows in ((a, rows_a), (b, rows_b))
    )
    assert before is not None, "a common example has a value"
    assert after is not None, "a common example has a value"
    difference = paired_difference(
        rows_a, rows_b, same_runs=same_runs, confidence=confidence, bounds=bounds
    )
    num_only_a, num_only_b = (
        len({key for run in arm for key, found in run.items() if found}) - len(common)
        for arm in (a, b)
    )
    return Comparison(
        before=before,
        after=after,
        difference=difference,
        num_only_a=num_only_a,
        num_only_b=num_only_b,
        confidence=confidence,
        num_runs=(len(a), len(b)),
    )


def measure_names(reports: Sequence[EvalReport]) -> list[str]:
    """Return the measures that all these reports have, the reward first.

    For pass@k and pass^k, k is 1, 2, 4... up to the rollouts of the best-covered example.
    """
    most = [
        max(map(len, rewards_by_example(report.outcomes).values()), default=0) for report in reports
    ]
    ks = [2**power for power in range(min(most).bit_length())]
    each = [{name for name, _ in metric_columns(report.outcomes)} for report in reports]
    metrics = [name for name, _ in metric_columns(reports[0].outcomes)]
    return [
        "reward",
        *(f"pass@{k}" for k in ks),
        *(f"pass^{k}" for k in ks if k > 1),
        *(f"metric/{name}" for name in metrics if all(name in found for found in each)),
        *_SHARES,
        *_COUNTED,
        *_environment_measures(reports),
    ]


def _environment_measures(reports: Sequence[EvalReport]) -> list[str]:
    each = [_scored_in_environments(report) for report in reports]
    return [name for name in each[0] if all(name in found for found in each)]


def _is_played_by(example: Hashable, environment: str, report: EvalReport) -> bool:
    task = cast(ExampleKey, example)[1]
    return task_environment(task, report.environments) == environment


def _scored_in_environments(report: EvalReport) -> list[str]:
    return [
        f"env/{name}/{measure}"
        for name, own in report.environments.items()
        for measure in ("reward", *(f"metric/{metric}" for metric in own["metrics"]))
        if own["reward"] is not None
    ]


def measured(report: EvalReport, measure: str) -> Clusters:
    """Return the values of a measure by example. Failed rollouts have no reward and no metrics."""
    outcomes, passes = report.outcomes, _PASSES.fullmatch(measure)
    for name in report.environments:
        if measure.startswith(f"env/{name}/"):
            whole = measured(report, measure.removeprefix(f"env/{name}/"))
            return {key: own for key, own in whole.items() if _is_played_by(key, name, report)}
    if measure == "reward":
        return rewards_by_example(outcomes)
    if passes is not None:
        threshold = report.settings.pass_threshold
        return passes_by_example(outcomes, threshold, int(passes[2]), _CHANCES[passes[1]])
    if measure.startswith("metric/"):
        column: Iterable[float | None] = dict(metric_columns(outcomes))[measure[len("metric/") :]]
        pairs = zip(values(outcomes, "error_type"), column, strict=True)
        return by_example(outcomes, (None if failed else value for failed, value in pairs))
    if measure in _SHARES:
        field = {"failed": "error_type", "truncated": "truncation_reason"}[measure]
        return by_example(outcomes, (float(value is not None) for value in values(outcomes, field)))
    return by_example(outcomes, map(float, values(outcomes, measure)))


def _bounds_of(measure: str) -> Bounds | None:
    """Return the bounds of a measure; None for what an environment computes."""
    if measure in _COUNTED:
        return COUNT
    return SHARE if measure in _SHARES or _PASSES.fullmatch(measure) else None


_CHANCES: Mapping[str, Callable[[int, int, int], float]] = {"@": pass_at_k, "^": pass_hat_k}


@dataclass(frozen=True, slots=True)
class ExampleChange:
    """One example's mean reward and share of passed rollouts in each arm."""

    example: Hashable
    reward_a: float
    reward_b: float
    pass_a: float
    pass_b: float

    @property
    def gain(self) -> float:
        """The change of the mean reward."""
        return self.reward_b - self.reward_a

    @property
    def flip(self) -> Literal["lost", "won", ""]:
        """Return "lost" if most rollouts passed in A but not in B, and "won" for the reverse."""
        was, now = self.pass_a > 0.5, self.pass_b > 0.5
        return "" if was == now else "won" if now else "lost"


def example_changes(a: Arm, b: Arm) -> list[ExampleChange]:
    """Return the common examples whose mean reward changed: lost ones, won ones, then the others.

    In each part, the largest change of the reward comes first.
    """
    reports_a, reports_b = as_arm(a), as_arm(b)
    arms = [_pooled(reports) for reports in (reports_a, reports_b)]
    threshold = reports_a[0].settings.pass_threshold
    found = []
    for example, rewards in arms[0].items():
        other = arms[1].get(example)
        if other:
            rewards_a, rewards_b = mean(rewards), mean(other)
            shares = [
                mean([float(value >= threshold) for value in each]) for each in (rewards, other)
            ]
            if rewards_a != rewards_b:
                found.append(ExampleChange(example, rewards_a, rewards_b, *shares))
    order = {"lost": 0, "won": 1, "": 2}
    return sorted(found, key=lambda e: (order[e.flip], -abs(e.gain)))


def _pooled(reports: Sequence[EvalReport]) -> dict[Hashable, list[float]]:
    """Return the rewards of all runs of an arm, by example."""
    pooled: dict[Hashable, list[float]] = {}
    pairs = chain.from_iterable(rewards_by_example(r.outcomes).items() for r in reports)
    for example, rewards in pairs:
        pooled.setdefault(example, []).extend(rewards)
    return pooled
