"""Pages of a run's rollouts and groups, selected by SQL, for tables on a screen.

The pages of one order fit together while nothing new is stored.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from statistics import mean, pstdev
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from rolltree.environments.rubrics import are_equal
from rolltree.insight.search import OWN, SearchIndex, previews
from rolltree.records.columns import ROLLOUTS
from rolltree.records.trained_steps import trained_groups, trained_steps
from rolltree.records.values import stored_names, values_of_rows
from rolltree.store import Run, to_plain
from rolltree.store.conditions import parted
from rolltree.store.filters import where_clause
from rolltree.store.metric_names import finite_numbers

# The most rows of a page; to read more at once, read a table (`rt.read_run`).
MAX_ROWS = 1000
# What the page may ask for; `inspect` reads these types. SQLite has no larger integers.
_MAX_INTEGER = 2**63 - 1
Offset: TypeAlias = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
Step: TypeAlias = Annotated[int, Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)]
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ROWS)]
COLUMNS = tuple(each.name for each in ROLLOUTS if each.name not in ("input", "errors"))
"""Columns of table `rollouts` that a page has; `metrics` comes with them."""
_OF_MEMBERS = ("request_id", "trajectory_index", "agent", "reward", "status")
_OF_GROUPS = (
    *("group_id", "phase", "train_step", "env_id", "task", "example_id", "index_in_group"),
    *("truncated", "num_completion_tokens", "parent_rollout", *_OF_MEMBERS),
)


def rollout_page(
    run: Run,
    index: SearchIndex | None = None,
    *,
    phase: str | None = None,
    step: Step | None = None,
    trained: Step | None = None,
    where: str | None = None,
    sort: str | None = None,
    text: str | None = None,
    offset: Offset = 0,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Return how many rollouts pass the filters, and one page of them in the order of `sort`.

    `step` is the one that they were played for, `trained` the one that trained them.
    With an `index`, `text` are consecutive words that they contain, and `where` and `sort` may name
    `search.OWN`.

    Raises:
        ConfigError: a filter or order that cannot be read.
        StoreError: a row is damaged or missing.
    """
    filters: dict[str, Any] = {} if phase is None else {"phase": phase}
    if step is not None:
        filters["train_step"] = step
    if trained is not None:
        filters["group_id"] = trained_groups(run, trained)
    if where:
        filters["where"] = where
    if index is not None:
        own, rest = parted(where, OWN) if where else ((), None)
        is_own = (sort or "").removeprefix("-") in OWN
        if own or text or is_own:
            filters = {name: value for name, value in filters.items() if name != "where"}
            filters |= {"where": rest} if rest else {}
            ids = index.ids(text, own, sort if is_own else None)
            if filters or (sort and not is_own):  # else the index has the order of the run
                ids = _both(ids, run.row_ids(sort=None if is_own else sort, **filters), is_own)
            return {
                "total": len(ids),
                "rows": _named(run, index.names(ids[offset : offset + limit])),
            }
    rows = rollout_rows(run, limit=limit, offset=offset, sort=sort, **filters)
    return {"total": run.num_rollouts(**filters), "rows": rows}


def _both(own: Sequence[int], stored: Sequence[int], is_own: bool) -> Sequence[int]:
    """Return the ids that are in both, in the order of the index or of the run."""
    ordered, passing = (own, set(stored)) if is_own else (stored, set(own))
    return [each for each in ordered if each in passing]


