"""The SQLite connection to `run.db` (transactions, paged reads) and the lock of its only writer.

It uses write-ahead logging, so readers never block and are never blocked, and `synchronous=FULL`,
so a committed batch survives a power cut as well as SIGKILL. The connection may be used from
several threads. The writer's lock is `flock`, which the kernel releases when its holder dies;
network file systems that do not implement `flock` are not supported.
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

from rolltree._helpers.files import odd_kind, open_regular
from rolltree.store.change import MAX_META_BYTES, Change
from rolltree.store.integrity import (
    MAX_NAMED,
    TABLES,
    CommitNote,
    Counts,
    Totals,
    checked,
    damaged,
    read_totals,
)
from rolltree.store.orders import Orders
from rolltree.store.rows import SUMMED, verify
from rolltree.store.schema import (
    check_schema,
    create_schema,
    is_empty,
)
from rolltree.store.trained import check_trained
from rolltree.values.errors import StoreError

_LOCK_ATTEMPTS = 5
# Seconds to wait for another program's lock. Readers of a healthy run never wait for a lock.
_WAIT_S = {"r": 10.0, "w": 30.0, "create": 30.0}
# The largest text or blob that is written or read; rolltree did not write a larger one.
_MAX_VALUE_BYTES = 2**28
_FILES = ("run.db", "run.db-wal", "run.db-shm", "run.db-journal", "run.commits", "run.lock")
# The end of a rollback journal that names a file for SQLite to delete; rolltree never writes one.
_NAMES_ANOTHER_FILE = bytes.fromhex("d9d505f920a163d7")
# A page of rows is in memory with all its blobs while it is used, so it has only a few rows.
PAGE_ROWS = 64
LIGHT_PAGE_ROWS = 1024  # without their blobs
_SQL_ERRORS = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)
"""Exceptions of SQLite's module; the last three come from impossible values in damaged files."""
ROW_ERRORS = (StoreError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of decoding a damaged row."""


class Database:
    """A connection to write (`"w"`), to create (`"create"`) or to read (`"r"`) a run's database.

    `first_meta` fills the meta table in the transaction that makes the schema. With `check="rows"`
    only the rows that are read are compared with their checksums.

    Raises:
        StoreError: the file is missing, empty, damaged, not a run's, or of another schema.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["r", "w", "create"],
        first_meta: Mapping[str, str] | None = None,
        *,
        check: Literal["file", "rows"] = "file",
    ) -> None:
        self.path = path
        self.is_new = False
        self._lock = threading.RLock()
        # Whether this object has compared the whole file with its checksums.
        self.is_checked = False
        self._check_file = check == "file"
        self._note = CommitNote(path)
        self.orders = Orders()
        check_files(path.parent, writes=mode != "r")
        if mode != "r" and _has_wal(path) and os.path.isfile(path):
            # Checked first, since a writer merges the log when it closes: damage would be lost.
            Database(path, "r").close()
        # The note is written after the commit, so the database is never behind it. Read first, it
        # cannot be ahead of a database that another process is writing.
        noted = self._note.read()
        self._connection = _connect(path, mode)
        # Absolute, since an environment may change the working directory.
        self._place = path.absolute()
        self._file = _identity(self._place)
        try:
            # A few bytes can ask SQLite for a value of gigabytes.
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            if mode == "create" and is_empty(self._connection):
                self._make(first_meta or {})
            elif is_empty(self._connection):
                raise StoreError(
                    f"{path} is empty: the program that made it was stopped before it could write. "
                    "Nothing is lost; start that command again, or delete the directory."
                )
            # The file may be untrusted: its schema must not call functions with side effects.
            self._connection.execute("PRAGMA trusted_schema = OFF")
            check_schema(self._connection, path)
            if not self.is_new:
                self._compare(noted)
            if mode != "r":
                # FULL: a commit is on disk before `add_rollouts` returns. With NORMAL, a power cut
                # would lose the last batches, which the trainer has counted as done.
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                if not self.is_new:
                    self.check()
        except _SQL_ERRORS as error:
            self.close()
            raise _unreadable(path, error) from error
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def _make(self, first_meta: Mapping[str, str]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        create_schema(self._connection)
        change = Change(self._connection, Counts())
        for key, value in first_meta.items():
            change.put("meta", key, value)
        change.finish()
        self._connection.execute("COMMIT")
        self._note.write(change.counts.commits)
        self.is_new = self.is_checked = True

    def _compare(self, noted: int) -> None:
        """Refuse a database that lacks batches which were stored in it."""
        missing = noted - self.counts().commits
        if missing > 0:
            raise StoreError(
                f"{self.path} lacks the last {missing} batches that were stored in it: its log "
                f"{self.path.name}-wal is damaged or was not copied with it, or an older copy was "
                "put in its place. Restore the whole directory from one copy; or, to continue "
                f"without these batches, delete {self._note.path}."
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Change]:
        """Apply all statements inside or none, even if the process dies inside.

        Raises:
            StoreError: the write failed, for example because the disk is full.
        """
        with self._lock:
            try:
                # IMMEDIATE takes the write lock now: a transaction that reads first and writes
                # later can fail in the middle, after its work.
                self._connection.execute("BEGIN IMMEDIATE")
                change = Change(self._connection, Counts.read(self._connection))
                yield change
                change.finish()
                self._connection.execute("COMMIT")
            except BaseException as error:  # Ctrl-C, too
                with contextlib.suppress(sqlite3.Error):
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                if isinstance(error, _SQL_ERRORS):
                    raise StoreError(
                        f"writing to {self.path} failed ({error}); nothing of this batch was "
                        "stored. Make room or check the disk, then start the same command again."
                    ) from error
                raise
            # After the commit, never before: a note ahead of the database would refuse the run.
            self._note.write(change.counts.commits)
            self.check_place()

    def check_place(self) -> None:
        """Raise an error if the open file is no longer the one at its path.

        The system lets a process write to an open file that was deleted, and drops it at the end.

        Raises:
            StoreError: the run directory was removed, moved or replaced.
        """
        if _identity(self._place) != self._file:
            raise StoreError(
                f"{self.path} was removed, moved or replaced while it was being written, so what "
                "is stored from now on would be lost. If the run directory was moved, continue "
                "there with the same command; otherwise restore it from a copy, or start again."
            )

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read several tables as they were at one moment, even while another process writes.

        Raises:
            StoreError: the file cannot be read, or what was read is damaged.
        """
        with self._lock:
            began = False
            try:
                began = not self._connection.in_transaction
                if began:
                    self._connection.execute("BEGIN")
                yield self._connection
            except _SQL_ERRORS as error:
                raise _unreadable(self.path, error) from error
            finally:
                if began:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("COMMIT")

    def counts(self) -> Counts:
        """Return how many rows the tables have.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        with self.snapshot() as connection, self.naming():
            return Counts.read(connection)

    def totals(self) -> tuple[Counts, list[Totals]]:
        """Return the counts, and the sums of every phase and environment in order of their start.

        Raises:
            StoreError: the file cannot be read or is damaged.
        """
        with self.snapshot() as connection, self.naming():
            counts = Counts.read(connection)
            return counts, read_totals(connection, counts)

    def table(self, name: str) -> list[tuple[Any, ...]]:
        """Return all rows of `meta`, `steps` or `events`, by key.

        Raises:
            StoreError: the file cannot be read, or a row is damaged or missing.
        """
        with self.snapshot() as connection, self.naming():
            expected = getattr(Counts.read(connection), name)
            columns = TABLES[name]
            key = columns.partition(",")[0]
            if name == "meta":
                _check_meta(connection)
            rows = connection.execute(
                f"SELECT {columns}, checksum FROM {name} ORDER BY {key}"
            ).fetchall()
            return list(checked(name, rows, expected))

    def check(self) -> None:
        """Read the whole file once and compare everything with its checksums and counts.

        100,000 rollouts in 470 MB take one second. The second call does nothing.

        Raises:
            StoreError: something is damaged; the first findings are named.
        """
        if self.is_checked or not self._check_file:
            return
        # SQLite's own check covers pages and indexes, but not the values in them, which the
        # checksums cover (design/0017).
        with self.snapshot() as connection:
            findings = [
                row[0] for row in connection.execute(f"PRAGMA integrity_check({MAX_NAMED})")
            ]
            if findings != ["ok"]:
                raise damaged(self.path, "; ".join(" ".join(text.split()) for text in findings))
            for name in TABLES:
                self.table(name)
            self.totals()
            counts = self.counts()
            number = 0
            # NOT INDEXED: a damaged index must not decide which rows are checked.
            sql = f"SELECT {', '.join(SUMMED)} FROM rollouts NOT INDEXED"
            with self.naming():
                for row in connection.execute(sql):
                    verify(row)
                    number += 1
                if number != counts.rollouts:
                    raise StoreError(f"it has {number} rollouts instead of {counts.rollouts}")
                check_trained(connection, counts.trained)
        self.is_checked = True

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Turn an error about a row into one that names the file."""
        try:
            yield
        except ROW_ERRORS as error:
            raise damaged(self.path, _message(error)) from error

    def all(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return every row of a query.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._lock:
            try:
                return self._connection.execute(sql, tuple(values)).fetchall()
            except _SQL_ERRORS as error:
                raise _unreadable(self.path, error) from error

    def pages(
        self,
        columns: Sequence[str],
        where: str,
        values: Sequence[Any],
        limit: int | None,
        page_rows: int = PAGE_ROWS,
        table: str = "rollouts",
        after: int = 0,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table in the order they were stored, with one page in memory at a time.

        `columns` begins with the id; ids are greater than `after`. The lock is free between pages,
        so the run may be written during iteration.
        """
        sql = (
            f"SELECT {', '.join(columns)} FROM {table} WHERE id > ? AND {where} ORDER BY id LIMIT ?"
        )
        while limit is None or limit > 0:
            size = page_rows if limit is None else min(page_rows, limit)
            page = self.all(sql, (after, *values, size))
            # An id that is not greater than the last would make this loop endless.
            for row in page:
                if not (isinstance(row[0], int) and row[0] > after):
                    raise damaged(self.path, f"row {row[0]} is out of order in an index")
                after = row[0]
                yield row
            if len(page) < size:
                return
            limit = None if limit is None else limit - len(page)

    def sorted(
        self,
        columns: Sequence[str],
        where: str,
        values: Sequence[Any],
        order: str,
        limit: int | None,
        offset: int,
        page_rows: int,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of `rollouts` in an order, with one page in memory at a time.

        `columns` begins with the id. The rows and their order are determined at the beginning.
        """
        # Only ids are sorted, and rows read by id, so 100,000 sorted rows take 800 KB.
        ids = self.orders.ids(self, where, values, order)
        ids = ids[offset : None if limit is None else offset + limit]
        for at in range(0, len(ids), page_rows):
            page = ids[at : at + page_rows]
            marks = ", ".join("?" for _ in page)
            sql = f"SELECT {', '.join(columns)} FROM rollouts WHERE id IN ({marks})"
            rows = {row[0]: row for row in self.all(sql, page)}
            yield from (rows[row_id] for row_id in page if row_id in rows)

    def readable(self, columns: Sequence[str]) -> Iterator[tuple[Any, ...] | int]:
        """Yield every row that SQLite can read, and the id of each row that it cannot.

        It uses no index, and reads row by row around damaged pages of the file.
        """
        names, after = ", ".join(columns), 0
        try:
            last = self.counts().last_id
        except StoreError:
            last = self.all("SELECT max(id) FROM rollouts NOT INDEXED")[0][0] or 0
        while after < last:
            sql = f"SELECT {names} FROM rollouts NOT INDEXED WHERE id > ? ORDER BY id LIMIT ?"
            try:
                rows = self.all(sql, (after, PAGE_ROWS))
                if not rows:
                    return
                page: list[tuple[Any, ...] | int] = [*rows]
                until = rows[-1][0]
            except StoreError:
                until = min(after + PAGE_ROWS, last)
                page = [
                    row
                    for row_id in range(after + 1, until + 1)
                    for row in self._one(names, row_id)
                ]
            yield from page
            after = until

    def _one(self, names: str, row_id: int) -> list[tuple[Any, ...] | int]:
        try:
            return [*self.all(f"SELECT {names} FROM rollouts NOT INDEXED WHERE id = ?", (row_id,))]
        except StoreError:
            return [row_id]

    def query(self, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Run a read-only statement, and return its rows as dicts."""
        with self._lock:
            self._connection.execute("PRAGMA query_only = ON")
            try:
                cursor = self._connection.execute(sql, tuple(values))
                names = [item[0] for item in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            except _SQL_ERRORS as error:
                raise StoreError(f"the query failed: {error}. The query was: {sql}") from error
            finally:
                self._connection.execute("PRAGMA query_only = OFF")

    def close(self) -> None:
        """Close the connection. Doing it twice does nothing."""
        with self._lock:
            self._connection.close()
            self._note.close()


def _message(error: Exception) -> str:
    is_readable = isinstance(error, StoreError | ValueError)
    return str(error) if is_readable else f"{type(error).__name__}: {error}"


def check_files(folder: Path, *, writes: bool) -> None:
    """Refuse a run if one of its files is a link, a pipe, a device or anything else irregular.

    SQLite opens its files by name and follows links, so the check comes before SQLite.

    Raises:
        StoreError: a file is not regular, or cannot be checked.
    """
    try:
        for name in _FILES:
            # Opening a FIFO waits for its other end forever, and a link may lead SQLite to another
            # person's file. Readers write to the shared memory, too.
            kind = odd_kind(folder / name, writes=writes or name.endswith("-shm"))
            if kind is None and name.endswith("journal") and _ends_with_name(folder / name):
                kind = "a journal that names another file to delete"
            if kind is not None:
                raise StoreError(
                    f"{folder / name} is {kind}, not a regular file of its own. rolltree does not "
                    "make such runs, and using it could wait forever or change other files. If you "
                    "trust the run, copy its folder (`cp -rL`) and use the copy; otherwise ask "
                    "whoever gave it to you for a new copy."
                )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"{folder} cannot be used as a run directory ({why}).") from error


def _ends_with_name(journal: Path) -> bool:
    try:
        with open(open_regular(journal), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_NAMES_ANOTHER_FILE)))
            return file.read(len(_NAMES_ANOTHER_FILE)) == _NAMES_ANOTHER_FILE and size > 512
    except FileNotFoundError:
        return False


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    if mode != "create" and not os.path.isfile(path):
        raise StoreError(
            f"{path.parent} is not a run directory: it has no {path.name}. Check the path; "
            "`rolltree runs` lists the runs below a directory."
        )
    flags = {"r": "mode=ro", "w": "mode=rw", "create": "mode=rwc"}[mode]
    if mode == "r" and not os.access(path.parent, os.W_OK) and not _has_wal(path):
        # A reader of a WAL database creates its -shm file, which a read-only disk does not allow.
        flags += "&immutable=1"
    uri = f"{path.absolute().as_uri()}?{flags}"
    try:
        return sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=_WAIT_S[mode]
        )
    except _SQL_ERRORS as error:
        raise _unreadable(path, error) from error


