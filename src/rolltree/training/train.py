"""The synchronous loop: rollouts, credit, samples, optimizer step, publish, store.

    for each step:  requests -> rollouts (stored at once) -> advantages -> samples
                    -> engine paused: gradients, weights in place, version + 1 -> metrics stored

Kill it anywhere: the same call continues from the last checkpoint, trains the later steps again
from their stored rollouts, and samples only what is missing. It knows every stage by its interface
and no environment. It leaves out evaluation, which is injected, and asynchronous training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rolltree.errors import TrainingError
from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.samples import SampleBatch, build_samples
from rolltree.store import Run
from rolltree.training.assign import assign_credit
from rolltree.training.checkpoint import Checkpoints, TrainState, export_model
from rolltree.training.collect import collect
from rolltree.training.config import TrainConfig
from rolltree.training.plan import step_requests
from rolltree.training.reporter import Reporter, Silent, TrainReport, TrainStart
from rolltree.training.rollout_metrics import rollout_metrics
from rolltree.training.trainer import Trainer
from rolltree.types import RolloutResult, State

Evaluate = Callable[[str, int], Awaitable[Mapping[str, Any]]]
"""(phase, step) -> metrics. It stores its own rollouts under `phase` and may be called again after
a kill, with the same weights."""


class WeightTarget(Protocol):
    """What serves the trained weights: the embedded engine, or a stand-in for it."""

    @property
    def version(self) -> int:
        """The policy version that it samples with."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which nothing is sampled."""
        ...

    def publish(self, version: int) -> None:
        """Take note that the weights are now those of `version`."""
        ...


def train(
    config: TrainConfig,
    *,
    source: RolloutSource,
    run: Run,
    client: object,
    engine: WeightTarget,
    model: Any,
    tokenizer: Any = None,
    evaluate: Evaluate | None = None,
    reporter: Reporter | None = None,
) -> TrainReport:
    """Run `train_async`, which says what the arguments are, in a new event loop."""
    return asyncio.run(
        train_async(
            config,
            source=source,
            run=run,
            client=client,
            engine=engine,
            model=model,
            tokenizer=tokenizer,
            evaluate=evaluate,
            reporter=reporter,
        )
    )


async def train_async(
    config: TrainConfig,
    *,
    source: RolloutSource,
    run: Run,
    client: object,
    engine: WeightTarget,
    model: Any,
    tokenizer: Any = None,
    evaluate: Evaluate | None = None,
    reporter: Reporter | None = None,
) -> TrainReport:
    """Train `model` in place until `train.num_steps` steps are done, continuing what `run` holds.

    Args:
        config: the settings; those the run was started with.
        source: what is trained on.
        run: where rollouts, metrics and checkpoints go, opened for writing.
        client: samples from `engine`.
        engine: serves `model`'s own tensors.
        model: as it was before any training; a checkpoint in `run` is loaded into it.
        tokenizer: exported with the model.
        evaluate: called before, during and after training as `config.eval` says.
        reporter: told about everything.

    Raises:
        TrainingError: a step cannot go on; the same call continues when the cause is removed.
        ConfigError: the source and the config do not fit.
    """
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    loop = _Loop(
        config=config,
        source=source,
        run=run,
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        evaluate=evaluate,
        reporter=reporter or Silent(),
        trainer=Trainer(model, config),
        checkpoints=Checkpoints(run.checkpoints, config.checkpoint.keep),
        rollouts=RolloutEngine(
            source,
            client,
            max_concurrent=config.engine.max_concurrent,
            time_limit_s=config.engine.time_limit_s,
            retries=config.engine.retries,
        ),
    )
    return await loop.run_all()


