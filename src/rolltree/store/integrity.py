"""What makes a flipped bit visible: a checksum per row, counts of every table, and the full check.

SQLite checks only its write-ahead log. Here each row has a CRC-32 of its table, its key and its
values; one row of `counts` says how many rows every table has and how many batches were stored;
`totals` holds the sums of each phase, so that a summary reads a few checked rows. The number of
batches also goes to the small file `run.commits` after each commit, because SQLite ignores a
damaged log from the damage on without a word.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from rolltree.errors import StoreError

_encode = msgspec.msgpack.Encoder().encode
_NOTE_BYTES = 32
MAX_TOLD = 5


def checksum(table: str, values: Sequence[Any]) -> int:
    """Return the CRC-32 of a row: its table's name, then its values as SQLite returns them."""
    return zlib.crc32(_encode([table, *values]))


def blob_checksum(blobs: Sequence[bytes]) -> int:
    """Return the CRC-32 of the compressed blobs, one after the other."""
    found = 0
    for blob in blobs:
        found = zlib.crc32(blob, found)
    return found


@dataclass(slots=True)
class Counts:
    """The one row of `counts`: batches ever stored, the last id given, and rows per table."""

    commits: int = 0
    last_id: int = 0
    rollouts: int = 0
    totals: int = 0
    meta: int = 0
    steps: int = 0
    events: int = 0

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Counts:
        """Read the row.

        Raises:
            StoreError: it is damaged; the file is not named.
        """
        names = [item.name for item in fields(cls)]
        rows = connection.execute(f"SELECT {', '.join(names)}, checksum FROM counts").fetchall()
        if len(rows) != 1 or checksum("counts", rows[0][:-1]) != rows[0][-1]:
            raise StoreError("the counts of its rows differ from their checksum")
        return cls(*rows[0][:-1])

    def write(self, connection: sqlite3.Connection) -> None:
        """Replace the row."""
        values = astuple(self)
        marks = ", ".join("?" for _ in (*values, 0))
        connection.execute("DELETE FROM counts")
        connection.execute(
            f"INSERT INTO counts VALUES ({marks})", (*values, checksum("counts", values))
        )


@dataclass(slots=True)
class Totals:
    """One row of `totals`: the sums over the rollouts of one phase and environment.

    `sum_reward` is over `num_scored` rows; `first_id` orders phases; `last_created_at` is seconds
    since the epoch.
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


_TOTAL_NAMES = [item.name for item in fields(Totals)]
_SUMS = """
SELECT phase, coalesce(env_id, ''), min(id), count(DISTINCT request_id), count(*),
       sum(status = 'error'), sum(truncated), count(reward), total(reward),
       coalesce(sum(num_prompt_tokens), 0), coalesce(sum(num_completion_tokens), 0),
       coalesce(max(created_at), 0.0)
