"""Filters over the columns of rollouts: the SQL of one, and whether a row passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltree.errors import ConfigError, did_you_mean
from rolltree.store.rows import BLOBS, COLUMNS, StoredRollout

_FILTERS = [name for name in COLUMNS if name not in (*BLOBS, "metrics", "input", "errors")]


def where_clause(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the condition of a WHERE clause and its values.

    Raises:
        ConfigError: there is no such column to filter by.
    """
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


def matches(row: StoredRollout, where: Mapping[str, Any]) -> bool:
    """Whether a row passes filters, as `where_clause` has SQL decide it."""
    for name, value in where.items():
        found = getattr(row, name)
        if isinstance(value, (list, tuple, set, frozenset)):
            if found not in value:
                return False
        elif found != value:
            return False
    return True
