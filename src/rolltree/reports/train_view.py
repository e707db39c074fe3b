"""Training while it runs: a live table in a terminal, one line per step elsewhere.

It implements the reporter protocol of `rolltree.training` and reads nothing but what it is told;
it never imports torch. What is shown is stored in the run too, so it decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rolltree.evaluation import EvalProgress
from rolltree.reports.formatting import duration, meter, say

if TYPE_CHECKING:
    from rolltree.training.reporter import TrainReport, TrainStart

NUM_ROWS = 14
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("", "reward/mean", lambda value: meter(value, 12)),
    ("failed", "error/share", "{:.0%}".format),
    ("tokens", "rollout/total_sampled_tokens", "{:,.0f}".format),
    ("entropy", "train/entropy", "{:.3f}".format),
    ("|Δ logprob|", "mismatch/abs_mean", "{:.1e}".format),
    ("reuse", "samples/reuse_factor", "{:.1f}x".format),
    ("rollout s", "time/rollout_s", "{:.1f}".format),
    ("step s", "time/step_s", "{:.1f}".format),
)
"""Heading, metric, how it is shown. A metric that a step lacks leaves its cell empty."""


class TrainView:
    """A training reporter. Use it as a context; `on_eval_progress` is for held-out evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[tuple[int, Mapping[str, Any]]] = []
        self._evaluations: list[str] = []
        self._status = "loading the model"
        self._num_steps = 0
        self._start = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=2, transient=False
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()

    def on_start(self, start: TrainStart) -> None:
        """Show what is trained, and the steps that an earlier start took."""
        self._num_steps = start.num_steps
        first = start.first_step - len(start.history)
        self._rows = [(first + i, metrics) for i, metrics in enumerate(start.history)]
        continued = f", continued at step {start.first_step}" if start.first_step > 1 else ""
        say(self._console, f"{start.num_parameters:,} parameters, run {start.run_path}{continued}")
        self._status = "starting"

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """Show how far the rollouts of a step are."""
        more = ", training" if num_done == num_total else ""
        self._status = f"step {step}/{self._num_steps}: rollouts {num_done}/{num_total}{more}"

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        self._rows.append((step, metrics))
        if self._live is None:
            cells = _cells(metrics)
            shown = "  ".join(f"{name} {value.strip()}" for name, value in cells if name and value)
            say(self._console, f"step {step}/{self._num_steps}  {shown}")

    def on_eval_progress(self, phase: str, progress: EvalProgress) -> None:
        """Show how far a held-out evaluation is."""
        self._status = f"{phase}: {progress.num_done}/{progress.num_total} held-out rollouts"

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """Show the mean reward of an evaluation with its interval."""
        found = metrics.get("reward") or {}
        said = "no reward" if not found else f"{found['mean']:.3f}"
        if found and found.get("low") is not None:
            said += f" [{found['low']:.3f}, {found['high']:.3f}]"
        earlier = ", from an earlier start" if stored else ""
        line = f"held out, {phase} (step {step}): {said}{earlier}"
        self._evaluations.append(line)
        if self._live is None:
            say(self._console, line)

    def on_notice(self, message: str) -> None:
        """Show what a person should know."""
        say(self._console, message)

    def on_end(self, report: TrainReport) -> None:
        """Stop saying what happens next."""
        self._status = ""

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 1))
        table.add_column("step", justify="right", style="bold")
        for heading, _, _ in _COLUMNS:
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for step, metrics in self._rows[-NUM_ROWS:]:
            table.add_row(f"{step}/{self._num_steps}", *(value for _, value in _cells(metrics)))
        lines = [Text(line) for line in self._evaluations[-4:]]
        if self._status:
            spent = duration(time.monotonic() - self._start)
            lines.append(Text(f"{self._status}  ({spent})", style="dim"))
        return Group(*([table] if self._rows else []), *lines)


def _cells(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (heading, show(float(metrics[name])) if metrics.get(name) is not None else "")
        for heading, name, show in _COLUMNS
    ]
