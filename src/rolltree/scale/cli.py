"""`rolltree cluster`: inspect a run on several processes, and change their number."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import echo, echo_json, run_argument


@click.group("cluster")
def cluster() -> None:
    """Inspect or scale a run with a [cluster] in its config, while `rolltree train` runs it."""


@cluster.command("status")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def show_cluster(run: Path, as_json: bool) -> None:
    """Show the roles of a run: where they are, what they do and wait for, what stalls."""
    from rolltree.scale.cluster.report import ask_driver, status_lines

    status = ask_driver(run, "/status")
    if as_json:
        echo_json(status)
        return
    for line in status_lines(status):
        echo(line)


@cluster.command("scale")
@run_argument
@click.argument("settings", nargs=-1, help="rollout_workers=N, engines=N, or both.")
def scale_cluster(run: Path, settings: tuple[str, ...]) -> None:
    """Change the number of rollout workers or engines of a run, until its driver ends."""
    from rolltree.scale.cluster.report import scale

    numbers = scale(run, settings)
    echo(", ".join(f"{name}: {number}" for name, number in numbers.items()))
