"""Filters and sorts the rows of `rollouts` once, then cuts them into pages."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rolltree.store.database import Database

# The number of orders that are kept; the least recently used one is dropped first.
_MAX_KEPT = 8


class Orders:
    """A cache of the orders that were used last; each is valid until something is stored.

    Paging through 100,000 sorted rows sorts them once, and the pages are consistent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, tuple[Any, ...], str], tuple[int, array[int]]] = (
            OrderedDict()
        )

    def ids(self, database: Database, where: str, values: Sequence[Any], order: str) -> array[int]:
        """Return the ids of the rows that pass the filter, in an order."""
        # Rows only come or go in a batch, so an order holds until the next one.
        key, commits = (where, tuple(values), order), database.counts().commits
        with self._lock:
            stored, ids = self._kept.get(key, (-1, array("q")))
        if stored != commits:
            sql = f"SELECT id FROM rollouts WHERE {where} ORDER BY {order}"
            ids = array("q", [row[0] for row in database.all(sql, values)])
        with self._lock:
            self._kept[key] = commits, ids
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return ids

    def count(self, database: Database, where: str, values: Sequence[Any]) -> int:
        """Return how many rows pass the filter."""
        now = (where, tuple(values), database.counts().commits)
        with self._lock:
            for (clause, operands, _), (stored, ids) in self._kept.items():
                if (clause, operands, stored) == now:
                    return len(ids)
        rows = database.all(f"SELECT count(*) FROM rollouts WHERE {where}", values)
        return int(rows[0][0])
