"""Reads a run: rollouts, steps, trained tokens, events and sums, also by SQL, and exports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rolltree.store.codec import TAG, loads
from rolltree.store.database import LIGHT_PAGE_ROWS, PAGE_ROWS, ROW_ERRORS, Database
from rolltree.store.filters import equals_clause, order_clause, where_clause
from rolltree.store.integrity import TABLES, Totals, checked, damaged, report_key, sum_rows
from rolltree.store.rows import (
    COLUMNS,
    LIGHT,
    STORED,
    SUMMED,
    Event,
    StepRow,
    StoredEvaluation,
    StoredRollout,
    as_stored,
    from_sql,
    verify,
)
from rolltree.store.trained import TRAINED_COLUMNS, TrainedRollout, trained_from_sql
from rolltree.values.errors import ConfigError, StoreError, did_you_mean

if TYPE_CHECKING:
    from rolltree.store.export import Render

T = TypeVar("T")

_METRIC_NAMES = """
SELECT key FROM (
  SELECT key, min(rollouts.id << 20 | each.id) AS first
  FROM rollouts, json_each(rollouts.metrics) AS each GROUP BY key
) ORDER BY first
"""
_META: dict[str, Any] = {"kind": str, "config": dict, "created_at": (int, float)}


class StoredRun:
    """The part of `Run` that reads; its methods may be called from any thread of the process."""

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self._database = database

    @property
    def checkpoints(self) -> Path:
        """The folder of training's checkpoints."""
        return self.path / "checkpoints"

    @property
    def meta(self) -> dict[str, Any]:
        """Everything stored with `set_meta`, plus `kind`, `config` and `created_at`."""
        rows = self._database.table("meta")
        with self._database.naming():
            meta = {key: loads(value) for key, value in rows}
            for key, kinds in _META.items():
                if not isinstance(meta.get(key), kinds):
                    raise ValueError(f"{key!r} of table meta is not what rolltree wrote")
        return meta

    @property
    def config(self) -> dict[str, Any]:
        """The redacted config that the run was made with."""
        return dict(self.meta.get("config") or {})

    @property
    def model_name(self) -> str:
        """The model's name in the settings of an evaluation or a training run; "" without one."""
        model = self.config.get("model")
        return str((model.get("name") if isinstance(model, Mapping) else model) or "")

    def kept_report(self, phase: str) -> Any:
        """Return the stored report of a phase; None if the phase has changed since, or has none."""
        return self.meta.get(report_key(phase))

    def rollouts(
        self,
        *,
        blobs: bool = True,
        limit: int | None = None,
        offset: int = 0,
        sort: str | None = None,
        **where: Any,
    ) -> Iterator[StoredRollout]:
        """Yield stored rows in the order they came, or sorted; `where` filters by columns.

        In `run.rollouts(phase="eval", status=["ok", "error"])`, a list means any of its values, and
        None means NULL. `where="reward < 0.5 and metrics/tries >= 2"` makes other comparisons.
        `sort="-reward"` begins with the greatest reward, `sort="-id"` with the row stored last.
        Without `blobs`, `record` and `tokens` stay empty and reading is fast.

        Raises:
            ConfigError: there is no such column.
            StoreError: a row is damaged or missing.
        """
        names = STORED if blobs else SUMMED
        yield from self._rows(names, where, limit, from_sql, offset, sort)

    def columns(
        self,
        names: Sequence[str],
        *,
        limit: int | None = None,
        offset: int = 0,
        sort: str | None = None,
        **where: Any,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of stored rows; rows are filtered and sorted as in `rollouts`.

        It is several times as fast as `rollouts(blobs=False)`; blobs are not among the columns. A
        row is compared with its checksum unless this object has checked the whole file, which a
        writer does when it is opened.

        Raises:
            ConfigError: there is no such column.
            StoreError: a row is damaged or missing.
        """
        for name in names:
            if name not in LIGHT:
                raise ConfigError(f"there is no light column {name!r}.{did_you_mean(name, LIGHT)}")
        stored, pick = self._picker(names)
        yield from self._rows(stored, where, limit, pick, offset, sort)

    def stored_after(self, after: int) -> Iterator[tuple[int, StoredRollout]]:
        """Yield the rows that were stored after the row of this id, each with its own id.

        Raises:
            StoreError: a row is damaged.
        """
        for row in self._database.pages(STORED, "1", (), None, after=after):
            with self._database.naming():
                rollout = from_sql(row)
            yield row[0], rollout

    def row_ids(self, *, sort: str | None = None, **where: Any) -> Sequence[int]:
        """Return the ids of the rows that pass the filters of `rollouts`, in the order of `sort`.

        Raises:
            ConfigError: there is no such column.
            StoreError: the file is damaged.
        """
        clause, values = where_clause(where)
        self._database.check()
        order = order_clause("id" if sort is None else sort)
        return self._database.orders.ids(self._database, clause, values, order)

    @property
    def last_id(self) -> int:
        """The id of the row that was stored last; 0 without rows."""
        return self._database.counts().last_id

    def sample(self, names: Sequence[str], phase: str, most: int) -> Iterator[tuple[Any, ...]]:
        """Yield columns of about `most` rows of a phase: pages of neighbours, spread over the run.

        Raises:
            StoreError: a row is damaged.
        """
        stored, pick = self._picker(names)
        # Pages of neighbours, not single rows: each page costs one descent of the index, and
        # neighbours differ little, while a run changes over its length.
        num_pages = max(1, most // PAGE_ROWS)
        first = min((each.first_id for each in self.totals() if each.phase == phase), default=1)
        last, after = self._database.counts().last_id, 0
        for page in range(num_pages):
            after = max(after, first - 1 + page * (last + 1 - first) // num_pages)
            rows = self._database.pages(stored, "phase = ?", (phase,), PAGE_ROWS, after=after)
            for row in rows:
                with self._database.naming():
                    picked = pick(row)
                after = row[0]
                yield picked

    def _picker(
        self, names: Sequence[str]
    ) -> tuple[Sequence[str], Callable[[Sequence[Any]], tuple[Any, ...]]]:
        """Return the columns to read for the wanted ones, and a function that picks those."""
        decoders = [(at, COLUMNS[name].decode) for at, name in enumerate(names)]
        decoders = [(at, decode) for at, decode in decoders if decode is not as_stored]
        places = [SUMMED.index(name) for name in names]
        # A checksum covers all columns, so checking a row needs all of them.
        is_checked = self._database.is_checked

        def pick(row: Sequence[Any]) -> tuple[Any, ...]:
            if is_checked:
                _, *picked = row
            else:
                verify(row)
                picked = [row[at] for at in places]
            for at, decode in decoders:
                picked[at] = decode(picked[at])
            return tuple(picked)

        return ("id", *names) if is_checked else SUMMED, pick

    def _rows(
        self,
        names: Sequence[str],
        where: Mapping[str, Any],
        limit: int | None,
        read: Callable[[Sequence[Any]], T],
        offset: int = 0,
        sort: str | None = None,
    ) -> Iterator[T]:
        clause, values = where_clause(where)
        before, num_rows = self._expected(where), 0
        size = PAGE_ROWS if names is STORED else LIGHT_PAGE_ROWS
        if sort is None and not offset:
            rows = self._database.pages(names, clause, values, limit, size)
        else:
            order = order_clause("id" if sort is None else sort)
            rows = self._database.sorted(names, clause, values, order, limit, offset, size)
        for row in rows:
            try:  # as `naming` does, without its cost for every row
                decoded = read(row)
            except ROW_ERRORS as error:
                raise damaged(self._database.path, str(error)) from error
            yield decoded
            num_rows += 1
        missing = limit is None and not offset and before is not None and before[0] != num_rows
        if missing and before == self._expected(where):  # no write during the iteration
            what = f"an index leads to {num_rows} of {before[0]} rollouts" if before else ""
            raise damaged(self._database.path, what)

    def _expected(self, where: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return how many rows a filter must find, and the number of batches stored so far.

        The sums have this number for phases. For other filters, check the whole file once and
        return None.
        """
        # Comparing the numbers of rows shows that a damaged index hides some. The sums have those
        # of phases; for other filters, only the whole file can show that nothing is hidden.
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
        clause, values = where_clause(where)
        expected = self._expected(where)
        if expected is not None:
            return expected[0]
        return self._database.orders.count(self._database, clause, values)

    def metric_names(self) -> list[Any]:
        """Return the names of all metrics of rollouts, in the order in which they appeared.

        SQLite finds them in a fifth of the time that reading and checking every row takes, which is
        only done if a name is not plain text.

        Raises:
            StoreError: a row is damaged.
        """
        try:
            names = [name for (name,) in self._database.all(_METRIC_NAMES)]
        except StoreError:  # some text is not JSON: reading the rows finds out which
            names = [TAG]
        is_plain = all(type(name) is str and name.isascii() and "\\" not in name for name in names)
        if is_plain and TAG not in names:
            return names
        return list(dict.fromkeys(name for (row,) in self.columns(["metrics"]) for name in row))

    @property
    def num_commits(self) -> int:
        """How many batches were ever stored; it grows with every write."""
        return self._database.counts().commits

    def totals(self) -> list[Totals]:
        """Return the sums over each phase and environment, in order of their start.

        Sums of rewards exclude delegated rollouts, as reports do.
        """
        return self._database.totals()[1]

    def phases(self) -> list[str]:
        """Return the names of the phases, in order of their start."""
        return list(dict.fromkeys(each.phase for each in self.totals()))

    def totals_with_sums(self) -> list[tuple[Totals, Totals]]:
        """Return the stored sums of each phase and environment, and those of its rows."""
        with self._database.snapshot() as connection:  # a writer may add rows between the two
            stored = self._database.totals()[1]
            rows = [
                each for phase in {t.phase for t in stored} for each in sum_rows(connection, phase)
            ]
        summed = {(each.phase, each.env_id): each for each in rows}
        return [(t, summed.get((t.phase, t.env_id), Totals("", ""))) for t in stored]

    def finished_ids(self, phase: str | None = None, *, failed: bool = True) -> set[str]:
        """Return the ids of stored requests; with `failed=False`, only of those that succeeded."""
        self._database.check()
        where: dict[str, Any] = {} if phase is None else {"phase": phase}
        clause, values = where_clause(where if failed else {**where, "status": "ok"})
        rows = self._database.all(f"SELECT request_id FROM rollouts WHERE {clause}", values)
        return {row[0] for row in rows}

    def trained(
        self,
        *,
        step: int | None = None,
        request_id: str | list[str] | None = None,
        trajectory_index: int | None = None,
    ) -> Iterator[TrainedRollout]:
        """Yield the values that training had for the tokens of rollouts, in the order of training.

        Without arguments all rows are yielded, else those of a step, of one or several requests, of
        a trajectory. A run whose `train.record_tokens` is false has none.

        Raises:
            StoreError: a row is damaged or missing.
        """
        self._database.check()
        filters = {"step": step, "request_id": request_id, "trajectory_index": trajectory_index}
        used = [equals_clause(*each) for each in filters.items() if each[1] is not None]
        clause = " AND ".join(["1", *(clause for clause, _ in used)])
        values = [value for _, operands in used for value in operands]
        names = tuple(TRAINED_COLUMNS)
        for row in self._database.pages(names, clause, values, None, table="trained"):
            with self._database.naming():
                rollout = trained_from_sql(row)
            yield rollout

    def snapshot(self) -> AbstractContextManager[object]:
        """`with run.snapshot():` reads everything as it was at one moment, while others write."""
        return self._database.snapshot()

    def steps(self) -> list[StepRow]:
        """Return the metrics of every step, in order, under the names of `docs/metrics.md`."""
        rows = self._database.table("steps")
        with self._database.naming():
            return [StepRow(step, created, loads(text)) for step, created, text in rows]

    def last_step(self) -> tuple[int, float]:
        """Return the last step and the time it was stored, without reading metrics; 0 if none."""
        sql = "SELECT coalesce(max(step), 0), coalesce(max(created_at), 0.0) FROM steps"
        step, created = self._database.all(sql)[0]
        return int(step), float(created)

    def newest_step(self) -> StepRow | None:
        """Return the metrics of the last step, without reading the others; None without steps."""
        sql = f"SELECT {TABLES['steps']}, checksum FROM steps ORDER BY step DESC LIMIT 1"
        rows = self._database.all(sql)
        with self._database.naming():
            for step, created, text in checked("steps", rows, len(rows)):
                return StepRow(step, created, loads(text))
        return None

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events of a kind, or all, oldest first."""
        rows = self._database.table("events")
        with self._database.naming():
            return [
                Event(name, created, step, loads(data))
                for _, created, name, step, data in rows
                if kind is None or name == kind
            ]

    def evaluations(self) -> list[StoredEvaluation]:
        """Return the finished held-out evaluations of a training run, by step."""
        events = self.events("evaluation")
        with self._database.naming():
            evaluations = map(StoredEvaluation.of, events)
            return sorted({done.phase: done for done in evaluations}.values())

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Run read-only SQL over `meta`, `rollouts`, `steps`, `events`, `trained`.

        The whole file is checked before the first query, since SQL does not compare checksums.

        Raises:
            StoreError: the SQL is wrong, or would write; or the file is damaged.
        """
        self._database.check()
        return self._database.query(sql, values)

    def export(
        self,
        target: str | Path,
        *,
        render: Render | None = None,
        **where: Any,
    ) -> int:
        """Write one JSON line per stored row and return their number; filters as in `rollouts`.

        Without `render` a line has every column except the blobs;
        `rolltree.rollouts.decode.export_line` is the renderer that adds messages and tokens.

        Raises:
            StoreError: the file cannot be written, or has all rows except damaged ones.
        """
        from rolltree.store.export import export_rows, light_line

        names = SUMMED if render is None else STORED
        rows = self.rollouts(blobs=render is not None, **where)
        return export_rows(Path(target), rows, self._database, names, render or light_line, where)
