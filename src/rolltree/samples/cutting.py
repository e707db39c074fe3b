"""Cuts samples that are too long: at `max_seq_len`, and into parts that fit a token budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from rolltree.samples.transform import subset, take_records
from rolltree.values.types import IntArray, Records, Sample, TruncationReason


def _count_records(records: Records) -> list[tuple[int, int, int]]:
    """Return (rollout, call, number of records) for every call that has records."""
    pairs = np.stack([records.rollout, records.call], axis=1)
    calls, counts = np.unique(pairs, axis=0, return_counts=True)
    return [(int(r), int(c), int(n)) for (r, c), n in zip(calls, counts, strict=True)]


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
        return None, _count_records(records)
    lost = _count_records(take_records(records, ~inside))
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


def parts_of(sample: Sample, max_tokens: int) -> list[Sample]:
    """Return the parts of a sample for `split_sample`; each repeats the context it attends to."""
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
