"""`rolltree runs`, `show` and `export`: list, show and export stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rolltree.cli.arguments import tell

PhaseOption = Annotated[str | None, typer.Option("--phase", help="Only this phase.")]
RunArgument = Annotated[Path, typer.Argument(help="A run directory.")]


def list_stored_runs(
    root: Annotated[Path, typer.Argument(help="Directory to search.")] = Path("runs"),
) -> None:
    """List the runs below a directory, newest first."""
    from rolltree.reports import SafeConsole, run_lines, say
    from rolltree.store import list_runs

    console, found = SafeConsole(), list_runs(root)
    for run in found:
        for line in run_lines(run):
            say(console, line)
    if not found:
        say(console, f"no runs below {root}")


def show_run(
    run: RunArgument,
    phase: PhaseOption = None,
    transcripts: Annotated[
        int, typer.Option("--transcripts", help="Number of rollouts to print.", min=0)
    ] = 1,
    failed: Annotated[bool, typer.Option("--failed", help="Print failed rollouts only.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", help="Maximum characters of one message.", min=1)
    ] = 600,
) -> None:
    """Show a run: phases, rewards, curve, and some rollouts."""
    from itertools import islice

    from rich.text import Text

    from rolltree.evaluation import stored_report
    from rolltree.reports import (
        SafeConsole,
        evaluation_facts,
        evaluation_table,
        phases_table,
        reward_curve,
        terminal_curve,
        transcript,
    )
    from rolltree.rollouts.record import decode_results
    from rolltree.store import Run, summarize

    console = SafeConsole()
    where: dict[str, Any] = {"phase": phase} if phase else {}
    if failed:
        where["status"] = "error"
    with Run.open(run, mode="r") as stored:
        console.print(phases_table(summarize(stored)))
        curve = reward_curve(stored)
        if curve is not None:
            console.print(Text(terminal_curve(curve), no_wrap=True))
        if phase:
            report = stored_report(stored, phase, outcomes=False)
            console.print(evaluation_table(report), "", evaluation_facts(report))
        for result in islice(decode_results(stored.rollouts(**where)), transcripts):
            console.print(transcript(result, limit=limit))


def export_run(
    run: RunArgument,
    target: Annotated[Path, typer.Argument(help="The JSONL file to write.")],
    phase: PhaseOption = None,
    light: Annotated[
        bool, typer.Option("--light", help="Columns and metrics only, no messages and tokens.")
    ] = False,
) -> None:
    """Write the rollouts of a run as JSON lines."""
    from rolltree.rollouts.record import export_line
    from rolltree.store import Run

    where: dict[str, Any] = {"phase": phase} if phase else {}
    with Run.open(run, mode="r") as stored:
        number = stored.export(target, render=None if light else export_line, **where)
    tell(f"wrote {number} rollouts to {target}")
