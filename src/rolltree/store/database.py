"""The SQLite connection to `run.db` (transactions, paged reads) and the lock of its one writer.

Write-ahead logging, so readers are never blocked and never block; `synchronous=FULL`, so a
committed batch survives a power cut as well as SIGKILL. The connection may be used from several
threads. The writer's lock is `flock`, which the kernel releases when its holder dies; network file
systems that do not implement `flock` are not supported.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rolltree.errors import StoreError
from rolltree.store.rows import check_schema, create_schema, is_empty

PAGE_ROWS = 64


class Database:
    """A connection for one writer (`"w"`), its maker (`"create"`) or a reader (`"r"`).

    `first_meta` fills the meta table in the transaction that makes the schema.

    Raises:
        StoreError: the file is missing, empty, damaged, not a run's, or of another schema.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["r", "w", "create"],
        first_meta: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.is_new = False
        self._lock = threading.RLock()
        self._connection = _connect(path, mode)
        try:
            if mode == "create" and is_empty(self._connection):
                with self.transaction():
                    create_schema(self._connection)
                    self._connection.executemany(
                        "INSERT INTO meta VALUES (?, ?)", (first_meta or {}).items()
                    )
                self.is_new = True
            elif is_empty(self._connection):
                raise StoreError(
                    f"{path} is empty: the program that made it was stopped before it could write. "
                    "Nothing is lost; start that command again, or delete the directory."
                )
            check_schema(self._connection, path)
            if mode != "r":
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.DatabaseError as error:
            self.close()
            raise _unreadable(path, error) from error
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All statements inside are applied, or none (also when the process dies inside).

        Raises:
            StoreError: the write failed, for example because the disk is full.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise StoreError(
                        f"writing to {self.path} failed ({error}); nothing of this batch was "
                        "stored. Make room or check the disk, then start the same command again."
                    ) from error
                raise

    def all(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return every row of a query.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._lock:
            try:
                return self._connection.execute(sql, tuple(values)).fetchall()
            except sqlite3.Error as error:
                raise _unreadable(self.path, error) from error

    def pages(
        self, columns: Sequence[str], where: str, values: Sequence[Any], limit: int | None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of `rollouts` in the order they were stored, a page in memory at a time.

        The lock is free between pages, so the run may be written during iteration.
        """
        after = 0
        sql = (
            f"SELECT id, {', '.join(columns)} FROM rollouts WHERE id > ? AND {where} "
            "ORDER BY id LIMIT ?"
        )
        while limit is None or limit > 0:
            size = PAGE_ROWS if limit is None else min(PAGE_ROWS, limit)
            page = self.all(sql, (after, *values, size))
            for row in page:
                yield row[1:]
            if len(page) < size:
                return
            after = page[-1][0]
            limit = None if limit is None else limit - len(page)

    def query(self, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Run a statement that may only read, and return its rows as dicts."""
        with self._lock:
            self._connection.execute("PRAGMA query_only = ON")
            try:
                cursor = self._connection.execute(sql, tuple(values))
                names = [item[0] for item in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            except sqlite3.Error as error:
                raise StoreError(f"the query failed: {error}. The query was: {sql}") from error
            finally:
                self._connection.execute("PRAGMA query_only = OFF")

    def close(self) -> None:
        """Close the connection. Doing it twice does nothing."""
        with self._lock:
            self._connection.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    if mode != "create" and not path.is_file():
        raise StoreError(
            f"{path.parent} is not a run directory: it has no {path.name}. Check the path; "
            "`rolltree runs` lists the runs below a directory."
        )
    flags = {"r": "mode=ro", "w": "mode=rw", "create": "mode=rwc"}[mode]
    if mode == "r" and not os.access(path.parent, os.W_OK) and not _has_wal(path):
        flags += "&immutable=1"  # a reader of a WAL file would have to create its -shm
    uri = f"{path.absolute().as_uri()}?{flags}"
    try:
        return sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=30.0
        )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: sqlite3.Error) -> StoreError:
    return StoreError(
        f"{path} cannot be read as a run database ({error}). It may be another program's file, "
        "closed, or damaged; choose another run directory, or restore it from a copy."
    )


def _has_wal(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()


class WriterLock:
    """One writer per run: an advisory lock on `run.lock`, held from construction to `release`.

    The text of the file names the holder for error messages; it decides nothing.

    Raises:
        StoreError: another process, or another `Run` object of this one, writes to the run.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(self._fd)
            os.close(self._fd)
            self._fd = None
            raise StoreError(
                f"{path.parent} is being written by {holder}; two writers would mix two runs. "
                "Wait for it or stop it, choose another run directory, or read this one with "
                'Run.open(path, mode="r").'
            ) from None
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(note).encode(), 0)

    def release(self) -> None:
        """Let another writer in. Doing it twice does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _describe(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {note['pid']} on {note['host']} (since {since})"
    return "another process"
