"""From stored rows to aggregates: a table of pure functions, open to the caller's own.

A reducer takes the outcomes of one evaluation and its settings. An episode that failed, or that
nothing scored, has no reward: it is left out of every mean and counted in `failures` and
`num_unscored`, never as a silent 0.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from rolltree.evaluation.estimate import CONFIDENCE, Estimate, estimate, pass_at_k
from rolltree.store import StoredRollout

ExampleKey: TypeAlias = tuple[str, str, int | str | None]
"""Environment, task, example id: the same in every evaluation of the same example."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """How one episode ended. `reward` is None when it failed or nothing scored it.

    An episode with several agents has the mean of their rewards and metrics, and the sum of all
    tokens and calls. What was delegated counts in the tokens and calls only: a child's reward is
    for its subtask.
    """

    request_id: str
    example: ExampleKey
    task: str
    reward: float | None
    metrics: Mapping[str, float]
    error_type: str | None
    truncation_reason: str | None
    stop_condition: str | None
    num_attempts: int
    num_calls: int
    num_prompt_tokens: int
    num_completion_tokens: int
    generation_ms: float
    scoring_ms: float
    total_ms: float

    @property
    def failed(self) -> bool:
        """Whether the episode ended with an error instead of a result."""
        return self.error_type is not None


def outcomes(rows: Iterable[StoredRollout]) -> list[EpisodeOutcome]:
    """Return one outcome per request, in the order in which requests first appear."""
    requests: dict[str, list[StoredRollout]] = {}
    for row in rows:
        requests.setdefault(row.request_id, []).append(row)
    return [_outcome(trajectories) for trajectories in requests.values()]


def _outcome(rows: Sequence[StoredRollout]) -> EpisodeOutcome:
    first = rows[0]
    failed = next((row for row in rows if row.status == "error"), None)
    own = [row for row in rows if not row.depth]
    rewards = [row.reward for row in own if _is_number(row.reward)]
    metrics: dict[str, list[float]] = {}
    for row in own:
        for name, value in row.metrics.items():
            if _is_number(value):
                metrics.setdefault(name, []).append(float(value))
    return EpisodeOutcome(
        request_id=first.request_id,
        example=(first.env_id, first.task, first.example_id),
        task=first.task,
        reward=fmean(r for r in rewards if r is not None) if rewards and failed is None else None,
        metrics={name: fmean(values) for name, values in metrics.items()},
        error_type=None if failed is None else failed.error_type or "unknown",
        truncation_reason=next(
            (row.truncation_reason or "unknown" for row in own if row.truncated), None
        ),
        stop_condition=next((row.stop_condition for row in own if row.stop_condition), None),
        num_attempts=max(row.num_attempts for row in rows),
        num_calls=sum(row.num_calls for row in rows),
        num_prompt_tokens=sum(row.num_prompt_tokens for row in rows),
        num_completion_tokens=sum(row.num_completion_tokens for row in rows),
        generation_ms=max(row.generation_ms for row in rows),
        scoring_ms=max(row.scoring_ms for row in rows),
        total_ms=max(row.total_ms for row in rows),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Settings:
    """What reducers get besides the outcomes.

    An episode passes when its reward is at least `pass_threshold`.
    """

    confidence: float = CONFIDENCE
    pass_threshold: float = 1.0


Reducer: TypeAlias = Callable[[Sequence[EpisodeOutcome], Settings], Any]


def rewards_by_example(outcomes: Iterable[EpisodeOutcome]) -> dict[Hashable, list[float]]:
    """Return the rewards of the scored episodes, clustered by example."""
    clusters: dict[Hashable, list[float]] = {}
    for outcome in outcomes:
        if outcome.reward is not None:
            clusters.setdefault(outcome.example, []).append(outcome.reward)
    return clusters


def reward(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> Estimate | None:
    """Mean reward over examples, scored episodes only."""
    return estimate(rewards_by_example(outcomes), confidence=settings.confidence)


def passes(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[int, Estimate]:
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


def tasks(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, Estimate]:
    """Mean reward of each task that has a scored episode."""
    names = sorted({outcome.task for outcome in outcomes})
    found = {
        name: reward([outcome for outcome in outcomes if outcome.task == name], settings)
        for name in names
    }
    return {name: result for name, result in found.items() if result is not None}


def metrics(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, Estimate]:
    """Mean of every numeric metric, over the episodes that have it."""
    clusters: dict[str, dict[Hashable, list[float]]] = {}
    for outcome in outcomes:
        if not outcome.failed:
            for name, value in outcome.metrics.items():
                clusters.setdefault(name, {}).setdefault(outcome.example, []).append(value)
    found = {name: estimate(c, confidence=settings.confidence) for name, c in clusters.items()}
    return {name: result for name, result in found.items() if result is not None}


def failures(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Failed episodes by error type, most frequent first."""
    return dict(Counter(o.error_type for o in outcomes if o.error_type).most_common())


def truncations(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Truncated episodes by reason, most frequent first."""
    return dict(Counter(o.truncation_reason for o in outcomes if o.truncation_reason).most_common())


def stops(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Episodes by the stop condition that ended them, most frequent first."""
    return dict(Counter(o.stop_condition for o in outcomes if o.stop_condition).most_common())


def usage(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, float]:
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
