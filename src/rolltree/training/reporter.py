"""Training progress callbacks, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rolltree._helpers.finished import Finished
from rolltree._helpers.html_view import html_lines, html_table
from rolltree.inference.models.load import has_gpu
from rolltree.narrator.detectors import Advice, advise
from rolltree.narrator.facts import read_facts
from rolltree.store import Run, StoredEvaluation
from rolltree.values.errors import StoreError

# What a printed report shows; `rows` has every metric.
_COLUMNS = {
    "reward": "reward/mean",
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
    "entropy": "train/entropy",
    "tokens": "rollout/total_sampled_tokens",
    "seconds": "time/step",
}


@dataclass(frozen=True, slots=True)
class TrainStart:
    """The start of a run: `first_step` is 1, or the step after the last one of an earlier start.

    `history` holds the metrics of the steps before it, `num_parameters` counts the trained ones.
    `evaluated_steps` are the steps after which a held-out evaluation runs.
    """

    run_path: Path
    first_step: int
    num_steps: int
    num_parameters: int
    history: tuple[Mapping[str, Any], ...]
    evaluated_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class TrainReport(Finished):
    """The results of a training run. Print it, or read it: `pandas.DataFrame(report.rows())`.

    Attributes:
        run_path: the run directory.
        metrics: the metrics of every step, in order: `report.metrics[-1]["reward/mean"]`.
        evaluations: the metrics of every held-out evaluation, by phase (`"eval_before"`, ...).
        eval_curve: the same evaluations in the order of training: `step`, `reward`, `interval`.
        model_path: the exported model, None with `checkpoint.export = false`.
        idle_gpu: the machine has a GPU, and the model was trained on the CPU.
    """

    run_path: Path
    metrics: tuple[Mapping[str, Any], ...]
    evaluations: Mapping[str, Mapping[str, Any]]
    eval_curve: tuple[StoredEvaluation, ...]
    model_path: Path | None
    # The machine has a GPU, and the model was trained on the CPU.
    idle_gpu: bool = False

    @classmethod
    def read(cls, run: Run) -> TrainReport:
        """Return the report of a stored run."""
        curve = tuple(run.evaluations())
        by_phase = {done.phase: done.metrics for done in curve}
        # An export appears whole or not at all, so it is enough that the folder exists.
        model = run.path / "model"
        steps = tuple(row.metrics for row in run.steps())
        device = (run.config.get("model") or {}).get("device", "cpu")
        idle_gpu = device == "cpu" and has_gpu()
        return cls(run.path, steps, by_phase, curve, model if model.is_dir() else None, idle_gpu)

    @property
    def run(self) -> Run:
        """The stored run with its rollouts, opened for reading: `with report.run as run: ...`."""
        return Run.open(self.run_path, "r")

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per step: `step` and its metrics."""
        # Every step has a row, so the n-th one is step n.
        return [{"step": step, **metrics} for step, metrics in enumerate(self.metrics, start=1)]

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to do next, judging by the stored run; each entry names its page of the docs.

        Empty if the run cannot be read any more.
        """
        # A report can be printed after its run was moved away.
        with suppress(StoreError), self.run as run:
            return advise(replace(read_facts(run), idle_gpu=self.idle_gpu))
        return ()

    def _repr_html_(self) -> str:
        """Return the steps as a table for a notebook, with what to do next."""
        lines = [f"{done.phase}: held-out reward {_shown(done.reward)}" for done in self.eval_curve]
        lines += [f"next: {each}" for each in self.advice]
        heads, *cells = self._cells()
        return html_table(f"run {self.run_path}", heads, cells) + html_lines(lines)

    def _cells(self) -> list[list[str]]:
        """Return the heads of the printed columns, and a row per step."""
        rows = [
            [str(row["step"]), *(_shown(row.get(name)) for name in _COLUMNS.values())]
            for row in self.rows()
        ]
        return [["step", *_COLUMNS], *rows]

    def __repr__(self) -> str:
        heads, *cells = self._cells()
        # Show the beginning and the end, which fit a screen.
        if len(cells) > 12:
            cells = [*cells[:5], ["..."] + [""] * len(_COLUMNS), *cells[-6:]]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in [heads, *cells]
        ]
        for done in self.eval_curve:
            lines.append(f"{done.phase}: held-out reward {_shown(done.reward) or 'none'}")
        lines += [f"model: {self.model_path}"] if self.model_path else []
        lines += [f"next: {each}" for each in self.advice]
        return "\n".join([f"TrainReport({len(self.metrics)} steps, run {self.run_path})", *lines])


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


class Reporter(Protocol):
    """Progress callbacks, called in the loop's thread; an error in one ends the run.

    An error in `on_end` is a notice, because the run is done. Subclass it and override what you
    need.
    """

    def on_start(self, start: TrainStart) -> None:
        """Training begins or continues."""
        return

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """One more rollout of a step is done; stored ones count from the start."""
        return

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, its metrics are stored and the new weights are published."""
        return

    def on_eval_progress(self, phase: str, num_done: int, num_total: int) -> None:
        """One more rollout of an evaluation is done."""
        return

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """An evaluation is done, or was stored by an earlier start."""
        return

    def on_notice(self, message: str) -> None:
        """The user should see a message, which is also stored."""
        return

    def on_end(self, report: TrainReport) -> None:
        """Training is over."""
        return


class Silent(Reporter):
    """A reporter that shows nothing."""
