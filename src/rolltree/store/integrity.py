"""Detects flipped bits: a checksum per row, counts of every table, and the full check.

SQLite checks only its write-ahead log. Here each row has a CRC-32 of its table, its key and its
values; the single row of `counts` has the number of rows of every table and of stored batches;
`totals` holds the sums of each phase, so that a summary reads only a few checked rows. The number
of batches is also written to the small file `run.commits` after each commit, because SQLite
silently ignores the rest of a log after damage.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from rolltree._helpers.files import open_regular, read_regular
from rolltree.values.errors import StoreError

_encode = msgspec.msgpack.Encoder().encode
_NOTE_BYTES = 32
# The number of damaged items that an error names, which are enough to find the disk or copy.
MAX_NAMED = 5


def checksum(table: str, values: Sequence[Any]) -> int:
    """Return the CRC-32 of a row: its table's name, then its values as SQLite returns them."""
    # The table's name is included, so that a whole row copied into another table is noticed.
    return zlib.crc32(_encode([table, *values]))


def put_row(connection: sqlite3.Connection, table: str, values: Sequence[Any]) -> None:
    """Insert a row with its checksum, or replace the one with its key."""
    marks = ", ".join("?" for _ in (*values, 0))
    row = (*values, checksum(table, values))
    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row)


def blob_checksum(blobs: Sequence[bytes]) -> int:
    """Return the CRC-32 of the compressed blobs, one after the other."""
    # Blobs have their own checksum, so that a scan of the columns never reads their pages.
    crc = 0
    for blob in blobs:
        crc = zlib.crc32(blob, crc)
    return crc


def is_intact(table: str, values: Sequence[Any], num_columns: int) -> bool:
    """Whether a row with blobs equals its checksums.

    `values` are its first `num_columns`, the last of which is the checksum of its blobs, then
    their own checksum, then all blobs or none of them.
    """
    head, row_sum, blobs = values[:num_columns], values[num_columns], values[num_columns + 1 :]
    try:
        is_same = checksum(table, head) == row_sum
        return is_same and (not blobs or blob_checksum(blobs) == head[-1])
    except TypeError:  # damage turned a blob into text or NULL
        return False


@dataclass(slots=True)
class Counts:
    """The single row of `counts`: batches ever stored, the last id given, and rows per table."""

    commits: int = 0
    last_id: int = 0
    rollouts: int = 0
    totals: int = 0
    meta: int = 0
    steps: int = 0
    events: int = 0
    trained: int = 0

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Counts:
        """Read the row.

        Raises:
            StoreError: it is damaged; the file is not named.
        """
        cursor = connection.execute("SELECT * FROM counts")
        names, rows = [item[0] for item in cursor.description[:-1]], cursor.fetchall()
        if len(rows) != 1 or checksum("counts", rows[0][:-1]) != rows[0][-1]:
            raise StoreError("the counts of its rows differ from their checksum")
        return cls(**dict(zip(names, rows[0][:-1], strict=True)))

    def write(self, connection: sqlite3.Connection) -> None:
        """Replace the row."""
        connection.execute("DELETE FROM counts")
        put_row(connection, "counts", astuple(self))


@dataclass(slots=True)
class Totals:
    """One row of `totals`: the sums over the rollouts of one phase and environment.

    `sum_reward` is over the `num_scored` rows that have a reward and were not delegated by another
    rollout: a phase's reward is that of its episodes. `first_id` orders phases; `last_created_at`
    is in seconds since the epoch.
    """

    phase: str
    env_id: str
    first_id: int = 0
    num_requests: int = 0
    num_rollouts: int = 0
    num_errors: int = 0
    num_truncated: int = 0
    num_scored: int = 0
    sum_reward: float = 0.0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    last_created_at: float = 0.0


