"""Loss records: which position's logits are trained towards which sampled token, and how.

Array code over whole groups of calls. Knows the token tree's streams. Leaves out how positions
come about: `flat.py` and `forest.py` pass the source of every record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.rollout import Call, Rollout
from rolltree.tokens import TokenTree
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


def _gather(
    tree: TokenTree, name: str, handles: Sequence[int], counts: NDArray[np.int64]
) -> NDArray[Any]:
    """Return a stream over the calls' sampled tokens, NaN where a call has none."""
    stream = tree.sampled[name]
    raw = [stream.raw(handle, int(count)) for handle, count in zip(handles, counts, strict=True)]
    dtype = stream.buffer.dtype
    if not any(isinstance(value, np.ndarray) for value in raw):
        return np.repeat(np.array([np.nan if v is None else v for v in raw]), counts).astype(dtype)
    return np.concatenate(
        [
            value
            if isinstance(value, np.ndarray)
            else np.full(count, np.nan if value is None else value, dtype)
            for value, count in zip(raw, counts, strict=True)
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
        source: int32 `[_R]`, the packed position before each sampled token; negative where the
            prompt is empty. Such a record has no logits to train and is left out.
        advantages: one per call; None trains with 0.
        factor: multiplies every weight (0 for a rollout that trains nothing).
    """
    tree = rollout.tree
    handles = [call.handle for call in calls]
    counts = np.array([tree.calls.num_sampled[handle] for handle in handles], dtype=np.int64)
    total = int(counts.sum())
    first = np.cumsum(counts) - counts
    ids = tree.arena.ids
    targets = [
        ids[low:high]
        for handle, count in zip(handles, counts, strict=True)
        for low, high in tree.arena.slices(tree.calls.end(handle), int(count))
    ]
    weight = _gather(tree, "weight", handles, counts)
    records = Records(
        source=source,
        target=np.concatenate(targets) if targets else np.empty(0, np.int32),
        logprob=_gather(tree, "logprob", handles, counts),
        temperature=_gather(tree, "temperature", handles, counts),
        advantage=np.repeat(np.array([a or 0.0 for a in advantages], np.float32), counts),
        weight=weight if factor == 1.0 else weight * np.float32(factor),
        version=_gather(tree, "version", handles, counts),
        rollout=np.full(total, rollout.index, np.int32),
        call=np.repeat(np.array([call.step for call in calls], np.int32), counts),
        offset=np.arange(total, dtype=np.int32) - np.repeat(first, counts).astype(np.int32),
    )
    valid = source >= 0
    return records if valid.all() else take_records(records, valid)