def _named(run: Run, names: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the rows of these rollouts in this order."""
    if not names:
        return []
    rows = rollout_rows(run, request_id=list({name: None for name, _ in names}))
    known = {(row["request_id"], row["trajectory_index"]): row for row in rows}
    return [known[name] for name in names if name in known]


def row_previews(
    run: Run, names: Sequence[tuple[str, int]], index: SearchIndex | None = None
) -> list[dict[str, Any]]:
    """Return `question` and `answer` of rollouts, and `breaks` and `advantage` once indexed.

    Raises:
        StoreError: a row is damaged.
    """
    known = index.facts(names) if index is not None else {}
    missing = {name: None for name in names if name not in known}
    if missing:
        rows = run.rollouts(request_id=list({name: None for name, _ in missing}))
        wanted = [row for row in rows if (row.request_id, row.trajectory_index) in missing]
        known |= previews(run, wanted)
    return [
        {"request_id": name[0], "trajectory_index": name[1], **known.get(name, {})}
        for name in names
    ]


def rollout_counts(run: Run, where: str | None = None) -> list[tuple[str, int | None, int]]:
    """Return how many rollouts of each phase and step pass a filter.

    Raises:
        ConfigError: a filter that cannot be read.
        StoreError: the file is damaged.
    """
    clause, values = where_clause({"where": where})
    return _counted(run, f"count(*) AS num FROM rollouts WHERE {clause}", *values)


def group_counts(run: Run) -> list[tuple[str, int | None, int]]:
    """Return how many groups each phase and step has.

    Raises:
        StoreError: the file is damaged.
    """
    return _counted(run, "count(DISTINCT group_id) AS num FROM rollouts WHERE group_id <> ''")


def _counted(run: Run, what: str, *values: Any) -> list[tuple[str, int | None, int]]:
    found = run.query(
        f"SELECT phase, train_step, {what} GROUP BY phase, train_step ORDER BY min(id)", *values
    )
    return [(row["phase"], row["train_step"], row["num"]) for row in found]


def rollout_rows(run: Run, **filters: Any) -> list[dict[str, Any]]:
    """Return rows of `rollout_page`; `filters` are those of `Run.rollouts`.

    Raises:
        StoreError: a row is damaged or missing.
    """
    names = [*stored_names(COLUMNS), "metrics"]
    page = list(run.columns(names, **filters))
    columns = values_of_rows(run, COLUMNS, page)
    return [
        {**{name: columns[name][at] for name in COLUMNS}, "metrics": finite_numbers(row.metrics)}
        for at, row in enumerate(page)
    ]


def group_page(
    run: Run,
    *,
    phase: str | None = None,
    step: Step | None = None,
    trained: Step | None = None,
    sort: Literal["-train_step"] | None = None,
    offset: Offset = 0,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Return how many groups there are, and one page of them in the order they began.

    With `sort="-train_step"`, groups of the newest step come first, in the order they began.

    Raises:
        StoreError: a row is damaged or missing.
    """
    clauses: list[str] = ["group_id <> ''"]
    values: list[Any] = []
    for name, value in (("phase", phase), ("train_step", step)):
        if value is not None:
            clauses.append(f"{name} = ?")
            values.append(value)
    if trained is not None:
        clauses.append("group_id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(trained_groups(run, trained)))
    said = " AND ".join(clauses)
    every = _group_ids(run, said, tuple(values), sort)
    return {"total": len(every), "rows": group_rows(run, every[offset : offset + limit])}


_Known: TypeAlias = dict[tuple[Any, ...], list[str]]
_GROUPS: weakref.WeakKeyDictionary[Run, tuple[int, _Known]] = weakref.WeakKeyDictionary()
"""The groups of a run by filter, in page order, and the number of commits when they were read."""


def _group_ids(run: Run, clause: str, values: tuple[Any, ...], sort: str | None) -> list[str]:
    # Grouping reads an index of all rows, and a table on a screen requests page after page
    # (design/0025), so the order is kept until a batch is stored.
    commits = run.num_commits
    known = _GROUPS.get(run)
    if known is None or known[0] != commits:
        known = _GROUPS[run] = commits, {}
    key = (clause, sort, *values)
    if key not in known[1]:
        newest = "max(train_step) DESC, " if sort is not None else ""
        sql = f"SELECT group_id FROM rollouts WHERE {clause} GROUP BY group_id"
        sql += f" ORDER BY {newest}min(id)"
        known[1][key] = [row["group_id"] for row in run.query(sql, *values)]
    return known[1][key]


def group_rows(run: Run, group_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of these groups, as `group_page` has them, in this order.

    Raises:
        StoreError: a row is damaged or missing.
    """
    groups: dict[str, list[Any]] = {name: [] for name in group_ids}
    for row in run.columns(_OF_GROUPS, group_id=list(groups)) if groups else ():
        groups[row.group_id].append(row)
    steps = trained_steps(run)
    return [
        {**_group(rows), "trained_step": steps.get(name)} for name, rows in groups.items() if rows
    ]


def _group(rows: list[Any]) -> dict[str, Any]:
    rows.sort(key=lambda row: (row.index_in_group, row.trajectory_index))
    own = [row.reward for row in rows if row.parent_rollout is None]
    scored = [reward for reward in own if reward is not None]
    first = rows[0]
    return {
        **{name: getattr(first, name) for name in ("group_id", "phase", "train_step")},
        # Environment, task, id.
        "example": {
            name: to_plain(getattr(first, name)) for name in ("env_id", "task", "example_id")
        },
        "members": [{name: getattr(row, name) for name in _OF_MEMBERS} for row in rows],
        # The rewards of all its rollouts; None: not scored.
        "rewards": [row.reward for row in rows],
        # Over the rewards that are compared, those of rollouts that were not delegated; `std` is
        # that of the population.
        "mean": mean(scored) if scored else None,
        "std": (0.0 if are_equal(scored) else pstdev(scored)) if scored else None,
        "num_failed": sum(row.status == "error" for row in rows),
        "num_truncated": sum(row.truncated for row in rows),
        "num_completion_tokens": sum(row.num_completion_tokens for row in rows),
    }
