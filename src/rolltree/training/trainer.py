"""One optimizer step from a list of samples, in place on the module that the engine serves.

    samples -> coefficients over all records -> packs within a token budget -> forward, loss,
    backward per pack -> clip -> AdamW

Coefficients are global, so how samples are packed changes nothing. It knows samples and models. It
leaves out where samples come from, publishing the weights, and distributed ranks.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltree.errors import TrainingError
from rolltree.samples import pack
from rolltree.training.aggregation import coefficients, rollout_means
from rolltree.training.algorithms import Algorithm
from rolltree.training.config import TrainConfig
from rolltree.training.forward import LogprobModel, choose_forward, enable_checkpointing
from rolltree.training.layout import Forest, collate, concat_records, prune
from rolltree.training.losses import KLS, LossInputs, get_loss
from rolltree.training.metrics import RecordStats
from rolltree.training.optim import Optimizer, learning_rate
from rolltree.types import Records, Sample


@dataclass(frozen=True, slots=True)
class _Pack:
    """One forward pass: a forest, and its records' place among all records of the step."""

    forest: Forest
    samples: tuple[Sample, ...]
    span: slice


class Trainer:
    """Trains one module in place.

    Args:
        model: a Hugging Face causal LM with float32 parameters.
        config: the `model`, `algorithm`, `optim` and `train` sections are read.

    Raises:
        TrainingError: the model cannot be trained as configured.
    """

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.algorithm: Algorithm = config.algorithm.resolve()
        self.loss = get_loss(self.algorithm.loss)
        self.optimizer = Optimizer(model, config.optim)
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

    def step(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Make `train.updates_per_step` optimizer steps on the samples of step `step`.

        Returns the metrics of the step: losses and ratios of the first update, gradient norms of
        the last.

        Raises:
            TrainingError: a number is not finite (the rollout is named and the weights are as they
                were before the update), or trainer and engine disagree on logprobs.
            TokenError: there is nothing to train on.
        """
        start = time.perf_counter()
        packs, records = self._packs(samples)
        weights = coefficients(records, self.algorithm.aggregation, self.algorithm.fixed_length)
        metrics: dict[str, float] = {}
        num_updates = self.config.train.updates_per_step
        for update in range(num_updates):
            stats = self._gradients(packs, records, weights)
            if update == 0:
                metrics = stats.metrics(records)
                self._check_mismatch(metrics)
            norm = self.optimizer.clip()
            if not math.isfinite(norm):
                self._name_non_finite(packs, records, weights)
            done = step * num_updates + update
            lr = learning_rate(self.config.optim, done, num_updates * self.config.train.num_steps)
            self.optimizer.step(lr)
            metrics |= {"train/grad_norm": norm, "train/lr": lr}
        spent = time.perf_counter() - start
        num_unique = sum(pack.forest.num_tokens for pack in packs)
        return metrics | {
            "train/num_samples": float(len(samples)),
            "train/num_packs": float(len(packs)),
            "train/num_tokens": float(num_unique),
            "train/num_records": float(len(records)),
            "time/train_s": spent,
            "train/tokens_per_s": num_unique * num_updates / spent,
        }

    def _packs(self, samples: Sequence[Sample]) -> tuple[list[_Pack], Records]:
        used = [_without_masked(sample) for sample in samples]
        pruned = [prune(sample) for sample in used if len(sample.records)]
        packs: list[_Pack] = []
        first = 0
        for chosen in pack(pruned, self.config.train.max_tokens):
            forest = collate(chosen)
            packs.append(_Pack(forest, tuple(chosen), slice(first, first + len(forest.records))))
            first += len(forest.records)
        if not packs:
            collate([])
        records = concat_records([pack.forest.records for pack in packs])
        _check_records(packs, records)
        return packs, records

    def _gradients(
        self, packs: Sequence[_Pack], records: Records, weights: np.ndarray
    ) -> RecordStats:
        """Add up the gradients of all packs and return what was seen per record."""
        log_ratio: np.ndarray | None = None
        if self.loss.over_rollout and len(packs) > 1:
            log_ratio = self._rollout_ratios(packs, records)
        stats = RecordStats(len(records))
        for item in packs:
            with self.logprobs.context():
                total = self._loss(item, records, weights, log_ratio, stats)
                if not torch.isfinite(total):
                    self._name_non_finite(packs, records, weights)
                total.backward()  # type: ignore[no-untyped-call]
        return stats

    def _loss(
        self,
        item: _Pack,
        records: Records,
        weights: np.ndarray,
        log_ratio: np.ndarray | None,
        stats: RecordStats,
    ) -> Tensor:
        """Return the share of the step's loss that one pack carries."""
        device = self.logprobs.device

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array[item.span])).to(device)

        got = self.logprobs(item.forest)
        behaviour = tensor(records.logprob)
        if self.loss.over_rollout and log_ratio is None:
            whole = rollout_means(records, (got.logprob.detach() - behaviour).cpu().numpy())
            rollout_ratio: Tensor | None = torch.from_numpy(whole).to(device)
        else:
            rollout_ratio = None if log_ratio is None else tensor(log_ratio)
        inputs = LossInputs(got.logprob, behaviour, tensor(records.advantage), rollout_ratio)
        terms = self.loss.fn(inputs, self.algorithm.parameters)
        loss = terms.loss
        kl = None
        if self.reference is not None:
            with torch.no_grad(), self.reference.context():
                reference = self.reference(item.forest).logprob
            kl = KLS[self.config.algorithm.kl](got.logprob, reference)
            loss = loss + self.config.algorithm.kl_coef * kl
        weight = tensor(weights)
        total = (weight * loss).sum()
        stats.add(item.span, got, terms.clipped, float(total.detach()), kl)
        return total

    @torch.no_grad()
    def _rollout_ratios(self, packs: Sequence[_Pack], records: Records) -> np.ndarray:
        """Return the mean log ratio of each record's rollout, which may span several packs."""
        difference = np.empty(len(records), np.float32)
        for item in packs:
            with self.logprobs.context():
                got = self.logprobs(item.forest).logprob.cpu().numpy()
            difference[item.span] = got - records.logprob[item.span]
        return rollout_means(records, difference)

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

    def _name_non_finite(
        self, packs: Sequence[_Pack], records: Records, weights: np.ndarray
    ) -> None:
        """Find the sample whose loss or gradient is not finite, and raise with its name."""
        self.optimizer.zero_grad()
        culprit = "none of the samples alone: their sum overflows"
        for item in packs:
            for index, sample in enumerate(item.samples):
                mine = item.forest.record_sample == index
                alone = replace(item, forest=collate([sample]), span=slice(0, int(mine.sum())))
                own = concat_records([alone.forest.records])
                part = weights[item.span][mine]
                with self.logprobs.context():
                    loss = self._loss(alone, own, part, None, RecordStats(len(own)))
                    loss.backward()  # type: ignore[no-untyped-call]
                finite = bool(torch.isfinite(loss)) and math.isfinite(self.optimizer.clip())
                self.optimizer.zero_grad()
                if not finite:
                    culprit = f"the sample of rollouts {_names([sample])}"
                    break
            else:
                continue
            break
        raise TrainingError(
            f"the loss or its gradient is not finite; it comes from {culprit}. The weights were "
            "not changed. Look at that sample's tokens and advantages; if all samples are bad, "
            "the weights have diverged: continue from an earlier checkpoint with a lower optim.lr."
        )


