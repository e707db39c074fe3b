"""Transforms samples: prunes, cuts at `max_seq_len`, joins side by side, splits at a token budget.

The remaining tokens stay exact: a kept token keeps its ancestors, and joining and splitting keep
every record exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.streams import join_streams, move_streams
from rolltree.tokens.buffers import concat
from rolltree.values.errors import TokenError
from rolltree.values.types import IntArray, Records, Sample, TruncationReason

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


def count_records(records: Records) -> list[tuple[int, int, int]]:
    """Return (rollout, call, number of records) for every call that has records."""
    pairs = np.stack([records.rollout, records.call], axis=1)
    calls, counts = np.unique(pairs, axis=0, return_counts=True)
    return [(int(r), int(c), int(n)) for (r, c), n in zip(calls, counts, strict=True)]


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


def cap_sample(
    sample: Sample, max_seq_len: int
) -> tuple[Sample | None, list[tuple[int, int, int]]]:
    """Cut a sample at `max_seq_len` tokens per path, so that all scopes lose the same tokens.

    The `info` of a cut sample has `seq_len_truncated` True, `seq_len_original` and `seq_len_kept`
    in tokens, `seq_len_lost` in sampled tokens, and `seq_len_cut`, which says for each origin
    whether it lost any; such an origin is `truncated`, with reason `max_seq_len` unless the episode
    has its own.

    Returns:
        The cut sample, or None if nothing trainable is left of it, and the lost tokens as
        `(rollout, call, number of sampled tokens)`.
    """
    keep = sample.positions < max_seq_len
    if keep.all():
        return sample, []
    records = sample.records
    # The sampled token follows its source and has to fit, too.
    inside = sample.positions[records.source] + 1 < max_seq_len
    # A sample that was already masked entirely stays, and is counted as masked.
    if (records.weight != 0).any() and not (records.weight[inside] != 0).any():
        return None, count_records(records)
    lost = count_records(take_records(records, ~inside))
    cut_calls = {(rollout, call) for rollout, call, _ in lost}
    is_cut = tuple(
        any((rollout, call) in cut_calls for call in origin.calls)
        for rollout, origin in zip(sample.info["rollouts"], sample.origins, strict=True)
    )
    origins = tuple(
        replace(
            origin,
            truncated=True,
            truncation_reason=origin.truncation_reason or str(TruncationReason.MAX_SEQ_LEN),
        )
        if cut
        else origin
        for origin, cut in zip(sample.origins, is_cut, strict=True)
    )
    capped = subset(
        sample,
        keep,
        inside,
        seq_len_truncated=True,
        seq_len_original=sample.num_tokens,
        seq_len_kept=int(keep.sum()),
        seq_len_lost=sum(count for _, _, count in lost),
        seq_len_cut=is_cut,
    )
    return replace(capped, origins=origins), lost


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
    bounds = _best_cuts(sample.positions, max_tokens)
    return [_part(sample, low, high) for low, high in pairwise(bounds)]


def _best_cuts(positions: IntArray, max_tokens: int) -> list[int]:
    """Return the bounds of the parts, including 0 and the number of tokens."""
    total = len(positions)
    # If the depth does not grow by 1, a branch has ended; the depth there is the context to repeat.
    jumps = np.flatnonzero(np.diff(positions) != 1) + 1
    cuts = [0, *jumps.tolist(), total]
    context = [0, *positions[jumps].tolist()]
    cost = [0.0] + [np.inf] * (len(cuts) - 1)
    came_from = [0] * len(cuts)
    first = 0
    # A solution always exists: one branch with its context is a path, and every path fits.
    for end in range(1, len(cuts)):
        while cuts[end] - cuts[first] > max_tokens:
            first += 1
        for start in range(end - 1, first - 1, -1):
            if cuts[end] - cuts[start] + context[start] > max_tokens:
                continue
            candidate = cost[start] + context[start]
            if candidate < cost[end]:
                cost[end], came_from[end] = candidate, start
    bounds = [len(cuts) - 1]
    while bounds[-1]:
        bounds.append(came_from[bounds[-1]])
    return [cuts[index] for index in reversed(bounds)]


def _part(sample: Sample, low: int, high: int) -> Sample:
    keep = np.zeros(sample.num_tokens, np.bool_)
    # All ancestors before `low` of later tokens are ancestors of the first token, too.
    keep[:low] = sample.subtree_end[:low] > low
    num_repeated = int(keep.sum())
    keep[low:high] = True
    source = sample.records.source
    mine = (source >= low) & (source < high)
    return subset(sample, keep, mine, num_repeated=num_repeated)