TOTAL_NAMES = [item.name for item in fields(Totals)]
_SUMS = """
SELECT phase, coalesce(env_id, ''), min(id), count(DISTINCT request_id), count(*),
       sum(status = 'error'), sum(truncated), count(reward) FILTER (WHERE depth = 0),
       total(reward) FILTER (WHERE depth = 0),
       coalesce(sum(num_prompt_tokens), 0), coalesce(sum(num_completion_tokens), 0),
       coalesce(max(created_at), 0.0)
FROM rollouts WHERE phase = ? GROUP BY coalesce(env_id, '')
"""


def sum_rows(connection: sqlite3.Connection, phase: str) -> list[Totals]:
    """Return the sums of a phase, computed from its rows, one for each environment."""
    return [Totals(*row) for row in connection.execute(_SUMS, (phase,))]


def read_totals(connection: sqlite3.Connection, counts: Counts) -> list[Totals]:
    """Return the sums of every phase and environment, in order of their start.

    Raises:
        StoreError: they are damaged; the file is not named.
    """
    rows = connection.execute(
        f"SELECT {', '.join(TOTAL_NAMES)}, checksum FROM totals ORDER BY first_id"
    ).fetchall()
    for row in rows:
        if checksum("totals", row[:-1]) != row[-1]:
            raise StoreError(f"the totals of phase {row[0]!r} differ from their checksum")
    totals = [Totals(*row[:-1]) for row in rows]
    if len(totals) != counts.totals or sum(t.num_rollouts for t in totals) != counts.rollouts:
        raise StoreError("the totals of a phase are missing")
    return totals


def report_key(phase: str) -> str:
    """Return the key of a phase's report in `meta`; it is deleted when the phase changes."""
    return f"report.{phase}"


TABLES = {
    "meta": "key, value",
    "steps": "step, created_at, metrics",
    "events": "id, created_at, kind, step, data",
}
"""The tables that are read whole, with their columns; the first column is the key."""


class CommitNote:
    """The file `run.commits`: how many batches were stored, written after each commit.

    It is not synced, so after a power cut it may be behind the database, which is fine; it is
    never ahead of it. A missing or unreadable note is ignored.
    """

    def __init__(self, database: Path) -> None:
        # SQLite silently ends a write-ahead log at its first damaged frame, which loses the last
        # batches. A number outside the database reveals that (design/0017).
        self.path = database.with_name("run.commits")
        self._fd: int | None = None

    def read(self) -> int:
        """Return the number of batches; 0 if the note is missing or unreadable."""
        with contextlib.suppress(OSError, ValueError):
            # With a checksum, so that a torn write cannot make a healthy run look incomplete.
            number, _, crc = read_regular(self.path, _NOTE_BYTES).decode("ascii").partition(" ")
            if int(crc) == checksum("note", [int(number)]):
                return int(number)
        return 0

    def write(self, commits: int) -> None:
        """Note the number; an error, such as a full disk, is ignored: the batch is stored."""
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
            # One small write at a fixed place; the padding overwrites a longer text.
            text = f"{commits} {checksum('note', [commits])}"
            os.pwrite(self._fd, text.ljust(_NOTE_BYTES).encode(), 0)

    def close(self) -> None:
        """Close the file. Doing it twice does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def checked(
    table: str, rows: Sequence[tuple[Any, ...]], expected: int
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a whole table, keyed by their first value, without their checksums.

    Raises:
        StoreError: a row differs from its checksum, is missing or is a duplicate.
    """
    # A duplicate could replace a missing row, so the number of keys is compared, too.
    if len(rows) != expected or len({row[0] for row in rows}) != expected:
        raise StoreError(f"table {table} has {len(rows)} rows instead of {expected}")
    for row in rows:
        if checksum(table, row[:-1]) != row[-1]:
            raise StoreError(f"row {row[0]!r} of table {table} differs from its checksum")
        yield row[:-1]


def damaged(path: Path, what: str) -> StoreError:
    """Return the error for a damaged database: the damage found, and what to do."""
    return StoreError(
        f"{path} is damaged: {what}. Something changed the file after rolltree wrote it (a failing "
        "disk, a broken copy, another program), so its numbers would be wrong. Restore it from a "
        f"copy; `rolltree export {path.parent} FILE` saves every rollout that is intact."
    )