FROM rollouts WHERE phase = ? GROUP BY coalesce(env_id, '')
"""


def read_totals(connection: sqlite3.Connection, counts: Counts) -> list[Totals]:
    """Return the sums of every phase and environment, in the order they began.

    Raises:
        StoreError: they are damaged; the file is not named.
    """
    rows = connection.execute(
        f"SELECT {', '.join(_TOTAL_NAMES)}, checksum FROM totals ORDER BY first_id"
    ).fetchall()
    for row in rows:
        if checksum("totals", row[:-1]) != row[-1]:
            raise StoreError(f"the totals of phase {row[0]!r} differ from their checksum")
    found = [Totals(*row[:-1]) for row in rows]
    if len(found) != counts.totals or sum(t.num_rollouts for t in found) != counts.rollouts:
        raise StoreError("the totals of a phase are missing")
    return found


def report_key(phase: str) -> str:
    """Return where `meta` has the report of a phase, which goes when the phase changes."""
    return f"report.{phase}"


TABLES = {
    "meta": "key, value",
    "steps": "step, created_at, metrics",
    "events": "id, created_at, kind, step, data",
}
"""The tables that are read whole, with their columns; the first one is the key."""


@dataclass(slots=True)
class Change:
    """An open transaction: its connection, and the counts and sums that are stored at its end."""

    connection: sqlite3.Connection
    counts: Counts
    totals: dict[tuple[str, str], Totals] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    """The phases whose rollouts have changed: a report of them no longer holds."""

    def put(self, table: str, *values: Any) -> None:
        """Insert or replace the row of `meta`, `steps` or `events` with this key."""
        key = TABLES[table].partition(",")[0]
        known = self.connection.execute(
            f"SELECT count(*) FROM {table} WHERE {key} = ?", values[:1]
        ).fetchone()[0]
        marks = ", ".join("?" for _ in (*values, 0))
        self.connection.execute(
            f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*values, checksum(table, values))
        )
        setattr(self.counts, table, getattr(self.counts, table) + 1 - known)

    def next_id(self) -> int:
        """Return an id that no row has had."""
        self.counts.last_id += 1
        return self.counts.last_id

    def count(self, row: Mapping[str, Any], times: int) -> None:
        """Add a stored rollout, SQL values by name, to the sums; with -1 take it away.

        The row is in its table when it is added, and no longer when it is taken away.
        """
        same = "SELECT count(*) FROM rollouts WHERE request_id = ? AND +phase = ?"  # by its id
        others = self.connection.execute(same, (row["request_id"], row["phase"])).fetchone()[0]
        self.phases.add(row["phase"])
        found = self._totals_of(row)
        found.num_requests += times * (others == (times > 0))
        found.num_rollouts += times
        found.num_errors += times * (row["status"] == "error")
        found.num_truncated += times * bool(row["truncated"])
        found.num_scored += times * (row["reward"] is not None)
        found.sum_reward += times * (row["reward"] or 0.0)
        found.num_prompt_tokens += times * (row["num_prompt_tokens"] or 0)
        found.num_completion_tokens += times * (row["num_completion_tokens"] or 0)
        found.last_created_at = max(found.last_created_at, row["created_at"] or 0.0)
        self.counts.rollouts += times

    def sum_again(self, phase: str) -> None:
        """Sum a phase from its rows, after many of them, or some with a reward, were deleted."""
        self.phases.add(phase)
        self._write_totals()
        gone = self.connection.execute("DELETE FROM totals WHERE phase = ?", (phase,)).rowcount
        self.counts.totals -= gone
        for row in self.connection.execute(_SUMS, (phase,)).fetchall():
            found = Totals(*row)
            self.totals[found.phase, found.env_id] = found
            self.counts.totals += 1

    def finish(self) -> None:
        """Write sums and counts, drop old reports: the last statements of the transaction."""
        self._write_totals()
        for phase in self.phases:
            drop = "DELETE FROM meta WHERE key = ?"
            self.counts.meta -= self.connection.execute(drop, (report_key(phase),)).rowcount
        self.counts.commits += 1
        self.counts.write(self.connection)

    def _totals_of(self, row: Mapping[str, Any]) -> Totals:
        key = (row["phase"], row["env_id"] or "")
        if key not in self.totals:
            known = self.connection.execute(
                f"SELECT {', '.join(_TOTAL_NAMES)} FROM totals WHERE phase = ? AND env_id = ?", key
            ).fetchone()
            self.totals[key] = Totals(*known) if known else Totals(*key, first_id=row["id"])
            self.counts.totals += known is None
        return self.totals[key]

    def _write_totals(self) -> None:
        for key, totals in self.totals.items():
            if totals.num_rollouts:
                values = astuple(totals)
                marks = ", ".join("?" for _ in (*values, 0))
                self.connection.execute(
                    f"INSERT OR REPLACE INTO totals VALUES ({marks})",
                    (*values, checksum("totals", values)),
                )
            else:
                self.connection.execute("DELETE FROM totals WHERE phase = ? AND env_id = ?", key)
                self.counts.totals -= 1
        self.totals.clear()


class CommitNote:
    """The file `run.commits`: how many batches were stored, written after each commit.

    It is not synced, so after a power cut it may be behind the database, which is fine; it is
    never ahead of it. A missing or unreadable note says nothing.
    """

    def __init__(self, database: Path) -> None:
        self.path = database.with_name("run.commits")
        self._fd: int | None = None

    def read(self) -> int:
        """Return the number of batches, 0 when the note says nothing."""
        with contextlib.suppress(OSError, ValueError):
            number, _, found = self.path.read_text(encoding="ascii").partition(" ")
            if int(found) == checksum("note", [int(number)]):
                return int(number)
        return 0

    def write(self, commits: int) -> None:
        """Note it; a full disk does not matter here, the batch itself is stored."""
        with contextlib.suppress(OSError):
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
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
        StoreError: a row differs from its checksum, or is missing or twice there.
    """
    if len(rows) != expected or len({row[0] for row in rows}) != expected:
        raise StoreError(f"table {table} has {len(rows)} rows instead of {expected}")
    for row in rows:
        if checksum(table, row[:-1]) != row[-1]:
            raise StoreError(f"row {row[0]!r} of table {table} differs from its checksum")
        yield row[:-1]


def damaged(path: Path, what: str) -> StoreError:
    """Return the error for a damaged database: what was found, and the ways out."""
    return StoreError(
        f"{path} is damaged: {what}. Something changed the file after rolltree wrote it (a failing "
        "disk, a broken copy, another program), and its numbers would be wrong. Restore it from a "
        f"copy; `rolltree export {path.parent} FILE` saves every rollout that is whole."
    )
