"""A run directory: `run.db`, `config.json`, `checkpoints/`, one writer, any number of readers.

Append-only rollouts, metrics per training step, events and metadata, each batch one transaction.
Training writes checkpoints itself, below `Run.checkpoints`; `rolltree.rollouts.record` turns a
rollout into rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from rolltree.errors import ConfigError, RolltreeError, StoreError, did_you_mean
from rolltree.redact import known_secrets, redact, remember, secrets_in
from rolltree.store.codec import dumps, loads, to_plain
from rolltree.store.database import LIGHT_PAGE_ROWS, PAGE_ROWS, Database, WriterLock
from rolltree.store.integrity import (
    MAX_TOLD,
    Change,
    Totals,
    damaged,
    read_totals,
    report_key,
)
from rolltree.store.rows import (
    BLOBS,
    COLUMNS,
    LIGHT,
    STORED,
    SUMMED,
    Event,
    StepRow,
    StoredRollout,
    as_stored,
    from_sql,
    to_sql,
    verify,
    with_checksums,
)

_INSERT = (
    f"INSERT INTO rollouts ({', '.join(STORED)}) VALUES ({', '.join('?' for _ in STORED)}) "
    "ON CONFLICT (request_id, trajectory_index) DO NOTHING"
)
_FILTERS = [name for name in COLUMNS if name not in (*BLOBS, "metrics", "input", "errors")]
_REQUEST_ID = list(COLUMNS).index("request_id")
_ROW_ERRORS = (RolltreeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a row, or rendering it, may raise when there is something wrong with the row."""
T = TypeVar("T")
_MISSING = object()


