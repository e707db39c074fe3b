"""The SQLite schema of a run, its version, and the checks before a file is trusted.

The module knows nothing about run directories beyond the one file. It leaves out migrations:
there is one schema so far, and a file of another version is refused by name.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rolltree.errors import StoreError
from rolltree.store.rows import COLUMNS

SCHEMA_VERSION = 2
APPLICATION_ID = 0x726F6C74  # "rolt", in the header of every run.db


def _statements() -> list[str]:
    columns = ",\n  ".join(f"{name} {column.sql}" for name, column in COLUMNS.items())
    return [
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        f"CREATE TABLE rollouts (\n  id INTEGER PRIMARY KEY,\n  {columns},\n"
        "  UNIQUE (request_id, trajectory_index)\n)",
        "CREATE INDEX rollouts_by_phase ON rollouts (phase, train_step, id)",
        "CREATE INDEX rollouts_by_group ON rollouts (group_id)",
        "CREATE TABLE steps (step INTEGER PRIMARY KEY, created_at REAL NOT NULL,"
        " metrics TEXT NOT NULL)",
        "CREATE TABLE events (id INTEGER PRIMARY KEY, created_at REAL NOT NULL,"
        " kind TEXT NOT NULL, step INTEGER, data TEXT NOT NULL)",
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {SCHEMA_VERSION}",
    ]


def is_empty(connection: sqlite3.Connection) -> bool:
    """Say whether the file holds nothing yet: new, or its maker was killed before the commit."""
    row = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(row[0] == 0)


def create_schema(connection: sqlite3.Connection) -> None:
    """Create every table; the caller holds the transaction, so it is all there or nothing."""
    for statement in _statements():
        connection.execute(statement)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a run, or is a run of another schema.

    Raises:
        StoreError: with what the file is instead, and what to do.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is a SQLite file, but not one that rolltree made, so nothing is read from or "
            "written to it. Choose another run directory."
        )
    if version != SCHEMA_VERSION:
        newer = version > SCHEMA_VERSION
        advice = "upgrade rolltree" if newer else "open it with the version of rolltree it is from"
        raise StoreError(
            f"{path} has run schema {version}; this rolltree reads schema {SCHEMA_VERSION}. It was "
            f"written by {'a newer' if newer else 'an older'} version: {advice}."
        )
