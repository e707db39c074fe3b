"""Metrics of a step: of its loss records, as the optimizer saw them, and of its rollouts.

All trained tokens have equal weight. For metrics per task of one environment, query the run store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from statistics import pstdev
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rolltree._helpers.tasks import peak_rss_bytes
from rolltree.environments.rubrics import are_equal
from rolltree.samples import take_records
from rolltree.store.weights import task_environment
from rolltree.values.estimate import episodes_estimate, mean
from rolltree.values.types import FinishReason, IntArray, Records, RolloutResult, State

if TYPE_CHECKING:  # torch takes seconds to load, and an audit reads only metrics of rollouts
    from torch import Tensor

    from rolltree.training.layout import FloatColumn
    from rolltree.training.logprobs import RecordLogprobs
    from rolltree.training.models.ranks import Ranks
    from rolltree.training.objective import ObjectiveTerms

MISMATCH = "train/sampling/sampling_logp_difference/mean"
"""Mean |trainer's logprob - engine's| of the tokens that the current weights sampled, if any."""


class RecordStats:
    """Logprob, entropy, KL, clipping and correction of every record of one optimizer step.

    `reference` is the logprob of the reference model, for an estimated KL.
    """

    def __init__(
        self,
        num_records: int,
        *,
        kl: bool = False,
        reference: bool = False,
        factor: bool = False,
    ) -> None:
        self.logprob = np.zeros(num_records, np.float32)
        self.entropy = np.zeros(num_records, np.float32)
        self.clipped = np.zeros(num_records, np.float32)
        self.kl = np.zeros(num_records, np.float32) if kl else None
        self.reference = np.zeros(num_records, np.float32) if reference else None
        self.factor = np.zeros(num_records, np.float32) if factor else None
        self.loss = 0.0

    def add(
        self,
        span: slice,
        got: RecordLogprobs,
        terms: ObjectiveTerms,
        factor: FloatColumn | None = None,
        reference: Tensor | None = None,
    ) -> None:
        """Add the records of one pack; `factor` is the factor of the correction."""
        self.logprob[span] = got.logprob.detach().cpu().numpy()
        self.entropy[span] = got.entropy.detach().cpu().numpy()
        self.clipped[span] = terms.clipped.cpu().numpy()
        self.loss += float(terms.total.detach())
        if self.kl is not None and terms.kl is not None:
            self.kl[span] = terms.kl.cpu().numpy()
        if self.reference is not None and reference is not None:
            self.reference[span] = reference.cpu().numpy()
        if self.factor is not None and factor is not None:
            self.factor[span] = factor

    def sum_over(self, ranks: Ranks) -> None:
        """Add the values of the other ranks; each record belongs to one rank."""
        names = ("logprob", "entropy", "clipped", "kl", "reference", "factor")
        columns = {name: each for name in names if (each := getattr(self, name)) is not None}
        # A record is 0 on every rank but its own, so the sum is its value.
        *summed, loss = ranks.total(*columns.values(), np.array([self.loss]))
        for name, column in zip(columns, summed, strict=True):
            setattr(self, name, column)
        self.loss = float(loss[0])

    def metrics(self, records: Records, version: int | None = None) -> dict[str, float]:
        """Return the metrics; `records` are those of the step, in the same order.

        `mismatch/*` is trainer minus engine logprob before any update, over the tokens that
        `version` sampled (None: all tokens); it is absent if there are none. `ratio/*` is the
        exponential of that difference for all tokens: `ratio/p01` and `ratio/p99` are its tails,
        `ratio/outside_share` the share below 1/2 or above 2, `ratio/ess` the effective sample size
        as a share (Kish 1965). Tokens without a behaviour logprob (supervised ones) have neither.
        `correction/*` is present if there is a correction.
        """
        metrics = {
            "train/loss": self.loss,
            "train/entropy": float(self.entropy.mean()),
            "train/clip_ratio/region_mean": float(self.clipped.mean()),
        }
        if self.kl is not None:
            metrics["train/kl"] = float(self.kl.mean())
        if self.factor is not None:
            metrics["correction/mean"] = float(self.factor.mean())
            metrics["correction/masked_share"] = float((self.factor == 0).mean())
        # No engine sampled supervised tokens.
        if not np.isnan(records.logprob).any():
            metrics |= self._against_engine(records, version)
        return metrics

    def _against_engine(self, records: Records, version: int | None) -> dict[str, float]:
        difference, ratio = importance_ratio(self.logprob, records.logprob)
        tails = np.quantile(ratio, (0.01, 0.99))
        metrics = {
            "ratio/mean": float(ratio.mean()),
            "ratio/min": float(ratio.min()),
            "ratio/p01": float(tails[0]),
            "ratio/p99": float(tails[1]),
            "ratio/max": float(ratio.max()),
            "ratio/outside_share": float(((ratio < 0.5) | (ratio > 2)).mean()),
            "ratio/ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        }
        # Older tokens differ because the policy has changed since; `ratio/*` shows that.
        fresh = np.ones(len(ratio), bool) if version is None else records.version == version
        if not fresh.any():
            return metrics
        own = difference[fresh]
        return metrics | {
            "mismatch/mean": float(own.mean()),
            MISMATCH: float(np.abs(own).mean()),
            "train/sampling/sampling_logp_difference/max": float(np.abs(own).max()),
            # k3 of Schulman 2020: never negative, and its expectation is the KL.
            "mismatch_kl/mean": float((ratio[fresh] - 1 - own).mean()),
            **mismatch_metrics(take_records(records, fresh), own),
        }


def importance_ratio(
    logprob: FloatColumn, engine: FloatColumn
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return trainer minus engine logprob of each token, and its exponential."""
    difference = (logprob - engine).astype(np.float64)
    # Capped so that float64 holds the exponential, and its square.
    return difference, np.exp(np.minimum(difference, 50.0))


