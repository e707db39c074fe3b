"""`rolltree audit`: check everything that is stored in a run again."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import echo_json, run_argument


@click.command("audit")
@run_argument
@click.option(
    "--recompute",
    type=click.IntRange(min=0),
    default=0,
    help="Compare the engine's logprobs with a checkpoint's on this many rollouts (needs torch).",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder with tokenizer.json. Default: the run's, or that of the model it names.",
)
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, help="Findings to print, over all checks."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on stdout.")
def audit_run(run: Path, recompute: int, tokenizer: Path | None, limit: int, as_json: bool) -> None:
    """Check a stored run against itself: tokens, text, versions, rewards, advantages, counts."""
    from rolltree.records import audit

    report = audit(run, recompute=recompute, tokenizer=tokenizer)
    # The table imports rich, which JSON does not need.
    if as_json:
        echo_json(report.as_dict())
    else:
        from rolltree.reports import SafeConsole, audit_lines, audit_table, say

        console = SafeConsole()
        console.print(audit_table(report))
        for line in audit_lines(report, limit=limit):
            say(console, line)
    # Scripts must notice that something was found.
    if not report.ok:
        raise click.exceptions.Exit(1)
