"""`rolltree data` and `rolltree export`: a run as tidy tables, and as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rolltree.cli.arguments import (
    FiniteRange,
    echo,
    echo_json,
    known_name,
    phase_option,
    run_argument,
    until_reader_leaves,
    where_option,
)
from rolltree.values.errors import ConfigError

FORMATS = ("table", "jsonl", "csv", "json")


@click.command("data")
@run_argument
@click.argument("table", required=False, help="A table. Without it, tables and columns are listed.")
@phase_option
@where_option
@click.option("--sort", help="Column to order the rollouts by; -COLUMN is descending.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Rows. Default: 20 in a terminal.")
@click.option("-c", "--columns", help="Names of columns, separated by commas.")
@click.option("--full", is_flag=True, help="Table tokens: every call's whole context.")
@click.option("--format", "form", default="table", help=f"One of {', '.join(FORMATS)}.")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write a file instead: .parquet, .arrow, .jsonl or .csv.",
)
def show_data(
    run: Path,
    table: str | None,
    phase: str | None,
    where: tuple[str, ...],
    sort: str | None,
    limit: int | None,
    columns: str | None,
    full: bool,
    form: str,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print a table of a run, or write it to a file."""
    from rolltree.records import read_run
    from rolltree.records.columns import TABLES
    from rolltree.reports import print_columns, print_table

    chosen = "json" if as_json else known_name(form, FORMATS, "--format")
    filters: dict[str, Any] = {"phase": phase, "where": _joined(where), "sort": sort}
    # Only filters that were given, since a table rejects those that it does not have.
    filters = {name: value for name, value in filters.items() if value is not None}
    if full:
        filters["full"] = True
    with read_run(run) as data:
        if table is None:
            # Flags without an effect are errors, here and below.
            _refuse(output is not None or limit or columns or filters, "name a table")
            with until_reader_leaves():
                print_columns(data, as_json=chosen == "json")
            return
        found = data.table(known_name(table, TABLES, "TABLE"), **filters)
        if columns:
            found = found.select([name.strip() for name in columns.split(",")])
        # Only a terminal has a default limit; a file gets every row.
        if output is None:
            with until_reader_leaves():
                print_table(found, chosen, limit)
            return
        _refuse(chosen != "table", "-o names the format by its suffix; leave --format out")
        number = (found if limit is None else found.head(limit)).write(output)
    echo(f"wrote {number} rows to {output}")


@click.command("export")
@run_argument
@click.argument("target", type=click.Path(path_type=Path), help="The file or folder to write.")
@click.option(
    "--as",
    "kind",
    default="rollouts",
    help="rollouts (JSON lines), results (verifiers), dataset (Hugging Face) or sft.",
)
@phase_option
@where_option
@click.option(
    "--min-reward", type=FiniteRange(), help="With --as sft: leave out rollouts below this."
)
@click.option("--best-of-group", is_flag=True, help="With --as sft: keep the best of each group.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export_rollouts(
    run: Path,
    target: Path,
    kind: str,
    phase: str | None,
    where: tuple[str, ...],
    min_reward: float | None,
    best_of_group: bool,
    as_json: bool,
) -> None:
    """Write whole rollouts of a run as files for other programs."""
    from rolltree.insight.export import EXPORT_KINDS
    from rolltree.records import export_run

    filters = {"phase": phase, "where": _joined(where)}
    filters = {name: value for name, value in filters.items() if value is not None}
    number = export_run(
        run,
        target,
        known_name(kind, EXPORT_KINDS, "--as"),
        min_reward=min_reward,
        best_of_group=best_of_group,
        **filters,
    )
    if as_json:
        echo_json({"kind": kind, "target": str(target), "num_rows": number})
    else:
        echo(f"wrote {number} {'rollouts' if kind != 'sft' else 'rows'} to {target}")


def _refuse(wrong: Any, advice: str) -> None:
    if wrong:
        raise ConfigError(f"these flags have no effect here: {advice}.")


def _joined(where: tuple[str, ...]) -> str | None:
    return " and ".join(where) if where else None
