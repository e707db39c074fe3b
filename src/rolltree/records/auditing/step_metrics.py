"""The metrics of a step, computed again from its trained tokens.

One row per family of metrics; a family gives no numbers if its input was not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rolltree.records.auditing.rollout import TrainedFacts

Numbers: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FromTokens:
    """Metrics of the tokens that a step trained; `relative` is their stored precision."""

    compute: Callable[[Sequence[TrainedFacts]], Numbers]
    relative: float = 1e-6


def _records(rows: Sequence[TrainedFacts]) -> Numbers:
    computed = sum(row.num_computed for row in rows)
    return {"train/num_records": float(computed)}


def _skipped(rows: Sequence[TrainedFacts]) -> Numbers:
    if not all(row.is_weighted for row in rows):
        return {}
    counted = sum(row.num_counted for row in rows)
    computed = sum(row.num_computed for row in rows)
    return {"train/num_skipped_records": float(counted - computed)}


def _entropy(rows: Sequence[TrainedFacts]) -> Numbers:
    computed = sum(row.num_computed for row in rows)
    return {"train/entropy": sum(row.sum_entropy for row in rows) / computed} if computed else {}


def _mismatch(rows: Sequence[TrainedFacts]) -> Numbers:
    number = sum(row.num_fresh for row in rows)
    total = sum(row.mismatch * row.num_fresh for row in rows if row.mismatch is not None)
    # A step of several updates has the metric of the first one only.
    return {"train/sampling/sampling_logp_difference/mean": total / number} if number else {}


def _lag(rows: Sequence[TrainedFacts]) -> Numbers:
    number = sum(row.num_computed for row in rows)
    return {"train/lag_mean": sum(row.sum_lag for row in rows) / number} if number else {}


def _engine_entropy(rows: Sequence[TrainedFacts]) -> Numbers:
    sums = [row.sum_logprob for row in rows]
    num_tokens = sum(row.num_tokens for row in rows)
    if not num_tokens or None in sums:
        return {}
    return {"rollout/entropy": -sum(value for value in sums if value is not None) / num_tokens}


FROM_TOKENS = (
    FromTokens(_records),
    FromTokens(_skipped),
    # Stored as float16.
    FromTokens(_entropy, 2e-3),
    # Logprobs are stored as float32, and their differences are small.
    FromTokens(_mismatch, 1e-2),
    FromTokens(_lag),
    # The step computed this mean in float32.
    FromTokens(_engine_entropy, 1e-4),
)
