"""Makes one sample of calls: tokens in depth-first order, loss records, origins and streams.

A flat sample holds calls that each extend the one before. It is a tree with a single path, and its
arrays are read-only views if possible, so that a prompt that many samples repeat is in memory once.
A tree sample holds any calls. A run (a contiguous piece of the tree's arena) stays in one piece,
since at each branch point the run's own continuation is the first child; so depth-first order is an
order of runs, and `subtree_end` changes only at branch points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.resolve import ResolvedRollout, ResolvedStep
from rolltree.samples.streams import SampleStream, move_streams
from rolltree.samples.transform import concat_records, take_records
from rolltree.tokens import PlacedStream, TokenTree
from rolltree.tokens.buffers import concat
from rolltree.values.errors import TokenError
from rolltree.values.types import FloatArray, IntArray, Records, Sample, Scope

Part = tuple[ResolvedRollout, Sequence[ResolvedStep]]
"""A rollout, and its calls that are in a sample."""
Streams = Mapping[str, SampleStream]


def flat_sample(
    rollout: ResolvedRollout,
    calls: Sequence[ResolvedStep],
    scope: Scope,
    streams: Streams,
    inputs: Sequence[str] = (),
    **info: Any,
) -> Sample:
    """Return the sample of calls that each extend the one before them, id for id.

    `streams` are those of the rollout's tree, from `tree_streams`; `inputs` names the streams that
    become `Records.extra`; `info` is added to the sample's.
    """
    tree, table = rollout.tree, rollout.tree.calls
    last = calls[-1].handle
    length = tree.path_len(last)
    # The position before each sampled token; -1 for the first token of a call without a prompt.
    source = [
        _arange(start + count)[start:] if start >= 0 else np.arange(-1, count - 1, dtype=np.int32)
        for start, count in (
            (table.prompt_len[call.handle] - 1, table.num_sampled[call.handle]) for call in calls
        )
    ]

    # This array is as long as the whole tree, so it is made only if there are streams to move.
    def packed() -> IntArray:
        position = np.full(tree.num_tokens, -1, np.int32)
        parts = tree.arena.slices(table.end(last), length)
        position[concat([np.arange(*part) for part in parts], np.int64)] = _arange(length)
        return position

    records = make_records(rollout, calls, concat(source, np.int32), inputs)
    return _sample(
        [(rollout, calls)],
        ids=tree.arena.path_view(table.end(last), length),
        positions=_arange(length),
        subtree_end=np.broadcast_to(np.int32(length), length),
        records=records,
        info={"scope": scope, **info, "streams": _at(streams, packed)},
    )


def tree_sample(parts: Sequence[Part], streams: Streams, inputs: Sequence[str] = ()) -> Sample:
    """Return one sample that has every token of the calls once; the rollouts share one tree."""
    tree = parts[0][0].tree
    laid = layout(tree, [call.handle for _, calls in parts for call in calls])
    records = [
        make_records(
            rollout,
            calls,
            concat([_source(tree, laid.packed, call.handle) for call in calls], np.int32),
            inputs,
        )
        for rollout, calls in parts
    ]
    return _sample(
        parts,
        ids=laid.ids,
        positions=laid.positions,
        subtree_end=laid.subtree_end,
        records=concat_records(records),
        info={"scope": "tree", "streams": _at(streams, lambda: laid.packed)},
    )


def _sample(
    parts: Sequence[Part],
    *,
    ids: IntArray,
    positions: IntArray,
    subtree_end: IntArray,
    records: Records,
    info: dict[str, Any],
) -> Sample:
    origins = [(rollout.index, rollout.origins(calls)) for rollout, calls in parts]
    info["rollouts"] = tuple(index for index, own in origins for _ in own)
    for name in ("changed_sampling", "left_out"):
        marks = tuple(
            (rollout.index, call.index, getattr(call, name))
            for rollout, calls in parts
            for call in calls
            if getattr(call, name) is not None
        )
        if marks:
            info[name] = marks
    together = tuple(origin for _, own in origins for origin in own)
    return Sample(ids, positions, subtree_end, records, together, info)


def _at(streams: Streams, packed: Callable[[], IntArray]) -> dict[str, SampleStream]:
    return move_streams(streams, packed()) if streams else {}


def on_one_tree(rollouts: Sequence[ResolvedRollout]) -> list[ResolvedRollout]:
    """Return the rollouts on one token tree: their own if they share one, else a merged tree."""
    if all(rollout.tree is rollouts[0].tree for rollout in rollouts):
        return list(rollouts)
    merged = TokenTree()
    # Per tree, because a tree that several rollouts share is merged only once.
    first: dict[int, int] = {}
    moved = []
    for rollout in rollouts:
        if id(rollout.tree) not in first:
            first[id(rollout.tree)] = merged.merge(rollout.tree)
        shift = first[id(rollout.tree)]
        calls = tuple(replace(call, handle=call.handle + shift) for call in rollout.calls)
        moved.append(replace(rollout, tree=merged, calls=calls))
    return moved


# -- positions -----------------------------------------------------------------------------------

_shared: list[IntArray] = [np.arange(1024, dtype=np.int32)]


def _arange(length: int) -> IntArray:
    """Return `arange(length)` as a read-only view of an array that all paths share."""
    if len(_shared[0]) < length:
        # Earlier views keep the previous array alive.
        _shared[0] = np.arange(2 * length, dtype=np.int32)
    view = _shared[0][:length]
    view.flags.writeable = False
    return view


@dataclass(frozen=True, slots=True)
class Layout:
    """Depth-first order of the tokens of some calls.

    `ids`, `positions` and `subtree_end` are int32 `[_T]`; `packed[arena_index]` is the position of
    a token, -1 if no call needs it.
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
            # An earlier call needed this run, so everything above it is already marked.
            if seen:
                break
            token, run = arena.run_parent[run], arena.run_parent_run[run]
    return needed


