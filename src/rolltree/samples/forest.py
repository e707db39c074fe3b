"""Tree samples: every token of one or more rollouts once, in depth-first order.

A run of the token tree stays in one piece: its own continuation is the first child at each of its
branch points, so depth-first order is an order of runs, and `subtree_end` changes at branch points
only. Knows the arena's runs. Leaves out merging (`TokenTree.merge`) and splitting (`split.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rolltree.samples.records import concat_records, make_records
from rolltree.samples.rollout import Call, Rollout
from rolltree.samples.spans import CallSpan, group_origins
from rolltree.samples.stream_views import collect_streams
from rolltree.tokens import TokenTree
from rolltree.types import IntArray, Sample


@dataclass(frozen=True, slots=True)
class Layout:
    """Depth-first order of the tokens that some calls need.

    `ids`, `positions` and `subtree_end` are int32 `[_T]`; `packed[arena_index]` is the position of
    a token, -1 where no call needs it.
    """

    ids: IntArray
    positions: IntArray
    subtree_end: IntArray
    packed: IntArray


def _needed_ends(tree: TokenTree, handles: Iterable[int]) -> list[int]:
    """Return per run the arena index after the last token that a call needs (0: none)."""
    arena = tree.arena
    needed = [0] * arena.num_runs
    for handle in handles:
        token, run = tree.calls.end(handle)
        while run >= 0 and needed[run] <= token:
            seen = needed[run]
            needed[run] = token + 1
            if seen:
                break
            token, run = arena.run_parent[run], arena.run_parent_run[run]
    return needed


def layout(tree: TokenTree, handles: Iterable[int]) -> Layout:
    """Lay out the paths of some calls in depth-first order. O(tokens), Python per run only."""
    arena = tree.arena
    needed = _needed_ends(tree, handles)
    children: dict[int, list[int]] = {}
    for run, end in enumerate(needed):
        if end:
            children.setdefault(arena.run_parent_run[run], []).append(run)
    sizes = [max(0, end - arena.run_start[run]) for run, end in enumerate(needed)]
    for run in range(len(needed) - 1, -1, -1):
        parent = arena.run_parent_run[run]
        if needed[run] and parent >= 0:
            sizes[parent] += sizes[run]

    starts: list[int] = []
    lengths: list[int] = []
    offsets: list[int] = []
    depths: list[int] = []
    segment_lengths: list[int] = []
    segment_ends: list[int] = []
    total = 0
    stack = list(reversed(children.get(-1, [])))
    while stack:
        run = stack.pop()
        start, end = arena.run_start[run], needed[run]
        starts.append(start)
        lengths.append(end - start)
        offsets.append(total)
        depths.append(arena.run_depth[run])
        subtree_end = total + sizes[run]
        branches = sorted(children.get(run, ()), key=lambda child: arena.run_parent[child])
        for child in branches:
            attach = arena.run_parent[child] + 1
            if attach > start:
                segment_lengths.append(attach - start)
                segment_ends.append(subtree_end)
                start = attach
            subtree_end -= sizes[child]
        segment_lengths.append(end - start)
        segment_ends.append(subtree_end)
        stack.extend(branches)
        total += end - arena.run_start[run]

    return _arrays(tree, total, starts, lengths, offsets, depths, segment_lengths, segment_ends)


def _arrays(
    tree: TokenTree,
    total: int,
    starts: list[int],
    lengths: list[int],
    offsets: list[int],
    depths: list[int],
    segment_lengths: list[int],
    segment_ends: list[int],
) -> Layout:
    order = np.arange(total, dtype=np.int32)
    shift = np.array(offsets, dtype=np.int32)
    from_arena = order + np.repeat(np.array(starts, np.int32) - shift, lengths)
    packed = np.full(tree.num_tokens, -1, dtype=np.int32)
    packed[from_arena] = order
    return Layout(
        ids=tree.arena.ids[from_arena],
        positions=order + np.repeat(np.array(depths, np.int32) - shift, lengths),
        subtree_end=np.repeat(np.array(segment_ends, np.int32), segment_lengths),
        packed=packed,
    )


def _source(tree: TokenTree, packed: IntArray, handle: int) -> IntArray:
    """Return the packed position before each sampled token of a call; -1 before the root."""
    count = tree.calls.num_sampled[handle]
    if not count:
        return np.empty(0, np.int32)
    arena = tree.arena
    first_has_none = tree.calls.prompt_len[handle] == 0
    before = arena.up(tree.calls.end(handle), 1)
    parts = [packed[low:high] for low, high in arena.slices(before, count - first_has_none)]
    if first_has_none:
        parts.insert(0, np.array([-1], np.int32))
    return np.concatenate(parts)


def forest_sample(
    tree: TokenTree,
    parts: Sequence[tuple[Rollout, Sequence[Call]]],
    factors: Sequence[float],
) -> Sample:
    """Return one sample with every token of the calls once.

    Args:
        tree: the tree that the calls' handles refer to (a merged one for several rollouts).
        parts: each rollout with its calls.
        factors: one weight factor per rollout.
    """
    handles = [call.handle for _, calls in parts for call in calls]
    laid = layout(tree, handles)
    records = []
    spans: list[CallSpan] = []
    for (rollout, calls), factor in zip(parts, factors, strict=True):
        sources = [_source(tree, laid.packed, call.handle) for call in calls]
        advantages = [call.advantage for call in calls]
        source = np.concatenate(sources) if sources else np.empty(0, np.int32)
        records.append(make_records(rollout, calls, source, advantages, factor))
        for call in calls:
            if tree.num_sampled(call.handle):
                places = tree.arena.slices(
                    tree.calls.end(call.handle), tree.num_sampled(call.handle)
                )
                start, end = laid.packed[places[0][0]], laid.packed[places[-1][1] - 1] + 1
                spans.append(CallSpan.of(rollout, call, int(start), int(end)))

    def locate(handle: int, positions: IntArray) -> IntArray:
        path = [
            laid.packed[low:high]
            for low, high in tree.arena.slices(tree.calls.end(handle), tree.path_len(handle))
        ]
        return np.concatenate(path)[positions] if path else positions

    origins, indices = group_origins(parts)
    return Sample(
        ids=laid.ids,
        positions=laid.positions,
        subtree_end=laid.subtree_end,
        records=concat_records(records),
        origins=origins,
        info={
            "scope": "tree",
            "spans": tuple(spans),
            "rollouts": indices,
            "step_rewards": tuple(call.reward for _, calls in parts for call in calls),
            "streams": collect_streams(tree, handles, locate),
        },
    )
