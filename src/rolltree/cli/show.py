"""`rolltree show`: the phases, rewards, curve and some rollouts of a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rolltree.cli.arguments import echo_json, phase_option, run_argument, where_option

if TYPE_CHECKING:
    from rolltree.store import Run


@click.command("show")
@run_argument
@phase_option
@click.option("--step", type=int, help="Only training rollouts of this step; -1 is the last one.")
@click.option("--failed", is_flag=True, help="Only failed rollouts.")
@where_option
@click.option("--sort", help="Order by a column or metrics/NAME; -reward begins with the highest.")
@click.option("--last", is_flag=True, help="Begin with the newest rollout.")
@click.option(
    "--transcripts", type=click.IntRange(min=0), default=1, help="Number of episodes to print."
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=600, help="Maximum characters of one message."
)
@click.option("--json", "as_json", is_flag=True, help="Print the run and chosen rollouts as JSON.")
def show_run(
    run: Path,
    phase: str | None,
    step: int | None,
    failed: bool,
    where: tuple[str, ...],
    sort: str | None,
    last: bool,
    transcripts: int,
    limit: int,
    as_json: bool,
) -> None:
    """Show a run: what happened, phases, rewards, curve, and some rollouts."""
    from rolltree.records import shown_requests
    from rolltree.store import Run, summarize

    if last and sort is not None:
        raise click.UsageError("--last and --sort cannot be combined; choose one.")
    # `rows_only` checks each row that it reads, without first checking the whole file.
    with Run.open(run, mode="r") as stored, Run.open(run, mode="r", check="rows") as rows_only:
        chosen = shown_requests(
            stored,
            num=transcripts,
            phase=phase,
            step=step,
            failed=failed,
            where=where,
            sort="-id" if last else sort,
        )
        if as_json:
            _print_json(stored, rows_only, chosen.request_ids)
            return
        from rolltree.records import reward_parts
        from rolltree.records.overview import run_overview
        from rolltree.reports import (
            SafeConsole,
            overview_line,
            phases_table,
            reward_curve,
            say,
            story_lines,
            transcript,
        )
        from rolltree.rollouts.decode import decode_results

        console = SafeConsole()
        # The story and the overview describe the whole run, so a choice of rollouts omits them.
        if not (phase or chosen.words):
            from rolltree.records.story import run_story

            for line in story_lines(run_story(rows_only, quick=True)["sentences"]):
                console.print(line, soft_wrap=True)
            say(console, overview_line(run_overview(rows_only)))
        console.print(phases_table(summarize(stored)))
        curve = reward_curve(stored)
        if curve is not None:
            from rolltree.reports import CurveView

            console.print(CurveView(curve))
        if phase:
            from rolltree.evaluation import stored_report
            from rolltree.reports import evaluation_facts, evaluation_table

            # From the aggregates that the evaluation stored: reading all rows of a large run again
            # would take seconds.
            report = stored_report(stored, phase, outcomes=False)
            console.print(evaluation_table(report), "", evaluation_facts(report))
        if chosen.words:
            say(console, str(chosen))
        for request_id in chosen.request_ids:
            rows = list(rows_only.rollouts(request_id=request_id))
            rewards = [reward_parts(stored, row) for row in rows]
            for result in decode_results(rows, tokens=False):
                console.print(transcript(result, limit=limit, rewards=rewards))


def _print_json(stored: Run, rows_only: Run, request_ids: tuple[str, ...]) -> None:
    from rolltree.records import RunData, reward_parts
    from rolltree.records.overview import run_json
    from rolltree.rollouts.decode import export_line

    about = {**run_json(rows_only), "story": RunData(rows_only).story()}
    rows = [
        {**export_line(row, tokens=False), "rewards": reward_parts(stored, row)}
        for request_id in request_ids
        for row in rows_only.rollouts(request_id=request_id)
    ]
    echo_json({**about, "rollouts": rows})
