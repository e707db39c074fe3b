"""Computes the metrics of a step's tokens again: those of the loss, the KL and the ratios.

Every rollout gives sums, which are small enough to keep for a whole run; a step's metrics follow
from those of its rollouts. Quantiles do not, so `ratio/p01` and `ratio/p99` are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rolltree.insight.auditing.rollout import TrainedFacts
from rolltree.store.trained import TrainedRollout
from rolltree.training.algorithms import Algorithm
from rolltree.training.coefficients import rollout_means
from rolltree.training.losses import KLS, LossInputs, get_loss
from rolltree.training.metrics import MISMATCH, importance_ratio

# How far the trainer's logprobs of two passes may lie apart: the loss reads those that are stored,
# but ratios of whole rollouts and corrections may come from a pass of their own.
_SAME_PASS, _OTHER_PASS = 1e-6, 1e-3
# Relative errors of float32 sums, and of entropies, which are stored as float16.
_SUM, _HALF = 1e-5, 1e-3
# The error of r - 1 - log r in float32, per token.
_OF_KL = 3e-7


class _Column(np.ndarray[Any, Any]):
    """An array with the methods of a tensor that losses call, so that an audit loads no torch."""

    def exp(self) -> _Column:
        return cast(_Column, np.exp(self))

    def minimum(self, other: Any) -> _Column:
        return cast(_Column, np.minimum(self, other))

    def clamp(self, min: Any = None, max: Any = None) -> _Column:
        return cast(_Column, np.clip(self, min, max))

    def where(self, condition: Any, other: Any) -> _Column:
        return np.where(condition, self, other).view(_Column)

    def detach(self) -> _Column:
        return self

    def new_zeros(self, shape: Any) -> _Column:
        return np.zeros(shape, self.dtype).view(_Column)

    def bool(self) -> _Column:
        return cast(_Column, self.astype(np.bool_))


@np.errstate(all="ignore")
def note_sums(
    known: TrainedFacts,
    row: TrainedRollout,
    lag: NDArray[np.int64] | None,
    engine: NDArray[np.float64],
    algorithm: Algorithm,
) -> None:
    """Note the sums and largest values over the tokens of a rollout that a step trained."""
    computed = np.isfinite(row.logprob)
    given = np.isfinite(engine)
    kl = _kl(row, algorithm)[computed]
    known.num_computed = int(computed.sum())
    known.sums = {
        "lag": 0 if lag is None else lag[computed].sum(),
        "entropy": row.entropy[computed].sum(dtype=np.float64),
        "num_logprobs": given.sum(),
        "logprob": engine[given].sum(),
        "kl": kl.sum(dtype=np.float64),
    }
    both = computed & given
    if both.any():
        difference, ratio = importance_ratio(row.logprob[both], engine[both].astype(np.float32))
        # Older tokens rightly differ from what the engine said.
        own = slice(None) if lag is None else lag[both] == 0
        size = np.abs(difference[own])
        known.num_fresh = len(size)
        known.sums |= {
            "num_ratios": len(ratio),
            "ratio": ratio.sum(),
            "ratio_squared": (ratio**2).sum(),
            "outside": ((ratio < 0.5) | (ratio > 2)).sum(),
            "difference": difference[own].sum(),
            "size": size.sum(),
            "mismatch_kl": (ratio - 1 - difference)[own].sum(),
        }
        known.peaks = {
            "ratio": ratio.max(),
            "inverse": -ratio.min(),
            "size": size.max(initial=0.0),
        }
    if computed.any() and _has_known_loss(algorithm):
        with suppress(Exception):  # a loss that a user added may ask anything of a tensor
            known.sums |= _loss(row, computed, engine, kl, algorithm)
    # As Python's finite numbers, because the processes of an audit exchange JSON.
    for values in (known.sums, known.peaks):
        values |= {n: float(each) if math.isfinite(each) else 0.0 for n, each in values.items()}


def _has_known_loss(algorithm: Algorithm) -> bool:
    # A stored weight has the correction in it, which scales neither KL nor entropy.
    others = algorithm.entropy_coef > 0 or (
        algorithm.kl_coef > 0 and not KLS[algorithm.kl].in_reward
    )
    return not algorithm.loss_inputs and not (algorithm.correction is not None and others)


def _kl(row: TrainedRollout, algorithm: Algorithm) -> NDArray[np.float32]:
    """Return the KL of each token, float32 `[_T]`; 0 if the run has none."""
    estimate: Any = KLS[algorithm.kl].fn
    found: NDArray[np.float32] | None = row.kl
    if found is None and algorithm.kl_coef > 0 and estimate and row.reference is not None:
        found = estimate(like_tensor(row.logprob), like_tensor(row.reference))
    return np.zeros(row.num_tokens, np.float32) if found is None else found


def _loss(
    row: TrainedRollout,
    computed: NDArray[np.bool_],
    engine: NDArray[np.float64],
    kl: NDArray[np.float32],
    algorithm: Algorithm,
) -> dict[str, Any]:
    """Return the rollout's share of the loss, and the number of its clipped tokens, as bounds."""
    logprob, advantage = row.logprob[computed], row.advantage[computed]
    entropy, weight = row.entropy[computed], row.weight[computed]
    old = engine[computed].astype(np.float32) if algorithm.correction is None else logprob
    is_in_reward = algorithm.kl_coef > 0 and KLS[algorithm.kl].in_reward
    if is_in_reward:
        advantage, kl = advantage - np.float32(algorithm.kl_coef) * kl, np.zeros_like(kl)
    is_exact = not (algorithm.correction or algorithm.over_rollout or is_in_reward)
    noise = np.float32(_SAME_PASS if is_exact else _OTHER_PASS)
    # Three times: with logprobs that are as much too small as they may be, as stored, too large.
    now = np.concatenate([logprob - noise, logprob, logprob + noise])
    thrice = (np.concatenate([each] * 3) for each in (old, advantage))
    columns = [like_tensor(each) for each in (now, *thrice)]
    loss, parameters = get_loss(algorithm.loss), algorithm.parameters
    if loss.rollout_term is not None:
        terms = loss.rollout_term(columns[0] - columns[1], columns[2], parameters)
        times: Any = SimpleNamespace(rollout=np.repeat(np.arange(3), len(logprob)))
        columns.append(like_tensor(rollout_means(times, cast(Any, terms))))
    found: Any = loss.fn(LossInputs(*columns), parameters)
    clipped = found.clipped.reshape(3, -1)
    each = found.loss.reshape(3, -1).astype(np.float64)
    each = weight * (each + algorithm.kl_coef * kl - algorithm.entropy_coef * entropy)
    of_others = _HALF * algorithm.entropy_coef * entropy + (_OF_KL + 2 * noise) * algorithm.kl_coef
    slack = _SUM * np.abs(each[1]) + np.abs(weight) * of_others
    return {
        "num_losses": len(logprob),
        "least_loss": (each.min(0) - slack).sum(),
        "most_loss": (each.max(0) + slack).sum(),
        "least_clipped": clipped.all(0).sum(),
        "most_clipped": clipped.any(0).sum(),
    }