def _without_masked(sample: Sample) -> Sample:
    """Drop the records of weight 0, which no loss and no normalizer sees."""
    keep = sample.records.weight != 0
    if keep.all():
        return sample
    columns = {name: getattr(sample.records, name)[keep] for name in Records.__dataclass_fields__}
    return replace(sample, records=Records(**columns))


def _check_records(packs: Sequence[_Pack], records: Records) -> None:
    """Refuse records that no gradient can be computed from, by the name of their rollout."""
    for name in ("logprob", "advantage", "weight", "temperature"):
        values = getattr(records, name)
        bad = ~np.isfinite(values)
        if name == "temperature":
            bad |= values <= 0
        if bad.any():
            worst = int(bad.argmax())
            raise TrainingError(
                f"the {name} of a token of rollout {_rollout_at(packs, worst)} is "
                f"{float(values[worst])}, so its gradient would destroy the weights. The engine "
                "(logprob, temperature) or the reward (advantage) gave it; look at that rollout in "
                "the run store. Training needs the engine's logprobs and a temperature above 0."
            )


def _names(samples: Sequence[Sample]) -> str:
    names = dict.fromkeys(origin.rollout_id for sample in samples for origin in sample.origins)
    shown = list(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > 8 else "")


def _rollout_at(packs: Sequence[_Pack], record: int) -> str:
    """Return the names of the rollouts of the sample that holds a record."""
    for item in packs:
        if record < item.span.stop:
            index = int(item.forest.record_sample[record - item.span.start])
            return _names([item.samples[index]])
    return "unknown"
