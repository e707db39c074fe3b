"""The training loop: rollouts, credit, samples, optimizer step, publish, store.

    for each step:  requests -> rollouts (stored at once) -> advantages -> samples
                    -> engine paused: gradients, weights in place, version + 1 -> metrics stored

With `train.async_steps`, sampling goes on while the gradients are computed, and the engine is
paused only while the weights are written. A run that was killed continues from its last checkpoint:
later steps are trained again from their stored rollouts, and only what is missing is sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rolltree._helpers.tasks import run_shielded
from rolltree.inference.vocabulary import Vocabulary
from rolltree.narrator.detectors import DETECTORS
from rolltree.narrator.facts import Facts, Looked, read_facts
from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.rollouts.decode import decode_results
from rolltree.samples import SampleBatch, SkipReason, build_samples
from rolltree.store import Run, StoredRollout
from rolltree.store.metric_names import eval_numbers, numbers
from rolltree.store.weights import environments_of
from rolltree.training.advantages import CreditReport, join_credit
from rolltree.training.batches import has_loss, mask_stale, newest_version, staleness_limit
from rolltree.training.checkpoint import Checkpoints, TrainState
from rolltree.training.config import TrainConfig, as_started
from rolltree.training.feeds import Feed, StepRollouts
from rolltree.training.metrics import MISMATCH, rollout_metrics
from rolltree.training.parts import (
    TrainParts,
    export_together,
    make_checkpoints,
    make_trainer,
    renew_copy,
    score_together,
)
from rolltree.training.plan import forked_at
from rolltree.training.publishing import Publisher, RunHooks, WeightLock, run_hooks
from rolltree.training.reporter import Reporter, Silent, TrainReport, TrainStart
from rolltree.training.token_record import TokenRecord
from rolltree.training.tracking import Trackers
from rolltree.training.trainer import Trainer
from rolltree.training.untrainable import MaskedCalls, note_misspelled
from rolltree.values.errors import NonFiniteStep, StoreError, TrainingError
from rolltree.values.state import RAISED
from rolltree.values.types import RolloutResult, State

if TYPE_CHECKING:
    from rolltree.training.models.ranks import Ranks

Evaluate = Callable[[str, int], Awaitable[Mapping[str, Any]]]
"""(phase, step) -> metrics. It stores its own rollouts under `phase` and may be called again after
a kill, with the same weights."""


async def run_training(
    config: TrainConfig,
    parts: TrainParts,
    *,
    source: RolloutSource,
    run: Run,
    evaluate: Evaluate | None = None,
    reporter: Reporter | None = None,
    ranks: Ranks | None = None,
    rollouts: RolloutEngine | None = None,
) -> TrainReport:
    """Train `parts.model` in place until `train.num_steps` steps are done, continuing `run`.

    `rolltree.train` builds everything that this function takes.

    Args:
        config: the settings, the same ones that the run was started with.
        parts: see `build_parts`. The model is as it was before any training; a checkpoint in `run`
            is loaded into it.
        source: the environment.
        run: where rollouts, metrics and checkpoints go, opened for writing.
        evaluate: called before, during and after training as `config.eval` says.
        reporter: gets progress callbacks.
        ranks: the processes that train with this one, which is rank 0; the others run `follow`.
        rollouts: runs the rollouts, instead of an engine in this process.

    If cancelled, it finishes the step that is writing weights, saves a checkpoint, and raises.

    Raises:
        TrainingError: a step failed; the same call continues once the cause is removed.
        ConfigError: the source and the config do not match.
    """
    config = as_started(config, run.config)
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    shown = reporter or Silent()
    notify = partial(run.announce, show=shown.on_notice)
    rollouts = rollouts or RolloutEngine(
        source,
        parts.client,
        max_concurrent=config.engine.max_concurrent,
        time_limit_s=config.engine.time_limit_s,
        deadline_s=config.engine.deadline_s,
        retries=config.engine.retries,
        notify=notify,
    )
    trackers = Trackers(config, notify)
    trainer = make_trainer(parts.model, config, ranks)
    loop = _Loop(
        config=config,
        run=run,
        parts=parts,
        evaluate=evaluate,
        reporter=shown,
        notify=notify,
        trackers=trackers,
        ranks=ranks,
        trainer=trainer,
        checkpoints=make_checkpoints(run.checkpoints, config, ranks),
        rollouts=rollouts,
        vocabulary=None if _renders(parts.client) else Vocabulary(parts.tokenizer),
        publisher=Publisher(
            parts.model,
            parts.engine,
            rollouts.client,
            tolerance=config.engine.probe_tolerance,
            score=lambda prompts: score_together(parts.model, prompts, ranks),
            renew=lambda: renew_copy(parts.model, parts.served, ranks),
        ),
    )
    try:
        return await loop.run_all()
    finally:
        trackers.close()


def _renders(client: Any) -> bool:
    # A pool's calls go to any of its clients, so all of them have to render.
    parts = getattr(client, "clients", [client])
    return all(getattr(part, "renderer", None) is not None for part in parts)


_PATIENCE = 10
_MOST_SKIPPED = 3
"""Steps in a row with equal rewards before the user gets a notice."""


@dataclass(slots=True, kw_only=True)
class _Loop:
    config: TrainConfig
    run: Run
    parts: TrainParts
    evaluate: Evaluate | None
    reporter: Reporter
    notify: Callable[[str], None]
    trackers: Trackers
    ranks: Ranks | None
    trainer: Trainer
    checkpoints: Checkpoints
    rollouts: RolloutEngine
    publisher: Publisher
    vocabulary: Vocabulary | None  # set if servers render prompts, to check their ids
    averages: Mapping[str, float] = field(default_factory=dict)
    weight_lock: WeightLock | None = None  # of a step that is running or has failed
    done: int = 0  # steps whose weights are published and metrics stored
    saved: int = 0
    num_equal: int = 0  # steps in a row whose rewards were all equal
    num_skipped: int = 0  # steps in a row whose gradient was not finite
    noticed: set[str] = field(default_factory=set)  # kinds of notices that are sent only once
    raised: set[str] = field(default_factory=set)  # what raised and was scored, as notices said
    is_writing: bool = False  # weights and averages may be partly updated by a step

    @property
    def hooks(self) -> RunHooks:
        return run_hooks(self.parts.engine)

    async def run_all(self) -> TrainReport:
        try:
            return await self._run_all()
        except asyncio.CancelledError:
            # `_take` is shielded, so a cancellation comes before or after it. `is_writing` is
            # still set only if the step failed halfway: then the weights belong to no version.
            if self.done > self.saved and not self.is_writing:
                self._save(self.done)
            raise
        finally:
            # Not when the parts are closed, because the run's database may be closed by then. The
            # engines of a [cluster] end with their run.
            if self.config.cluster is None:
                with suppress(StoreError):
                    self.hooks.announce_kept_weights()

    async def _run_all(self) -> TrainReport:
        first = self._restore()
        self.done = self.saved = first.step
        await self.hooks.begin(self.notify, self.publisher.probe)
        # Before the first request: an engine with a copy still has the weights that it was started
        # with, not those of the checkpoint.
        async with self.parts.engine.paused():
            await self.publisher.publish(first.version)
        await self.publisher.verify(first.version)
        self._start(first)
        num_steps = self.config.train.num_steps
        if self.config.eval.before:
            # Only the first start has these weights. Later starts report the stored result, or
            # store that the evaluation was skipped.
            start = forked_at(self.run)
            await self._evaluate("eval_before", start, current=first.step)
        for phase in self._owed(first.step):
            await self._evaluate(phase, first.step, current=first.step)
        feed = self._feed()
        try:
            for step in range(first.step + 1, num_steps + 1):
                metrics = await self._step(step, feed)
                inside = self._is_evaluated(step)
                # Repeating an asynchronous step gives the same weights only up to rounding.
                exact = inside and self.config.train.async_steps > 0
                if step == num_steps or step % self.config.checkpoint.every == 0 or exact:
                    self._save(step)
                self.trackers.log(numbers(metrics), step)
                self.reporter.on_step(step, metrics)
                # After the save, so that after a kill during the evaluation the next start makes it
                # up (design/0016).
                if inside:
                    await self._evaluate(f"eval/{step:06d}", step, current=step)
        finally:
            # The rollouts end first: after a failure the engine stays paused until no rollout is
            # left that could sample from half-written weights (design/0008).
            await feed.aclose()
            if self.weight_lock is not None:
                await self.weight_lock.aclose()
        if self.config.eval.after:
            await self._evaluate(self._last_phase(num_steps), num_steps, current=num_steps)
        return self._end()

    def _restore(self) -> TrainState:
        """Load the last checkpoint, and delete the metrics of the steps that will be repeated."""
        path = self.checkpoints.latest(self.notify)
        state = TrainState(0, 0)
        if path is not None:
            state = self.checkpoints.load(path, self.parts.model, self.trainer.optimizer)
            self.averages = state.averages
        num_steps = self.config.train.num_steps
        if state.step > num_steps:
            raise TrainingError(
                f"{self.run.path} has trained {state.step} steps, but train.num_steps is "
                f"{num_steps}; a run cannot go back. Raise train.num_steps, or use another run "
                "directory."
            )
        self.run.truncate_steps(state.step)
        return state

    def _start(self, first: TrainState) -> None:
        self.run.plan("steps", self.config.train.num_steps)
        self.trackers.open(self.run.path, first.step + 1)
        self.reporter.on_start(
            TrainStart(
                run_path=self.run.path,
                first_step=first.step + 1,
                num_steps=self.config.train.num_steps,
                num_parameters=sum(p.numel() for p in self.trainer.optimizer.parameters),
                history=tuple(row.metrics for row in self.run.steps()),
                evaluated_steps=self._evaluated_steps(first.step),
            )
        )

    def _evaluated_steps(self, after: int) -> tuple[int, ...]:
        if self.evaluate is None:
            return ()
        last = self.config.train.num_steps
        inside = (step for step in range(after + 1, last) if self._is_evaluated(step))
        return (*inside, last) if self.config.eval.after else tuple(inside)

    def _feed(self) -> Feed:
        sources = self.config, self.rollouts, self.run
        calls: dict[str, Any] = {"notify": self.notify, "on_progress": self.reporter.on_rollouts}
        is_async = self.config.train.async_steps
        if not is_async and not self.config.algorithm.dynamic_sampling_max:
            return Feed(*sources, **calls)
        from rolltree.training.dynamic_sampling import DynamicFeed
        from rolltree.training.no_signal_warning import NoSignalWarning
        from rolltree.training.stream_feed import StreamFeed

        kind = StreamFeed if is_async else DynamicFeed
        return kind(*sources, warning=NoSignalWarning(self.notify), **calls)

    async def _step(self, step: int, feed: Feed) -> dict[str, float]:
        """Take one step, publish its weights, and return its metrics."""
        began = time.perf_counter()
        # Sampling may be cancelled at any moment, since every finished rollout is stored. A step
        # that has begun is always finished: weights, version and metrics belong together.
        collected = await self.hooks.guard(feed.next(step))
        return await run_shielded(self._take(step, collected, began))

    async def _take(self, step: int, collected: StepRollouts, began: float) -> dict[str, float]:
        """Train on the collected rollouts; weights, version and stored metrics change together."""
        wrong: Mapping[tuple[int, int, int], str] = {}
        if self.vocabulary is not None:
            from rolltree.training.sampled import misspelled

            wrong = await asyncio.to_thread(misspelled, collected.trained, self.vocabulary)
        # Set before the first write to the weights, because `_samples` already updates the moving
        # averages.
        self.is_writing = True
        sampled_at = time.perf_counter()
        batch, record, credit = self._samples(collected)
        if wrong:
            samples = note_misspelled(batch.samples, credit.places, wrong)
            batch = replace(batch, samples=samples)
        self._note_raised(collected.sampled, step)
        trained = await self._train(batch, step, record, _may_stand_still(collected, batch))
        spent = time.perf_counter() - began
        environments = environments_of(self.rollouts.source)
        metrics = (
            rollout_metrics(collected.sampled, environments)
            | credit.metrics
            | dict(collected.metrics)
            | trained
        )
        sampled = metrics["rollout/total_sampled_tokens"]
        metrics |= _sample_metrics(batch) | {
            "policy/version": float(step),
            "time/wait_for_batch": sampled_at - began,
            "time/step": spent,
            "rollout/tokens_per_s": sampled / max(spent, 1e-9),
        }
        # Last: after an earlier kill, the step is repeated from its stored rollouts.
        await asyncio.to_thread(
            lambda: self.run.add_step(step, metrics, record.rows(step) if record else ())
        )
        self.done, self.is_writing = step, False
        self._note_equal_rewards(metrics)
        if num := self.trackers.wants(step):
            advantages = credit.first_advantages(collected.trained)
            self._show("completions", collected.sampled, num, step, "train", advantages)
        return metrics

    def _note_equal_rewards(self, metrics: Mapping[str, float]) -> None:
        """Send a notice after `_PATIENCE` steps in a row with equal rewards: they teach nothing."""
        equal = metrics.get("reward/std") == 0.0
        self.num_equal = self.num_equal + 1 if equal else 0
        if self.num_equal == _PATIENCE:
            # A damaged row ends no training.
            with suppress(StoreError):
                self._narrate(read_facts(self.run, quick=True), "zero_variance", "flat_groups")

    def _narrate(self, facts: Facts, *kinds: str) -> None:
        """Send what the narrator says of some kinds."""
        for kind in kinds:
            for each in DETECTORS[kind].sentences(kind, facts):
                advice = each["advice"].replace(" RUN ", f" {self.run.path} ")
                self.notify(f"{each['text']} {advice}".rstrip())

    async def _train(
        self, batch: SampleBatch, step: int, record: TokenRecord | None, may_stand_still: bool
    ) -> dict[str, float]:
        """Train on the samples, publish the weights as version `step`, and verify them.

        If every token that was sampled is masked or left out, the weights stay as they are.
        """
        on_batch = None if record is None else record.add
        samples, stale = batch.samples, dict[str, float]()
        if self.config.train.async_steps:
            samples, stale = mask_stale(samples, step - 1, staleness_limit(self.config))
        samples, masked = self.trainer.trainable(samples)
        masked.add_skipped(batch.skipped)
        self._note_masked(masked, step)
        stands_still = may_stand_still and not has_loss(samples)
        if stands_still or not self.config.train.async_steps:
            # The embedded engine reads the tensors that AdamW writes: a forward pass in between
            # would use weights that never existed (design/0008).
            async with self.parts.engine.paused():
                if stands_still:
                    trained = self._stand_still(step)
                else:
                    # Before the step: the probe is compared with the old weights as well
                    # (design/0022).
                    self.publisher.expect(samples)
                    try:
                        trained = self.trainer.step(samples, step, on_batch=on_batch)
                        self.num_skipped = 0
                    except NonFiniteStep as error:
                        trained = self._skip(step, error)
                # Also after a step that trained nothing: versions count steps, and a token's lag
                # is a difference of versions.
                await self.publisher.publish(step)
            spent = {"time/broadcast_weights": self.publisher.spent_s}
            verified = await self.publisher.verify(step)
            return trained | masked.metrics() | stale | spent | verified
        # Gradients only read the weights, so the engine keeps sampling while they are computed. The
        # trainer's thread holds the lock from the optimizer's first write to the publish.
        self.weight_lock = lock = WeightLock(
            self.parts.engine.paused, lambda: self.publisher.publish(step)
        )

        def train() -> dict[str, float] | NonFiniteStep:
            self.publisher.expect(samples)
            try:
                return self.trainer.step(samples, step, exclusive=lock, on_batch=on_batch)
            except NonFiniteStep as error:
                # Publishes the same weights, since versions count steps.
                with lock():
                    return error

        # A thread cannot be cancelled. The pause must not end while it still writes.
        done = await run_shielded(asyncio.to_thread(train))
        self.weight_lock = None
        if isinstance(done, NonFiniteStep):
            trained = self._skip(step, done)
        else:
            trained, self.num_skipped = done, 0
        # Without tokens of the current weights `train.max_mismatch` had nothing to compare.
        is_checked = MISMATCH in trained or self.trainer.algorithm.supervised
        if not is_checked:
            self._notify_once(
                "probe",
                f"train.max_mismatch compares tokens that the current weights sampled, but step "
                f"{step} trains none, because sampling runs ahead (train.async_steps). After such "
                "a step the engine answers a probe, which is compared with the trainer instead "
                "(engine.probe_tolerance).",
            )
        verified = await self.publisher.verify(step, always=not is_checked)
        spent = {"time/paused_s": lock.paused_s, "time/broadcast_weights": self.publisher.spent_s}
        return trained | masked.metrics() | stale | verified | spent

    def _notify_once(self, kind: str, message: str) -> None:
        """Send the first notice of its kind."""
        if kind not in self.noticed:
            self.noticed.add(kind)
            self.notify(message)

    def _note_masked(self, masked: MaskedCalls, step: int) -> None:
        """Send a notice the first time that calls are masked for a reason."""
        for reason, sentence in masked.sentences.items():
            self._notify_once(
                f"masked/{reason}",
                f"step {step} leaves {masked.num_calls[reason]} calls out of the loss, which "
                f"cannot be trained (masked/{reason} counts them; their rewards count): "
                f"{sentence}",
            )

    def _skip(self, step: int, error: NonFiniteStep) -> dict[str, float]:
        """Return the metrics of a step that is skipped, with a notice why.

        Raises:
            NonFiniteStep: so many steps in a row cannot be chance; the weights have diverged.
        """
        self.num_skipped += 1
        if self.num_skipped == _MOST_SKIPPED:
            raise error
        self.notify(f"step {step} is skipped: {error}")
        return {"train/num_records": 0.0, "train/grad_norm": 0.0, "train/skipped_step": 1.0}

    def _note_raised(self, results: Sequence[RolloutResult], step: int) -> None:
        """Send a notice the first time that a reward function or the environment raises.

        Its rollouts are scored, since the answer may be the cause; so may be a mistake in the code.
        """
        looked = [
            Looked(
                StoredRollout(request_id=each.request.request_id, train_step=step),
                scoring_errors=tuple(
                    (name, f"{error['type']}: {error['message']}")
                    for key in RAISED
                    for name, error in (state.get(key) or {}).items()
                    if name not in self.raised
                ),
            )
            for each in results
            for state in each.states
        ]
        self.raised.update(name for each in looked for name, _ in each.scoring_errors)
        self._narrate(Facts("train", {}, (), looked), "scoring")

    def _stand_still(self, step: int) -> dict[str, float]:
        """Return the metrics of a step that trains nothing; the first time, send a notice why."""
        self._notify_once(
            "no token",
            f"step {step} has no token to train: all of its rollouts are masked or left out "
            "(truncation, mask_truncated_completions, failures, prompts beyond "
            "train.max_seq_len, calls that cannot be trained, which masked/* count, or masks "
            "of the environment), so the weights stay as they are. "
            "If that goes on, nothing is learned. Raise sampling.max_tokens or "
            f"train.max_seq_len, or look at a few: rolltree show {self.run.path} "
            "--transcripts 3.",
        )
        return {"train/num_records": 0.0, "train/grad_norm": 0.0}

    def _samples(
        self, collected: StepRollouts
    ) -> tuple[SampleBatch, TokenRecord | None, CreditReport]:
        """Join the credit of one step's groups; return its samples, token record and credit."""
        section, algorithm = self.config.train, self.config.algorithm
        results, policy = collected.trained, algorithm.policy(section.max_seq_len)
        report = join_credit(results, collected.credit, policy, self.averages)
        self.averages = report.averages
        if report.problems:
            self._notify_once(
                "no credit",
                f"{len(report.problems)} episodes are left out of the training, because their "
                f"credit is unknown (credit/unusable_share counts them): {report.problems[0]}",
            )
        group_of = {result.request.request_id: result.request.group_id for result in results}
        for result in results:
            for state in result.states:
                state.setdefault("request_id", result.request.request_id)
        keys: dict[str, Callable[[State], Hashable] | None] = {
            # A name that an environment gave is in no group; its rollout shares with its like.
            "group": lambda state: group_of.get(state["request_id"], state["request_id"]),
            "step": lambda state: 0,
            "rollout": None,
        }
        batch = build_samples(
            report.trained,
            section.scope,
            advantages=report.advantages,
            truncation=report.effects,
            max_seq_len=section.max_seq_len,
            group_key=keys[section.share_prefix_across] if section.scope == "tree" else None,
            inputs=algorithm.resolve().loss_inputs,
            skip_invalid=True,
        )
        record = TokenRecord(results, report) if section.record_tokens else None
        return batch, record, report

    def _save(self, step: int) -> None:
        start = time.perf_counter()
        # Every step publishes one version, so the two numbers are equal.
        state = TrainState(step, step, self.averages)
        path = self.checkpoints.save(self.parts.model, self.trainer.optimizer, state)
        spent = time.perf_counter() - start
        data = {"name": path.name, "time_s": spent}
        self.run.add_event("checkpoint", data, step=step)
        self.saved = step

    def _show(
        self,
        name: str,
        results: Iterable[RolloutResult],
        num: int,
        step: int,
        phase: str,
        advantages: Mapping[tuple[str, int], float] | None = None,
    ) -> None:
        from rolltree.training.transcripts import transcripts

        read = partial(transcripts, results, num, step=step, phase=phase, advantages=advantages)
        self.trackers.show(name, read, step)

    def _last_phase(self, step: int) -> str:
        """Return the phase of the evaluation after training.

        If a run is continued with more steps, `eval_after` belongs to the step where it ended
        before, even if that evaluation did not finish, so a later end gets its own phase.
        """
        begun = [e.step for e in self.run.events("evaluation_begun")]
        done = [e.step for e in self.run.evaluations() if e.phase == "eval_after"]
        others = {at for at in (*begun, *done) if at != step}
        return f"eval_after/{step:06d}" if others else "eval_after"

    def _is_evaluated(self, step: int) -> bool:
        """Return whether `eval.every` asks for an evaluation after `step`; never for the last."""
        every = self.config.eval.every
        return every > 0 and step % every == 0 and 0 < step < self.config.train.num_steps

    def _owed(self, step: int) -> list[str]:
        """Return the phases that earlier starts left undone at `step`, where this start begins.

        They were interrupted after the checkpoint was written, or `eval.every` asks for them only
        now. A notice names those whose weights are gone.
        """
        done = {evaluation.step for evaluation in self.run.evaluations()}
        known = done | {event.step for event in self.run.events("evaluation_skipped")}
        gone = [
            n
            # A fork's earlier steps belong to the run that it was forked from.
            for n in range(forked_at(self.run) + 1, step)
            if self._is_evaluated(n) and n not in known
        ]
        # Stored, so that the next start does not give the same notice again.
        for number in gone:
            data = {"phase": f"eval/{number:06d}", "done": step}
            self.run.add_event("evaluation_skipped", data, step=number)
        if gone:
            self.notify(
                f"eval.every = {self.config.eval.every} asks for an evaluation after step "
                f"{', '.join(map(str, gone))}, which no earlier start made. Training is at step "
                f"{step}, and the weights of those steps are gone, so it is skipped."
            )
        # `eval.after` decides about the evaluation after the last step.
        if step in done or step == self.config.train.num_steps:
            return []
        # A final evaluation that was interrupted here, before train.num_steps was raised, keeps
        # its phase and with it its stored rollouts.
        begun = [e.data["phase"] for e in self.run.events("evaluation_begun") if e.step == step]
        return begun or ([f"eval/{step:06d}"] if self._is_evaluated(step) else [])

    async def _evaluate(self, phase: str, step: int, *, current: int) -> None:
        """Evaluate once per phase and run; an evaluation that is stored is only reported."""
        if self.evaluate is None:
            return
        stored = [done for done in self.run.evaluations() if done.phase == phase]
        if stored:
            metrics = stored[-1].metrics
        # The model has been trained further, so its score would be stored for the wrong step.
        elif current != step:
            self.run.add_event("evaluation_skipped", {"phase": phase, "done": current}, step=step)
            return
        else:
            # The name of the final phase depends on earlier starts (`_last_phase`), so it is
            # stored.
            if phase.startswith("eval_after"):
                self.run.add_event("evaluation_begun", {"phase": phase}, step=step)
            metrics = dict(await self.hooks.guard(self.evaluate(phase, step)))
            # Last: without this event the next start makes the evaluation again, and reuses its
            # stored rollouts.
            self.run.add_event("evaluation", {"phase": phase, "metrics": metrics}, step=step)
        if not stored:
            self.trackers.log(eval_numbers(metrics), step)
            if num := self.trackers.wants():
                rows = self.run.rollouts(phase=phase, limit=num, sort="request_id")
                results = decode_results(rows, tokens=False)
                self._show("eval/completions", results, num, step, phase)
        self.reporter.on_eval(phase, step, metrics, bool(stored))

    def _end(self) -> TrainReport:
        # Exported before "finished" is stored: the start after a kill in between exports again.
        if self.config.checkpoint.export:
            path = self.run.path / "model"
            export_together(self.parts.model, self.parts.tokenizer, path, self.config, self.ranks)
        self.run.add_event("finished", step=self.done)
        report = TrainReport.read(self.run)
        try:
            self.reporter.on_end(report)
        except Exception as error:  # noqa: BLE001  the run is done, and its caller wants the report
            self.notify(
                f"the reporter's on_end failed ({type(error).__name__}: {error}); the run is done "
                "and stored."
            )
        return report


