"""Metrics to TensorBoard, wandb, trackio and MLflow, beside the run store, which always has them.

A tracker is a reporter; a row of `TRACKERS` makes one from what it needs to know. A run that is
continued goes on under the same name, and steps that are trained again after a kill are sent again.
It knows metrics as flat numbers and imports a tracker's package when it is asked for. It leaves out
texts, tables and models: they are in the run directory.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rolltree.errors import ConfigError, UnknownName, did_you_mean
from rolltree.training.config import TrainConfig
from rolltree.training.reporter import Reporter, TrainReport, TrainStart


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run; `first_step` is where this start begins."""

    path: Path
    project: str
    name: str
    config: Mapping[str, Any]
    first_step: int

    @property
    def key(self) -> str:
        """Eight hex digits that are the same for every start of the run."""
        return hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=4).hexdigest()


class Sink(Protocol):
    """Where one tracker's numbers go."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardSink:
    """Event files in `tensorboard/` of the run directory: `tensorboard --logdir RUN`."""

    def __init__(self, run: TrackedRun) -> None:
        _package("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=run.first_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink:
    """A wandb run. `WANDB_MODE=offline` keeps it on disk, in `wandb/` of the run directory.

    wandb takes no step twice, so its x axis is the metric `step`.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb = _package("wandb", "wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=f"{run.name}-{run.key}",
            resume="allow",
            dir=str(run.path),
            config=dict(run.config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioSink:
    """A trackio run, in trackio's own local store."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = _package("trackio", "trackio")
        self._trackio.init(
            project=run.project, name=run.name, resume="allow", config=dict(run.config)
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class MlflowSink:
    """An MLflow run; `MLFLOW_TRACKING_URI` says where, as for every MLflow client.

    The id is kept in `mlflow-run-id` of the run directory, so a continued run goes on there.
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow = _package("mlflow", "mlflow")
        from mlflow.entities import Metric

        self._metric: Callable[..., Any] = Metric
        self._client = mlflow.MlflowClient()
        note = run.path / "mlflow-run-id"
        if note.is_file():
            self._id = note.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        for section, values in run.config.items():
            for key, value in values.items():
                self._client.log_param(self._id, f"{section}.{key}", str(value)[:500])
        note.write_text(self._id + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one batch."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[TrackedRun], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
}


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"track.to asks for {package!r}, which is not installed ({error}), so its metrics "
            f"would be lost. Install it: pip install 'rolltree[track]' (or pip install {package})."
        ) from error


class Tracking:
    """A reporter around another one: everything is passed on, and numbers go to the trackers.

    Raises:
        UnknownName: `track.to` names a tracker that does not exist.
        ConfigError: its package is not installed (when training starts).
    """

    def __init__(self, inner: Reporter, config: TrainConfig) -> None:
        self._inner, self._config = inner, config
        self._sinks: list[Sink] = []
        for name in config.track.to:
            if name not in TRACKERS:
                raise UnknownName(f"there is no tracker {name!r}.{did_you_mean(name, TRACKERS)}")

    def on_start(self, start: TrainStart) -> None:
        """Open the trackers."""
        section = self._config.track
        name = section.name or start.run_path.resolve().name
        config = self._config.as_dict()
        run = TrackedRun(start.run_path, section.project, name, config, start.first_step)
        for tracker in section.to:
            self._sinks.append(TRACKERS[tracker](run))
        self._inner.on_start(start)

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """Pass it on."""
        self._inner.on_rollouts(step, num_done, num_total)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._log(numbers(metrics), step)
        self._inner.on_step(step, metrics)

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """Send an evaluation, unless an earlier start did."""
        if not stored:
            self._log(numbers(metrics, phase.partition("/")[0]), step)
        self._inner.on_eval(phase, step, metrics, stored)

    def on_notice(self, message: str) -> None:
        """Pass it on."""
        self._inner.on_notice(message)

    def on_end(self, report: TrainReport) -> None:
        """Pass it on."""
        self._inner.on_end(report)

    def close(self) -> None:
        """Close the trackers, also after a failure."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.log(values, step)


def numbers(data: Mapping[str, Any], stem: str = "") -> dict[str, float]:
    """Return the finite numbers of nested metrics under flat names.

    >>> numbers({"reward": {"mean": 0.5, "unit": "share"}, "num_failed": 0}, "eval")
    {'eval/reward/mean': 0.5, 'eval/num_failed': 0.0}
    """
    flat: dict[str, float] = {}
    for name, value in data.items():
        key = f"{stem}/{name}" if stem else str(name)
        if isinstance(value, Mapping):
            flat |= numbers(value, key)
        elif isinstance(value, int | float) and math.isfinite(value):
            flat[key] = float(value)
    return flat
