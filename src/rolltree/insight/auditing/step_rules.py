"""The rules that compare steps, settings and events with each other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rolltree._helpers.files import read_regular
from rolltree.insight.auditing.rules import CLOCK_S, AuditRule, InRun, RunProblem, Stored
from rolltree.store.metric_names import number_of
from rolltree.store.metric_table import metric_of
from rolltree.training.plan import PHASE
from rolltree.training.sections import learning_rate
from rolltree.values.errors import StoreError

_MOST_BYTES = 2**24
_ROUNDING = 1e-4
_PARTS_OF_STEP = ("time/wait_for_batch", "time/train_s", "time/broadcast_weights", "time/paused_s")


def _impossible_metrics(stored: Stored) -> Iterator[RunProblem]:
    for row in stored.run.steps():
        for name, given in row.metrics.items():
            metric = metric_of(name)
            if metric is None:
                yield RunProblem(f"a training stores no metric {name}", step=row.step)
                continue
            value, (least, most) = number_of(given), metric.bounds
            if value is None or least - _ROUNDING <= value <= most + _ROUNDING:
                continue
            span = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            yield RunProblem(f"{name} is {value:g}, but it can only be {span}", step=row.step)
        whole = number_of(row.metrics.get("time/step"))
        for name in _PARTS_OF_STEP:
            part = number_of(row.metrics.get(name))
            if whole is not None and part is not None and part > whole + _ROUNDING:
                yield RunProblem(
                    f"time/step is {whole:g} s, but {name} in it is {part:g} s", step=row.step
                )


def _differing_speeds(stored: Stored) -> Iterator[RunProblem]:
    for row in stored.run.steps():
        found = {name: number_of(value) for name, value in row.metrics.items()}
        for name, of, time, num_passes in _speeds(stored):
            speed, tokens, spent = found.get(name), found.get(of), found.get(time)
            if speed is None or tokens is None or spent is None or spent <= 0:
                continue
            right = tokens * num_passes / max(spent, 1e-9)
            if not math.isclose(speed, right, rel_tol=1e-6):
                yield RunProblem(
                    f"{name} is {speed:g}, but {tokens:g} tokens in {spent:g} s are {right:g}",
                    step=row.step,
                )


def _speeds(stored: Stored) -> Iterator[tuple[str, str, str, int]]:
    """Yield speeds of a step: metric, number of tokens, time, and how often each is computed."""
    yield "rollout/tokens_per_s", "rollout/total_sampled_tokens", "time/step", 1
    # Fewer mini-batches than the settings say if fewer rollouts train.
    if stored.config is not None and stored.config.train.minibatches == 1:
        num_passes = stored.config.train.updates_per_step
        yield "train/tokens_per_s", "train/num_computed_tokens", "time/train_s", num_passes


def _differing_settings(stored: Stored) -> Iterator[RunProblem]:
    """Compare steps and plans with the settings, unless these changed during the run."""
    run, config = stored.run, stored.config
    if config is None or any(event.data.get("changed") for event in run.events("resumed")):
        return
    steps = [row for row in run.steps() if row.step > stored.first]
    train, optim = config.train, config.optim
    last = max((row.step for row in steps), default=0)
    if last > train.num_steps:
        yield _differs("the last step is", last, "train.num_steps", train.num_steps, last)
    for row in steps:
        rate, num_updates = (
            number_of(row.metrics.get("train/learning_rate")),
            train.updates_per_step,
        )
        due = learning_rate(optim, row.step * num_updates - 1, train.num_steps * num_updates)
        if rate is not None and not math.isclose(rate, due, rel_tol=1e-6, abs_tol=1e-12):
            yield _differs("its learning rate is", rate, "what [optim] gives", due, row.step)
    groups: defaultdict[int, set[str]] = defaultdict(set)
    for item in stored.facts:
        label = item.row.group_id.rpartition("/")[2]
        if item.row.phase == PHASE and item.row.train_step is not None and label[:1] == "g":
            groups[item.row.train_step].add(label)
    most = config.algorithm.groups_per_step
    for step, labels in sorted(groups.items()):
        if len(labels) > most:
            yield _differs("its groups are", len(labels), "algorithm.groups_per_step", most, step)
    planned: Mapping[str, Any] = run.meta.get("planned") or {}
    if planned.get("steps", train.num_steps) != train.num_steps:
        yield _differs("planned steps are", planned["steps"], "train.num_steps", train.num_steps)
    size = config.eval.num_examples * config.eval.rollouts_per_example
    for done in run.evaluations():
        number = planned.get(f"phase/{done.phase}", 0)
        if 0 < size < number:
            yield _differs(f"{done.phase} plans", number, "the size set in eval", size, done.step)


def _differs(
    what: str, value: object, name: str, wanted: object, step: int | None = None
) -> RunProblem:
    return RunProblem(f"{what} {value}, but {name} is {wanted}", step=step)


def _missing_checkpoints(stored: Stored) -> Iterator[RunProblem]:
    """Compare the events with `checkpoint.every`, unless that changed during the run."""
    saved = {event.step for event in stored.run.events("checkpoint")}
    changed = [event.data.get("changed") for event in stored.run.events("resumed")]
    if stored.config is None or not saved or "checkpoint.every" in str(changed):
        return
    every, last = (
        stored.config.checkpoint.every,
        max((r.step for r in stored.run.steps()), default=0),
    )
    owed = [step for step in range(stored.first + 1, last) if step % every == 0]
    for step in sorted({*owed} - saved):
        yield RunProblem(
            f"a checkpoint is saved every {every} steps, but the events have none for this step",
            step=step,
        )


def _late_rollouts(stored: Stored) -> Iterator[RunProblem]:
    ended = {
        str(event.data.get("phase")): event.created_at for event in stored.run.events("evaluation")
    }
    for item in stored.facts:
        late_s = item.row.created_at - ended.get(item.row.phase, math.inf)
        if late_s > CLOCK_S:
            yield RunProblem(
                f"it was stored {late_s:.0f} s after the evaluation {item.row.phase} had ended",
                item.place,
            )


def _settings_for_people(stored: Stored) -> Iterator[RunProblem]:
    from rolltree.store.settings import config_text

    text = config_text(stored.run.config).encode()
    try:
        read = read_regular(stored.run.path / "config.json", _MOST_BYTES)
    except (OSError, StoreError):  # a copy of a run may lack it
        return
    if read != text:
        yield RunProblem(
            "config.json differs from the run's stored settings, which are what it ran with"
        )


STEP_RULES: tuple[AuditRule[InRun], ...] = (
    AuditRule("steps", "impossible_metric", _impossible_metrics),
    AuditRule("steps", "metrics_differ", _differing_speeds),
    AuditRule("steps", "settings_differ", _differing_settings),
    AuditRule("steps", "missing_checkpoint", _missing_checkpoints),
    AuditRule("times", "late_rollout", _late_rollouts),
    AuditRule("storage", "settings_file_differs", _settings_for_people),
)
