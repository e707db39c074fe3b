"""Evaluations and training runs in the terminal while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rolltree.reports.formatting import duration, meter, safe_text, say

if TYPE_CHECKING:
    from rolltree.evaluation import EvalProgress
    from rolltree.training.reporter import TrainReport, TrainStart

NUM_ROWS = 14
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("", "reward/mean", lambda value: meter(value, 12)),
    ("failed", "error/mean", "{:.0%}".format),
    ("tokens", "rollout/total_sampled_tokens", "{:,.0f}".format),
    ("entropy", "train/entropy", "{:.3f}".format),
    ("|Δ logprob|", "train/sampling/sampling_logp_difference/mean", "{:.1e}".format),
    ("reuse", "samples/reuse_factor", "{:.1f}x".format),
    ("rollout s", "time/wait_for_batch", "{:.1f}".format),
    ("step s", "time/step", "{:.1f}".format),
)
"""Heading, metric, how it is shown. A metric that a step lacks leaves its cell empty."""


class EvalView:
    """Live progress of an evaluation, for `on_progress`; without a terminal, a line per tenth."""

    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._live = console.is_terminal
        self._start = time.monotonic()
        self._last_tenth = -1
        self._last_tokens = 0
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[said]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._progress.add_task(str(safe_text(label)), total=1, said="")
        self.progress: EvalProgress | None = None

    def update(self, progress: EvalProgress) -> None:
        """Show where the evaluation stands."""
        if self.progress is None:
            self._last_tokens = progress.num_completion_tokens
        self.progress = progress
        said = self._said(progress)
        self._progress.update(
            self._task, completed=progress.num_done, total=progress.num_total, said=said
        )
        tenth = 10 * progress.num_done // max(1, progress.num_total)
        if not self._live and tenth > self._last_tenth:
            self._last_tenth = tenth
            say(self._console, f"{progress.num_done}/{progress.num_total}  {said}".rstrip())

    def _said(self, progress: EvalProgress) -> str:
        parts = []
        if progress.mean_reward is not None:
            parts.append(f"reward {progress.mean_reward:.3f}")
        if progress.num_failed:
            parts.append(f"failed {progress.num_failed}")
        if progress.num_truncated:
            parts.append(f"truncated {progress.num_truncated}")
        elapsed = time.monotonic() - self._start
        new = progress.num_completion_tokens - self._last_tokens
        if elapsed > 0.5 and new:
            parts.append(f"{new / elapsed:.0f} tokens/s")
        return "  ".join(parts)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class TrainView:
    """A training reporter. Use it as a context."""

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

    def on_eval_progress(self, phase: str, num_done: int, num_total: int) -> None:
        """Show how far a held-out evaluation is."""
        self._status = f"{phase}: {num_done}/{num_total} held-out rollouts"

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
        """Show a message of the trainer."""
        say(self._console, message)

    def on_end(self, report: TrainReport) -> None:
        """Clear the status line."""
        self._status = ""

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 1))
        table.add_column("step", justify="right", style="bold")
        for heading, _, _ in _COLUMNS:
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for step, metrics in self._rows[-NUM_ROWS:]:
            table.add_row(f"{step}/{self._num_steps}", *(value for _, value in _cells(metrics)))
        lines = [safe_text(line) for line in self._evaluations[-4:]]
        if self._status:
            spent = duration(time.monotonic() - self._start)
            lines.append(safe_text(f"{self._status}  ({spent})", style="dim"))
        return Group(*([table] if self._rows else []), *lines)


def _cells(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (heading, show(float(metrics[name])) if metrics.get(name) is not None else "")
        for heading, name, show in _COLUMNS
    ]
