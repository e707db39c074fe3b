"""Prints tables of a run: as text for the terminal, or as JSON or CSV."""

from __future__ import annotations

import csv
import json
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from rolltree._helpers.redact import shown
from rolltree.reports.formatting import SafeConsole, safe_text, say, text_table

if TYPE_CHECKING:
    from rolltree.records import RunData, Table

_SHOWN_ROWS = 20
_FILE_WIDTH = 10_000
_CELL = 48
# Columns that other commands and `--where` take, so a part of one would be of no use.
_KEYS = frozenset(
    ("request_id", "group_id", "parent_rollout", "env_id", "task", "example_id", "phase")
)
_FIRST = {
    "rollouts": "request_id reward status num_calls num_completion_tokens stop_condition",
    "calls": "request_id call agent num_prompt_tokens num_new_tokens num_completion_tokens "
    "finish_reason mean_logprob",
    "tokens": "request_id call position token_id author logprob version advantage trainer_logprob",
    "breaks": "request_id call previous_call agent position cause",
}
"""The columns of a table that a terminal shows by default; of other tables, the first eight."""


def print_columns(data: RunData, *, as_json: bool) -> None:
    """Print the tables of a run with their columns."""
    from rolltree.records.columns import TABLES

    tables = [data.table(name) for name in TABLES]
    if as_json:
        print(json.dumps({table.name: _described(table) for table in tables}, indent=2))
        return
    console = SafeConsole()
    for table in tables:
        grid = RichTable.grid(padding=(0, 2))
        for column in table.columns:
            grid.add_row(
                safe_text("  " + column.name, style="cyan"),
                safe_text(column.kind, style="dim"),
                safe_text(column.description),
            )
        console.print(safe_text(table.name, style="bold"), grid, "")


def print_table(table: Table, form: str, limit: int | None) -> None:
    """Print rows on stdout as a `table`, `jsonl`, `csv` or `json`.

    Text of models cannot control the terminal: JSON is ASCII, and in CSV control characters become
    their Unicode pictures. Files that `rolltree data -o` writes have them unchanged.
    """
    if form == "table":
        _print_grid(table, _SHOWN_ROWS if limit is None else limit)
        return
    rows = islice(table.rows(), limit)
    if form == "jsonl":
        # Printed while they are read, since a table of tokens may have millions of rows.
        for row in rows:
            print(json.dumps(row))
    elif form == "csv":
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(table.column_names)
        for row in rows:
            out.writerow([shown(x) if isinstance(x, str) else x for x in row.values()])
    else:
        # A single document, so all rows have to be in memory.
        columns = _described(table)
        print(json.dumps({"table": table.name, "columns": columns, "rows": list(rows)}))


def _described(table: Table) -> list[dict[str, str]]:
    return [
        {"name": column.name, "type": column.kind, "description": column.description}
        for column in table.columns
    ]


def _print_grid(table: Table, limit: int) -> None:
    from rolltree.records.columns import TABLES

    console, num_columns = SafeConsole(), len(table.columns)
    if not console.is_terminal:
        # A file or a pipe has no width, and what is cut could not be found there.
        console.width = _FILE_WIDTH
    is_whole = num_columns >= len(TABLES.get(table.name, ()))
    # If columns were chosen, all of them are shown.
    if is_whole and num_columns > 8:
        first = _FIRST.get(table.name, " ".join(table.column_names[:8])).split()
        table = table.select(first)
    # One row more than is shown, to know whether there are more without counting millions of rows.
    rows = list(islice(table.rows(), limit + 1))
    texts = ("string", "int32 list", "messages")
    align = "".join("l" if column.kind in texts else "r" for column in table.columns)
    names = table.column_names
    cells = (
        tuple(
            safe_text(_cell(value), limit=None if name in _KEYS else _CELL)
            for name, value in zip(names, row.values(), strict=True)
        )
        for row in rows[:limit]
    )
    grid = text_table(names, cells, align, pad_edge=False)
    for name, column in zip(names, grid.columns, strict=True):
        if name in _KEYS:
            column.overflow = "fold"
    console.print(grid)
    notes = []
    if len(rows) > limit:
        notes.append("more rows: --limit N, or -o FILE for all")
    if len(table.columns) < num_columns:
        more = num_columns - len(table.columns)
        notes.append(f"{more} more columns: `rolltree data RUN` lists them, --columns chooses")
    if not rows:
        notes.append("no rows")
    for note in notes:
        say(console, note)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    # Larger floats, such as times, would be shown in scientific notation.
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
