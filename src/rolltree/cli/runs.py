"""`rolltree runs`, `show` and `export`: list, show and export stored runs."""

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


@click.command("show")
@run_argument
@phase_option
@click.option(
    "--transcripts", type=click.IntRange(min=0), default=1, help="Number of rollouts to print."
)
@click.option("--failed", is_flag=True, help="Print failed rollouts only.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=600, help="Maximum characters of one message."
)
def show_run(run: Path, phase: str | None, transcripts: int, failed: bool, limit: int) -> None:
    """Show a run: phases, rewards, curve, and some rollouts."""
    from itertools import islice

    from rolltree.reports import SafeConsole, phases_table, reward_curve, transcript
    from rolltree.rollouts.decode import decode_results
    from rolltree.store import Run, summarize

    console = SafeConsole()
    where: dict[str, Any] = {"phase": phase} if phase else {}
    if failed:
        where["status"] = "error"
    with Run.open(run, mode="r") as stored:
        console.print(phases_table(summarize(stored)))
        curve = reward_curve(stored)
        if curve is not None:
            from rich.text import Text

            from rolltree.reports import terminal_curve

            console.print(Text(terminal_curve(curve), no_wrap=True))
        if phase:
            from rolltree.evaluation import stored_report
            from rolltree.reports import evaluation_facts, evaluation_table

            report = stored_report(stored, phase, outcomes=False)
            console.print(evaluation_table(report), "", evaluation_facts(report))
        for result in islice(decode_results(stored.rollouts(**where), tokens=False), transcripts):
            console.print(transcript(result, limit=limit))


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
