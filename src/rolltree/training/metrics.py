"""What an optimizer step saw, per loss record, and its summary as flat metrics.

Arrays of length `_R` are filled pack by pack and reduced once, weighted like the loss's tokens. It
knows records and nothing of models. It leaves out rewards and timings.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rolltree.training.logprobs import RecordLogprobs
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

    def metrics(self, records: Records) -> dict[str, float]:
        """Return the summary; `records` are those of the step, in the same order.

        `mismatch/*` is trainer minus engine logprob before any update, `ratio/*` its exponential,
        `ratio/ess` the effective sample size as a share (Kish 1965).
        """
        weight = records.weight.astype(np.float64)
        weight = weight / max(float(weight.sum()), 1e-30)
        used = records.weight > 0
        difference = (self.logprob - records.logprob).astype(np.float64)
        ratio = np.exp(np.minimum(difference, 50.0))
        seen = difference[used] if used.any() else np.zeros(1)
        tail = ratio[used] if used.any() else np.ones(1)
        metrics = {
            "train/loss": self.loss,
            "train/entropy": float(weight @ self.entropy),
            "train/clip_share": float(weight @ self.clipped),
            "mismatch/mean": float(weight @ difference),
            "mismatch/abs_mean": float(weight @ np.abs(difference)),
            "mismatch/abs_max": float(np.abs(seen).max()),
            "mismatch/k3": float(weight @ (ratio - 1 - difference)),
            "ratio/mean": float(weight @ ratio),
            "ratio/min": float(tail.min()),
            "ratio/max": float(tail.max()),
            "ratio/ess": float(tail.sum() ** 2 / (len(tail) * (tail**2).sum())),
        }
        if self.kl is not None:
            metrics["train/kl"] = float(weight @ self.kl)
        return metrics
