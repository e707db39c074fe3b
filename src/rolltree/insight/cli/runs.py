"""`rolltree runs`: list stored runs."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import echo_json
from rolltree.values.errors import ConfigError

_RUNS = Path("runs")


@click.command("runs")
@click.argument("root", type=click.Path(path_type=Path), default=_RUNS, help="Directory to search.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def list_stored_runs(root: Path, as_json: bool) -> None:
    """List the runs below a directory, newest first: state, age, progress, rewards, health."""
    from rolltree.insight.page.glances import known_glance
    from rolltree.reports import SafeConsole, run_lines, say
    from rolltree.store import Run, list_runs

    # The default need not exist yet.
    if not root.is_dir() and root != _RUNS:
        raise ConfigError(
            f"{root} is not a folder, so there are no runs to list. Name a run directory or a "
            "folder of runs: rolltree runs runs."
        )
    # `list_runs` reads no rollouts; for JSON, which says more, every run is opened below.
    console, found = SafeConsole(), list_runs(root)
    if as_json:
        from rolltree.records.overview import run_json

        overviews = []
        for run in found:
            # Without a check of the whole file, which would take long for a folder of runs.
            with Run.open(run.path, mode="r", check="rows") as stored:
                about = run_json(stored)
            overviews.append({**about, "health": known_glance(run.path)["health"]})
        echo_json(overviews)
        return
    for run in found:
        for line in run_lines(run, known_glance(run.path)["health"]):
            say(console, line)
    if not found:
        say(console, f"no runs below {root}")
