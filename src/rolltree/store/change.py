"""An open transaction, which updates sums and counts together with the rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from rolltree.store.codec import loads
from rolltree.store.integrity import (
    TABLES,
    TOTAL_NAMES,
    Counts,
    Totals,
    put_row,
    report_key,
    sum_rows,
)
from rolltree.store.rows import LIGHT, STORED, with_checksums
from rolltree.store.trained import insert_trained
from rolltree.values.errors import StoreError

MAX_META_BYTES = 2**22
"""The largest setting, or stored report: each look at a run reads all of them."""
_INSERT = (
    f"INSERT INTO rollouts ({', '.join(STORED)}) VALUES ({', '.join('?' for _ in STORED)}) "
    "ON CONFLICT (request_id, trajectory_index) DO NOTHING"
)


@dataclass(slots=True)
class Change:
    """An open transaction: its connection, and the counts and sums that are stored at its end."""

    connection: sqlite3.Connection
    counts: Counts
    totals: dict[tuple[str, str], Totals] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    """The phases whose rollouts have changed, so that their reports are out of date."""

    def put(self, table: str, *values: Any) -> None:
        """Insert or replace the row of `meta`, `steps` or `events` with this key."""
        if table == "meta" and len(values[1].encode()) > MAX_META_BYTES:
            raise StoreError(
                f"{values[0]!r} has more than {MAX_META_BYTES:,} bytes and is not stored: every "
                "look at the run would read it. Is data among the settings? Put it into a file, "
                "and its path into the settings."
            )
        key = TABLES[table].partition(",")[0]
        known = self.connection.execute(
            f"SELECT count(*) FROM {table} WHERE {key} = ?", values[:1]
        ).fetchone()[0]
        put_row(self.connection, table, values)
        setattr(self.counts, table, getattr(self.counts, table) + 1 - known)

    def next_id(self) -> int:
        """Return an id that no row has or had."""
        self.counts.last_id += 1
        return self.counts.last_id

    def count(self, row: Mapping[str, Any], times: int) -> None:
        """Add a rollout, given as SQL values by name, to the sums; with `times` -1, subtract it.

        Call it after the row was inserted into its table, or deleted from it.
        """
        same = "SELECT count(*) FROM rollouts WHERE request_id = ? AND +phase = ?"  # by its id
        others = self.connection.execute(same, (row["request_id"], row["phase"])).fetchone()[0]
        self.phases.add(row["phase"])
        totals = self._totals_of(row)
        # A request is counted when its first row comes, and subtracted when its last row goes.
        totals.num_requests += times * (others == (times > 0))
        totals.num_rollouts += times
        totals.num_errors += times * (row["status"] == "error")
        totals.num_truncated += times * bool(row["truncated"])
        # Delegated rollouts are rewarded for subtasks, so a phase's mean excludes them.
        if not row["depth"]:
            totals.num_scored += times * (row["reward"] is not None)
            totals.sum_reward += times * (row["reward"] or 0.0)
        totals.num_prompt_tokens += times * (row["num_prompt_tokens"] or 0)
        totals.num_completion_tokens += times * (row["num_completion_tokens"] or 0)
        totals.last_created_at = max(totals.last_created_at, row["created_at"] or 0.0)
        self.counts.rollouts += times

    def add_rollout(self, values: Sequence[Any]) -> int:
        """Insert the SQL values of a row, unless its key exists; return the number inserted."""
        stored = with_checksums(self.next_id(), values)
        added = self.connection.execute(_INSERT, stored).rowcount
        # The same result may come twice after a kill: the stored row stays, and counts once.
        if added:
            self.count(dict(zip(STORED, stored, strict=True)), 1)
        else:
            self.counts.last_id -= 1
        return added

    def put_trained(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Replace the stored tokens of a step by these values of `trained_to_sql`."""
        self.drop_trained("step = ?", step)
        for values in rows:
            insert_trained(self.connection, self.next_id(), values)
        self.counts.trained += len(rows)

    def drop_trained(self, clause: str, step: int) -> None:
        """Delete the trained tokens of the steps that a clause selects."""
        gone = self.connection.execute(f"DELETE FROM trained WHERE {clause}", (step,))
        self.counts.trained -= gone.rowcount

    def drop_request(self, request_id: str, *, if_failed: bool) -> list[dict[str, Any]]:
        """Delete the rows of a request, with `if_failed` only if one of them failed.

        Return the type, the errors and the time of each row that failed.
        """
        names = ("id", *LIGHT)
        selected = self.connection.execute(
            f"SELECT {', '.join(names)} FROM rollouts WHERE request_id = ?", (request_id,)
        ).fetchall()
        rows = [dict(zip(names, row, strict=True)) for row in selected]
        failed = [row for row in rows if row["status"] == "error"]
        if failed or (rows and not if_failed):
            self.connection.execute("DELETE FROM rollouts WHERE request_id = ?", (request_id,))
            for row in rows:
                self.count(row, -1)
            # In floats, (a + b) - b may differ from a, so the phase is summed from its rows again.
            for phase in {row["phase"] for row in rows if row["reward"] is not None}:
                self.sum_again(phase)
        return [
            {
                "type": row["error_type"],
                "errors": loads(row["errors"]),
                "created_at": row["created_at"],
            }
            for row in failed
        ]

    def sum_again(self, phase: str) -> None:
        """Sum a phase from its rows, after many of them, or some with a reward, were deleted."""
        self.phases.add(phase)
        self._write_totals()
        gone = self.connection.execute("DELETE FROM totals WHERE phase = ?", (phase,)).rowcount
        self.counts.totals -= gone
        for totals in sum_rows(self.connection, phase):
            self.totals[totals.phase, totals.env_id] = totals
            self.counts.totals += 1

    def finish(self) -> None:
        """Write sums and counts, and drop old reports, at the end of the transaction."""
        self._write_totals()
        # A report on rollouts that have changed since would be shown as current.
        for phase in self.phases:
            drop = "DELETE FROM meta WHERE key = ?"
            self.counts.meta -= self.connection.execute(drop, (report_key(phase),)).rowcount
        self.counts.commits += 1
        self.counts.write(self.connection)

    def _totals_of(self, row: Mapping[str, Any]) -> Totals:
        key = (row["phase"], row["env_id"] or "")
        if key not in self.totals:
            known = self.connection.execute(
                f"SELECT {', '.join(TOTAL_NAMES)} FROM totals WHERE phase = ? AND env_id = ?", key
            ).fetchone()
            self.totals[key] = Totals(*known) if known else Totals(*key, first_id=row["id"])
            self.counts.totals += known is None
        return self.totals[key]

    def _write_totals(self) -> None:
        for key, totals in self.totals.items():
            if totals.num_rollouts:
                put_row(self.connection, "totals", astuple(totals))
            else:
                self.connection.execute("DELETE FROM totals WHERE phase = ? AND env_id = ?", key)
                self.counts.totals -= 1
        self.totals.clear()