def _check_meta(connection: sqlite3.Connection) -> None:
    sql = "SELECT key FROM meta WHERE length(CAST(value AS BLOB)) > ? LIMIT 1"
    for (key,) in connection.execute(sql, (MAX_META_BYTES,)):
        raise ValueError(
            f"{str(key)[:100]!r} of table meta has more than {MAX_META_BYTES:,} bytes, which "
            "rolltree does not write"
        )


def _unreadable(path: Path, error: Exception) -> StoreError:
    if _has_wal(path) and not os.access(path.parent, os.W_OK):
        return StoreError(
            f"{path} cannot be read ({error}): its disk is read-only, and the last batches are "
            f"still in {path.name}-wal, which SQLite cannot use there. To read them, copy the "
            "directory to a disk that can be written and open the copy."
        )
    return StoreError(
        f"{path} cannot be read as a run database ({error}). It may be closed, damaged, or another "
        "program's file; choose another run directory, or restore it from a copy."
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _has_wal(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()


class WriterLock:
    """The lock of a run's only writer: `flock` on `run.lock`, from construction to `release`.

    The text of the file names the holder, only for error messages.

    Raises:
        StoreError: another process, or another `Run` object of this one, writes to the run.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock_soon(self._fd)
        except BlockingIOError:
            holder = _describe(self._fd)
            os.close(self._fd)
            self._fd = None
            raise StoreError(
                f"{path.parent} is being written by {holder}; two writers would mix two runs. "
                "Wait for it or stop it, choose another run directory, or read this one meanwhile: "
                f'rolltree show {path.parent}, or Run.open(path, mode="r").'
            ) from None
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        # The kernel drops the lock when the process dies; the text may name a dead process.
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(note).encode(), 0)

    @staticmethod
    def holder(path: Path) -> str | None:
        """Return the name of the process that holds the lock at `path`; None if it is free.

        The check takes a shared lock for an instant, which a starting writer waits for.
        """
        try:
            fd = open_regular(path)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _describe(fd)
        except OSError:  # a disk without flock
            return None
        finally:
            os.close(fd)
        return None

    def release(self) -> None:
        """Let another writer in. Doing it twice does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock_soon(fd: int) -> None:
    """Lock a file; retry for a moment, since another process may just be checking the lock.

    Raises:
        BlockingIOError: another process holds it.
    """
    # `holder` takes a shared lock for its check, and a writer must not fail because of that.
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt == _LOCK_ATTEMPTS - 1:
                raise
            time.sleep(0.01)


def _describe(fd: int) -> str:
    with contextlib.suppress(
        *(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)
    ):
        note = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {note['pid']} on {note['host']} (since {since})"
    return "another process"
