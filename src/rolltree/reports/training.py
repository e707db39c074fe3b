"""A training run in the terminal: live progress, and the report of a stored run.

The report (curve, held-out gain, transcripts) is read from the run store alone, so it can be
printed again at any time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rolltree.evaluation import EvalReport, compare, stored_report
from rolltree.redact import shown_command
from rolltree.reports.curves import Curve, save_curve, terminal_curve
from rolltree.reports.evaluation import comparison_table, evaluation_table
from rolltree.reports.formatting import duration, meter, safe_text, say
from rolltree.reports.runs import transcript
from rolltree.rollouts.record import decode_results
from rolltree.store import Run

if TYPE_CHECKING:
    from rolltree.training.reporter import TrainReport, TrainStart

CURVE_FILE = "reward_curve.png"
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


def reward_curve(run: Run) -> Curve | None:
    """Return the mean training reward of every step and the held-out means; None without steps."""
    points = [
        (row.step, float(row.metrics["reward/mean"]))
        for row in run.steps()
        if _is_finite(row.metrics.get("reward/mean"))
    ]
    if not points:
        return None
    held_out = [
        (step, stored_report(run, phase, outcomes=False).reward) for step, phase in evaluations(run)
    ]
    return Curve(
        title=f"mean reward, {', '.join(_env_ids(run))}",
        steps=[step for step, _ in points],
        rewards=[reward for _, reward in points],
        held_out=[(step, found) for step, found in held_out if found is not None],
    )


def evaluations(run: Run) -> list[tuple[int, str]]:
    """Return the step and phase of every held-out evaluation of a training run, by step."""
    found = {event.data["phase"]: event.step or 0 for event in run.events("evaluation")}
    return sorted((step, phase) for phase, step in found.items())


def save_reward_curve(run: Run) -> Path | None:
    """Draw the reward curve into the run directory; None when there is nothing to draw.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    curve = reward_curve(run)
    return None if curve is None else save_curve(curve, run.path / CURVE_FILE)


def training_report(run: Run, *, num_transcripts: int = 2) -> list[RenderableType]:
    """Return the report of a run: curve, held-out results, transcripts."""
    parts: list[RenderableType] = []
    curve = reward_curve(run)
    if curve is not None:
        parts += [Text(terminal_curve(curve), no_wrap=True), ""]
    found = evaluations(run)
    reports = [_held_out(run, phase) for _, phase in found[:1] + found[1:][-1:]]
    if len(reports) == 2 and all(report.reward is not None for report in reports):
        names = tuple(f"step {step}" for step, _ in (found[0], found[-1]))
        parts.append(Text("Held-out examples", style="bold"))
        parts.append(comparison_table(compare(*reports), names=(names[0], names[1])))
    else:
        parts += [evaluation_table(report) for report in reports]
    parts += _transcripts(run, num_transcripts)
    return parts


def next_commands(run: Run, train_command: Sequence[str]) -> list[str]:
    """Return three commands to try: look closer, measure the trained model, go on.

    `train_command` is the command that made the run, as a list of words.
    """
    config, path = run.config, str(run.path)
    env = config.get("env") or {}
    measure = ["rolltree", "eval", str(env.get("id", "ENV")), "-m", f"{path}/model", "-n", "50"]
    if env.get("args"):
        measure += ["-a", json.dumps(env["args"])]
    num_steps = int((config.get("train") or {}).get("num_steps", len(run.steps())))
    more = f"train.num_steps={max(num_steps, len(run.steps())) * 2}"
    if (config.get("optim") or {}).get("schedule", "constant") != "constant":
        further = ["rolltree", "fork", path, f"--set={more}"]  # a horizon of its own
    else:
        kept = (w for w in train_command if "train.num_steps=" not in w)
        further = [*kept, f"--set={more}" if "fork" in train_command[:2] else more]
    phase = [["--phase", name] for _, name in evaluations(run)[-1:]]
    look = ["rolltree", "show", path, *(phase[0] if phase else []), "--transcripts", "5"]
    return [shown_command(words) for words in (look, measure, further)]


def _held_out(run: Run, phase: str) -> EvalReport:
    model = (run.config.get("model") or {}).get("name", "")
    return stored_report(run, phase, model=f"{model}, {phase}")


def _transcripts(run: Run, num: int) -> list[RenderableType]:
    """Return the first held-out examples (not the best), at the first and the last evaluation."""
    found = evaluations(run)
    if num < 1 or not found:
        return []
    phases = found[:1] + found[1:][-1:]
    rows = run.rollouts(phase=phases[0][1], blobs=False)
    examples = sorted({row.example_id for row in rows}, key=lambda key: (str(type(key)), key))
    parts: list[RenderableType] = []
    for example in examples[:num]:
        for step, phase in phases:
            shown = run.rollouts(phase=phase, example_id=example, index_in_group=0)
            parts += [
                transcript(result, title=f"example {example}, step {step} ({phase})", limit=400)
                for result in decode_results(shown)
            ]
    return parts


def _env_ids(run: Run) -> list[str]:
    rows = run.query("SELECT DISTINCT env_id FROM rollouts ORDER BY env_id")
    return [str(row["env_id"]) for row in rows]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


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
