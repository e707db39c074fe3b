"""Flat samples: one path of tokens, the calls on it in order.

A flat sequence is the tree that is a path, so it has the same arrays as a tree sample. They are
read-only views where they can be: the prompt that T step samples repeat is in memory once. Leaves
out the choice of calls (`grouping.py`) and cutting (`capping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rolltree.samples.records import make_records
from rolltree.samples.rollout import Call, Rollout
from rolltree.samples.spans import CallSpan, group_origins
from rolltree.samples.stream_views import path_streams
from rolltree.tokens import Break
from rolltree.tokens.buffers import concat
from rolltree.types import IntArray, Sample, Scope

_positions: list[IntArray] = [np.arange(1024, dtype=np.int32)]


def path_positions(length: int) -> IntArray:
    """Return `arange(length)` as a read-only view of one array that all paths share."""
    if len(_positions[0]) < length:
        _positions[0] = np.arange(2 * length, dtype=np.int32)
    view = _positions[0][:length]
    view.flags.writeable = False
    return view


def flat_sample(
    rollout: Rollout,
    calls: Sequence[Call],
    scope: Scope,
    advantages: Sequence[float | None],
    factor: float,
    openers: Mapping[tuple[int, int], Break],
) -> Sample:
    """Return the sample of calls that each extend the one before them, id for id.

    `openers` maps rollout and call to the break that opened a sample there.
    """
    tree, table = rollout.tree, rollout.tree.calls
    last = calls[-1].handle
    length = tree.path_len(last)
    handles = [call.handle for call in calls]
    prompt_lens = [table.prompt_len[handle] for handle in handles]
    counts = [table.num_sampled[handle] for handle in handles]
    source = [
        path_positions(start + count)[start:]
        if start >= 0
        else np.arange(-1, count - 1, dtype=np.int32)
        for start, count in zip((n - 1 for n in prompt_lens), counts, strict=True)
    ]
    spans = tuple(
        CallSpan.of(rollout, call, start, start + count)
        for call, start, count in zip(calls, prompt_lens, counts, strict=True)
    )
    origins, indices = group_origins([(rollout, calls)])
    return Sample(
        ids=tree.arena.path_view(table.end(last), length),
        positions=path_positions(length),
        subtree_end=np.broadcast_to(np.int32(length), length),
        records=make_records(rollout, calls, concat(source, np.int32), advantages, factor),
        origins=origins,
        info={
            "scope": scope,
            "spans": spans,
            "rollouts": indices,
            "break": openers.get((rollout.index, calls[0].step)),
            "step_rewards": tuple(call.reward for call in calls),
            "streams": path_streams(tree, handles),
        },
    )