_OFFSETS = (0, 1, 4, 16, 64, 256, 1024)
_CALLS = (0, 1, 2, 4, 8, 16)
"""Lower bounds of the ranges; the last one is open."""


def mismatch_metrics(records: Records, difference: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean absolute difference per range of positions and of calls.

    Example: `{"mismatch/at_0": ..., "mismatch/at_1-3": ..., "mismatch/call_0": ...,
    "mismatch/call_16+": ...}`; a range without tokens is absent.

    Args:
        records: `_R` loss records.
        difference: float64 `[_R]`, trainer minus engine logprob.
    """
    size = np.abs(difference)
    return {
        **_per_range("mismatch/at", records.offset, _OFFSETS, size),
        **_per_range("mismatch/call", records.call, _CALLS, size),
    }


def _per_range(
    stem: str, values: IntArray, bounds: tuple[int, ...], size: NDArray[np.float64]
) -> dict[str, float]:
    place = np.searchsorted(bounds, values, side="right") - 1
    count = np.bincount(place, minlength=len(bounds))
    total = np.bincount(place, weights=size, minlength=len(bounds))
    names = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(bounds)]
    names.append(f"{bounds[-1]}+")
    return {
        f"{stem}_{name}": float(total[i] / count[i]) for i, name in enumerate(names) if count[i]
    }


def rollout_metrics(
    results: Sequence[RolloutResult], environments: Sequence[str] = ()
) -> dict[str, float]:
    """Return the metrics of all rollouts of one step.

    Rewards and metrics are those of the episodes' own rollouts; with several agents, or delegation,
    `reward/<agent>/mean` is each agent's. Lengths and calls are over all rollouts. The interval of
    the reward, `reward/low` to `reward/high`, takes the group as the unit, as an evaluation does.
    Rewards and `metrics/*` are means over rollouts that have the value; failed rollouts have none
    and are counted in `error/*`. Lengths count sampled tokens (`rollout/max_sampled_tokens`: of one
    call), `rollout/length_cut_share` is the share of calls that reached their token limit.

    `environments` names those of a group; if there are several, `env/<name>/...` are the rewards,
    metrics and failures of each.
    """
    states = [state for result in results for state in result.states]
    metrics = _rewards(results) | _agent_rewards(states) | _metrics_of_rubrics(results)
    extras = [_extras(step) for state in states for step in state.get("trajectory") or ()]
    sampled = [int(extra.get("num_completion_tokens") or 0) for extra in extras]
    prompts = [int(extra.get("num_prompt_tokens") or 0) for extra in extras]
    cut = [str(extra.get("finish_reason")) == FinishReason.LENGTH for extra in extras]
    lengths = [
        sum(
            int(_extras(step).get("num_completion_tokens") or 0)
            for step in s.get("trajectory") or ()
        )
        for s in states
    ]
    count = max(1, len(states))
    metrics |= {
        "rollout/num_calls": len(extras) / count,
        "train/completions/mean_length": sum(lengths) / count,
        "train/completions/min_length": float(min(lengths, default=0)),
        "train/completions/max_length": float(max(lengths, default=0)),
        "rollout/max_sampled_tokens": float(max(sampled, default=0)),
        "rollout/prompt_tokens": sum(prompts) / count,
        "rollout/total_sampled_tokens": float(sum(sampled)),
        "rollout/length_cut_share": sum(cut) / max(1, len(extras)),
        "is_truncated/mean": sum(bool(s.get("truncated")) for s in states) / count,
        "rollout/generation_ms": _mean_timing(states, "generation_ms"),
        "rollout/scoring_ms": _mean_timing(states, "scoring_ms"),
        "memory/peak_rss_bytes": float(peak_rss_bytes()),
    }
    errors = Counter(result.error.type for result in results if result.error is not None)
    metrics["error/mean"] = sum(errors.values()) / max(1, len(results))
    metrics |= {f"error/{kind}": float(number) for kind, number in sorted(errors.items())}
    return metrics | _per_environment(results, environments)


def _per_environment(
    results: Sequence[RolloutResult], environments: Sequence[str]
) -> dict[str, float]:
    if len(environments) < 2:
        return {}
    parts: defaultdict[str | None, list[RolloutResult]] = defaultdict(list)
    for result in results:
        task = str(result.request.input["task"])
        parts[task_environment(task, environments)].append(result)
    metrics: dict[str, float] = {}
    for name in filter(parts.get, environments):
        part = parts[name]
        own = _rewards(part) | _metrics_of_rubrics(part)
        own["error/mean"] = sum(each.error is not None for each in part) / len(part)
        own["num_rollouts"] = float(len(part))
        metrics |= {f"env/{name}/{key}": value for key, value in own.items()}
    return metrics


def _metrics_of_rubrics(results: Sequence[RolloutResult]) -> dict[str, float]:
    """Return the mean of each metric over the episodes' own rollouts."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for state in result.states:
            # An episode's metrics are those of its own rollouts, not of those they delegated to.
            if state.get("parent_rollout") is None:
                for name, value in (state.get("metrics") or {}).items():
                    if isinstance(value, int | float):
                        by_name[name].append(float(value))
    return {f"metrics/{name}": mean(values) for name, values in sorted(by_name.items())}


def _rewards(results: Sequence[RolloutResult]) -> dict[str, float]:
    """Return the mean reward with its interval, spread and maximum; empty without rewards."""
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)
    for result in results:
        for state in result.states:
            if state.get("parent_rollout") is None and state.get("reward") is not None:
                groups[result.request.group_id].append(float(state["reward"]))
    rewards = [reward for group in groups.values() for reward in group]
    if not rewards:
        return {}
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": 0.0 if are_equal(rewards) else pstdev(rewards),
        "reward/max": max(rewards),
    }
    estimate = episodes_estimate(groups)
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        metrics |= {"reward/low": estimate.low, "reward/high": estimate.high}
    return metrics


def _agent_rewards(states: Sequence[State]) -> dict[str, float]:
    """Return the mean reward of each agent; empty if there is only one."""
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    for state in states:
        if state.get("reward") is not None:
            by_agent[str(state.get("agent") or "agent")].append(float(state["reward"]))
    # `reward/mean` already is that agent's mean.
    if len(by_agent) < 2:
        return {}
    return {f"reward/{agent}/mean": mean(values) for agent, values in sorted(by_agent.items())}


def _extras(step: Any) -> dict[str, Any]:
    return step.get("extras") or {}


def _mean_timing(states: Sequence[State], name: str) -> float:
    values = [float((state.get("timing") or {}).get(name) or 0.0) for state in states]
    return mean(values) if values else 0.0
