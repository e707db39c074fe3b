"""Export: one JSON line per stored rollout; of a damaged file, all rows that are intact."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rolltree._helpers.files import whole_file
from rolltree.store.codec import to_plain
from rolltree.store.conditions import matches
from rolltree.store.database import Database
from rolltree.store.integrity import MAX_NAMED
from rolltree.store.rows import LIGHT, StoredRollout, from_sql
from rolltree.values.errors import ConfigError, RolltreeError, StoreError

Render: TypeAlias = Callable[[StoredRollout], Mapping[str, Any]]

_ROW_ERRORS = (RolltreeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of reading or rendering a row that is damaged."""


def light_line(row: StoredRollout) -> dict[str, Any]:
    """Return every column of a row except the blobs."""
    return {name: getattr(row, name) for name in LIGHT}


def export_rows(
    path: Path,
    rows: Iterator[StoredRollout],
    database: Database,
    names: Sequence[str],
    render: Render,
    where: Mapping[str, Any],
) -> int:
    """Write one JSON line per row and return their number.

    If a row of `rows` is damaged, the file is written again from the rows of `database` whose
    columns `names` can still be read.

    Raises:
        StoreError: the file cannot be written, or has all rows except damaged ones.
    """
    try:
        return _write_lines(path, map(render, rows))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}), so the export is not complete. "
            "Check the folder and the free space, or choose another file."
        ) from error
    except ConfigError:
        raise
    except _ROW_ERRORS as error:
        cause = error
    # A damaged row must not prevent the export of others: read row by row, without an index.
    lost: list[str] = []
    number = _write_lines(path, _whole_lines(database, names, render, where, lost))
    if not lost:
        raise cause
    more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    raise StoreError(
        f"{number} rollouts are in {path}, and these could not be read: "
        f"{'; '.join(lost[:MAX_NAMED])}{more}. Something changed {database.path} after "
        "rolltree wrote it; restore it from a copy to get them."
    ) from cause


def _whole_lines(
    database: Database,
    names: Sequence[str],
    render: Render,
    where: Mapping[str, Any],
    lost: list[str],
) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of all intact rows, and note the others in `lost`; no index is used."""
    num_seen = 0
    for stored in database.readable(names):
        num_seen += 1
        if isinstance(stored, int):
            lost.append(f"row {stored} (SQLite cannot read it)")
            continue
        try:
            row = from_sql(stored)
            line = render(row) if matches(row, where) else None
        except StoreError as error:
            lost.append(str(error).rstrip("."))
        except _ROW_ERRORS as error:
            lost.append(f"rollout {stored[1]!r} (row {stored[0]}): {type(error).__name__}")
        else:
            if line is not None:
                yield line
    with contextlib.suppress(StoreError):
        missing = database.counts().rollouts - num_seen
        if missing > 0:
            lost.append(f"{missing} rows that are no longer there")


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    with whole_file(path) as part:
        return write_lines(part, map(to_plain, lines))


def write_lines(path: Path, lines: Iterable[Any]) -> int:
    """Write plain data as JSON, one line each, and return their number."""
    number = 0
    # Models do write lone surrogates, which have no UTF-8: they are written as JSON escapes.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for number, line in enumerate(lines, 1):  # noqa: B007
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return number
