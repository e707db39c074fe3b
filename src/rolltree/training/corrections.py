"""Weights against an engine that samples from another distribution, as a table of pure functions.

An engine's kernels, its precision or its older weights make the behaviour logprob differ from what
the trainer computes. Each row turns that difference, taken once at the start of a batch, into one
factor per loss record; every policy loss is multiplied by it, and its own ratio is then against the
trainer's logprob at that moment. Pure numpy. It knows nothing about losses. It leaves out
normalizers: a masked token still counts in them, so they depend on data alone.

Notation: `k = exp(trainer - engine)` per token. A sequence is the rollout, never a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rolltree.errors import ConfigError, UnknownName, did_you_mean
from rolltree.training.aggregation import rollout_means, rollout_sums
from rolltree.training.layout import FloatColumn
from rolltree.training.losses import fill
from rolltree.types import Records

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
    return _capped(_exp(rollout_sums(records, log_ratio)), p)


def sequence_mask(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return the product of k over the rollout inside `[low, high]`, and 0 outside.

    Liu et al. 2025, "When speed kills stability", sequence-level masked importance sampling.
    """
    ratio = _exp(rollout_sums(records, log_ratio))
    return ratio * _inside(ratio, p)


def geometric_mask(records: Records, log_ratio: FloatColumn, p: Mapping[str, float]) -> FloatColumn:
    """Return 1 where the geometric mean of k over the rollout is inside `[low, high]`, else 0.

    A long rollout is not refused for its length, as by the product: Li and Liu 2025, "Trust region
    optimization via sequence masking" (geometric sequence masking).
    """
    return _inside(_exp(rollout_means(records, log_ratio)), p)


CORRECTIONS: dict[str, Correction] = {
    "token_tis": Correction(token_tis, {"correction_high": 2.0}),
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
    if name not in CORRECTIONS:
        raise UnknownName(f"there is no correction {name!r}.{did_you_mean(name, CORRECTIONS)}")
    return CORRECTIONS[name]
