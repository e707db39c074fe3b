"""`rolltree runs` and `export`: list and export stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rolltree.cli.arguments import tell

run_argument = click.argument("run", type=click.Path(path_type=Path), help="A run directory.")
phase_option = click.option("--phase", help="Only this phase.")


@click.command("runs")
@click.argument(
    "root", type=click.Path(path_type=Path), default=Path("runs"), help="Directory to search."
)
def list_stored_runs(root: Path) -> None:
    """List the runs below a directory, newest first."""
    from rolltree.reports import SafeConsole, run_lines, say
    from rolltree.store import list_runs

    console, found = SafeConsole(), list_runs(root)
    for run in found:
        for line in run_lines(run):
            say(console, line)
    if not found:
        say(console, f"no runs below {root}")


@click.command("export")
@run_argument
@click.argument("target", type=click.Path(path_type=Path), help="The JSONL file to write.")
@phase_option
@click.option("--light", is_flag=True, help="Columns and metrics only, no messages and tokens.")
def export_run(run: Path, target: Path, phase: str | None, light: bool) -> None:
    """Write the rollouts of a run as JSON lines."""
    from rolltree.rollouts.decode import export_line
    from rolltree.store import Run

    where: dict[str, Any] = {"phase": phase} if phase else {}
    with Run.open(run, mode="r") as stored:
        number = stored.export(target, render=None if light else export_line, **where)
    tell(f"wrote {number} rollouts to {target}")
