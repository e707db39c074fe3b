"""Loss records: which position's logits are trained towards which sampled token, and how.

Array code over whole groups of calls. Knows the token tree's streams. Leaves out how positions
come about: `flat.py` and `forest.py` pass the source of every record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.rollout import Call, Rollout
from rolltree.tokens import TokenTree
from rolltree.tokens.buffers import concat
from rolltree.types import IntArray, Records

COLUMNS = tuple(column.name for column in fields(Records))


def empty_records() -> Records:
    """Return zero records."""
    ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return Records(ints, ints, floats, floats, floats, floats, ints, ints, ints, ints)


def take_records(records: Records, keep: NDArray[Any], **changes: Any) -> Records:
    """Return the records selected by a mask or an index, with some columns replaced after that."""
    columns = {name: getattr(records, name)[keep] for name in COLUMNS}
    return Records(**(columns | changes))


def concat_records(parts: Sequence[Records]) -> Records:
    """Concatenate records in order."""
    if not parts:
        return empty_records()
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return Records(**columns)


def _spread(values: Sequence[float], counts: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Return each value as often as its count says."""
    if len(values) == 1:
        return np.full(counts[0], values[0], dtype)
    return np.repeat(np.array(values, dtype), counts)


def _gather(
    tree: TokenTree, name: str, handles: Sequence[int], counts: Sequence[int]
) -> NDArray[Any]:
    """Return a stream over the calls' sampled tokens, NaN where a call has none."""
    stream = tree.sampled[name]
    dtype = stream.buffer.dtype
    raw = [
        np.nan if (value := stream.raw(handle, count)) is None else value
        for handle, count in zip(handles, counts, strict=True)
    ]
    arrays = [value if isinstance(value, np.ndarray) else None for value in raw]
    if all(array is None for array in arrays):
        return _spread(raw, counts, dtype)  # type: ignore[arg-type]
    return np.concatenate(
        [
            np.full(count, value, dtype) if array is None else array
            for value, array, count in zip(raw, arrays, counts, strict=True)
        ]
    )


def make_records(
    rollout: Rollout,
    calls: Sequence[Call],
    source: IntArray,
    advantages: Sequence[float | None],
    factor: float,
) -> Records:
    """Return one record per sampled token of `calls`, in call order.

    Args:
        rollout: where the calls are from.
        calls: at least one.
        source: int32 `[_R]`, the packed position before each sampled token; negative where the
            prompt is empty. Such a record has no logits to train and is left out.
        advantages: one per call; None trains with 0.
        factor: multiplies every weight (0 for a rollout that trains nothing).
    """
    tree, table = rollout.tree, rollout.tree.calls
    handles = [call.handle for call in calls]
    counts = [table.num_sampled[handle] for handle in handles]
    total = len(source)
    first = list(accumulate(counts, initial=0))[:-1]
    ids = tree.arena.ids
    targets = [
        ids[low:high]
        for handle, count in zip(handles, counts, strict=True)
        for low, high in tree.arena.slices(table.end(handle), count)
    ]
    weight = _gather(tree, "weight", handles, counts)
    records = Records(
        source=source,
        target=concat(targets, np.int32),
        logprob=_gather(tree, "logprob", handles, counts),
        temperature=_gather(tree, "temperature", handles, counts),
        advantage=_spread([a or 0.0 for a in advantages], counts, np.float32),
        weight=weight if factor == 1.0 else weight * np.float32(factor),
        version=_gather(tree, "version", handles, counts),
        rollout=np.full(total, rollout.index, np.int32),
        call=_spread([call.step for call in calls], counts, np.int32),
        offset=np.arange(total, dtype=np.int32) - _spread(first, counts, np.int32),
    )
    if total and source.min() < 0:
        return take_records(records, source >= 0)
    return records
