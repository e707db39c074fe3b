"""Extra streams of a sample, such as routed experts or images: values at packed positions.

A token of the tree has one value per stream, from the first call that gave one: by causality, the
calls would all give the same value. (Routed experts of several policy versions differ, and the
newest version counts.) So a sample has the streams of all tokens on its paths, whichever call of
the rollout gave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.tokens import ROUTED_EXPERTS, PlacedStream, TokenStream, TokenTree
from rolltree.tokens.routing import routing_version
from rolltree.values.errors import TokenError
from rolltree.values.types import IntArray


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Values at packed positions: `positions` int32 `[n]`, ascending and unique.

    `values` is an array `[n, ...]` for per-token streams, and a tuple of n arrays of any shape for
    placed streams.
    """

    positions: IntArray
    values: NDArray[Any] | tuple[NDArray[Any], ...]

    def take(self, index: NDArray[Any], positions: IntArray) -> SampleStream:
        """Return the values at `index`, moved to `positions`."""
        values = self.values
        taken = tuple(values[i] for i in index) if isinstance(values, tuple) else values[index]
        return SampleStream(positions, taken)


def tree_streams(tree: TokenTree) -> dict[str, SampleStream]:
    """Return every stream of a tree, by arena index; the first call that has a value wins.

    For routed experts, the newest weights win: with their experts, tokens that these weights
    sampled get the logprobs that they were sampled with, and older tokens are off-policy anyway.
    """
    streams: dict[str, SampleStream] = {}
    # The sort is stable, so for equal versions the first call wins.
    newest_first = sorted(range(tree.num_calls), key=lambda call: -routing_version(tree, call))
    for name in tree.extra.names():
        parts = [
            _by_token(tree, handle, stream)
            for handle in (newest_first if name == ROUTED_EXPERTS else range(tree.num_calls))
            if (stream := tree.stream(name, handle)) is not None
        ]
        joined = _join(parts)
        # `unique` keeps the first of equal positions, so parts come in order of precedence.
        tokens, first = np.unique(joined.positions, return_index=True)
        streams[name] = joined.take(first, tokens.astype(np.int32))
    return streams


def _by_token(tree: TokenTree, handle: int, stream: TokenStream | PlacedStream) -> SampleStream:
    """Return a stream of a call with arena indices in place of positions of the path."""
    values: Any = stream.values
    if isinstance(stream, PlacedStream):
        at, values = np.asarray(stream.positions, np.int32), tuple(values)
    else:
        start = stream.start or 0
        at = np.arange(start, start + len(values), dtype=np.int32)
    if not len(at):
        return SampleStream(at, values)
    low, high = int(at.min()), int(at.max()) + 1
    # Walk only the part of the path that has values, which may be a few tokens of a long path.
    last = tree.arena.up(tree.calls.end(handle), tree.path_len(handle) - high)
    path = [np.arange(*part, dtype=np.int32) for part in tree.arena.slices(last, high - low)]
    return SampleStream(np.concatenate(path)[at - low], values)


def _join(parts: Sequence[SampleStream]) -> SampleStream:
    values = [part.values for part in parts]
    positions = np.concatenate([part.positions for part in parts])
    if isinstance(values[0], tuple):
        return SampleStream(positions, tuple(item for group in values for item in group))
    try:
        return SampleStream(positions, np.concatenate(values))
    except ValueError as error:
        shapes = sorted({str(np.shape(value)[1:]) for value in values})
        raise TokenError(
            f"a stream has values of shapes {' and '.join(shapes)} in samples of one batch, so it "
            "cannot be laid out. Were the rollouts recorded with several models?"
        ) from error


def move_streams(
    streams: Mapping[str, SampleStream], position_of: IntArray
) -> dict[str, SampleStream]:
    """Return streams at new positions; `position_of[old]` is the new position, or -1 to drop it."""
    moved: dict[str, SampleStream] = {}
    for name, stream in streams.items():
        positions = position_of[stream.positions]
        # Sorted again, since depth-first order differs from the order of the arena.
        order = np.argsort(positions, kind="stable")
        order = order[positions[order] >= 0]
        if len(order):
            moved[name] = stream.take(order, positions[order].astype(np.int32))
    return moved


def join_streams(
    parts: Sequence[Mapping[str, SampleStream]], starts: Sequence[int]
) -> dict[str, SampleStream]:
    """Return the streams of samples side by side, with part p shifted by `starts[p]`."""
    return {
        name: _join(
            [
                SampleStream(part[name].positions + np.int32(start), part[name].values)
                for part, start in zip(parts, starts, strict=True)
                if name in part
            ]
        )
        for name in dict.fromkeys(name for part in parts for name in part)
    }
