"""Stored runs in the terminal: a list of them, and one at a glance.

Reads the run store only.
"""

from __future__ import annotations

import time

from rich.table import Table

from rolltree.reports.formatting import safe_text
from rolltree.store import RunSummary


def run_lines(run: RunSummary) -> list[str]:
    """Return a run as two lines: its path, and what it holds."""
    phases = [f"{phase.phase} {_mean(phase.mean_reward)}" for phase in run.phases[:4]]
    if len(run.phases) > 4:
        phases.append(f"{len(run.phases) - 4} more phases")
    steps = [f"{run.num_steps} steps"] if run.num_steps else []
    facts = [_when(run.last_written), run.kind, *run.env_ids, *steps, *phases]
    return [str(run.path), "  " + "  ".join(facts)]


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
