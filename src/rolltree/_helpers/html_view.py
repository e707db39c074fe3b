"""Small pieces of HTML for notebooks: tables and lines.

Texts of models and environments may be in them, so everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rolltree._helpers.redact import shown

MOST_ROWS = 200
"""The most rows to show, since a notebook stores in its file what it shows."""


def html_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; a long one has only its first rows, and a line that says so."""
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:MOST_ROWS]
    )
    more = [f"the first {MOST_ROWS:,} of {len(rows):,} rows"] if len(rows) > MOST_ROWS else []
    caption = f"<caption>{_text(title)}</caption>" if title else ""
    return (
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{html_lines(more)}"
    )


def html_lines(lines: Iterable[object]) -> str:
    """Return lines, each in its own block."""
    return "".join(f"<div>{_text(line)}</div>" for line in lines)


def _text(value: object) -> str:
    return escape(shown("" if value is None else str(value)))
