"""Pages of a run's rollouts and groups, cut by SQL: what a table on a screen shows."""

from __future__ import annotations

from statistics import pstdev
from typing import Any

from rolltree.records.columns import ROLLOUTS
from rolltree.records.values import number_of, rollout_values, stored_names
from rolltree.store import Run, to_plain

MAX_ROWS = 1000
COLUMNS = tuple(each.name for each in ROLLOUTS if each.name not in ("input", "errors"))
"""Columns of table `rollouts` that a page has; `metrics` comes with them."""
_OF_GROUP = ("group_id", "phase", "train_step", "env_id", "task", "example_id")
_OF_MEMBER = ("request_id", "trajectory_index", "reward", "status", "truncated")


def rollout_page(
    run: Run,
    *,
    phase: str | None = None,
    step: int | None = None,
    where: str | None = None,
    sort: str | None = None,
    offset: int = 0,
    limit: int = 100,
) -> dict[str, Any]:
    """Return how many rollouts pass the filters, and one page of them in the order of `sort`.

    Raises:
        ConfigError: a filter or order that cannot be read.
        StoreError: a row is damaged or missing.
    """
    filters: dict[str, Any] = {} if phase is None else {"phase": phase}
    if step is not None:
        filters["train_step"] = step
    if where:
        filters["where"] = where
    names = [*stored_names(COLUMNS), "metrics"]
    page = list(run.columns(names, limit=limit, offset=offset, sort=sort, **filters))
    found = dict(zip(names, map(list, zip(*page, strict=True)), strict=True)) if page else {}
    columns = rollout_values(COLUMNS, found) if page else {}
    rows = [
        {**{name: columns[name][at] for name in COLUMNS}, "metrics": _numbers(found["metrics"][at])}
        for at in range(len(page))
    ]
    return {"total": run.num_rollouts(**filters), "rows": rows}


def group_page(
    run: Run,
    *,
    phase: str | None = None,
    step: int | None = None,
    offset: int = 0,
    limit: int = 100,
) -> dict[str, Any]:
    """Return how many groups there are, and one page of them in the order they began.

    A row has `group_id`, `phase`, `train_step`, `example` (environment, task, id), the `rewards` of
    the group's rollouts (None: not scored), their `mean`, `std` (population), and `num_failed`.

    Raises:
        StoreError: a row is damaged or missing.
    """
    clauses, values = ["group_id <> ''"], []
    for name, value in (("phase", phase), ("train_step", step)):
        if value is not None:
            clauses.append(f"{name} = ?")
            values.append(value)
    said = " AND ".join(clauses)
    total = run.query(f"SELECT count(DISTINCT group_id) AS n FROM rollouts WHERE {said}", *values)
    chosen = run.query(
        f"SELECT group_id FROM rollouts WHERE {said} GROUP BY group_id ORDER BY min(id)"
        " LIMIT ? OFFSET ?",
        *values,
        limit,
        offset,
    )
    groups: dict[str, list[tuple[Any, ...]]] = {row["group_id"]: [] for row in chosen}
    names = (*_OF_GROUP, *_OF_MEMBER, "num_completion_tokens")
    for row in run.columns(names, group_id=list(groups)) if groups else ():
        groups[row[0]].append(row)
    return {"total": total[0]["n"], "rows": [_group(rows) for rows in groups.values() if rows]}


def _group(rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    group_id, phase, step, env_id, task, example_id, *_ = rows[0]
    rewards = [row[8] for row in rows]
    scored = [reward for reward in rewards if reward is not None]
    return {
        "group_id": group_id,
        "phase": phase,
        "train_step": step,
        "example": {"env_id": env_id, "task": task, "example_id": to_plain(example_id)},
        "members": [{"request_id": row[6], "trajectory_index": row[7]} for row in rows],
        "rewards": rewards,
        "mean": sum(scored) / len(scored) if scored else None,
        "std": pstdev(scored) if scored else None,
        "num_failed": sum(row[9] == "error" for row in rows),
        "num_truncated": sum(bool(row[10]) for row in rows),
        "num_completion_tokens": sum(row[11] for row in rows),
    }


def _numbers(metrics: Any) -> dict[str, float]:
    found = {str(name): number_of(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if value is not None}
