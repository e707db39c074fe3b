"""Live views of evaluations and training runs in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rolltree.reports.formatting import duration, meter, only_shows, safe_text, say
from rolltree.store.metric_table import metric_rows

if TYPE_CHECKING:
    from rolltree.evaluation import EvalProgress
    from rolltree.training.reporter import TrainReport, TrainStart

NUM_ROWS = 14
_LATEST = 20
"""The number of latest steps from which the remaining time is estimated."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table; if space is short, the column with the largest `rank` goes first."""

    heading: str
    metric: str
    show: Callable[[Mapping[str, Any]], str]
    rank: int = 0

    def cell(self, metrics: Mapping[str, Any]) -> str:
        """Return the cell of a step, which is empty if the step lacks the metric."""
        return self.show(metrics) if metrics.get(self.metric) is not None else ""


def _number(name: str) -> _Column:
    metric = metric_rows()[name]
    form = f"{{:{metric.form}}}{'x' * (metric.unit == 'x')}"
    return _Column(metric.heading, name, lambda row: form.format(float(row[name])), metric.rank)


def _reward(metrics: Mapping[str, Any]) -> str:
    low, high = metrics.get("reward/low"), metrics.get("reward/high")
    known = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{metrics['reward/mean']:.3f}{known}"


_COLUMNS = (
    _Column("reward", "reward/mean", _reward),
    _Column("", "reward/mean", lambda row: meter(float(row["reward/mean"]), 8), rank=9),
    *map(
        _number,
        (
            *("error/mean", "train/completions/mean_length", "train/entropy", "train/kl"),
            *("train/grad_norm", "train/sampling/sampling_logp_difference/mean"),
            *("samples/reuse_factor", "time/wait_for_batch", "time/step"),
        ),
    ),
)
"""If a step lacks a metric, its cell is empty; if all steps lack it, the column is left out."""

# A terminal that is gone, or a number that cannot be formatted, must not end a run.
_survives = only_shows("progress")


class EvalView:
    """Live progress of an evaluation, for `on_progress`; a line per 10 % without a terminal."""

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

    @_survives
    def update(self, progress: EvalProgress) -> None:
        """Show the progress."""
        if self.progress is None:
            # The tokens of an earlier start, which do not count for the speed of this one.
            self._last_tokens = progress.num_completion_tokens
        self.progress = progress
        said = self._words(progress)
        self._progress.update(
            self._task, completed=progress.num_done, total=progress.num_total, said=said
        )
        tenth = 10 * progress.num_done // max(1, progress.num_total)
        # In a file, ten lines are enough for an evaluation of any length.
        if not self._live and tenth > self._last_tenth:
            self._last_tenth = tenth
            say(self._console, f"{progress.num_done}/{progress.num_total}  {said}".rstrip())

    def _words(self, progress: EvalProgress) -> str:
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
        with only_shows("progress"):
            self._progress.start()
        return self

    @_survives
    def __exit__(self, *error: object) -> None:
        self._progress.stop()


