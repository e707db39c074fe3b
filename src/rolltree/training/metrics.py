"""What an optimizer step saw, per loss record, and its summary as flat metrics.

Arrays of length `_R` are filled pack by pack and reduced once, every trained token counting the
same. It knows records and nothing of models. It leaves out rewards and timings.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rolltree.training.logprobs import RecordLogprobs
from rolltree.training.ranks import Ranks
from rolltree.types import Records


class RecordStats:
    """Logprob, entropy, KL and clipping of every record of one optimizer step."""

    def __init__(self, num_records: int) -> None:
        self.logprob = np.zeros(num_records, np.float32)
        self.entropy = np.zeros(num_records, np.float32)
        self.clipped = np.zeros(num_records, np.float32)
        self.kl: np.ndarray | None = None
        self.loss = 0.0

    def add(
        self,
        span: slice,
        got: RecordLogprobs,
        clipped: Tensor,
        loss: float,
        kl: Tensor | None = None,
    ) -> None:
        """Take the records of one pack."""
        self.logprob[span] = got.logprob.detach().cpu().numpy()
        self.entropy[span] = got.entropy.cpu().numpy()
        self.clipped[span] = clipped.cpu().numpy()
        self.loss += loss
        if kl is not None:
            if self.kl is None:
                self.kl = np.zeros_like(self.logprob)
            self.kl[span] = kl.detach().cpu().numpy()

    def sum_over(self, ranks: Ranks) -> None:
        """Add what the other ranks saw of the same records; each record is one rank's."""
        columns = ["logprob", "entropy", "clipped", *(["kl"] if self.kl is not None else [])]
        own = [getattr(self, name) for name in columns]
        *summed, loss = ranks.total(*own, np.array([self.loss]))
        for name, column in zip(columns, summed, strict=True):
            setattr(self, name, column)
        self.loss = float(loss[0])

    def metrics(self, records: Records) -> dict[str, float]:
        """Return the summary; `records` are those of the step, in the same order.

        `mismatch/*` is trainer minus engine logprob before any update, `ratio/*` its exponential,
        `ratio/ess` the effective sample size as a share (Kish 1965).
        """
        difference = (self.logprob - records.logprob).astype(np.float64)
        ratio = np.exp(np.minimum(difference, 50.0))
        metrics = {
            "train/loss": self.loss,
            "train/entropy": float(self.entropy.mean()),
            "train/clip_share": float(self.clipped.mean()),
            "mismatch/mean": float(difference.mean()),
            "mismatch/abs_mean": float(np.abs(difference).mean()),
            "mismatch/abs_max": float(np.abs(difference).max()),
            "mismatch/k3": float((ratio - 1 - difference).mean()),
            "ratio/mean": float(ratio.mean()),
            "ratio/min": float(ratio.min()),
            "ratio/max": float(ratio.max()),
            "ratio/ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        }
        if self.kl is not None:
            metrics["train/kl"] = float(self.kl.mean())
        return metrics
