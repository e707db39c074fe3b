"""Outcomes to aggregates: a table of pure functions, open to the caller's own.

A reducer takes the outcomes of one evaluation and its settings. The policy for failures is one:
an episode that failed, or that nothing scored, has no reward; it is left out of every mean and
shows in `failures` and `num_unscored`, never as a silent 0.0. The module knows nothing about
where outcomes come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from rolltree.evaluation.estimate import CONFIDENCE, Estimate, estimate, pass_at_k
from rolltree.evaluation.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Settings:
    """What reducers are told besides the outcomes.

    An episode passes when its reward is at least `pass_threshold`.
    """

    confidence: float = CONFIDENCE
    pass_threshold: float = 1.0


Reducer: TypeAlias = Callable[[Sequence[Outcome], Settings], Any]


def rewards_by_example(outcomes: Iterable[Outcome]) -> dict[Hashable, list[float]]:
    """Return the rewards of the scored episodes, clustered by example."""
    clusters: dict[Hashable, list[float]] = {}
    for outcome in outcomes:
        if outcome.reward is not None:
            clusters.setdefault(outcome.example, []).append(outcome.reward)
    return clusters


def reward(outcomes: Sequence[Outcome], settings: Settings) -> Estimate | None:
    """Mean reward over examples, scored episodes only."""
    return estimate(rewards_by_example(outcomes), confidence=settings.confidence)


def passes(outcomes: Sequence[Outcome], settings: Settings) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... up to the scored rollouts of the best-covered example.

    An example with fewer than k scored rollouts says nothing about pass@k and is left out of it.
    """
    clusters = rewards_by_example(outcomes)
    most = max(map(len, clusters.values()), default=0)
    found: dict[int, Estimate] = {}
    for k in sorted({2**power for power in range(most.bit_length())} | ({most} if most else set())):
        values = {
            example: [
                pass_at_k(len(rewards), sum(r >= settings.pass_threshold for r in rewards), k)
            ]
            for example, rewards in clusters.items()
            if len(rewards) >= k
        }
        result = estimate(values, confidence=settings.confidence, are_shares=True)
        if result is not None:
            found[k] = result
    return found


def tasks(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, Estimate]:
    """Mean reward of each task that has a scored episode."""
    names = sorted({outcome.task for outcome in outcomes})
    found = {
        name: reward([outcome for outcome in outcomes if outcome.task == name], settings)
        for name in names
    }
    return {name: result for name, result in found.items() if result is not None}


def metrics(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, Estimate]:
    """Mean of every numeric metric, over the episodes that have it."""
    clusters: dict[str, dict[Hashable, list[float]]] = {}
    for outcome in outcomes:
        if not outcome.failed:
            for name, value in outcome.metrics.items():
                clusters.setdefault(name, {}).setdefault(outcome.example, []).append(value)
    found = {name: estimate(c, confidence=settings.confidence) for name, c in clusters.items()}
    return {name: result for name, result in found.items() if result is not None}


def failures(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, int]:
    """Failed episodes by error type, most frequent first."""
    return dict(Counter(o.error_type for o in outcomes if o.error_type).most_common())


def truncations(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, int]:
    """Truncated episodes by reason, most frequent first."""
    return dict(Counter(o.truncation_reason for o in outcomes if o.truncation_reason).most_common())


def stops(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, int]:
    """Episodes by the stop condition that ended them, most frequent first."""
    return dict(Counter(o.stop_condition for o in outcomes if o.stop_condition).most_common())


def usage(outcomes: Sequence[Outcome], settings: Settings) -> dict[str, float]:
    """Totals and means per episode of calls, tokens and milliseconds."""
    fields = ("num_calls", "num_prompt_tokens", "num_completion_tokens")
    found: dict[str, float] = {}
    for name in fields:
        found[name] = sum(getattr(outcome, name) for outcome in outcomes)
    for name in (*fields, "generation_ms", "scoring_ms", "total_ms"):
        values = [getattr(outcome, name) for outcome in outcomes]
        found[f"mean_{name}"] = fmean(values) if values else 0.0
    found["num_retried"] = sum(outcome.num_attempts > 1 for outcome in outcomes)
    return found


REDUCERS: Mapping[str, Reducer] = {
    "reward": reward,
    "pass_at": passes,
    "tasks": tasks,
    "metrics": metrics,
    "failures": failures,
    "truncations": truncations,
    "stops": stops,
    "usage": usage,
}
"""What every report holds. Pass `{**REDUCERS, "mine": function}` to add your own."""
