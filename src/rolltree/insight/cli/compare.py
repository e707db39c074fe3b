"""`rolltree compare`: evaluations of stored runs, paired by example."""

from __future__ import annotations

import click

from rolltree.cli.arguments import FiniteRange, echo, echo_json


@click.command("compare")
@click.argument("arms", nargs=-1, required=True, help="Arms: [NAME=]RUN[:PHASE][,RUN...].")
@click.option(
    "--confidence",
    type=FiniteRange(0.5, 0.9999),
    default=0.95,
    help="Joint confidence of all intervals.",
)
@click.option(
    "--pass-threshold",
    type=FiniteRange(),
    default=1.0,
    help="Lowest reward that counts as a pass in pass@k and flips.",
)
@click.option(
    "--price",
    type=FiniteRange(),
    nargs=2,
    help="Dollars per million prompt tokens, and per million sampled tokens.",
)
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=5,
    help="Number of changed examples to show.",
)
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare_stored_runs(
    arms: tuple[str, ...],
    confidence: float,
    pass_threshold: float,
    price: tuple[float, float] | None,
    examples: int,
    markdown: bool,
    as_json: bool,
) -> None:
    """Compare runs with the first, example by example; one run: its first and last evaluation."""
    from rolltree.records import compare

    if markdown and as_json:
        raise click.UsageError("--markdown and --json cannot be combined; choose one.")
    comparison = compare(
        *arms,
        confidence=confidence,
        pass_threshold=pass_threshold,
        price=price,
        num_examples=examples,
    )
    if as_json:
        echo_json(comparison.as_dict())
        return
    if markdown:
        from rolltree.reports import comparison_markdown

        # Not through the console, which would wrap lines at the terminal's width.
        echo(comparison_markdown(comparison).rstrip("\n"))
        return
    from rolltree.reports import SafeConsole, comparison_parts

    console = SafeConsole()
    for part in comparison_parts(comparison):
        console.print(part)