class Run:
    """One run. Make it with `create`, `open` or `open_or_create`; close it or use `with`.

    Methods may be called from any thread of the process.
    """

    def __init__(self, path: Path, database: Database, lock: WriterLock | None) -> None:
        self.path = path
        self._database = database
        self._lock = lock
        self._secrets: tuple[str, ...] = ()

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        kind: str = "run",
        secrets: Sequence[str] = (),
    ) -> Run:
        """Make a new run directory and open it for writing.

        `config` is stored redacted, in the database and as `config.json` for people; what stands
        under its secret keys is protected, and cut out of all that is stored. `secrets`
        are those of `protect`.

        Raises:
            StoreError: there is already a run, or a file that rolltree did not make.
        """
        secrets = (*secrets, *secrets_in(config or {}))
        run = cls._make(Path(path), _config_data(config or {}, secrets), kind, secrets)
        if not run._database.is_new:
            run.close()
            raise StoreError(
                f"{path} already holds a run, and a new one would mix with it. Continue it with "
                "Run.open(path) or Run.open_or_create(path, ...), or choose another directory."
            )
        return run

    @classmethod
    def open(cls, path: str | Path, mode: Literal["r", "w"] = "w") -> Run:
        """Open an existing run to continue it (`"w"`), or to read it while others write (`"r"`).

        Raises:
            StoreError: not a run, of another schema, or (`"w"`) being written by another process.
        """
        directory = Path(path)
        if mode == "r":
            return cls(directory, Database(directory / "run.db", "r"), None)
        if not (directory / "run.db").is_file():
            Database(directory / "run.db", "w")  # raises with the explanation
        with _writing(directory):
            lock = WriterLock(directory / "run.lock")
        try:
            return cls(directory, Database(directory / "run.db", "w"), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_or_create(
        cls,
        path: str | Path,
        *,
        config: Mapping[str, Any],
        kind: str = "run",
        may_change: Sequence[str] = (),
        secrets: Sequence[str] = (),
        advice: str = "",
    ) -> Run:
        """Continue the run at `path`, or make it: what "the same command again" means.

        Settings bind when the first rollout or step is stored; until then other ones replace them.
        `may_change` names dotted keys (or their parents) in which a continued run may differ
        from its first start, such as `"max_concurrent"`. `advice` ends the message about others.

        Raises:
            ConfigError: the run was started with other settings.
        """
        secrets = (*secrets, *secrets_in(config))
        data = _config_data(config, secrets)
        run = cls._make(Path(path), data, kind, secrets)
        if run._database.is_new:
            return run
        differences = config_differences(run.config, data, may_change)
        if not run.is_bound:
            run._rebind(data, kind)
        elif differences:
            run.close()
            raise ConfigError(
                f"{path} was started with other settings, which one run must not mix: "
                f"{'; '.join(differences)}. Choose another run directory, or use the settings in "
                f"{Path(path) / 'config.json'}.{advice and ' ' + advice}"
            )
        run.add_event("resumed")
        return run

    @property
    def is_bound(self) -> bool:
        """Whether a rollout or a step is stored, so that the settings may no longer change."""
        sql = "SELECT EXISTS (SELECT 1 FROM rollouts) OR EXISTS (SELECT 1 FROM steps)"
        return bool(self._database.all(sql)[0][0])

    def _rebind(self, config: Any, kind: str) -> None:
        """Take other settings, for a run that holds nothing yet."""
        if config == self.config and kind == self.meta["kind"]:
            return
        with self._database.transaction() as change:
            for key, value in (("config", config), ("kind", kind)):
                change.put("meta", key, dumps(value))
        write_config(self.path / "config.json", self.config)

    @classmethod
    def _make(cls, path: Path, config: Any, kind: str, secrets: Sequence[str]) -> Run:
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(path / "run.lock")
        meta = {"kind": kind, "config": config, "created_at": time.time()}
        try:
            first_meta = {key: dumps(value) for key, value in meta.items()}
            run = cls(path, Database(path / "run.db", "create", first_meta), lock)
            run.protect(*secrets)
            with _writing(path):
                write_config(path / "config.json", run.config)
        except BaseException:
            lock.release()
            raise
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and let another writer in."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def checkpoints(self) -> Path:
        """Where training keeps its checkpoints."""
        return self.path / "checkpoints"

    @property
    def read_only(self) -> bool:
        """Whether this object may only read."""
        return self._lock is None

    @property
    def meta(self) -> dict[str, Any]:
        """Everything stored with `set_meta`, plus `kind`, `config` and `created_at`."""
        return {key: loads(value) for key, value in self._database.table("meta")}

    @property
    def config(self) -> dict[str, Any]:
        """The redacted config that the run was made with."""
        return dict(self.meta.get("config") or {})

    def set_meta(self, key: str, value: Any) -> None:
        """Store one value under a name; the last one wins."""
        self._must_write()
        text = dumps(redact(value, self._secrets))
        with self._database.transaction() as change:
            change.put("meta", key, text)

    def keep_report(self, phase: str, report: Any, *, num_requests: int) -> bool:
        """Store what was computed from all rollouts of a phase; say whether it was.

        It is not when the phase has another number of requests than it was computed from. It
        stays until the phase changes.
        """
        self._must_write()
        text = dumps(redact(report, self._secrets))
        with self._database.transaction() as change:
            totals = read_totals(change.connection, change.counts)
            is_whole = num_requests == sum(t.num_requests for t in totals if t.phase == phase)
            if is_whole:
                change.put("meta", report_key(phase), text)
        return is_whole

    def kept_report(self, phase: str) -> Any:
        """Return the report that was stored last, None when the phase has changed since."""
        return self.meta.get(report_key(phase))

    def protect(self, *secrets: str) -> None:
        """Name secrets of this process; they are cut out of everything written from now on.

        Texts of fewer than eight characters are ignored: cutting them out would tear real data.
        So are identities (request, group, phase, example), by which a run is continued.
        """
        self._secrets = known_secrets((*self._secrets, *secrets))
        remember(*secrets)

    def add_rollouts(
        self,
        rows: Iterable[StoredRollout],
        *,
        replace_failed: bool = False,
        replaced: Collection[str] = (),
    ) -> int:
        """Store rows in one transaction and return how many were new.

        A `(request_id, trajectory_index)` that is stored already is left as it is, so the same
        result may come twice and is counted once. With `replace_failed`, a request whose stored
        rows failed is replaced, and an event keeps what failed. The requests of `replaced` are
        replaced whatever became of them.
        """
        self._must_write()
        values = [to_sql(row, self._secrets) for row in rows]
        with self._database.transaction() as change:
            for request_id in dict.fromkeys(row[_REQUEST_ID] for row in values):
                if replace_failed or request_id in replaced:
                    self._drop(change, request_id, failed=request_id not in replaced)
            return sum(self._add(change, row) for row in values)

    def _add(self, change: Change, values: Sequence[Any]) -> int:
        stored = with_checksums(change.next_id(), values)
        added = change.connection.execute(_INSERT, stored).rowcount
        if added:
            change.count(dict(zip(STORED, stored, strict=True)), 1)
        else:
            change.counts.last_id -= 1
        return added

    def _drop(self, change: Change, request_id: str, *, failed: bool) -> None:
        """Take the rows of a request away; with `failed` only if one of them failed."""
        names = ("id", *LIGHT)
        found = change.connection.execute(
            f"SELECT {', '.join(names)} FROM rollouts WHERE request_id = ?", (request_id,)
        ).fetchall()
        rows = [dict(zip(names, row, strict=True)) for row in found]
        wrong = [row for row in rows if row["status"] == "error"]
        if wrong:
            errors = [{"type": r["error_type"], "errors": loads(r["errors"])} for r in wrong]
            data = {"request_id": request_id, "failed": errors}
            self._insert_event(change, "retried", data, None)
        if wrong or (rows and not failed):
            change.connection.execute("DELETE FROM rollouts WHERE request_id = ?", (request_id,))
            for row in rows:
                change.count(row, -1)
            for phase in {row["phase"] for row in rows if row["reward"] is not None}:
                change.sum_again(phase)  # taking floats away does not leave the sum of the others

    def rollouts(
        self, *, blobs: bool = True, limit: int | None = None, **where: Any
    ) -> Iterator[StoredRollout]:
        """Yield stored rows in the order they came; `where` compares columns.

        `run.rollouts(phase="eval", status=["ok", "error"])`: a list means any of these, None
        means NULL. Without `blobs`, `record` and `tokens` stay empty and reading is fast.

        Raises:
            ConfigError: there is no such column.
            StoreError: a row is damaged or missing.
        """
        yield from self._rows(STORED if blobs else SUMMED, where, limit, from_sql)

    def columns(self, names: Sequence[str], **where: Any) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of stored rows, in the order they came; filters as in `rollouts`.

        It is several times as fast as `rollouts(blobs=False)`; blobs are not among the columns. A
        row is compared with its checksum unless this object has checked the whole file, as one that
        writes does when it is opened.

        Raises:
            ConfigError: there is no such column.
            StoreError: a row is damaged or missing.
        """
        for name in names:
            if name not in LIGHT:
                raise ConfigError(f"there is no light column {name!r}.{did_you_mean(name, LIGHT)}")
        is_checked = self._database.is_checked  # then rows need no second check
        columns = ("id", *names) if is_checked else SUMMED
        places = [SUMMED.index(name) for name in names]
        decoders = [(at, COLUMNS[name].decode) for at, name in enumerate(names)]
        decoders = [(at, decode) for at, decode in decoders if decode is not as_stored]

        def pick(row: Sequence[Any]) -> tuple[Any, ...]:
            if is_checked:
                found = list(row[1:])
            else:
                verify(row)
                found = [row[at] for at in places]
            for at, decode in decoders:
                found[at] = decode(found[at])
            return tuple(found)

        yield from self._rows(columns, where, None, pick)

    def _rows(
        self,
        names: Sequence[str],
        where: Mapping[str, Any],
        limit: int | None,
        read: Callable[[Sequence[Any]], T],
    ) -> Iterator[T]:
        clause, values = _where(where)
        before, num_rows = self._expected(where), 0
        size = PAGE_ROWS if names is STORED else LIGHT_PAGE_ROWS
        for row in self._database.pages(names, clause, values, limit, size):
            with self._database.naming():
                found = read(row)
            yield found
            num_rows += 1
        missing = limit is None and before is not None and before[0] != num_rows
        if missing and before == self._expected(where):  # nobody wrote during the iteration
            what = f"an index leads to {num_rows} of {before[0]} rollouts" if before else ""
            raise damaged(self._database.path, what)

    def _expected(self, where: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return how many rows a filter must find, and the number of batches stored until now.

        The sums know that for phases. For any other filter the whole file is checked, once.
        """
        if where.keys() - {"phase"}:
            self._database.check()
            return None
        counts, totals = self._database.totals()
        if "phase" not in where:
            return counts.rollouts, counts.commits
        wanted = where["phase"]
        phases = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else [wanted]
        return sum(t.num_rollouts for t in totals if t.phase in phases), counts.commits

    def num_rollouts(self, **where: Any) -> int:
        """Count stored rows, with the filters of `rollouts`."""
        clause, values = _where(where)
        expected = self._expected(where)
        if expected is not None:
            return expected[0]
        sql = f"SELECT count(*) FROM rollouts WHERE {clause}"
        return int(self._database.all(sql, values)[0][0])

    def totals(self) -> list[Totals]:
        """Return the sums over each phase and environment, in the order they began."""
        return self._database.totals()[1]

    def finished_ids(self, phase: str | None = None, *, failed: bool = True) -> set[str]:
        """Return the ids of requests that are stored; without `failed`, only those that worked."""
        self._database.check()
        where: dict[str, Any] = {} if phase is None else {"phase": phase}
        clause, values = _where(where if failed else {**where, "status": "ok"})
        rows = self._database.all(f"SELECT request_id FROM rollouts WHERE {clause}", values)
        return {row[0] for row in rows}

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of one optimizer step; the same step again replaces them."""
        self._must_write()
        text = dumps(redact(dict(metrics), self._secrets))
        with self._database.transaction() as change:
            change.put("steps", int(step), time.time(), text)

    def steps(self) -> list[StepRow]:
        """Return the metrics of every step, in order."""
        rows = self._database.table("steps")
        return [StepRow(step, created, loads(text)) for step, created, text in rows]

    def truncate_steps(self, after: int, *, rollout_phases: Sequence[str] = ()) -> int:
        """Forget the steps after a checkpoint's, which a resumed trainer takes again.

        Rollouts of `rollout_phases` with a later `train_step` go with them. An event records how
        many rows went. Returns the number of steps forgotten.
        """
        self._must_write()
        with self._database.transaction() as change:
            execute = change.connection.execute
            steps = execute("DELETE FROM steps WHERE step > ?", (after,)).rowcount
            change.counts.steps -= steps
            rollouts = 0
            for phase in rollout_phases:
                late = "DELETE FROM rollouts WHERE phase = ? AND train_step > ?"
                gone = execute(late, (phase, after)).rowcount
                if gone:
                    change.counts.rollouts -= gone
                    change.sum_again(phase)
                rollouts += gone
            if steps or rollouts:
                data = {"steps": steps, "rollouts": rollouts}
                self._insert_event(change, "truncated", data, after)
        return steps

    def add_event(
        self, kind: str, data: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> None:
        """Record that something happened."""
        self._must_write()
        with self._database.transaction() as change:
            self._insert_event(change, kind, data or {}, step)

    def events(self, kind: str | None = None) -> list[Event]:
        """Return what happened, oldest first."""
        return [
            Event(name, created, step, loads(data))
            for _, created, name, step, data in self._database.table("events")
            if kind is None or name == kind
        ]

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Run read-only SQL over `meta`, `rollouts`, `steps`, `events`.

        The whole file is checked before the first query: SQL itself reads what is there.

        Raises:
            StoreError: the SQL is wrong, or would write; or the file is damaged.
        """
        self._database.check()
        return self._database.query(sql, values)

    def export(
        self,
        target: str | Path,
        *,
        render: Callable[[StoredRollout], Mapping[str, Any]] | None = None,
        **where: Any,
    ) -> int:
        """Write one JSON line per stored row and return how many; filters as in `rollouts`.

        Without `render` a line has every column but the blobs;
        `rolltree.rollouts.export_line` is the renderer that adds messages and tokens.

        Raises:
            StoreError: the file cannot be written, or rows are damaged; all others are in it then.
        """
        blobs, path = render is not None, Path(target)
        columns = _columns if render is None else render
        try:
            return _write_lines(path, map(columns, self.rollouts(blobs=blobs, **where)))
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror}), so the export is not complete. "
                "Check the folder and the free space, or choose another file."
            ) from error
        except ConfigError:
            raise
        except _ROW_ERRORS as error:
            cause = error
        lost: list[str] = []
        number = _write_lines(path, self._whole_lines(columns, blobs, where, lost))
        if not lost:
            raise cause
        more = f" and {len(lost) - MAX_TOLD} more" if len(lost) > MAX_TOLD else ""
        raise StoreError(
            f"{number} rollouts are in {path}, and these could not be read: "
            f"{'; '.join(lost[:MAX_TOLD])}{more}. Something changed {self._database.path} after "
            "rolltree wrote it; restore it from a copy to have them."
        ) from cause

    def _whole_lines(
        self,
        render: Callable[[StoredRollout], Mapping[str, Any]],
        blobs: bool,
        where: Mapping[str, Any],
        lost: list[str],
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the lines of all rows that are whole, and note what is not; no index is used."""
        num_seen = 0
        for found in self._database.readable(STORED if blobs else SUMMED):
            num_seen += 1
            if isinstance(found, int):
                lost.append(f"row {found} (SQLite cannot read it)")
                continue
            try:
                row = from_sql(found)
                line = render(row) if _matches(row, where) else None
            except StoreError as error:
                lost.append(str(error).rstrip("."))
            except _ROW_ERRORS as error:
                lost.append(f"rollout {found[1]!r} (row {found[0]}): {type(error).__name__}")
            else:
                if line is not None:
                    yield line
        with contextlib.suppress(StoreError):
            missing = self._database.counts().rollouts - num_seen
            if missing > 0:
                lost.append(f"{missing} rows that are no longer there")

    def _must_write(self) -> None:
        if self.read_only:
            raise StoreError(
                f"{self.path} was opened for reading, so nothing can be stored in it. Open it "
                'with Run.open(path, mode="w").'
            )

    def _insert_event(
        self, change: Change, kind: str, data: Mapping[str, Any], step: int | None
    ) -> None:
        text = dumps(redact(dict(data), self._secrets))
        change.put("events", change.next_id(), time.time(), kind, step, text)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}), and a run writes its rollouts there. "
            "Make room or check the disk, or choose another run directory."
        ) from error


def _config_data(config: Mapping[str, Any], secrets: Sequence[str]) -> Any:
    return to_plain(redact(dict(config), known_secrets(secrets)))


def _columns(row: StoredRollout) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS if name not in BLOBS}


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    number = 0
    # Half a surrogate pair, which models do write, has no UTF-8: JSON's own escape says it.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for line in lines:
            file.write(json.dumps(to_plain(line), ensure_ascii=False) + "\n")
            number += 1
    return number


def _matches(row: StoredRollout, where: Mapping[str, Any]) -> bool:
    for name, value in where.items():
        found = getattr(row, name)
        if isinstance(value, (list, tuple, set, frozenset)):
            if found not in value:
                return False
        elif found != value:
            return False
    return True


def _where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    clauses: list[str] = ["1"]
    values: list[Any] = []
    for name, value in filters.items():
        if name not in _FILTERS:
            raise ConfigError(
                f"rollouts cannot be filtered by {name!r}.{did_you_mean(name, _FILTERS)}"
            )
        if isinstance(value, (list, tuple, set, frozenset)):
            named = [item for item in value if item is not None]
            clause = f"{name} IN ({', '.join('?' for _ in named)})"
            clauses.append(f"({clause} OR {name} IS NULL)" if None in value else clause)
            values.extend(named)
        else:
            clauses.append(f"{name} IS ?")
            values.append(value)
    return " AND ".join(clauses), values


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json` through a temporary file and a rename, if its content would change."""
    text = json.dumps(config, indent=2) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], may_change: Sequence[str] = ()
) -> list[str]:
    """Return one text per dotted key in which two configs differ, `may_change` left out.

    >>> config_differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 4}, may_change=["c"])
    ['a.b was 1 and is now 3']
    """
    before, after = _flatten(old), _flatten(new)
    found = []
    for key in sorted(before.keys() | after.keys()):
        allowed = any(key == name or key.startswith(name + ".") for name in may_change)
        was, now = before.get(key, _MISSING), after.get(key, _MISSING)
        if not allowed and was != now:
            found.append(f"{key} was {_show(was)} and is now {_show(now)}")
    return found


def _show(value: object) -> str:
    return "not set" if value is _MISSING else repr(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
