"""Sends metrics to TensorBoard, wandb, trackio and MLflow; the run store always has them too.

A continued run keeps its name in the tracker. Steps that are repeated after a kill are sent again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree._helpers.files import odd_kind, read_regular, write_whole
from rolltree._helpers.redact import shown_command
from rolltree.training.transcripts import COLUMNS, Transcript
from rolltree.values.errors import import_extra


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as trackers see it; `first_step` is where this start begins."""

    path: Path
    project: str
    name: str
    config: Mapping[str, Any]
    first_step: int

    @property
    def key(self) -> str:
        """Eight hex digits that are the same for every start of the run in this directory."""
        return hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class Sink:
    """An open tracker.

    `log(values, step)` sends numbers, `show(name, transcripts, step)` texts, `close()` ends it.
    """

    log: Callable[[Mapping[str, float], int], None]
    show: Callable[[str, Sequence[Transcript], int], None]
    close: Callable[[], None]


def tensorboard(run: TrackedRun) -> Sink:
    """Write event files to `tensorboard/` of the run directory."""
    _package("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then hides values that an earlier start wrote for the steps that follow.
    writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=run.first_step)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(name: str, rollouts: Sequence[Transcript], step: int) -> None:
        writer.add_text(name, "\n\n---\n\n".join(_literal(str(each)) for each in rollouts), step)
        writer.flush()

    return Sink(log, show, writer.close)


def wandb(run: TrackedRun) -> Sink:
    """Log to a wandb run. `WANDB_MODE=offline` keeps it in `wandb/` of the run directory.

    wandb does not accept a step twice, so its x axis is the metric `step`.
    """
    package = _package("wandb")
    # wandb's metadata has the command line; it is sent only if it has no secrets.
    hides = shown_command(sys.argv) != shlex.join(sys.argv)
    tracked = package.init(
        settings=package.Settings(x_disable_meta=True) if hides else None,
        project=run.project,
        name=run.name,
        # Two runs with the same name stay separate; a continued run stays one run.
        id=f"{run.name}-{run.key}",
        resume="allow",
        dir=str(run.path),
        config=dict(run.config),
    )
    tracked.define_metric("step")
    tracked.define_metric("*", step_metric="step")

    def show(name: str, rollouts: Sequence[Transcript], step: int) -> None:
        table = package.Table(columns=list(COLUMNS), data=[each.row() for each in rollouts])
        tracked.log({name: table, "step": step})

    return Sink(lambda values, step: tracked.log({**values, "step": step}), show, tracked.finish)


def trackio(run: TrackedRun) -> Sink:
    """Log to trackio's own local store."""
    package = _package("trackio")
    package.init(project=run.project, name=run.name, resume="allow", config=dict(run.config))

    def show(name: str, rollouts: Sequence[Transcript], step: int) -> None:
        rows = [
            [_literal(value) if isinstance(value, str) else value for value in each.row()]
            for each in rollouts
        ]
        package.log({name: package.Table(columns=list(COLUMNS), data=rows)}, step=step)

    return Sink(lambda values, step: package.log(dict(values), step=step), show, package.finish)


_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow rejects in the name of a metric."""


def mlflow(run: TrackedRun) -> Sink:
    """Log to the MLflow server at `MLFLOW_TRACKING_URI`; without one, to `mlruns/` of the run.

    mlflow-skinny, which the extra installs, has no database, and has to be allowed to use files.
    The id is kept in `mlflow-run-id` of the run directory, so that a continued run uses it again.
    """
    package = _package("mlflow")
    where = os.environ.get("MLFLOW_TRACKING_URI")
    if not where:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        where = (run.path / "mlruns").resolve().as_uri()
    client = package.MlflowClient(where)
    from mlflow.entities import Metric

    note = run.path / "mlflow-run-id"
    # In someone else's run directory it could be a pipe or a link.
    if odd_kind(note) is None and note.exists():
        identity = read_regular(note, 1024).decode().strip()
        client.update_run(identity, status="RUNNING")
    else:
        known = client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else client.create_experiment(run.project)
        identity = client.create_run(experiment, run_name=run.name).info.run_id
        for section, values in run.config.items():
            for key, value in (values or {}).items():
                # Some versions of MLflow refuse longer values.
                client.log_param(identity, f"{section}.{key}", str(value)[:500])
        # Last, so that a run that is continued there has its parameters.
        write_whole(note, identity + "\n", follow=False)

    def log(values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            Metric(_NOT_IN_MLFLOW.sub("_", name), value, now, step)
            for name, value in values.items()
        ]
        client.log_batch(identity, metrics=metrics)

    def show(name: str, rollouts: Sequence[Transcript], step: int) -> None:
        text = "\n\n---\n\n".join(map(str, rollouts))
        client.log_text(identity, text, f"{name}/step-{step:06d}.txt")

    return Sink(log, show, lambda: client.set_terminated(identity))


TRACKERS: dict[str, Callable[[TrackedRun], Sink]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "trackio": trackio,
    "mlflow": mlflow,
}


def _literal(text: str) -> str:
    """Return text as a block of code, so that Markdown in it is shown as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _package(name: str) -> Any:
    return import_extra(name, f"track.to = {name!r}", "rolltree[track]", f" (or {name} alone)")
