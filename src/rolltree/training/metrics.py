"""What an optimizer step saw, per loss record, and its summary as flat metrics.

Arrays of length `_R` are filled pack by pack and reduced once, every trained token counting the
same. It knows records and nothing of models. It leaves out rewards and timings.
"""

from __future__ import annotations

import numpy as np

from rolltree.samples import take_records
from rolltree.training.layout import FloatColumn
from rolltree.training.logprobs import RecordLogprobs
from rolltree.training.objective import ObjectiveTerms
from rolltree.training.places import by_place
from rolltree.training.ranks import Ranks
from rolltree.types import Records


class RecordStats:
    """Logprob, entropy, KL, clipping and correction of every record of one optimizer step."""

    def __init__(self, num_records: int, *, kl: bool = False, factor: bool = False) -> None:
        self.logprob = np.zeros(num_records, np.float32)
        self.entropy = np.zeros(num_records, np.float32)
        self.clipped = np.zeros(num_records, np.float32)
        self.kl = np.zeros(num_records, np.float32) if kl else None
        self.factor = np.zeros(num_records, np.float32) if factor else None
        self.loss = 0.0

    def add(
        self,
        span: slice,
        got: RecordLogprobs,
        terms: ObjectiveTerms,
        factor: FloatColumn | None = None,
    ) -> None:
        """Take the records of one pack; `factor` is the correction's."""
        self.logprob[span] = got.logprob.detach().cpu().numpy()
        self.entropy[span] = got.entropy.detach().cpu().numpy()
        self.clipped[span] = terms.clipped.cpu().numpy()
        self.loss += float(terms.total.detach())
        if self.kl is not None and terms.kl is not None:
            self.kl[span] = terms.kl.cpu().numpy()
        if self.factor is not None and factor is not None:
            self.factor[span] = factor

    def sum_over(self, ranks: Ranks) -> None:
        """Add what the other ranks saw of the same records; each record is one rank's."""
        columns = {name: getattr(self, name) for name in ("logprob", "entropy", "clipped")}
        columns |= {"kl": self.kl} if self.kl is not None else {}
        columns |= {"factor": self.factor} if self.factor is not None else {}
        *summed, loss = ranks.total(*columns.values(), np.array([self.loss]))
        for name, column in zip(columns, summed, strict=True):
            setattr(self, name, column)
        self.loss = float(loss[0])

    def metrics(self, records: Records, version: int | None = None) -> dict[str, float]:
        """Return the summary; `records` are those of the step, in the same order.

        `mismatch/*` is trainer minus engine logprob before any update, of the tokens that `version`
        sampled (None: of all); without such tokens it is not there. `ratio/*` is the exponential of
        that difference for all tokens: `ratio/p01` and `ratio/p99` are its tails,
        `ratio/outside_share` the share below 1/2 or above 2, `ratio/ess` the effective sample size
        as a share (Kish 1965). Tokens without a behaviour
        logprob (supervised ones) have neither. `correction/*` is there with a correction.
        """
        metrics = {
            "train/loss": self.loss,
            "train/entropy": float(self.entropy.mean()),
            "train/clip_share": float(self.clipped.mean()),
        }
        if self.kl is not None:
            metrics["train/kl"] = float(self.kl.mean())
        if self.factor is not None:
            metrics["correction/mean"] = float(self.factor.mean())
            metrics["correction/masked_share"] = float((self.factor == 0).mean())
        if not np.isnan(records.logprob).any():
            metrics |= self._against_engine(records, version)
        return metrics

    def _against_engine(self, records: Records, version: int | None) -> dict[str, float]:
        difference = (self.logprob - records.logprob).astype(np.float64)
        ratio = np.exp(np.minimum(difference, 50.0))
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
        fresh = np.ones(len(ratio), bool) if version is None else records.version == version
        if not fresh.any():
            return metrics
        own = difference[fresh]
        return metrics | {
            "mismatch/mean": float(own.mean()),
            "mismatch/abs_mean": float(np.abs(own).mean()),
            "mismatch/abs_max": float(np.abs(own).max()),
            "mismatch/k3": float((ratio[fresh] - 1 - own).mean()),
            **by_place(take_records(records, fresh), own),
        }
