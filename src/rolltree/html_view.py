"""Small pieces of HTML for notebooks: tables and lines, with everything escaped.

What models and environments wrote may be in them, so no text is taken for markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rolltree.redact import shown

MOST_ROWS = 200
"""Rows that are shown; a notebook keeps what it shows in its file."""


def html_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; of a long one the first rows, and how many there are."""
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
    """Return lines, each as a block of its own."""
    return "".join(f"<div>{_text(line)}</div>" for line in lines)


def html_pre(text: object) -> str:
    """Return text as it is laid out."""
    return f"<pre>{_text(text)}</pre>"


def _text(value: object) -> str:
    return escape(shown("" if value is None else str(value)))
