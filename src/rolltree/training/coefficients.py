"""Numbers per loss record: its coefficient in the loss, and its correction for the engine.

An aggregation returns `[_R]` coefficients; the loss is `sum(coefficient * token loss)`. They are
computed over all records of an optimizer step at once, so micro-batches and ranks change nothing,
and depend on the rollout and the model call that a token belongs to, never on how samples were cut.

A correction is for an engine whose kernels, precision or older weights make the behaviour logprob
differ from what the trainer computes. Each row of `CORRECTIONS` turns that difference, taken once
at the start of a batch, into one factor per record; every policy loss is multiplied by it, and its
own ratio is then relative to the trainer's logprob at that moment. A token that a correction masks
still counts in the coefficients, so they depend on data alone.

Notation: `k = exp(trainer - engine)` per token. A sequence is the rollout, never a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.training.layout import FloatColumn
from rolltree.training.losses import fill
from rolltree.values.errors import ConfigError, look_up
from rolltree.values.types import Records


def _ratio(values: NDArray[np.float64], divisor: NDArray[Any] | float) -> FloatColumn:
    with np.errstate(divide="ignore", invalid="ignore"):
        # The divisor of a call or rollout that is masked as a whole is 0.
        return np.where(values > 0, values / divisor, 0.0).astype(np.float32)


def _mean_of_means(keys: NDArray[np.int64], weight: NDArray[np.float64]) -> FloatColumn:
    # numpy 2.0.0 returns the inverse with two dimensions, other versions with one.
    _, index = np.unique(keys, axis=0, return_inverse=True)
    index = np.asarray(index).reshape(-1)
    total = np.bincount(index, weights=weight)
    # The mean is over calls or rollouts that have a token to train.
    divisor = total[index] * float(max(1, int((total > 0).sum())))
    return _ratio(weight, divisor)


def token_mean(records: Records, length: int) -> FloatColumn:
    """Every token counts the same: `1 / number of tokens`.

    DAPO: Yu et al. 2025, arXiv:2503.14476, equation 12.
    """
    weight = records.weight.astype(np.float64)
    return _ratio(weight, float(weight.sum()))


def call_mean(records: Records, length: int) -> FloatColumn:
    """Every model call counts the same: the mean over calls of the mean over a call's tokens.

    A rollout of many calls weighs more than one of few.
    """
    keys = np.stack([records.rollout, records.call], axis=1).astype(np.int64)
    return _mean_of_means(keys, records.weight.astype(np.float64))


def rollout_mean(records: Records, length: int) -> FloatColumn:
    """Every rollout counts the same: the mean over rollouts of the mean over a rollout's tokens.

    GRPO's `1 / |o_i|`: Shao et al. 2024, arXiv:2402.03300, equation 3, a rollout being an output.
    """
    keys = records.rollout.astype(np.int64)[:, None]
    return _mean_of_means(keys, records.weight.astype(np.float64))


def fixed_length(records: Records, length: int) -> FloatColumn:
    """Divide by a constant: `1 / (number of rollouts * length)`, whatever was sampled.

    Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, section 3.2 (no `1 / |o_i|`).
    """
    weight = records.weight.astype(np.float64)
    count = len(np.unique(records.rollout[weight > 0]))
    return _ratio(weight, float(max(1, count) * length))


AGGREGATIONS: dict[str, Callable[[Records, int], FloatColumn]] = {
    "token": token_mean,
    "call": call_mean,
    "rollout": rollout_mean,
    "fixed_length": fixed_length,
}


def coefficients(records: Records, aggregation: str, length: int) -> FloatColumn:
    """Return the coefficient of every record; `length` is read by `fixed_length` only.

    Raises:
        UnknownName: there is no such aggregation.
    """
    return look_up("aggregation", aggregation, AGGREGATIONS)(records, length)


def rollout_sums(records: Records, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for every record, the sum of `values` over all records of its rollout."""
    _, index = np.unique(records.rollout, return_inverse=True)
    return np.asarray(np.bincount(index, weights=values)[index], np.float32)