@dataclass(slots=True, kw_only=True)
class _Loop:
    config: TrainConfig
    source: RolloutSource
    run: Run
    engine: WeightTarget
    model: Any
    tokenizer: Any
    evaluate: Evaluate | None
    reporter: Reporter
    trainer: Trainer
    checkpoints: Checkpoints
    rollouts: RolloutEngine
    evaluations: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)

    async def run_all(self) -> TrainReport:
        first = self._restore()
        async with self.engine.paused():
            self.engine.publish(first.version)
        self._start(first)
        num_steps, every = self.config.train.num_steps, self.config.eval.every
        if self.config.eval.before:
            await self._evaluate("eval_before", 0, current=first.step)
        for step in range(first.step + 1, num_steps + 1):
            metrics = await self._step(step)
            self.run.add_step(step, metrics)
            if step == num_steps or step % self.config.checkpoint.every == 0:
                self._save(step)
            self.reporter.on_step(step, metrics)
            if every and step % every == 0 and step < num_steps:
                await self._evaluate(f"eval/{step:06d}", step, current=step)
        if self.config.eval.after:
            await self._evaluate("eval_after", num_steps, current=num_steps)
        return self._end()

    def _restore(self) -> TrainState:
        """Load the last checkpoint, and forget the metrics of the steps that are taken again."""
        path = self.checkpoints.latest()
        state = TrainState(0, 0)
        if path is not None:
            state = self.checkpoints.load(path, self.model, self.trainer.optimizer)
            self.averages = state.averages
        num_steps = self.config.train.num_steps
        if state.step > num_steps:
            raise TrainingError(
                f"{self.run.path} has trained {state.step} steps and train.num_steps is "
                f"{num_steps}; a run cannot go back. Raise train.num_steps, or start another run "
                "directory."
            )
        self.run.truncate_steps(state.step)
        return state

    def _start(self, first: TrainState) -> None:
        self.reporter.on_start(
            TrainStart(
                run_path=self.run.path,
                first_step=first.step + 1,
                num_steps=self.config.train.num_steps,
                num_parameters=sum(p.numel() for p in self.trainer.optimizer.parameters),
                history=tuple(row.metrics for row in self.run.steps()),
            )
        )

    async def _step(self, step: int) -> dict[str, float]:
        """Take one step and return its metrics; the weights are published."""
        clock = [time.perf_counter()]
        requests = step_requests(self.config, self.source, step)
        collected = await collect(
            requests,
            self.rollouts,
            self.run,
            lambda done: self.reporter.on_rollouts(step, done, len(requests)),
        )
        clock.append(time.perf_counter())
        batch, credit = self._samples(collected.results)
        async with self.engine.paused():
            trained = self.trainer.step(batch.samples, step)
            self.engine.publish(step)
        clock.append(time.perf_counter())
        metrics = rollout_metrics(collected.results) | credit | trained
        return metrics | {
            "samples/reuse_factor": batch.report["num_raw_tokens"] / batch.report["num_tokens"],
            "samples/break_rate": batch.report["break_rate"],
            "samples/skipped_tokens": batch.report["num_skipped_tokens"],
            "rollout/entropy": _sampled_entropy(batch),
            "rollout/reused_share": collected.num_reused / len(requests),
            "policy/version": float(step),
            "time/rollout_s": clock[1] - clock[0],
            "time/step_s": clock[2] - clock[0],
        }

    def _samples(self, results: Sequence[RolloutResult]) -> tuple[SampleBatch, dict[str, float]]:
        """Assign credit and build the samples of one step."""
        section, algorithm = self.config.train, self.config.algorithm
        report = assign_credit(
            results,
            algorithm.resolve().credit,
            algorithm.policy(section.max_seq_len),
            self.averages,
        )
        self.averages = report.averages
        group_of: dict[int, str] = {}
        for result in results:
            for state in result.states:
                state.setdefault("request_id", result.request.request_id)
                group_of[id(state)] = result.request.group_id
        keys: dict[str, Callable[[State], Hashable]] = {
            "group": lambda state: group_of[id(state)],
            "step": lambda state: 0,
            "rollout": id,
        }
        batch = build_samples(
            report.trained,
            section.scope,
            truncation=algorithm.truncation_policy(),
            max_seq_len=section.max_seq_len,
            group_key=keys[section.share] if section.scope == "tree" else None,
        )
        return batch, report.metrics

    def _save(self, step: int) -> None:
        start = time.perf_counter()
        state = TrainState(step, step, self.averages)
        path = self.checkpoints.save(self.model, self.trainer.optimizer, state)
        spent = time.perf_counter() - start
        self.run.add_event("checkpoint", {"name": path.name, "time_s": spent}, step=step)

    async def _evaluate(self, phase: str, step: int, *, current: int) -> None:
        """Evaluate once per phase and run; an evaluation that is stored is only reported."""
        if self.evaluate is None:
            return
        stored = [event for event in self.run.events("evaluation") if event.data["phase"] == phase]
        if stored:
            metrics: Mapping[str, Any] = stored[-1].data["metrics"]
        elif current != step:
            self.run.add_event("evaluation_skipped", {"phase": phase, "done": current}, step=step)
            return
        else:
            metrics = dict(await self.evaluate(phase, step))
            self.run.add_event("evaluation", {"phase": phase, "metrics": metrics}, step=step)
        self.evaluations[phase] = metrics
        self.reporter.on_eval(phase, step, metrics, bool(stored))

    def _end(self) -> TrainReport:
        path: Path | None = None
        if self.config.checkpoint.export:
            path = export_model(self.model, self.tokenizer, self.run.path / "model")
        report = TrainReport(
            run_path=self.run.path,
            num_steps=self.config.train.num_steps,
            steps=tuple(row.metrics for row in self.run.steps()),
            evaluations=dict(self.evaluations),
            model_path=path,
        )
        self.reporter.on_end(report)
        return report


def _sampled_entropy(batch: SampleBatch) -> float:
    """Return minus the mean engine logprob of all sampled tokens: an estimate of the entropy."""
    return -float(np.mean(np.concatenate([s.records.logprob for s in batch.samples])))
