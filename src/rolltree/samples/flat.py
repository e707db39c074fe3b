"""Flat samples: one path of tokens, the calls on it in order.

A flat sequence is the tree that is a path, so it has the same arrays as a tree sample. Leaves out
the choice of calls (`grouping.py`) and cutting (`capping.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rolltree.samples.records import make_records
from rolltree.samples.rollout import Call, Rollout
from rolltree.samples.spans import CallSpan, group_origins
from rolltree.samples.stream_views import path_streams
from rolltree.tokens import Break
from rolltree.types import Sample, Scope


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
    prompt_lens = np.array([table.prompt_len[handle] for handle in handles], dtype=np.int64)
    counts = np.array([table.num_sampled[handle] for handle in handles], dtype=np.int64)
    total = int(counts.sum())
    before = prompt_lens - 1 - (np.cumsum(counts) - counts)
    source = (np.repeat(before, counts) + np.arange(total)).astype(np.int32)
    spans = tuple(
        CallSpan(rollout.index, call.step, start, start + count)
        for call, start, count in zip(calls, prompt_lens.tolist(), counts.tolist(), strict=True)
    )
    origins, indices = group_origins([(rollout, calls)])
    return Sample(
        ids=tree.arena.path(table.end(last), length),
        positions=np.arange(length, dtype=np.int32),
        subtree_end=np.full(length, length, dtype=np.int32),
        records=make_records(rollout, calls, source, advantages, factor),
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