def like_tensor(values: Any) -> Any:
    """Return an array as what a loss takes for a tensor."""
    return np.asarray(values).view(_Column)


def metrics_of_tokens(
    rows: Sequence[TrainedFacts], first: Sequence[TrainedFacts], algorithm: Algorithm
) -> Iterator[tuple[str, float, float, float]]:
    """Yield metrics of the tokens that a step trained: name, value, relative and absolute error.

    A metric is left out if its input was not stored.

    Args:
        rows: what the step trained.
        first: what its first update did; empty if that is not known.
        algorithm: the run's.
    """
    sums = _sums(rows)
    computed = sum(row.num_computed for row in rows)
    yield "train/num_records", computed, 1e-6, 0.0
    if all(row.is_weighted for row in rows):
        counted = sum(row.num_counted for row in rows)
        yield "train/num_skipped_records", counted - computed, 1e-6, 0.0
    if computed:
        yield "train/lag_mean", sums["lag"] / computed, 1e-6, 1e-7
    if count := sums["num_logprobs"]:
        # The step computed this mean in float32.
        yield "rollout/entropy", -sums["logprob"] / count, 1e-4, 1e-5
    sums, computed = _sums(first), sum(row.num_computed for row in first)
    if not computed:
        return
    yield "train/entropy", sums["entropy"] / computed, 2e-3, 2e-4
    if algorithm.kl_coef > 0:
        yield "train/kl", sums["kl"] / computed, 1e-5, _OF_KL
    if sums["num_losses"] == computed:
        for name, stem, size in (
            ("train/loss", "loss", 1.0),
            ("train/clip_ratio/region_mean", "clipped", computed),
        ):
            low, high = sums[f"least_{stem}"] / size, sums[f"most_{stem}"] / size
            yield name, (low + high) / 2, 1e-6, (high - low) / 2 + 1e-9
    if sums["num_ratios"] != computed:
        return
    total, peaks = sums["ratio"], dict[str, float]()
    for row in first:
        peaks |= {name: max(value, peaks.get(name, value)) for name, value in row.peaks.items()}
    yield "ratio/mean", total / computed, 1e-6, 0.0
    yield "ratio/min", -peaks["inverse"], 1e-6, 0.0
    yield "ratio/max", peaks["ratio"], 1e-6, 0.0
    yield "ratio/outside_share", sums["outside"] / computed, 1e-6, 0.0
    yield "ratio/ess", total**2 / (computed * sums["ratio_squared"]), 1e-6, 0.0
    if fresh := sum(row.num_fresh for row in first):
        yield "mismatch/mean", sums["difference"] / fresh, 1e-6, 1e-12
        yield MISMATCH, sums["size"] / fresh, 1e-6, 1e-12
        yield MISMATCH.replace("mean", "max"), peaks["size"], 1e-6, 1e-12
        yield "mismatch_kl/mean", sums["mismatch_kl"] / fresh, 1e-6, 1e-12


def _sums(rows: Sequence[TrainedFacts]) -> defaultdict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row.sums.items():
            total[name] += value
    return total
