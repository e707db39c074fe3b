"""`rolltree runs`: list stored runs."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import echo_json

run_argument = click.argument("run", type=click.Path(path_type=Path), help="A run directory.")
phase_option = click.option("--phase", help="Only this phase.")


@click.command("runs")
@click.argument(
    "root", type=click.Path(path_type=Path), default=Path("runs"), help="Directory to search."
)
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def list_stored_runs(root: Path, as_json: bool) -> None:
    """List the runs below a directory, newest first: state, age, progress, rewards."""
    from rolltree.reports import SafeConsole, run_lines, say
    from rolltree.store import Run, list_runs

    # `list_runs` reads no rollouts; for JSON, which says more, every run is opened below.
    console, found = SafeConsole(), list_runs(root)
    if as_json:
        from dataclasses import asdict

        from rolltree.records.overview import run_overview

        overviews = []
        for run in found:
            # Without a check of the whole file, which would take long for a folder of runs.
            with Run.open(run.path, mode="r", check="rows") as stored:
                overviews.append({**run_overview(stored), **asdict(run), "path": str(run.path)})
        echo_json(overviews)
        return
    for run in found:
        for line in run_lines(run):
            say(console, line)
    if not found:
        say(console, f"no runs below {root}")
