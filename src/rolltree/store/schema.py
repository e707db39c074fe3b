"""The SQL schema of `run.db`: its tables and indexes, and the check that a file holds no code."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import fields
from pathlib import Path

from rolltree.store.integrity import Counts
from rolltree.store.rows import COLUMNS, STORED
from rolltree.store.trained import TRAINED_COLUMNS
from rolltree.values.errors import StoreError

SCHEMA_VERSION = 4
APPLICATION_ID = 0x726F6C74  # "rolt", in the header of every run.db


_COLUMN = r"\w+(?: (?:INTEGER|TEXT|REAL|BLOB)?(?: PRIMARY KEY| NOT NULL)*)?"
_LIST = r"\((?:\w+, )*\w+\)"
_PASSIVE = re.compile(
    rf"CREATE TABLE \w+ ?\(\s*{_COLUMN}(?:,\s*(?:{_COLUMN}|(?:UNIQUE|PRIMARY KEY) {_LIST}))*\s*\)"
    rf"(?: WITHOUT ROWID)?|CREATE INDEX \w+ ON \w+ {_LIST}|CREATE TABLE sqlite_stat\d\([\w,]+\)"
)
"""Statements like those of rolltree and of ANALYZE: without views, triggers, virtual tables or
modules, and without expressions that SQLite would compute (of generated columns, defaults, checks,
partial indexes)."""


def _statements() -> list[str]:
    types = {name: column.sql for name, column in COLUMNS.items()}
    types |= {"id": "INTEGER PRIMARY KEY", "blob_checksum": "INTEGER", "checksum": "INTEGER"}
    columns = ",\n  ".join(f"{name} {types[name]}" for name in STORED)
    counts = ", ".join(f"{item.name} INTEGER" for item in fields(Counts))
    trained = ", ".join(f"{name} {kind}" for name, kind in TRAINED_COLUMNS.items())
    return [
        # WITHOUT ROWID: rows are stored in the order of their text key, without a second tree.
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER)"
        " WITHOUT ROWID",
        f"CREATE TABLE counts ({counts}, checksum INTEGER)",
        "CREATE TABLE totals (phase TEXT, env_id TEXT, first_id INTEGER, num_requests INTEGER,"
        " num_rollouts INTEGER, num_errors INTEGER, num_truncated INTEGER, num_scored INTEGER,"
        " sum_reward REAL, num_prompt_tokens INTEGER, num_completion_tokens INTEGER,"
        " last_created_at REAL, checksum INTEGER, PRIMARY KEY (phase, env_id)) WITHOUT ROWID",
        f"CREATE TABLE rollouts (\n  {columns},\n  UNIQUE (request_id, trajectory_index)\n)",
        # An id at the end of an index allows paging: a reader continues after the last id it saw.
        "CREATE INDEX rollouts_by_phase ON rollouts (phase, id)",
        "CREATE INDEX rollouts_by_step ON rollouts (phase, train_step, id)",
        "CREATE INDEX rollouts_by_group ON rollouts (group_id)",
        "CREATE TABLE steps (step INTEGER PRIMARY KEY, created_at REAL NOT NULL,"
        " metrics TEXT NOT NULL, checksum INTEGER)",
        "CREATE TABLE events (id INTEGER PRIMARY KEY, created_at REAL NOT NULL,"
        " kind TEXT NOT NULL, step INTEGER, data TEXT NOT NULL, checksum INTEGER)",
        f"CREATE TABLE trained ({trained}, UNIQUE (request_id, trajectory_index, step))",
        "CREATE INDEX trained_by_step ON trained (step, id)",
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {SCHEMA_VERSION}",
    ]


def is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether the file is empty: it is new, or its maker was killed before the commit."""
    row = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(row[0] == 0)


def create_schema(connection: sqlite3.Connection) -> None:
    """Create every table; in the caller's transaction, so all are created or none."""
    # DDL is transactional in SQLite: a process that is killed here leaves an empty file.
    for statement in _statements():
        connection.execute(statement)


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a run's, has active statements or another schema version.

    Raises:
        StoreError: the file is refused; the message says why, and what to do.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is a SQLite file, but not one that rolltree made, so nothing is read from or "
            "written to it. Choose another run directory."
        )
    # A trigger or a view of an untrusted file would run in our connection, with our rights
    # (design/0017), so only passive tables and indexes are accepted.
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        if sql is None or _PASSIVE.fullmatch(sql):  # None: the index of a key
            continue
        if kind in ("table", "index"):
            is_virtual = sql.upper().startswith("CREATE VIRTUAL")
            kind = "virtual table" if is_virtual else f"{kind} with rules of its own"
        raise StoreError(
            f"{path} has a {kind}, {name!r}, which rolltree never makes and which could change "
            "what is read or written, so the file is not used. Ask its source for a clean copy."
        )
    if version != SCHEMA_VERSION:
        newer = version > SCHEMA_VERSION
        advice = "upgrade rolltree" if newer else "open it with the version of rolltree it is from"
        raise StoreError(
            f"{path} has run schema {version}; this rolltree reads schema {SCHEMA_VERSION}. "
            f"It was written by {'a newer' if newer else 'an older'} version: {advice}."
        )
