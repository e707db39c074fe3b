"""Joining and splitting samples: both keep every record exactly once.

Joining puts samples side by side as one forest. Splitting cuts a tree in depth-first order; an
interval of that order plus the ancestors of its first token is a valid sample, so each part repeats
one path as context. Knows the sample's arrays. Leaves out which parts go together (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rolltree.errors import TokenError
from rolltree.samples.records import COLUMNS, concat_records
from rolltree.samples.stream_views import SampleStream, join_streams
from rolltree.samples.subset import subset
from rolltree.types import IntArray, Records, Sample


def join_samples(samples: Sequence[Sample]) -> Sample:
    """Return one sample that holds all of them side by side; no token attends to another sample.

    `info["parts"]` has the info of each, `info["part_starts"]` its first packed position.
    """
    lengths = [sample.num_tokens for sample in samples]
    starts = [int(start) for start in np.cumsum([0, *lengths])[:-1]]
    shifted = [_shift(sample.records, start) for sample, start in zip(samples, starts, strict=True)]
    empty = [np.empty(0, np.int32)]
    streams: list[dict[str, SampleStream]] = [s.info.get("streams", {}) for s in samples]
    return Sample(
        ids=np.concatenate(empty + [sample.ids for sample in samples]),
        positions=np.concatenate(empty + [sample.positions for sample in samples]),
        subtree_end=np.concatenate(
            empty
            + [
                sample.subtree_end + np.int32(start)
                for sample, start in zip(samples, starts, strict=True)
            ]
        ),
        records=concat_records(shifted),
        origins=tuple(origin for sample in samples for origin in sample.origins),
        info={
            "parts": tuple(sample.info for sample in samples),
            "part_starts": tuple(starts),
            "streams": join_streams(streams, starts),
        },
    )


def _shift(records: Records, start: int) -> Records:
    columns: dict[str, Any] = {name: getattr(records, name) for name in COLUMNS}
    columns["source"] = records.source + np.int32(start)
    return Records(**columns)


def split_sample(sample: Sample, max_tokens: int) -> list[Sample]:
    """Split a tree sample into parts of at most `max_tokens`, repeating as few tokens as possible.

    Parts are intervals of the depth-first order, cut where a branch ends, each behind the path to
    its first token. The cuts with the fewest repeated tokens are found by dynamic programming.
    `info["num_repeated"]` is how many leading tokens of a part are repeated context,
    `info["interval"]` the positions of the sample it covers. A record goes to the part that covers
    its source.

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
    """Return the bounds of the parts, 0 and the number of tokens included."""
    total = len(positions)
    jumps = np.flatnonzero(np.diff(positions) != 1) + 1
    cuts = [0, *jumps.tolist(), total]
    context = [0, *positions[jumps].tolist()]
    cost = [0.0] + [np.inf] * (len(cuts) - 1)
    came_from = [0] * len(cuts)
    first = 0
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
    keep[:low] = sample.subtree_end[:low] > low
    num_repeated = int(keep.sum())
    keep[low:high] = True
    source = sample.records.source
    mine = (source >= low) & (source < high)
    return subset(sample, keep, mine, interval=(low, high), num_repeated=num_repeated)
