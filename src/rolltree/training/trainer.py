"""One optimizer step from a list of samples, in place on the module that the engine serves.

    samples -> packs (`batches.py`) -> forward, loss (`objective.py`), backward per pack
            -> clip -> AdamW

Every rank gets all samples, computes its own packs and steps its own shard of the weights; sums
over ranks make it the step that one process would take.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rolltree.inference.local.shell import is_mixture
from rolltree.inference.models import load_model
from rolltree.tokens import ROUTED_EXPERTS
from rolltree.training.algorithms import Algorithm
from rolltree.training.batches import Batch, Pack, build_batch, has_loss, split_rollouts
from rolltree.training.config import TrainConfig
from rolltree.training.forward import (
    LogprobModel,
    backward_precision,
    choose_forward,
    is_padding,
)
from rolltree.training.layout import FloatColumn, collate, rollout_names
from rolltree.training.logprobs import RecordLogprobs
from rolltree.training.losses import KLS
from rolltree.training.metrics import MISMATCH, RecordStats
from rolltree.training.models.plain_weights import is_adapted
from rolltree.training.objective import (
    FixedTerms,
    check_auxiliary,
    fixed_terms_need_whole_rollouts,
    fixed_terms_of,
    needs_fixed_terms,
    objective,
    rollout_ratios,
)
from rolltree.training.optim import Optimizer
from rolltree.training.sections import learning_rate
from rolltree.training.untrainable import (
    ForeignRouting,
    MaskedCalls,
    TrainableLimits,
    mask_untrainable,
)
from rolltree.values.errors import ConfigError, NonFiniteStep, TrainingError
from rolltree.values.types import Sample

if TYPE_CHECKING:
    from rolltree.training.models.ranks import Ranks

Exclusive = Callable[[], AbstractContextManager[None]]
"""Returns the context in which nothing but the optimizer touches the weights."""
OnBatch = Callable[[Batch, RecordStats], None]
"""Called with a batch and its statistics per record."""


class Trainer:
    """Trains one module in place.

    Args:
        model: a Hugging Face causal LM with float32 parameters.
        config: the `model`, `algorithm`, `optim` and `train` sections are read.
        ranks: the processes that train together; the module is then sharded in place.
        reference: the model that the KL is computed against, instead of `algorithm.reference`; it
            is frozen in place. Without either, it is a copy of `model` as it is now.

    The reference takes four bytes per parameter; with adapters the model below them is the
    reference and takes no extra memory. It is sharded over the ranks, except for a KL over the
    whole vocabulary, for which each rank holds all of it.

    Raises:
        TrainingError: the model cannot be trained as configured.
        ConfigError: a reference that is missing, unused, or has a different vocabulary.
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        ranks: Ranks | None = None,
        reference: Any = None,
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks
        self.algorithm: Algorithm = config.algorithm.resolve()
        check_auxiliary(model)
        self.logprobs = self._reader(model)
        self._limits = self._find_limits(self._prepare_replay())
        self._whole_kl = self.algorithm.kl_coef > 0 and KLS[self.algorithm.kl].fn is None
        # Before sharding: the reference may be a copy of the model, and shards cannot be copied.
        self.reference = self._reference(reference)
        if config.train.gradient_checkpointing:
            self.logprobs.recompute_layers()
        if ranks is not None:
            from rolltree.training.models.ranks import shard

            shard(self.logprobs, ranks)
            if self.reference is not None and self._whole_kl:
                # Its logits are made chunk by chunk inside the trained model's pass, where nothing
                # gathers shards of a second model.
                self.reference.move(ranks.device)
            elif self.reference is not None and self.reference.model is model:
                # Copied again, because `shard` has changed `self.logprobs`.
                self.reference = self._below_adapters()
            elif self.reference is not None:
                shard(self.reference, ranks)
        # After sharding, which replaces the parameters.
        self.optimizer = Optimizer(model, config.optim)
        self._has_written = False

    def _reader(self, model: Any) -> LogprobModel:
        section = self.config.train
        return LogprobModel(
            model,
            choose_forward(model, section.forward, section.scope, section.tree_attention),
            compute_dtype=getattr(torch, self.config.model.compute_dtype),
        )

    def _find_limits(self, foreign_routing: ForeignRouting | None) -> TrainableLimits:
        # The head may be larger than the embedding, or smaller.
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        longest = self.logprobs.longest
        max_tokens = self.config.train.max_tokens
        return TrainableLimits(
            min(len(end.weight) for end in ends),
            max_tokens if longest is None else min(longest[0], max_tokens),
            foreign_routing,
        )

    def trainable(self, samples: Sequence[Sample]) -> tuple[list[Sample], MaskedCalls]:
        """Return the samples without the calls that cannot be trained, and an account of those.

        `step` does the same with samples that still hold such calls.

        Raises:
            TrainingError: a call has other sampling settings, and `train.changed_sampling` is
                `refuse`.
        """
        kept, masked = mask_untrainable(samples, self.algorithm, self._limits)
        if self.config.train.changed_sampling == "refuse":
            masked.check()
        return kept, masked

    def _prepare_replay(self) -> ForeignRouting | None:
        """Make the reader replay routed experts if it can; return which ones cannot be replayed.

        Raises:
            TrainingError: `train.replay_experts` is true, but the model cannot.
        """
        wanted = self.config.train.replay_experts
        if wanted is False:
            return None
        if wanted is None and not is_mixture(self.model):
            why = (
                f"the rollouts carry routed experts, but {type(self.model).__name__} is not a "
                "mixture: its configuration counts no experts. "
                "Set train.replay_experts = false to leave them alone."
            )
        else:
            from rolltree.training.models.routing import Replay

            try:
                self.logprobs.replay = Replay(self.model)
                return self.logprobs.replay.foreign
            except TrainingError as error:
                if wanted:
                    raise
                why = str(error)
        # Whatever was recorded is not this model's.
        return lambda values: (np.ones(len(values), np.bool_), why)

    def _check_routing(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the share of tokens whose experts are replayed as a metric, if there are any.

        Raises:
            TrainingError: they are required but missing.
        """
        wanted = self.config.train.replay_experts
        known = [
            len(stream.positions)
            if (stream := s.info.get("streams", {}).get(ROUTED_EXPERTS))
            else 0
            for s in samples
        ]
        if wanted and not all(known):
            raise TrainingError(
                f"train.replay_experts is true, but the sample of rollouts "
                f"{rollout_names(samples[known.index(0)])} has no routed experts, so it would be "
                "trained on the trainer's own choice. Let the engine record them "
                "(engine.record_experts, or the server's flag), or leave train.replay_experts out."
            )
        if wanted is False or not any(known):
            return {}
        return {"routing/replayed_share": sum(known) / sum(s.num_tokens for s in samples)}

    def _reference(self, given: Any) -> LogprobModel | None:
        """Return the frozen model that the KL is computed against, None without a KL."""
        name, teaches = self.config.algorithm.reference, self.algorithm.teaches
        if self.algorithm.kl_coef == 0:
            if given is not None:
                raise ConfigError(
                    "a reference model was given, but algorithm.kl_coef is 0, so it would do "
                    "nothing. Set the coefficient, or leave the reference out."
                )
            return None
        if given is None and name is None and teaches:
            raise ConfigError(
                f"algorithm.name = {self.config.algorithm.name!r} learns from a teacher model, "
                "but none is set. Set algorithm.reference to the teacher's name or folder."
            )
        # Then each rank needs the whole reference, but the model below adapters is sharded.
        whole_on_ranks = self._whole_kl and self.ranks is not None
        if given is None and name is None and is_adapted(self.model):
            from rolltree.training.models.lora import changes_nothing

            if not changes_nothing(self.model):
                raise ConfigError(
                    "the KL is computed against the model as it is now, adapter included, but "
                    "training changes the adapter, so no frozen copy is left. Set "
                    "algorithm.reference to a folder with the merged model, or algorithm.kl_coef "
                    "= 0."
                )
            if not whole_on_ranks:
                return self._below_adapters()
        if given is None:
            device = self.config.model.device
            given = (
                copy.deepcopy(self.model)
                if name is None
                else load_model(name, "float32", device=device)[0]
            )
        reader = self._reader(given.requires_grad_(False).eval())
        rows = [len(module.get_output_embeddings().weight) for module in (self.model, reader.model)]
        if not is_padding(*rows):
            raise ConfigError(
                f"the trained model has a vocabulary of {rows[0]:,} tokens and the reference one "
                f"of {rows[1]:,}, so their logprobs cannot be compared. Use a reference with "
                "the same tokenizer."
            )
        # Both distributions are over the ids that both have; padding is never sampled.
        reader.num_ids = min(rows)
        self._limits = replace(self._limits, vocab_size=min(self._limits.vocab_size, *rows))
        return reader

    def _below_adapters(self) -> LogprobModel:
        """Return a reader of the model without its adapters, whose weights never change."""
        reader = copy.copy(self.logprobs)
        # The reference chooses its own experts (design/0023).
        reader.replay = None
        from rolltree.training.models.lora import adapters_off

        reader.around = partial(adapters_off, self.model)
        return reader

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        *,
        exclusive: Exclusive = nullcontext,
        on_batch: OnBatch | None = None,
    ) -> dict[str, float]:
        """Make `train.updates_per_step` optimizer steps on the samples of step `step` (from 1).

        `exclusive` is opened before the first write to the weights and closed after the last.
        `on_batch` is called for each mini-batch after its first gradients.

        Returns the metrics of the step: losses and ratios of the first update, the gradient
        norm of the last.

        Raises:
            NonFiniteStep: the first gradient is not finite; the rollout is named.
            TrainingError: no call can be trained, a later gradient is not finite (the weights are
                as they were before that update), or trainer and engine disagree on logprobs.
            TokenError: there is nothing to train on.
        """
        began = time.perf_counter()
        # Drop the gradients of a step that raised.
        self.optimizer.zero_grad()
        self._has_written = False
        section = self.config.train
        samples, masked = self.trainable(samples)
        if masked.sentences and not has_loss(samples):
            raise TrainingError(
                f"none of the {masked.num_calls.total()} calls of step {step} can be trained. "
                f"{' '.join(masked.sentences.values())}"
            )
        routing = self._check_routing(samples)
        # With a KL or entropy term, tokens without an advantage have a gradient too.
        skip = section.skip_zero_advantage and self.algorithm.only_advantage
        rank, num_ranks = (self.ranks.rank, self.ranks.size) if self.ranks else (0, 1)
        batches = [
            build_batch(
                part,
                self.algorithm,
                section.max_tokens,
                skip_zero_advantage=skip,
                rank=rank,
                num_ranks=num_ranks,
            )
            for part in split_rollouts(samples, section.minibatches)
        ]
        num_updates = section.updates_per_step
        # Before the first update, so that all mini-batches use the weights the step began with.
        fixed_terms = [self._fixed_terms(batch, num_updates) for batch in batches]
        metrics: dict[str, float] = {}
        fresh = step - 1 if section.async_steps else None  # None: all tokens are fresh
        with ExitStack() as held:
            for update in range(num_updates):
                batch = batches[update % len(batches)]
                stats = self._gradients(batch, fixed_terms[update % len(batches)])
                if on_batch is not None and update < len(batches):
                    on_batch(batch, stats)
                # Later updates run with weights that none of these tokens was sampled with.
                if update == 0:
                    metrics = stats.metrics(batch.records, fresh)
                    if not self.algorithm.supervised:
                        self._check_mismatch(metrics)
                # Check before writing to the weights, which could not be recovered from NaN.
                norm = self.optimizer.clip()
                if not math.isfinite(norm):
                    self._name_non_finite(batch)
                done = (step - 1) * num_updates + update
                lr = learning_rate(self.config.optim, done, num_updates * section.num_steps)
                if update == 0:
                    # Not earlier: an asynchronous engine samples while gradients are computed.
                    held.enter_context(exclusive())
                self._has_written = True
                self.optimizer.step(lr)
                metrics |= {"train/grad_norm": norm, "train/learning_rate": lr}
        spent = time.perf_counter() - began
        num_tokens = sum(batch.num_tokens for batch in batches)
        return metrics | {
            "train/num_samples": float(len(samples)),
            "train/num_packs": float(sum(len(batch.packs) for batch in batches)),
            "train/num_computed_tokens": float(num_tokens),
            "train/num_records": float(sum(len(batch.records) for batch in batches)),
            "train/num_skipped_records": float(sum(batch.num_skipped for batch in batches)),
            "train/lag_mean": float(
                np.mean(step - 1 - np.concatenate([b.records.version for b in batches]))
            ),
            **masked.metrics(),
            "time/train_s": spent,
            "train/tokens_per_s": num_tokens * num_updates / len(batches) / spent,
            **routing,
        }

    def _fixed_terms(self, batch: Batch, num_updates: int) -> FixedTerms | None:
        """Return the fixed terms of a batch, or None if the first pass computes them."""
        if not needs_fixed_terms(self.algorithm):
            return fixed_terms_of(self.algorithm, batch.records)
        spans = self.algorithm.over_rollout or fixed_terms_need_whole_rollouts(self.algorithm)
        # The first pass computes these terms itself, unless they need whole rollouts and packs hold
        # only parts (design/0010).
        if num_updates == 1 and (batch.is_whole or not spans):
            return None
        reference = None
        if self.reference is not None and KLS[self.algorithm.kl].in_reward:
            reference = self._measure(self.reference, batch)
        logprob = self._measure(self.logprobs, batch)
        return fixed_terms_of(self.algorithm, batch.records, logprob, reference)

    @torch.no_grad()
    def _measure(self, model: LogprobModel, batch: Batch) -> FloatColumn:
        """Return the logprobs of all records of a batch, of all ranks, with the current weights."""
        logprobs = np.zeros(len(batch.records), np.float32)
        for item in batch.packs:
            with model.context():
                got = model(item.forest).logprob.cpu().numpy()
            # Fillers run too, because all ranks must gather the layers equally often.
            if not item.is_filler:
                logprobs[item.span] = got
        return logprobs if self.ranks is None else self.ranks.total(logprobs)[0]

    def _gradients(self, batch: Batch, fixed: FixedTerms | None = None) -> RecordStats:
        """Add up the gradients of all packs; return the statistics per record, over all ranks."""
        fixed = fixed or self._fixed_terms(batch, 1)
        ratios: FloatColumn | None = None
        if fixed is not None and self.algorithm.over_rollout and not batch.is_whole:
            # A rollout's ratio needs all its records, including those in other packs and ranks.
            now = self._measure(self.logprobs, batch)
            ratios = rollout_ratios(self.algorithm, batch.records, fixed, now)
        stats = self._new_stats(len(batch.records))
        for item in batch.packs:
            with self.logprobs.context():
                part = None if fixed is None else fixed.part(item.span)
                mean = None if ratios is None else ratios[item.span]
                self._backward(self._loss(item, part, mean, stats))
        if self.ranks is not None:
            # Then all ranks decide the same, and none waits for a rank that raised (design/0007).
            stats.sum_over(self.ranks)
        if not math.isfinite(stats.loss):
            self._name_non_finite(batch)
        return stats

    def _new_stats(self, num_records: int) -> RecordStats:
        refers = self.reference is not None
        return RecordStats(
            num_records,
            kl=refers,
            reference=refers and not self._whole_kl,
            factor=self.algorithm.correction is not None,
        )

    def _loss(
        self, item: Pack, fixed: FixedTerms | None, ratios: FloatColumn | None, stats: RecordStats
    ) -> Tensor:
        """Return one pack's share of the step's loss.

        If `fixed` or `ratios` is None, it is computed from this pack, which then holds whole
        rollouts.
        """
        algorithm, records = self.algorithm, item.forest.records
        got, reference = self._read(item)
        # A loss of 0 that still runs the backward pass, in which ranks communicate.
        if item.is_filler:
            return 0 * got.logprob.sum()
        now = got.logprob.detach().cpu().numpy()
        if fixed is None:
            below = None if reference is None else reference.cpu().numpy()
            fixed = fixed_terms_of(algorithm, records, now, below)
        if ratios is None:
            ratios = rollout_ratios(algorithm, records, fixed, now)
        terms = objective(
            algorithm,
            records.weight,
            fixed,
            got,
            ratios=ratios,
            reference=reference,
            extra=records.extra,
        )
        stats.add(item.span, got, terms, fixed.factor, reference)
        return terms.total

    def _read(self, item: Pack) -> tuple[RecordLogprobs, Tensor | None]:
        """Return the model's logprobs of a pack, and the reference's if the loss reads them."""
        reference = None
        if self.reference is not None and not self._whole_kl:
            with torch.no_grad(), self.reference.context():
                reference = self.reference(item.forest).logprob
        got = self.logprobs(
            item.forest,
            entropy_gradient=self.algorithm.entropy_coef > 0,
            teacher=self.reference if self._whole_kl else None,
        )
        return got, reference

    def _backward(self, total: Tensor) -> None:
        with backward_precision(self.config.model.backward_dtype):
            total.backward()  # type: ignore[no-untyped-call]

    def _check_mismatch(self, metrics: dict[str, float]) -> None:
        # Missing if no token is of the current version; the loop then probes the engine.
        mismatch, limit = metrics.get(MISMATCH, 0.0), self.config.train.max_mismatch
        if mismatch > limit:
            self.optimizer.zero_grad()
            raise TrainingError(
                f"trainer and engine disagree on the logprobs of sampled tokens by {mismatch:.3g} "
                f"on average (train.max_mismatch is {limit}), so importance ratios would be wrong. "
                "Usual causes: the engine serves other weights or another precision, or its "
                "logprobs are not those of the temperature it sampled with."
            )

    def _name_non_finite(self, batch: Batch) -> None:
        """Find the sample whose loss or gradient is not finite, and raise an error naming it."""
        self.optimizer.zero_grad()
        culprit = next(
            (
                f"the sample of rollouts {rollout_names(sample)}"
                # All ranks go through the same samples, because each pass is collective.
                for sample in batch.samples
                if not self._is_finite_alone(sample)
            ),
            "none of the samples alone, their sum overflows",
        )
        # A loop may skip a step that has not written anything.
        kind = TrainingError if self._has_written else NonFiniteStep
        raise kind(
            f"the loss or its gradient is not finite; it comes from {culprit}. The weights were "
            "not changed by this update. Look at that sample's tokens and advantages; if all are "
            "bad, the weights have diverged: continue from an earlier checkpoint with a lower "
            "optim.lr."
        )

    def _is_finite_alone(self, sample: Sample) -> bool:
        forest = collate([sample])
        alone = Pack(forest, (sample,), slice(0, len(forest.records)))
        with self.logprobs.context():
            loss = self._loss(alone, None, None, self._new_stats(len(forest.records)))
            self._backward(loss)
        finite = bool(torch.isfinite(loss)) and math.isfinite(self.optimizer.clip())
        self.optimizer.zero_grad()
        return finite
