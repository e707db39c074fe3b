"""The metrics of a step, computed again from its rollouts and its trained tokens.

One row per family of metrics; a family gives no numbers if its input was not stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TypeAlias

from rolltree.estimate import episodes_estimate
from rolltree.records.auditing.report import grouped
from rolltree.records.auditing.rollout import RolloutFacts, TrainedFacts
from rolltree.types import FinishReason

Numbers: TypeAlias = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FromRollouts:
    """Metrics of all rollouts that a step sampled.

    `names` are prefixes of metrics that a step may have only if `compute` returns them; any other
    metric with such a prefix belongs to no rollout.
    """

    compute: Callable[[Sequence[RolloutFacts]], Numbers]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FromTokens:
    """Metrics of the tokens that a step trained; `relative` is their stored precision."""

    compute: Callable[[Sequence[TrainedFacts]], Numbers]
    relative: float = 1e-6


def _own(sampled: Sequence[RolloutFacts]) -> list[RolloutFacts]:
    return [item for item in sampled if item.parent_rollout is None]


def _rewards(sampled: Sequence[RolloutFacts]) -> Numbers:
    scored = [(item.group_id, item.reward) for item in _own(sampled) if item.reward is not None]
    if not scored:
        return {}
    found = [reward for _, reward in scored]
    numbers = {"reward/mean": fmean(found), "reward/std": pstdev(found), "reward/max": max(found)}
    estimate = episodes_estimate(grouped(scored))
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        numbers |= {"reward/low": estimate.low, "reward/high": estimate.high}
    return numbers


def _agent_rewards(sampled: Sequence[RolloutFacts]) -> Numbers:
    by_agent = grouped(
        (str((item.state or {}).get("agent") or "agent"), item.reward)
        for item in sampled
        if item.reward is not None
    )
    if len(by_agent) < 2:
        return {}
    return {f"reward/{agent}/mean": fmean(values) for agent, values in by_agent.items()}


def _functions(sampled: Sequence[RolloutFacts]) -> Numbers:
    by_name = grouped(pair for item in _own(sampled) for pair in item.metrics.items())
    return {f"metrics/{name}": fmean(values) for name, values in by_name.items()}


def _lengths(sampled: Sequence[RolloutFacts]) -> Numbers:
    lengths = [item.num_sampled for item in sampled]
    calls = [step["extras"] for item in sampled for step in (item.state or {})["trajectory"]]
    cut = sum(str(extras.get("finish_reason")) == FinishReason.LENGTH for extras in calls)
    longest = max((int(each.get("num_completion_tokens") or 0) for each in calls), default=0)
    return {
        "rollout/num_calls": len(calls) / len(sampled),
        "train/completions/mean_length": sum(lengths) / len(sampled),
        "train/completions/min_length": float(min(lengths)),
        "train/completions/max_length": float(max(lengths)),
        "rollout/max_sampled_tokens": float(longest),
        "rollout/prompt_tokens": sum(item.num_prompt_tokens for item in sampled) / len(sampled),
        "rollout/total_sampled_tokens": float(sum(lengths)),
        "rollout/length_cut_share": cut / max(1, len(calls)),
        "is_truncated/mean": sum(item.truncated for item in sampled) / len(sampled),
        "rollout/generation_ms": fmean(item.generation_ms for item in sampled),
        "rollout/scoring_ms": fmean(item.scoring_ms for item in sampled),
    }


def _errors(sampled: Sequence[RolloutFacts]) -> Numbers:
    kinds = {item.request_id: item.error_type for item in sampled if item.failed}
    num_requests = len({item.request_id for item in sampled})
    counts = Counter(kind for kind in kinds.values() if kind is not None)
    found = {f"error/{kind}": float(number) for kind, number in counts.items()}
    return {"error/mean": sum(counts.values()) / max(1, num_requests), **found}


FROM_ROLLOUTS = (
    FromRollouts(_rewards),
    FromRollouts(_agent_rewards),
    FromRollouts(_functions, ("metrics/",)),
    FromRollouts(_lengths),
)
FROM_REQUESTS = (FromRollouts(_errors, ("error/",)),)
"""Metrics that also count requests without a trajectory."""


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