def layout(tree: TokenTree, handles: Iterable[int]) -> Layout:
    """Lay out the paths of some calls in depth-first order: O(tokens), with Python code per run."""
    arena = tree.arena
    needed = _needed_ends(tree, handles)
    children: dict[int, list[int]] = {}
    for run, end in enumerate(needed):
        if end:
            children.setdefault(arena.run_parent_run[run], []).append(run)
    sizes = [max(0, end - arena.run_start[run]) for run, end in enumerate(needed)]
    # Parents have smaller numbers, so a run's size is complete before it is added to its parent's.
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
            # Tokens after a branch point no longer have that branch below them.
            attach = arena.run_parent[child] + 1
            if attach > start:
                segment_lengths.append(attach - start)
                segment_ends.append(subtree_end)
                start = attach
            subtree_end -= sizes[child]
        segment_lengths.append(end - start)
        segment_ends.append(subtree_end)
        # The stack returns the last branch first, since in depth-first order the deepest branch
        # follows the run.
        stack.extend(branches)
        total += end - arena.run_start[run]
    order = np.arange(total, dtype=np.int32)
    shift = np.array(offsets, dtype=np.int32)
    # In a run, arena indices and depths grow with the position, so one offset per run suffices.
    from_arena = order + np.repeat(np.array(starts, np.int32) - shift, lengths)
    packed = np.full(tree.num_tokens, -1, dtype=np.int32)
    packed[from_arena] = order
    return Layout(
        ids=arena.ids[from_arena],
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
    # The sources are the same part of the path as the sampled tokens, shifted up by one token.
    before = arena.up(tree.calls.end(handle), 1)
    parts = [packed[low:high] for low, high in arena.slices(before, count - first_has_none)]
    if first_has_none:
        parts.insert(0, np.array([-1], np.int32))
    return np.concatenate(parts)


# -- records -------------------------------------------------------------------------------------


def _spread(values: Sequence[float], counts: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Return the values, each repeated as often as its count says."""
    if len(values) == 1:
        return np.full(counts[0], values[0], dtype)
    return np.repeat(np.array(values, dtype), counts)


def _gather(
    tree: TokenTree, name: str, handles: Sequence[int], counts: Sequence[int]
) -> NDArray[Any]:
    """Return a stream over the calls' sampled tokens; NaN for calls without values."""
    stream = tree.sampled[name]
    dtype = stream.buffer.dtype
    raw = [
        np.nan if (value := stream.raw(handle, count)) is None else value
        for handle, count in zip(handles, counts, strict=True)
    ]
    arrays = [value if isinstance(value, np.ndarray) else None for value in raw]
    if all(array is None for array in arrays):
        # Streams that are constant over a call store one number (design/0001).
        return _spread(raw, counts, dtype)  # type: ignore[arg-type]
    return np.concatenate(
        [
            np.full(count, value, dtype) if array is None else array
            for value, array, count in zip(raw, arrays, counts, strict=True)
        ]
    )


def _loss_input(
    tree: TokenTree, name: str, handles: Sequence[int], counts: Sequence[int]
) -> FloatArray:
    """Return a named stream over the calls' sampled tokens; NaN for tokens without a value.

    Raises:
        TokenError: the stream does not have one number per token.
    """
    parts = []
    for handle, count in zip(handles, counts, strict=True):
        values = np.full(count, np.nan, np.float32)
        stream = tree.stream(name, handle)
        if stream is not None:
            if isinstance(stream, PlacedStream) or np.ndim(stream.values) != 1:
                raise TokenError(
                    f"the loss reads the stream {name!r}, which does not have one number per "
                    "token. Record it as an array with a value per sampled token."
                )
            # A stream may start or even end inside the prompt, or start after the first sampled
            # token.
            start = (stream.start or 0) - tree.prompt_len(handle)
            low = max(0, start)
            high = max(low, min(count, start + len(stream.values)))
            values[low:high] = stream.values[low - start : high - start]
        parts.append(values)
    return concat(parts, np.float32)


def make_records(
    rollout: ResolvedRollout,
    calls: Sequence[ResolvedStep],
    source: IntArray,
    inputs: Sequence[str] = (),
) -> Records:
    """Return one record per sampled token of `calls`, in call order.

    `source`, int32 `[_R]`, is the packed position before each sampled token; it is negative for the
    first token of a call without a prompt, whose record is left out, since no logits gave it. A
    call without an advantage has advantage 0. `inputs` names streams of the calls that become
    `Records.extra`.
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
        advantage=_spread([call.advantage or 0.0 for call in calls], counts, np.float32),
        weight=weight if rollout.weight == 1.0 else weight * np.float32(rollout.weight),
        version=_gather(tree, "version", handles, counts),
        rollout=np.full(total, rollout.index, np.int32),
        call=_spread([call.index for call in calls], counts, np.int32),
        offset=np.arange(total, dtype=np.int32) - _spread(first, counts, np.int32),
        extra={name: _loss_input(tree, name, handles, counts) for name in inputs},
    )
    if total and source.min() < 0:
        return take_records(records, source >= 0)
    return records
