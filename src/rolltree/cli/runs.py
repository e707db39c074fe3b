"""`rolltree runs`: list stored runs."""

from __future__ import annotations

from pathlib import Path

import click

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
