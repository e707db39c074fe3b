"""Token ids of a growing conversation in one array, so that T turns cost O(tokens) of memory.

`IdPath` is an immutable prefix of such an array. Appending to the longest path of an array writes
in place; appending to a shorter one (two calls that branch from the same turn) copies. It knows
nothing about messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rolltree.types import IntArray


class _Storage:
    __slots__ = ("ids", "used")

    def __init__(self, capacity: int) -> None:
        self.ids: IntArray = np.empty(capacity, np.int32)
        self.used = 0


class IdPath:
    """Ids that never change, int32 `[_T]`, and can be extended in O(new ids), amortised.

    >>> path = IdPath.of([1, 2]).extended([3])
    >>> path.ids.tolist()
    [1, 2, 3]
    """

    __slots__ = ("_length", "_storage")

    def __init__(self, storage: _Storage, length: int) -> None:
        self._storage = storage
        self._length = length

    @classmethod
    def of(cls, ids: Sequence[int] | IntArray) -> IdPath:
        """Return a path that holds a copy of `ids`."""
        return cls(_Storage(max(2 * len(ids), 64)), 0).extended(ids)

    @property
    def ids(self) -> IntArray:
        """The ids as a read-only view, int32 `[_T]`."""
        view = self._storage.ids[: self._length]
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        return self._length

    def extended(self, new: Sequence[int] | IntArray) -> IdPath:
        """Return this path followed by `new`."""
        storage, start = self._storage, self._length
        end = start + len(new)
        if storage.used != start or end > len(storage.ids):
            storage = _Storage(max(2 * end, 64))
            storage.ids[:start] = self._storage.ids[:start]
        storage.ids[start:end] = new
        storage.used = end
        return IdPath(storage, end)