def _may_stand_still(collected: StepRollouts, batch: SampleBatch) -> bool:
    """Return whether a step without a token to train leaves the weights as they are.

    It is an error if the model was called and no answer came with token ids: such a server will not
    begin to give them. Empty answers, and calls with invalid tokens, have or had ids. When the run
    is continued, the step stands still, so that it gets on.
    """
    has_calls = any(state["trajectory"] for each in collected.trained for state in each.states)
    had_ids = any(each.reason is not SkipReason.NO_TOKENS for each in batch.skipped)
    is_blind = has_calls and not had_ids and newest_version(collected.trained) is None
    return collected.is_replayed or not is_blind


def _sample_metrics(batch: SampleBatch) -> dict[str, float]:
    """Return metrics of the samples and tokens of a step.

    `rollout/entropy` is minus the mean engine logprob of all sampled tokens, an estimate of the
    entropy. Causes of breaks that did not occur are left out.
    """
    report = batch.report
    causes = {
        f"samples/breaks/{name.removeprefix('break_rate/')}": value
        for name, value in report.items()
        if name.startswith("break_rate/") and value
    }
    metrics = causes | {
        "samples/break_rate": report["break_rate"],
        "samples/skipped_tokens": report["num_skipped_tokens"],
    }
    if batch.samples:  # none if every rollout is left out
        # Without calls that the engine gave no logprobs for.
        logprob = np.concatenate([sample.records.logprob for sample in batch.samples])
        logprob = logprob[np.isfinite(logprob)]
        metrics["samples/reuse_factor"] = report["num_raw_tokens"] / report["num_tokens"]
        if len(logprob):
            metrics["rollout/entropy"] = -float(np.mean(logprob))
    return metrics
