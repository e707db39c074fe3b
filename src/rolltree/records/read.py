"""`read_run`: a stored run as tidy tables; only the requested columns and rows are read.

    with rt.read_run("runs/demo") as data:
        data.rollouts(phase="eval_after").to_pandas()

The run may be written by another process meanwhile; a table shows what is stored when it is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rolltree.records.columns import (
    BREAKS,
    CALLS,
    CONVERSATIONS,
    EVALUATIONS,
    EVENTS,
    ROLLOUTS,
    SFT,
    STEPS,
    TABLES,
    TOKENS,
)
from rolltree.records.table import Batch, Column, Table
from rolltree.records.values import json_text, stored_names, values_of_rows
from rolltree.store import Run, StepRow, StoredEvaluation
from rolltree.store.filters import METRIC, order_clause, where_clause
from rolltree.store.metric_names import is_number, number_of
from rolltree.tokens import Decoder
from rolltree.values.errors import ConfigError, UnknownName, did_you_mean

_BATCH_ROWS = 8192
_CHOICES = ("limit", "offset", "sort")


def read_run(path: str | Path) -> RunData:
    """Open a stored run to read its tables; nothing of it is loaded or run.

    Raises:
        StoreError: there is no run at `path`, or it cannot be read.
    """
    return RunData(Run.open(path, mode="r"))


class RunData:
    """The tables of one run. Close it, use `with`, or drop the last reference to it.

    Every method returns a `Table` that reads when its rows are asked for. Its filters choose
    rollouts as `Run.rollouts` does: columns (`phase="train"`, `train_step=[3, 4]`), conditions
    (`where="reward < 0.5 and metrics/tries >= 2"`), `sort="-reward"`, `limit`, `offset`. A wrong
    filter is rejected at once.

    Attributes:
        run: the open run, for what is not a table: its config, its metadata, SQL.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        # A table may live longer than this object, so the file closes with the run's last user.
        weakref.finalize(run, run._database.close)

    def __enter__(self) -> RunData:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the run; tables that were not read yet cannot be read after that."""
        self.run.close()

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
        if name in ("steps", "events") and filters:
            raise ConfigError(
                f"table {name!r} is not made of rollouts, so the filter {next(iter(filters))!r} "
                "would do nothing. Leave it out."
            )
        found: Table = getattr(self, name)(**filters)
        return found

    def story(self) -> list[dict[str, Any]]:
        """Return what happened, as sentences with their evidence, the most alarming first.

        A sentence has `text`, `kind`, `severity` (`error`, `warning`, `good`, `info`), `evidence`,
        `advice` and `page`, as docs/viewer.md lists them.
        """
        from rolltree.records.story import run_story

        found: list[dict[str, Any]] = run_story(self.run)["sentences"]
        return found

    def rollouts(self, **filters: Any) -> Table:
        """Return one row per rollout, without its messages and tokens.

        In addition to the documented columns, `metrics/NAME` has the values of each metric of the
        run that are numbers.
        """
        # Checked now, not when rows are read: a wrong name is an error at the line that has it.
        _check(filters)
        columns = [*ROLLOUTS, *self._metric_columns()]
        return Table("rollouts", columns, lambda names: self._rollouts(names, filters))

    def steps(self) -> Table:
        """Return one row per optimizer step, with one column per metric that is a number."""
        steps = self.run.steps()
        return _with_metrics("steps", STEPS, steps, [step.metrics for step in steps])

    def evaluations(self) -> Table:
        """Return one row per held-out evaluation of a training run, with one column per number."""
        found = self.run.evaluations()
        return _with_metrics("evaluations", EVALUATIONS, found, [done.numbers for done in found])

    def events(self) -> Table:
        """Return what happened to the run, oldest first."""

        def read(names: Sequence[str]) -> Iterator[Batch]:
            events = self.run.events()
            yield {
                "created_at": [event.created_at for event in events],
                "kind": [event.kind for event in events],
                "step": [event.step for event in events],
                "data": [json_text(event.data) for event in events],
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

        `decode` turns ids into text (`tokenizer.decode`): it fills the text columns, and is needed
        to detect the cause `retokenized`.
        """
        from rolltree.records.token_rows import break_batches

        _check(filters)
        return Table(
            "breaks", BREAKS, lambda _: break_batches(self.run.rollouts(**filters), decode)
        )

    def conversations(self, **filters: Any) -> Table:
        """Return the rows of `rollouts` and their messages, in `prompt` and `completion`."""
        from rolltree.records.conversations import conversation_batches

        _check(filters)
        columns = [*CONVERSATIONS[:-2], *self._metric_columns(), *CONVERSATIONS[-2:]]

        def read(names: Sequence[str]) -> Iterator[Batch]:
            return conversation_batches(self.run, filters, names)

        return Table("conversations", columns, read)

    def sft(
        self, *, min_reward: float | None = None, best_of_group: bool = False, **filters: Any
    ) -> Table:
        """Return a data set for supervised fine-tuning: exact ids, and labels for sampled tokens.

        One row per conversation of a rollout (scope `interleave`: a break begins another), each
        sampled token once. Rollouts that failed or that nothing scored are left out; so are
        tokens that the environment masked, and calls whose tokens it made unreadable: a warning
        says how many.

        Args:
            min_reward: leave out rollouts with a lower reward.
            best_of_group: of each group, and of each agent in it, take only the rollout with the
                highest reward, the first of equals.
            filters: those of every table.
        """
        from rolltree.records.conversations import sft_batches

        _check(filters)

        def read(_: Sequence[str]) -> Iterator[Batch]:
            return sft_batches(self.run, min_reward, best_of_group, filters)

        return Table("sft", SFT, read)

    def _metric_columns(self) -> list[Column]:
        # Metric names become column names, so those with control characters are left out.
        names = [name for name in self.run.metric_names() if isinstance(name, str)]
        return [Column(METRIC + n, "float64", "a metric") for n in names if n.isprintable()]

    def _rollouts(self, names: Sequence[str], filters: Mapping[str, Any]) -> Iterator[Batch]:
        rows = self.run.columns(stored_names(names), **filters)
        while page := list(islice(rows, _BATCH_ROWS)):
            yield values_of_rows(self.run, names, page)


def _with_metrics(
    name: str,
    columns: Sequence[Column],
    rows: Sequence[StepRow | StoredEvaluation],
    metrics: Sequence[Mapping[str, Any]],
) -> Table:
    """Return a table of rows in memory: their fields, then a column per metric with numbers."""
    found = dict.fromkeys(n for each in metrics for n, value in each.items() if is_number(value))

    def read(_: Sequence[str]) -> Iterator[Batch]:
        yield {
            **{each.name: [getattr(row, each.name) for row in rows] for each in columns},
            **{metric: [number_of(each.get(metric)) for each in metrics] for metric in found},
        }

    more = [Column(metric, "float64", "a metric") for metric in found]
    return Table(name, [*columns, *more], read)


def _check(filters: Mapping[str, Any]) -> None:
    """Reject filters that `Run.rollouts` would reject later."""
    where_clause({name: value for name, value in filters.items() if name not in _CHOICES})
    if filters.get("sort") is not None:
        order_clause(filters["sort"])
