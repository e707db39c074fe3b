"""Stored rows to outcomes: one light value per episode, which is what reducers reduce.

It knows the store's columns and nothing about tokens, clients or environments. It leaves out
everything that is not a number, a reason or an identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from rolltree.store import StoredRollout

ExampleKey: TypeAlias = tuple[str, str, int | str | None]
"""Environment, task, example id: the same in every evaluation of the same example."""


@dataclass(frozen=True, slots=True)
class Outcome:
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


def outcomes(rows: Iterable[StoredRollout]) -> list[Outcome]:
    """Return one outcome per request, in the order in which requests first appear."""
    requests: dict[str, list[StoredRollout]] = {}
    for row in rows:
        requests.setdefault(row.request_id, []).append(row)
    return [_outcome(trajectories) for trajectories in requests.values()]


def _outcome(rows: Sequence[StoredRollout]) -> Outcome:
    first = rows[0]
    failed = next((row for row in rows if row.status == "error"), None)
    own = [row for row in rows if not row.depth]
    rewards = [row.reward for row in own if _is_number(row.reward)]
    metrics: dict[str, list[float]] = {}
    for row in own:
        for name, value in row.metrics.items():
            if _is_number(value):
                metrics.setdefault(name, []).append(float(value))
    return Outcome(
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
