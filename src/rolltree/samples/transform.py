"""Transforms samples: prunes them, joins them side by side, splits them at a token budget.

The remaining tokens stay exact: a kept token keeps its ancestors, and joining and splitting keep
every record exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.streams import join_streams, move_streams
from rolltree.tokens.buffers import concat
from rolltree.values.errors import TokenError
from rolltree.values.types import Records, Sample

_FLOATS = ("logprob", "temperature", "advantage", "weight")
_COLUMNS = tuple(column.name for column in fields(Records) if column.name != "extra")


def blank_records(count: int, **columns: Any) -> Records:
    """Return `count` records of zeros, except for the given columns."""
    kinds = {name: np.float32 if name in _FLOATS else np.int32 for name in _COLUMNS}
    return Records(**{name: np.zeros(count, kind) for name, kind in kinds.items()} | columns)


def take_records(records: Records, keep: NDArray[Any], **changes: Any) -> Records:
    """Return the records selected by a mask or an index, then replace the columns in `changes`."""
    columns = {name: getattr(records, name)[keep] for name in _COLUMNS}
    extra = {name: values[keep] for name, values in records.extra.items()}
    return Records(**(columns | {"extra": extra} | changes))


def concat_records(parts: Sequence[Records]) -> Records:
    """Join records in order; an extra input is NaN for the parts that lack it."""
    if not parts:
        return blank_records(0)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    names = dict.fromkeys(name for part in parts for name in part.extra)
    extra = {
        name: np.concatenate(
            [part.extra.get(name, np.full(len(part), np.nan, np.float32)) for part in parts]
        )
        for name in names
    }
    return Records(**columns, extra=extra)


def subset(
    sample: Sample, keep: NDArray[np.bool_], records: NDArray[np.bool_], **info: Any
) -> Sample:
    """Return the sample of the tokens in `keep` `[_T]` and the records in `records` `[_R]`.

    `keep` must hold every ancestor of what it keeps and the sources of the kept records. `info` is
    added to the sample's.
    """
    # The number of kept tokens before each position; `[_T + 1]`, because a subtree may end at `_T`.
    before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)
    position_of = np.where(keep, before[:-1], -1).astype(np.int32)
    return Sample(
        ids=sample.ids[keep],
        positions=sample.positions[keep],
        subtree_end=before[sample.subtree_end[keep]],
        records=take_records(
            sample.records, records, source=before[sample.records.source[records]]
        ),
        origins=sample.origins,
        info={
            **sample.info,
            "streams": move_streams(sample.info.get("streams", {}), position_of),
            **info,
        },
    )


def prune_sample(sample: Sample) -> Sample:
    """Drop the tokens that no record needs: those without a source at or below them.

    The last sampled token of a path is such a token: its logits train nothing, so they need not be
    computed.

    Example: ids `[5 6 7 8 9]` with `subtree_end` `[5 5 3 5 5]` and sources 1 and 3 keep `[5 6 8]`.
    """
    is_source = np.zeros(sample.num_tokens + 1, np.int64)
    is_source[sample.records.source + 1] = 1
    before = np.cumsum(is_source)
    # Keep a token if the number of sources grows between it and the end of its subtree.
    keep = before[sample.subtree_end] > before[:-1]
    if keep.all():
        return sample
    return subset(sample, keep, np.ones(len(sample.records), np.bool_))


def join_samples(samples: Sequence[Sample]) -> Sample:
    """Return one sample with all samples side by side; no token attends to a different sample."""
    starts = np.cumsum([0, *(sample.num_tokens for sample in samples)], dtype=np.int32)[:-1]
    both = list(zip(samples, starts, strict=True))
    return Sample(
        ids=concat([sample.ids for sample in samples], np.int32),
        positions=concat([sample.positions for sample in samples], np.int32),
        subtree_end=concat([sample.subtree_end + start for sample, start in both], np.int32),
        records=concat_records(
            [replace(s.records, source=s.records.source + start) for s, start in both]
        ),
        origins=tuple(origin for sample in samples for origin in sample.origins),
        info={
            "streams": join_streams([s.info.get("streams", {}) for s in samples], starts.tolist())
        },
    )


def split_sample(sample: Sample, max_tokens: int) -> list[Sample]:
    """Split a tree sample into parts of at most `max_tokens`, repeating as few tokens as possible.

    Parts are intervals of the depth-first order, cut where a branch ends, each with the path to its
    first token in front. Dynamic programming finds the cuts with the fewest repeated tokens.
    `info["num_repeated"]` is the number of leading tokens of a part that are repeated context. A
    record goes to the part whose interval has its source.

    Raises:
        TokenError: one path alone is longer than `max_tokens`.
    """
    longest = int(sample.positions.max(initial=-1)) + 1
    if longest > max_tokens:
        raise TokenError(
            f"a sample has a path of {longest} tokens and a batch holds {max_tokens}; a path "
            "cannot be split without changing what its tokens attend to. Raise the budget, or cut "
            "samples with build_samples(..., max_seq_len=...)."
        )
    if sample.num_tokens <= max_tokens:
        return [sample]
    from rolltree.samples.cutting import parts_of

    return parts_of(sample, max_tokens)
