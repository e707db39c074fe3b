"""`read_run`: a stored run as tidy tables, read in the columns and rows that one asks for.

    with rt.read_run("runs/demo") as data:
        data.rollouts(phase="eval_after").to_pandas()

The run may be written by another process meanwhile; a table shows what is stored when it is read.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from rolltree.errors import UnknownName, did_you_mean
from rolltree.records.columns import BREAKS, CALLS, EVENTS, ROLLOUTS, STEPS, TABLES, TOKENS
from rolltree.records.table import Batch, Column, Table, clean_text
from rolltree.store import Run, to_plain
from rolltree.store.filters import METRIC, order_clause, where_clause
from rolltree.tokens import Decoder

_BATCH_ROWS = 8192
_CHOICES = ("limit", "offset", "sort")


def read_run(path: str | Path) -> RunData:
    """Open a stored run to read its tables; nothing of it is loaded or run.

    Raises:
        StoreError: there is no run at `path`, or it cannot be read.
    """
    return RunData(Run.open(path, mode="r"))


class RunData:
    """The tables of one run. Close it, use `with`, or let go of it.

    Every method returns a `Table` that reads when its rows are asked for. Its filters choose
    rollouts as `Run.rollouts` does: columns (`phase="train"`, `train_step=[3, 4]`), conditions
    (`where="reward < 0.5 and metrics/tries >= 2"`), `sort="-reward"`, `limit`, `offset`. A wrong
    filter is refused at once.

    Attributes:
        run: the open run, for what is no table: its config, its metadata, SQL.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._close = weakref.finalize(self, run.close)

    def __enter__(self) -> RunData:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the run; tables that were not read yet cannot be read after that."""
        self._close()

    def __repr__(self) -> str:
        return f"<RunData {self.run.path}: {', '.join(TABLES)}>"

    def table(self, name: str, **filters: Any) -> Table:
        """Return the table of this name, one of `rolltree.records.columns.TABLES`.

        Raises:
            UnknownName: there is no such table.
            ConfigError: rollouts cannot be filtered by that, or the table takes no filters.
        """
        if name not in TABLES:
            raise UnknownName(f"a run has no table {name!r}.{did_you_mean(name, TABLES)}")
        found: Table = getattr(self, name)(**filters)
        return found

    def rollouts(self, **filters: Any) -> Table:
        """Return one row per rollout, without its messages and tokens.

        Besides the documented columns there is `metrics/NAME` for every metric of the run, where it
        is a number.
        """
        _check(filters)
        metrics = [Column(METRIC + name, "float64", "a metric") for name in self._metrics()]
        columns = [*ROLLOUTS, *metrics]
        return Table("rollouts", columns, lambda names: self._rollouts(names, filters))

    def steps(self) -> Table:
        """Return one row per optimizer step, with one column per metric that is a number."""
        steps = self.run.steps()
        metrics = dict.fromkeys(
            name for step in steps for name, value in step.metrics.items() if _is_number(value)
        )
        columns = [*STEPS, *(Column(name, "float64", "a metric") for name in metrics)]

        def read(names: Sequence[str]) -> Iterator[Batch]:
            yield {
                "step": [step.step for step in steps],
                "created_at": [step.created_at for step in steps],
                **{name: [_number(step.metrics.get(name)) for step in steps] for name in metrics},
            }

        return Table("steps", columns, read)

    def events(self) -> Table:
        """Return what happened to the run, oldest first."""

        def read(names: Sequence[str]) -> Iterator[Batch]:
            events = self.run.events()
            yield {
                "created_at": [event.created_at for event in events],
                "kind": [event.kind for event in events],
                "step": [event.step for event in events],
                "data": [_json(event.data) for event in events],
            }

        return Table("events", EVENTS, read)

    def calls(self, **filters: Any) -> Table:
        """Return one row per model call."""
        from rolltree.records.token_rows import call_batches

        _check(filters)
        return Table("calls", CALLS, lambda _: call_batches(self.run.rollouts(**filters)))

    def tokens(self, *, full: bool = False, **filters: Any) -> Table:
        """Return one row per token: what each call sampled, and what was new in its prompt.

        With `full`, every call's whole context: O(turns^2) rows.
        """
        from rolltree.records.token_rows import token_batches

        _check(filters)

        def read(_: Sequence[str]) -> Iterator[Batch]:
            return token_batches(self.run, self.run.rollouts(**filters), full=full)

        return Table("tokens", TOKENS, read)

    def breaks(self, *, decode: Decoder | None = None, **filters: Any) -> Table:
        """Return one row per broken prefix: a call that does not extend what came before.

        `decode` turns ids into text (`tokenizer.decode`): it fills the texts, and tells the cause
        `retokenized`.
        """
        from rolltree.records.token_rows import break_batches

        _check(filters)
        return Table(
            "breaks", BREAKS, lambda _: break_batches(self.run.rollouts(**filters), decode)
        )

    def _metrics(self) -> list[str]:
        """Return the names of all metrics of rollouts, in the order in which they appeared."""
        found: dict[str, None] = {}
        for (metrics,) in self.run.columns(["metrics"]):
            for name in metrics:
                found[name] = None
        return [name for name in found if isinstance(name, str) and name.isprintable()]

    def _rollouts(self, names: Sequence[str], filters: Mapping[str, Any]) -> Iterator[Batch]:
        sources = {name: _source(name) for name in names}
        stored = list(dict.fromkeys(source for source, _ in sources.values()))
        rows = self.run.columns(stored, **filters)
        while page := list(islice(rows, _BATCH_ROWS)):
            found = dict(zip(stored, map(list, zip(*page, strict=True)), strict=True))
            yield {
                name: found[source] if read is None else [read(value) for value in found[source]]
                for name, (source, read) in sources.items()
            }


def _check(filters: Mapping[str, Any]) -> None:
    """Refuse what `Run.rollouts` would refuse later."""
    where_clause({name: value for name, value in filters.items() if name not in _CHOICES})
    if filters.get("sort") is not None:
        order_clause(filters["sort"])


def _source(name: str) -> tuple[str, Callable[[Any], Any] | None]:
    """Return the stored column that a column is made of, and by which function (None: as it is)."""
    if name.startswith(METRIC):
        metric = name.removeprefix(METRIC)
        return "metrics", lambda metrics: _number(metrics.get(metric))
    return _DERIVED.get(name, (name, None))


def _json(value: Any) -> str:
    return clean_text(json.dumps(to_plain(value), ensure_ascii=False))


def _first_message(errors: Sequence[Mapping[str, Any]]) -> str | None:
    message = errors[0].get("message") if errors else None
    return None if message is None else clean_text(str(message))


_DERIVED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "error_message": ("errors", _first_message),
    "errors": ("errors", _json),
    "input": ("input", _json),
    "example_id": ("example_id", lambda value: None if value is None else str(value)),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _number(value: Any) -> float | None:
    """Return a number as a finite float, and None for what is none."""
    if not _is_number(value):
        return None
    found = float(value)
    return found if found - found == 0.0 else None
