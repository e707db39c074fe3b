"""Small forests that show whether a model computes the same on a tree as on its rows."""

from __future__ import annotations

import numpy as np

from rolltree.training.layout import Forest, collate
from rolltree.types import Records, Sample

Shape = tuple[int, tuple["Shape", ...]]
"""A segment of a tree: how many tokens it has, and the segments that follow it."""


def probe_forest(vocabulary: int, shape: Shape) -> Forest:
    """Return a tree of that shape over arbitrary tokens, with one record at its end."""
    positions: list[int] = []
    ends: list[int] = []

    def lay(shape: Shape, depth: int) -> None:
        length, following = shape
        first = len(positions)
        positions.extend(range(depth, depth + length))
        ends.extend([0] * length)
        for child in following:
            lay(child, depth + length)
        ends[first : first + length] = [len(positions)] * length

    lay(shape, 0)
    count = len(positions)
    ids = (np.arange(count, dtype=np.int64) * 7919 + 11) % vocabulary
    row, depth, end = (np.array(column, np.int32) for column in (ids, positions, ends))
    return collate([Sample(row, depth, end, _one_record(count - 1), ())])


def _one_record(source: int) -> Records:
    ints, floats = np.zeros(1, np.int32), np.ones(1, np.float32)
    at = np.full(1, source, np.int32)
    return Records(at, ints, floats, floats, floats, floats, ints, ints, ints, ints)