def rollout_means(records: Records, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for every record, the mean of `values` over all records of its rollout."""
    # A plain mean: `build_batch` has dropped records of weight 0 by now.
    _, index, size = np.unique(records.rollout, return_inverse=True, return_counts=True)
    return np.asarray(np.bincount(index, weights=values)[index] / size[index], np.float32)


# -- corrections ---------------------------------------------------------------------------------

MAX_LOG = 50.0
"""Largest log ratio that is exponentiated: beyond it every band and cap decides the same."""

CorrectionFn = Callable[[Records, FloatColumn, Mapping[str, float]], FloatColumn]
"""(all records of a batch, trainer minus engine logprob `[_R]`, parameters) -> factor `[_R]`."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A row of the table; `over_rollout`: a factor needs all records of its rollout."""

    fn: CorrectionFn
    defaults: Mapping[str, float]
    over_rollout: bool = False

    def parameters(self, given: Mapping[str, float | None], name: str) -> dict[str, float]:
        """Return the defaults updated with what is given.

        Raises:
            ConfigError: a parameter is given that this correction does not read, or an empty band.
        """
        filled = fill(given, self.defaults, f"the correction {name!r}")
        if filled.get("correction_low", 0.0) > filled["correction_high"]:
            raise ConfigError(
                f"the band of the correction {name!r} is empty: correction_low is "
                f"{filled['correction_low']} and correction_high {filled['correction_high']}, so "
                "no token would train."
            )
        return filled


def _exp(log_ratio: FloatColumn) -> FloatColumn:
    return np.exp(np.clip(log_ratio, -MAX_LOG, MAX_LOG))


def _capped(ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    return np.minimum(ratio, np.float32(p["correction_high"]))


def _inside(ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    inside = (ratio >= p["correction_low"]) & (ratio <= p["correction_high"])
    return inside.astype(np.float32)


def token_tis(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return `min(k, high)`: truncated importance sampling per token.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    truncation: Ionides 2008.
    """
    return _capped(_exp(log_ratio), p)


def token_mask(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return `k` inside `[low, high]` and 0 outside.

    Masked importance sampling per token: Liu et al. 2025, "When speed kills stability". With both
    bounds it is IcePop: Ling team 2025, arXiv:2510.18855, section 3 (alpha 0.5, beta 5).
    """
    ratio = _exp(log_ratio)
    return ratio * _inside(ratio, p)


def sequence_tis(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return `min(product of k over the rollout, high)` for all its tokens.

    Liu et al. 2025, "When speed kills stability", sequence-level truncated importance sampling.
    """
    # Over the rollout, not the row: how samples are cut must not matter (design/0010).
    return _capped(_exp(rollout_sums(records, log_ratio)), p)


def sequence_mask(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return the product of k over the rollout inside `[low, high]`, and 0 outside.

    Liu et al. 2025, "When speed kills stability", sequence-level masked importance sampling.
    """
    ratio = _exp(rollout_sums(records, log_ratio))
    return ratio * _inside(ratio, p)


def geometric_mask(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return 1 if the geometric mean of k over the rollout is inside `[low, high]`, else 0.

    Unlike the product, it does not reject rollouts for their length: Li and Liu 2025, "Trust region
    optimization via sequence masking" (geometric sequence masking).
    """
    return _inside(_exp(rollout_means(records, log_ratio)), p)


CORRECTIONS: dict[str, Correction] = {
    "token_tis": Correction(token_tis, {"correction_high": 2.0}),
    # No lower bound: a token that the trainer finds less likely keeps its small factor.
    "token_mis": Correction(token_mask, {"correction_low": 0.0, "correction_high": 2.0}),
    "icepop": Correction(token_mask, {"correction_low": 0.5, "correction_high": 5.0}),
    "sequence_tis": Correction(sequence_tis, {"correction_high": 2.0}, over_rollout=True),
    "sequence_mis": Correction(
        sequence_mask, {"correction_low": 0.0, "correction_high": 2.0}, over_rollout=True
    ),
    "geometric_mask": Correction(
        geometric_mask, {"correction_low": 0.99, "correction_high": 1.01}, over_rollout=True
    ),
}


def get_correction(name: str) -> Correction:
    """Return a row of `CORRECTIONS`.

    Raises:
        UnknownName: there is no such correction.
    """
    return look_up("correction", name, CORRECTIONS)