class TrainView:
    """A training reporter. Use it as a context manager; `clock` returns seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._rows: list[tuple[int, Mapping[str, Any]]] = []
        self._evaluations: list[str] = []
        self._status = "loading the model"
        self._num_steps = self._step = 0
        self._evaluated_steps: tuple[int, ...] = ()
        # `_last` is when the last step or evaluation ended.
        self._start = self._last = clock()
        self._step_s: deque[float] = deque(maxlen=_LATEST)
        self._eval_s: list[float] = []
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=2, transient=False
            )

    def __enter__(self) -> Self:
        with only_shows("progress"):
            if self._live is not None:
                self._live.start()
        return self

    @_survives
    def __exit__(self, *error: object) -> None:
        self._status = ""
        if self._live is not None:
            self._live.stop()

    @_survives
    def on_start(self, start: TrainStart) -> None:
        """Show the size of the model, the run, and the steps of earlier starts."""
        self._num_steps = start.num_steps
        first = start.first_step - len(start.history)
        self._rows = [(first + i, metrics) for i, metrics in enumerate(start.history)]
        self._step, self._last = start.first_step - 1, self._clock()
        self._evaluated_steps = start.evaluated_steps
        # A continued run already knows how long its steps take.
        known = (metrics.get("time/step") for metrics in start.history)
        self._step_s.extend(float(seconds) for seconds in known if seconds is not None)
        continued = f", continued at step {start.first_step}" if start.first_step > 1 else ""
        say(self._console, f"{start.num_parameters:,} parameters, run {start.run_path}{continued}")
        self._status = "starting"

    @_survives
    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """Show the progress of a step's rollouts."""
        more = ", training" if num_done == num_total else ""
        self._status = f"step {step}/{self._num_steps}: rollouts {num_done}/{num_total}{more}"

    @_survives
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        now = self._clock()
        self._step_s.append(now - self._last)
        self._step, self._last = step, now
        self._rows.append((step, metrics))
        if self._live is None:
            found = {column.heading: column.cell(metrics) for column in _COLUMNS if column.heading}
            found["eta"] = self._left()
            shown = "  ".join(f"{name} {value}" for name, value in found.items() if value)
            say(self._console, f"step {step}/{self._num_steps}  {shown}")

    @_survives
    def on_eval_progress(self, phase: str, num_done: int, num_total: int) -> None:
        """Show the progress of a held-out evaluation."""
        self._status = f"{phase}: {num_done}/{num_total} held-out rollouts"

    @_survives
    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """Show the mean reward of an evaluation with its interval."""
        now = self._clock()
        # A stored evaluation takes no time now; the next one will take as long as it took then.
        took = metrics.get("elapsed_s") if stored else now - self._last
        self._eval_s += [] if took is None else [float(took)]
        self._evaluated_steps = tuple(n for n in self._evaluated_steps if n > step)
        self._last = now
        found = metrics.get("reward") or {}
        said = "no reward" if not found else f"{found['mean']:.3f}"
        if found and found.get("low") is not None:
            said += f" [{found['low']:.3f}, {found['high']:.3f}]"
        earlier = ", from an earlier start" if stored else ""
        line = f"held out, {phase} (step {step}): {said}{earlier}"
        self._evaluations.append(line)
        if self._live is None:
            say(self._console, line)

    @_survives
    def on_notice(self, message: str) -> None:
        """Show a message of the trainer."""
        say(self._console, message)

    @_survives
    def on_end(self, report: TrainReport) -> None:
        """Clear the status line."""
        self._status = ""

    def _left(self) -> str:
        """Return the remaining time if steps and evaluations take as long as the earlier ones.

        Until an evaluation has been timed, the text says how many are left. It is empty at the end,
        and before any step has been timed.
        """
        steps, evaluations = self._num_steps - self._step, len(self._evaluated_steps)
        is_known = self._step_s if steps > 0 else self._eval_s and evaluations
        if not is_known:
            return ""
        left = steps * fmean(self._step_s) if steps > 0 else 0.0
        left += evaluations * fmean(self._eval_s) if self._eval_s else 0.0
        said = duration(max(0.0, left - (self._clock() - self._last)))
        if self._eval_s or not evaluations:
            return said
        return f"{said} and {'an evaluation' if evaluations == 1 else f'{evaluations} evaluations'}"

    def _render(self) -> Group:
        rows = self._rows[-NUM_ROWS:]
        table = Table(box=None, padding=(0, 1))
        table.add_column("step", justify="right", style="bold")
        columns = _fitting(rows, self._console.width)
        for column in columns:
            table.add_column(
                column.heading, justify="right" if column.heading else "left", no_wrap=True
            )
        for step, metrics in rows:
            cells = (column.cell(metrics) for column in columns)
            table.add_row(f"{step}/{self._num_steps}", *cells)
        lines = [safe_text(line) for line in self._evaluations[-4:]]
        if self._status:
            times = [duration(self._clock() - self._start)]
            times += [f"ETA {left}"] if (left := self._left()) else []
            lines.append(safe_text(f"{self._status}  ({', '.join(times)})", style="dim"))
        return Group(*([table] if rows else []), *lines)


def _fitting(rows: Sequence[tuple[int, Mapping[str, Any]]], width: int) -> list[_Column]:
    """Return the columns that some row has and that fit, with the step, into `width` characters."""
    widths = {
        column: max([len(column.heading), *map(len, cells)]) + 2
        for column in _COLUMNS
        if any(cells := [column.cell(metrics) for _, metrics in rows])
    }
    # Columns are dropped by rank until the rest fits, since a table that wraps is unreadable.
    kept = list(widths)
    most = width - max((2 * len(str(step)) + 3 for step, _ in rows), default=0) - 2
    while len(kept) > 1 and sum(widths[column] for column in kept) > most:
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept
