"""One optimizer step from a list of samples, in place on the module that the engine serves.

    samples -> packs (`batches.py`) -> forward, loss, backward per pack -> clip -> AdamW

With several ranks every rank is given all samples, computes its own packs, and steps its own shard
of the weights; sums over ranks make it the step that one rank would take. It knows samples, losses
and models. It leaves out where samples come from and publishing the weights.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.errors import TrainingError
from rolltree.training.aggregation import rollout_means
from rolltree.training.algorithms import Algorithm
from rolltree.training.batches import Batch, Pack, make_batch, rollout_names
from rolltree.training.config import TrainConfig
from rolltree.training.forward import LogprobModel, choose_forward, enable_checkpointing
from rolltree.training.layout import FloatColumn, collate
from rolltree.training.losses import KLS, LossInputs, get_loss
from rolltree.training.metrics import RecordStats
from rolltree.training.optim import Optimizer, learning_rate
from rolltree.training.precision import backward_precision
from rolltree.training.ranks import Ranks
from rolltree.training.shard import shard
from rolltree.types import Records, Sample


class Trainer:
    """Trains one module in place.

    Args:
        model: a Hugging Face causal LM with float32 parameters.
        config: the `model`, `algorithm`, `optim` and `train` sections are read.
        ranks: those that train with this one; the module is then sharded in place.

    Raises:
        TrainingError: the model cannot be trained as configured.
    """

    def __init__(self, model: Any, config: TrainConfig, ranks: Ranks | None = None) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.algorithm: Algorithm = config.algorithm.resolve()
        self.loss = get_loss(self.algorithm.loss)
        dtype = getattr(torch, config.model.compute_dtype)
        options: dict[str, Any] = {"compute_dtype": dtype, "chunk_rows": config.train.chunk_rows}
        forward = choose_forward(model, config.train.forward, config.train.scope)
        self.logprobs = LogprobModel(model, forward, **options)
        self.reference: LogprobModel | None = None
        if config.algorithm.kl_coef > 0:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self.reference = LogprobModel(frozen, forward, **options)
        if config.train.gradient_checkpointing:
            enable_checkpointing(model)
        if ranks is not None:
            for part in (self.logprobs, self.reference):
                if part is not None:
                    shard(part, ranks)
        self.optimizer = Optimizer(model, config.optim)

    def step(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Make `train.updates_per_step` optimizer steps on the samples of step `step` (from 1).

        Returns the metrics of the step: losses and ratios of the first update, gradient norms of
        the last.

        Raises:
            TrainingError: a number is not finite (the rollout is named and the weights are as they
                were before the update), or trainer and engine disagree on logprobs.
            TokenError: there is nothing to train on.
        """
        start = time.perf_counter()
        section = self.config.train
        skip = section.skip_flat and self.reference is None
        place = (self.ranks.rank, self.ranks.size) if self.ranks else (0, 1)
        batch = make_batch(
            samples,
            self.algorithm,
            section.max_tokens,
            skip_flat=skip,
            rank=place[0],
            num_ranks=place[1],
        )
        metrics: dict[str, float] = {}
        num_updates = section.updates_per_step
        for update in range(num_updates):
            stats = self._gradients(batch)
            if update == 0:
                metrics = stats.metrics(batch.records)
                self._check_mismatch(metrics)
            norm = self.optimizer.clip()
            if not math.isfinite(norm):
                self._name_non_finite(batch)
            done = (step - 1) * num_updates + update
            lr = learning_rate(self.config.optim, done, num_updates * section.num_steps)
            self.optimizer.step(lr)
            metrics |= {"train/grad_norm": norm, "train/lr": lr}
        spent = time.perf_counter() - start
        return metrics | {
            "train/num_samples": float(len(samples)),
            "train/num_packs": float(len(batch.packs)),
            "train/num_tokens": float(batch.num_tokens),
            "train/num_records": float(len(batch.records)),
            "train/num_skipped_records": float(batch.num_skipped),
            "train/lag_mean": float(np.mean(step - 1 - batch.records.version)),
            "time/train_s": spent,
            "train/tokens_per_s": batch.num_tokens * num_updates / spent,
        }

    def _gradients(self, batch: Batch) -> RecordStats:
        """Add up the gradients of all packs and return what was seen per record."""
        log_ratio: FloatColumn | None = None
        if self.algorithm.over_rollout and not batch.is_whole:
            log_ratio = self._rollout_ratios(batch)
        stats = RecordStats(len(batch.records))
        for item in batch.packs:
            with self.logprobs.context():
                self._backward(self._loss(item, batch.records, log_ratio, stats))
        if self.ranks is not None:
            stats.sum_over(self.ranks)
        if not math.isfinite(stats.loss):
            self._name_non_finite(batch)
        return stats

    def _loss(
        self, item: Pack, records: Records, log_ratio: FloatColumn | None, stats: RecordStats
    ) -> Tensor:
        """Return the share of the step's loss that one pack carries."""

        def tensor(array: FloatColumn) -> Tensor:
            part = np.ascontiguousarray(array[item.span], np.float32)
            return torch.from_numpy(part).to(self.logprobs.device)

        got = self.logprobs(item.forest)
        if item.is_filler:
            return self._nothing(item, got.logprob)
        behaviour = tensor(records.logprob)
        if self.algorithm.over_rollout and log_ratio is None:  # the pack holds all records
            log_ratio = rollout_means(records, (got.logprob.detach() - behaviour).cpu().numpy())
        inputs = LossInputs(
            got.logprob,
            behaviour,
            tensor(records.advantage),
            None if log_ratio is None else tensor(log_ratio),
        )
        terms = self.loss.fn(inputs, self.algorithm.parameters)
        loss, kl = terms.loss, None
        if self.reference is not None:
            with torch.no_grad(), self.reference.context():
                reference = self.reference(item.forest).logprob
            kl = KLS[self.config.algorithm.kl](got.logprob, reference)
            loss = loss + self.config.algorithm.kl_coef * kl
        total = (tensor(records.weight) * loss).sum()
        stats.add(item.span, got, terms.clipped, float(total.detach()), kl)
        return total

    def _nothing(self, item: Pack, logprob: Tensor) -> Tensor:
        """Return a loss of 0, computed as other ranks compute theirs."""
        if self.reference is not None:
            with torch.no_grad(), self.reference.context():
                self.reference(item.forest)
        return 0 * logprob.sum()

    def _backward(self, total: Tensor) -> None:
        with backward_precision(self.config.model.backward_dtype):
            total.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _rollout_ratios(self, batch: Batch) -> FloatColumn:
        """Return the mean log ratio of each record's rollout, which may span several packs."""
        difference = np.zeros(len(batch.records), np.float32)
        for item in batch.packs:
            with self.logprobs.context():
                got = self.logprobs(item.forest).logprob.cpu().numpy()
            if not item.is_filler:
                difference[item.span] = got - batch.records.logprob[item.span]
        if self.ranks is not None:
            (difference,) = self.ranks.total(difference)
        return rollout_means(batch.records, difference)

    def _check_mismatch(self, metrics: dict[str, float]) -> None:
        mismatch, limit = metrics["mismatch/abs_mean"], self.config.train.max_mismatch
        if mismatch > limit:
            self.optimizer.zero_grad()
            raise TrainingError(
                f"trainer and engine disagree on the logprobs of sampled tokens by {mismatch:.3g} "
                f"on average (train.max_mismatch is {limit}), so importance ratios would be wrong. "
                "Usual causes: the engine serves other weights or another precision, or its "
                "logprobs are not those of the temperature it sampled with."
            )

    def _name_non_finite(self, batch: Batch) -> None:
        """Find the sample whose loss or gradient is not finite, and raise with its name."""
        self.optimizer.zero_grad()
        culprit = next(
            (
                f"the sample of rollouts {rollout_names(sample)}"
                for sample in batch.samples
                if not self._is_finite_alone(sample)
            ),
            "none of the samples alone, their sum overflows",
        )
        raise TrainingError(
            f"the loss or its gradient is not finite; it comes from {culprit}. The weights were "
            "not changed by this update. Look at that sample's tokens and advantages; if all are "
            "bad, the weights have diverged: continue from an earlier checkpoint with a lower "
            "optim.lr."
        )

    def _is_finite_alone(self, sample: Sample) -> bool:
        forest = collate([sample])
        alone = Pack(forest, (sample,), slice(0, len(forest.records)))
        with self.logprobs.context():
            loss = self._loss(alone, forest.records, None, RecordStats(len(forest.records)))
            self._backward(loss)
        finite = bool(torch.isfinite(loss)) and math.isfinite(self.optimizer.clip())
        self.optimizer.zero_grad()
        return finite
