"""Filters over the columns of rollouts, as SQL.

A filter compares a column with a value (`phase="eval"`; a list means any of its values, None means
NULL), or is a text of conditions named `where` (`conditions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltree.store.rows import BLOBS, COLUMNS
from rolltree.values.errors import ConfigError, did_you_mean

# The prefix of a metric's name among columns.
METRIC = "metrics/"
FILTERS = [name for name in COLUMNS if name not in (*BLOBS, "metrics", "input", "errors")]


def is_metric(name: str) -> bool:
    """Whether a name is that of a metric."""
    return name.startswith(METRIC)


def check_name(name: str, what: str) -> None:
    """Refuse a name that rollouts cannot be filtered or sorted by."""
    # A name goes into SQL as it is, so only known columns and quoted JSON paths may pass.
    if is_metric(name) and '"' not in name:
        return
    if name not in FILTERS:
        near = did_you_mean(name, [*FILTERS, f"{METRIC}NAME"])
        raise ConfigError(f"rollouts cannot be {what} by {name!r}.{near}")


def expression(name: str) -> str:
    """Return the SQL of a column or a metric."""
    if not is_metric(name):
        return name
    # In a quoted path, SQLite takes dots and brackets as parts of a metric's name.
    path = name.removeprefix(METRIC).replace("'", "''")
    return f"json_extract(metrics, '$.\"{path}\"')"


def where_clause(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the condition of a WHERE clause and its values.

    Raises:
        ConfigError: there is no such column, or `where` cannot be read.
    """
    clauses: list[str] = ["1"]
    values: list[Any] = []
    for name, value in filters.items():
        if name == "where":
            from rolltree.store.conditions import conditions

            for condition in conditions(value) if value is not None else ():
                clause, operand = condition.sql()
                clauses.append(clause)
                values.append(operand)
            continue
        if name not in FILTERS:
            known = [*FILTERS, "where"]
            raise ConfigError(
                f"rollouts cannot be filtered by {name!r}.{did_you_mean(name, known)}"
            )
        clause, operands = equals_clause(name, value)
        clauses.append(clause)
        values.extend(operands)
    return " AND ".join(clauses), values


def equals_clause(name: str, value: Any) -> tuple[str, list[Any]]:
    """Return the condition that a column equals a value, or one of several, and its values."""
    if not isinstance(value, (list, tuple, set, frozenset)):
        return f"{name} IS ?", [value]
    named = [item for item in value if item is not None]
    clause = f"{name} IN ({', '.join('?' for _ in named)})"
    return f"({clause} OR {name} IS NULL)" if None in value else clause, named


def order_clause(sort: str) -> str:
    """Return the ORDER BY of a column or `metrics/NAME`, descending if `-` is in front.

    `id` is the order in which rows were stored. Rows without a value come last.

    Raises:
        ConfigError: there is no such column.
    """
    name = sort.removeprefix("-")
    direction = "DESC" if sort.startswith("-") else "ASC"
    if name == "id":
        return f"id {direction}"
    check_name(name, "sorted")
    # Equal values keep the order in which they came, so that pages are consistent.
    return f"{expression(name)} {direction} NULLS LAST, id"
