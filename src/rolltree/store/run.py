"""A run directory: `run.db`, `config.json`, `checkpoints/`, one writer, any number of readers.

It stores append-only rollouts, metrics per training step, events and metadata; each batch is one
transaction. Training itself writes checkpoints, below `Run.checkpoints`; `rolltree.rollouts.record`
turns a rollout into rows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rolltree._helpers.redact import environment_secrets, known_secrets, redact, remember
from rolltree.store.change import MAX_META_BYTES, Change
from rolltree.store.codec import dumps, loads
from rolltree.store.database import Database, WriterLock, check_files
from rolltree.store.integrity import read_totals, report_key
from rolltree.store.reading import StoredRun
from rolltree.store.rows import COLUMNS, SqlRow, StoredRollout, to_sql
from rolltree.store.settings import (
    config_differences,
    stored_settings,
    with_defaults,
    without,
    write_config,
)
from rolltree.store.trained import TrainedRollout, trained_to_sql
from rolltree.values.errors import ConfigError, Stopped, StoreError

_REQUEST_ID = list(COLUMNS).index("request_id")


class Run(StoredRun):
    """One run. Make it with `create`, `open` or `open_or_create`; close it or use `with`.

    Methods may be called from any thread of the process.
    """

    def __init__(self, path: Path, database: Database, lock: WriterLock | None) -> None:
        super().__init__(path, database)
        self._lock = lock
        self._secrets: tuple[str, ...] = ()
        self._retried: dict[str, int] | None = (
            None  # the id of each cause's event; read when it is first needed
        )

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

        `config` is stored redacted, in the database and as `config.json` for people. The values of
        its secret keys are cut out of everything that is stored, as are `secrets` (see `protect`).

        Raises:
            StoreError: the directory has a run already, or a file that rolltree did not make.
        """
        data, secrets = stored_settings(config or {}, secrets)
        run = cls._make(Path(path), data, kind, secrets)
        if not run._database.is_new:
            run.close()
            raise StoreError(
                f"{path} already holds a run, and a new one would mix with it. Continue it with "
                "Run.open(path) or Run.open_or_create(path, ...), or choose another directory."
            )
        return run

    @classmethod
    def open(
        cls,
        path: str | Path,
        mode: Literal["r", "w"] = "w",
        *,
        check: Literal["file", "rows"] = "file",
    ) -> Run:
        """Open an existing run to continue it (`"w"`), or to read it while others write (`"r"`).

        Rows that are read are compared with their checksums, and the whole file before the first
        filter. `check="rows"` leaves out the check of the file, so that the first rows come at
        once; then a damaged index may hide rows.

        Raises:
            StoreError: `path` is not a run or has another schema, or (`"w"`) another process is
                writing it.
        """
        directory = Path(path)
        if mode == "r":
            return cls(directory, Database(directory / "run.db", "r", check=check), None)
        if not os.path.isfile(directory / "run.db"):
            Database(directory / "run.db", "w")  # raises with the explanation
        check_files(directory, writes=True)
        # The lock comes before the database: a second writer must not even merge its log.
        with _writing(directory):
            lock = WriterLock(directory / "run.lock")
        try:
            return cls(directory, Database(directory / "run.db", "w"), lock)
        except BaseException:  # Ctrl-C, too
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
        defaults: Mapping[str, Any] | None = None,
        removed: Collection[str] = (),
        secrets: Sequence[str] = (),
        advice: str = "",
    ) -> Run:
        """Continue the run at `path`, or make it, so that the same command also resumes.

        Settings are fixed when the first rollout or step is stored; until then, new ones replace
        them. `may_change` names dotted keys (or their parents), such as `"max_concurrent"`, in
        which a continued run may differ from its first start; their new values are stored, and the
        event `resumed` has the old ones. A setting that the run lacks, because it is newer, is
        compared as if the run had its value in `defaults`, and is stored. One of the dotted keys
        `removed`, which only older runs have, is not compared. `advice` is appended to the message
        about different settings.

        Raises:
            ConfigError: the run was started with different settings.
        """
        data, secrets = stored_settings(config, secrets)
        run = cls._make(Path(path), data, kind, secrets)
        if run._database.is_new:
            return run
        known = with_defaults(without(run.config, removed), defaults or {})
        differences = config_differences(known, data, may_change)
        if not run.is_bound:
            run._rebind(data, kind)
        elif differences:
            run.close()
            raise ConfigError(
                f"{path} was started with different settings, which a run must not mix: "
                f"{'; '.join(differences)}. Choose another run directory, or use the settings in "
                f"{Path(path) / 'config.json'}.{advice and ' ' + advice}"
            )
        else:
            run._rebind(data, run.meta["kind"])
        changed = config_differences(known, data)
        run.add_event("resumed", {"changed": changed} if changed and run.is_bound else None)
        return run

    @property
    def is_bound(self) -> bool:
        """Whether a rollout or a step is stored, so that the settings may no longer change."""
        sql = "SELECT EXISTS (SELECT 1 FROM rollouts) OR EXISTS (SELECT 1 FROM steps)"
        return bool(self._database.all(sql)[0][0])

    def _rebind(self, config: Any, kind: str) -> None:
        """Store new settings: of a run that is still empty, or those that may change or are new."""
        if config == self.config and kind == self.meta["kind"]:
            return
        with self._database.transaction() as change:
            for key, value in (("config", config), ("kind", kind)):
                change.put("meta", key, dumps(value))
        write_config(self.path / "config.json", self.config)

    @classmethod
    def _make(cls, path: Path, config: Any, kind: str, secrets: Sequence[str]) -> Run:
        make_run_folder(path)
        with _writing(path):
            check_files(path, writes=True)
            lock = WriterLock(path / "run.lock")
        meta = {"kind": kind, "config": config, "created_at": time.time()}
        try:
            first_meta = {key: dumps(value) for key, value in meta.items()}
            run = cls(path, Database(path / "run.db", "create", first_meta), lock)
            run.protect(*secrets)
            with _writing(path):
                write_config(path / "config.json", run.config)
        except BaseException:  # Ctrl-C, too
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
        if error is not None and not self.read_only:
            self._note_end(error)
        self.close()
        if error is None and not self.read_only:
            self._database.check_place()

    def _note_end(self, error: BaseException) -> None:
        """Store that, and why, the run's `with` block was left before its end."""
        is_failure = isinstance(error, Exception) and not isinstance(error, Stopped)
        data = {"state": "failed" if is_failure else "stopped"}
        if is_failure:
            data |= {"error": type(error).__name__, "message": str(error)}
        # The reason may be one that prevents storing, such as a full disk.
        with contextlib.suppress(StoreError):
            self.add_event("ended", data)

    def close(self) -> None:
        """Close the database and let another writer in."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def read_only(self) -> bool:
        """Whether this object may only read."""
        return self._lock is None

    def set_meta(self, key: str, value: Any) -> None:
        """Store a value under a name, replacing an earlier one."""
        self._must_write()
        text = dumps(redact(value, self._known))
        with self._database.transaction() as change:
            change.put("meta", key, text)

    def plan(self, what: str, number: int) -> None:
        """Note the planned number of `steps`, or of the requests of `phase/NAME`.

        It shows how far the run is; a later number replaces an earlier one.
        """
        planned = self.meta.get("planned") or {}
        if planned.get(what) != number:
            self.set_meta("planned", {**planned, what: number})

    def keep_report(self, phase: str, report: Any, *, num_requests: int) -> bool:
        """Store a report on all rollouts of a phase; return whether it was stored.

        It is not stored if the phase's number of requests differs from `num_requests`, from which
        the report was computed. It is kept until the phase changes.
        """
        self._must_write()
        text = dumps(redact(report, self._known))
        with self._database.transaction() as change:
            # The report would hide rollouts that came after it was computed.
            totals = read_totals(change.connection, change.counts)
            is_whole = num_requests == sum(t.num_requests for t in totals if t.phase == phase)
            # It is kept only to save time.
            is_kept = is_whole and len(text.encode()) <= MAX_META_BYTES
            if is_kept:
                change.put("meta", report_key(phase), text)
        return is_kept

    @property
    def _known(self) -> tuple[str, ...]:
        """The secrets known now: an environment may have loaded its keys since the start."""
        return known_secrets((*self._secrets, *environment_secrets()))

    def protect(self, *secrets: str) -> None:
        """Register secrets of this process; they are cut out of everything written from now on.

        Secrets of fewer than eight characters are ignored, since cutting them out would damage real
        data. Identities (request, group, phase, example) are never cut, since resuming needs them.
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

        A stored row with the same `(request_id, trajectory_index)` is kept, so a result that comes
        twice is counted once. With `replace_failed`, a request whose stored rows failed is
        replaced, and an event per cause and place counts such requests. Requests in `replaced` are
        replaced in any case.
        """
        self._must_write()
        # Encoding and cutting secrets take most of the time, so they come before the write lock.
        known = self._known
        values = [to_sql(row, known) for row in rows]
        return self.add_encoded(values, replace_failed=replace_failed, replaced=replaced)

    def add_encoded(
        self, values: Sequence[SqlRow], *, replace_failed: bool, replaced: Collection[str]
    ) -> int:
        """Do what `add_rollouts` does, with rows that another process encoded by `to_sql`."""
        self._must_write()
        with self._database.transaction() as change:
            for request_id in dict.fromkeys(row[_REQUEST_ID] for row in values):
                if replace_failed or request_id in replaced:
                    gone = change.drop_request(request_id, if_failed=request_id not in replaced)
                    if gone:
                        self._count_retry(change, request_id, gone)
            return sum(change.add_rollout(row) for row in values)

    def add_step(
        self, step: int, metrics: Mapping[str, Any], trained: Sequence[TrainedRollout] = ()
    ) -> None:
        """Store the metrics of one training step, and the values of the tokens that it trained.

        Storing a step again replaces both.

        Raises:
            StoreError: `trained` has rows of a different step.
        """
        self._must_write()
        others = {row.step for row in trained} - {step}
        if others:
            raise StoreError(
                f"tokens of step {min(others)} were given with the metrics of step {step}, and "
                "would be counted in the wrong step. Pass each step's own tokens."
            )
        text = dumps(redact(dict(metrics), self._known))
        # Metrics and tokens go into one transaction, so that a step is stored whole or not at all.
        values = [trained_to_sql(row) for row in trained]
        with self._database.transaction() as change:
            change.put("steps", int(step), time.time(), text)
            change.put_trained(int(step), values)

    def truncate_steps(self, after: int, *, rollout_phases: Sequence[str] = ()) -> int:
        """Delete the steps after a checkpoint's, which a resumed trainer trains again.

        Rollouts of `rollout_phases` with a later `train_step` are deleted, too. An event records
        the numbers of deleted rows. Return the number of deleted steps.
        """
        self._must_write()
        with self._database.transaction() as change:
            execute = change.connection.execute
            steps = execute("DELETE FROM steps WHERE step > ?", (after,)).rowcount
            change.counts.steps -= steps
            change.drop_trained("step > ?", after)
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
        """Store an event."""
        self._must_write()
        with self._database.transaction() as change:
            self._insert_event(change, kind, data or {}, step)

    def announce(self, message: str, show: Callable[[str], object]) -> None:
        """Store a notice for the user, and show it."""
        self.add_event("notice", {"message": message})
        show(message)

    def _must_write(self) -> None:
        if self.read_only:
            raise StoreError(
                f"{self.path} was opened for reading, so nothing can be stored in it. Open it "
                'with Run.open(path, mode="w").'
            )

    def _count_retry(
        self, change: Change, request_id: str, failed: Sequence[Mapping[str, Any]]
    ) -> None:
        """Count a failed request that is replaced, in one event per cause and place.

        While a server is away for an hour, every rollout fails hundreds of times. The first failure
        is kept whole; of the others only their number, the times, and how long they waited.
        """
        execute, now = change.connection.execute, time.time()
        if self._retried is None:
            sql = "SELECT id, data FROM events WHERE kind = 'retried' AND data LIKE '{\"cause\"%'"
            self._retried = {str(loads(text)["cause"]): row_id for row_id, text in execute(sql)}
        errors = failed[0]["errors"]
        places = [error.get("function") or error.get("tool") for error in errors]
        place = next((str(each) for each in places if each), "")
        phase = errors[0].get("phase") if errors else None
        cause = [each or "" for each in (failed[0]["type"], phase, place)]
        sql = "SELECT created_at, data FROM events WHERE id = ? AND kind = 'retried'"
        row_id = self._retried.get(str(cause), 0)
        created_at, text = execute(sql, (row_id,)).fetchone() or (now, "{}")
        data = loads(text)
        # A transaction that was rolled back may have left an id that belongs to another cause now.
        if data.get("cause") != cause:
            row_id, created_at = change.next_id(), now
            kept = [{"type": each["type"], "errors": each["errors"]} for each in failed]
            data = {"cause": cause, "times": 0, "first_at": now, "wait_s": 0.0, "failed": kept}
        data |= {
            "times": data["times"] + 1,
            "last_at": now,
            "wait_s": data["wait_s"] + max(0.0, now - min(each["created_at"] for each in failed)),
            "request_id": request_id,
        }
        change.put("events", row_id, created_at, "retried", None, dumps(redact(data, self._known)))
        self._retried[str(cause)] = row_id

    def _insert_event(
        self, change: Change, kind: str, data: Mapping[str, Any], step: int | None
    ) -> None:
        text = dumps(redact(dict(data), self._known))
        change.put("events", change.next_id(), time.time(), kind, step, text)


def make_run_folder(path: str | Path) -> None:
    """Make the folder of a run, as a command does whose run is opened only after slow work.

    Raises:
        StoreError: it cannot be made.
    """
    with _writing(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise StoreError(
            f"{path} cannot be written ({why}), but a run stores its rollouts there. Make room or "
            "check the disk, or choose another run directory."
        ) from error
