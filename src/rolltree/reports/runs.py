"""Stored runs in the terminal: a list of them, and one at a glance.

Reads the run store only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rolltree.reports.formatting import safe_text
from rolltree.store import RunSummary


def runs_table(runs: Sequence[RunSummary], root: Path) -> Table:
    """Return one line per run, newest first."""
    table = Table(box=None)
    for name in ("run", "kind", "environment", "phases (mean reward)", "steps", "written"):
        table.add_column(name, overflow="fold")
    for run in runs:
        path = run.path.relative_to(root) if run.path.is_relative_to(root) else run.path
        phases = ", ".join(f"{phase.phase} {_mean(phase.mean_reward)}" for phase in run.phases)
        table.add_row(
            safe_text(str(path)),
            safe_text(run.kind),
            safe_text(", ".join(run.env_ids)),
            safe_text(phases),
            str(run.num_steps or "-"),
            _when(run.last_written),
        )
    return table


def phases_table(run: RunSummary) -> Table:
    """Return one line per phase of a run."""
    table = Table(box=None)
    for name in ("phase", "episodes", "mean reward", "failed", "truncated", "prompt", "sampled"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in run.phases:
        table.add_row(
            safe_text(phase.phase),
            str(phase.num_requests),
            _mean(phase.mean_reward),
            str(phase.num_errors),
            str(phase.num_truncated),
            f"{phase.num_prompt_tokens:,}",
            f"{phase.num_completion_tokens:,}",
        )
    return table


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
