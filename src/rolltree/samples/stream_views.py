"""Extra streams of a sample: named values at packed positions, one per position.

Knows the stream containers of the token tree. Where several calls carry a value for the same
position, the first one wins: by causality they describe the same forward pass. Leaves out the
meaning of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.tokens import PlacedStream, TokenTree
from rolltree.types import IntArray


@dataclass(frozen=True, slots=True)
class SampleStream:
    """Values at packed positions: `positions` int32 `[n]`, ascending and unique.

    `values` is an array `[n, ...]` for per-token streams and a tuple of n arrays of any shape for
    placed ones.
    """

    positions: IntArray
    values: NDArray[Any] | tuple[NDArray[Any], ...]


def _unique(positions: list[IntArray], values: list[Any], placed: bool) -> SampleStream:
    joined = np.concatenate(positions)
    unique, first = np.unique(joined, return_index=True)
    if placed:
        return SampleStream(unique, tuple(values[index] for index in first))
    return SampleStream(unique, np.concatenate(values)[first])


def collect_streams(
    tree: TokenTree, handles: Sequence[int], locate: Callable[[int, IntArray], IntArray]
) -> dict[str, SampleStream]:
    """Return every stream that one of the calls carries.

    `locate(handle, path_positions)` maps positions on a call's path to packed positions.
    """
    streams: dict[str, SampleStream] = {}
    for name in tree.extra.names():
        positions: list[IntArray] = []
        values: list[Any] = []
        placed = name in tree.extra.placed
        for handle in handles:
            stream = tree.stream(name, handle)
            if stream is None:
                continue
            if isinstance(stream, PlacedStream):
                positions.append(locate(handle, np.asarray(stream.positions, dtype=np.int32)))
                values.extend(stream.values)
            else:
                start = stream.start or 0
                path = np.arange(start, start + len(stream.values), dtype=np.int32)
                positions.append(locate(handle, path))
                values.append(stream.values)
        if positions:
            streams[name] = _unique(positions, values, placed)
    return streams


def path_streams(tree: TokenTree, handles: Sequence[int]) -> dict[str, SampleStream]:
    """Return the streams of a flat sample, where packed and path positions are the same."""
    return collect_streams(tree, handles, lambda _, positions: positions)


def move_streams(
    streams: Mapping[str, SampleStream], position_of: IntArray
) -> dict[str, SampleStream]:
    """Return streams at new positions; `position_of[old]` is the new position or -1 for gone."""
    moved: dict[str, SampleStream] = {}
    for name, stream in streams.items():
        positions = position_of[stream.positions]
        order = np.argsort(positions, kind="stable")
        order = order[positions[order] >= 0]
        if len(order):
            values = stream.values
            kept = (
                tuple(values[index] for index in order)
                if isinstance(values, tuple)
                else values[order]
            )
            moved[name] = SampleStream(positions[order].astype(np.int32), kept)
    return moved


def join_streams(
    parts: Sequence[Mapping[str, SampleStream]], starts: Sequence[int]
) -> dict[str, SampleStream]:
    """Return the streams of samples put side by side, part p shifted by `starts[p]`."""
    joined: dict[str, SampleStream] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [(part[name], s) for part, s in zip(parts, starts, strict=True) if name in part]
        positions = np.concatenate([stream.positions + np.int32(s) for stream, s in found])
        values = [stream.values for stream, _ in found]
        if isinstance(values[0], tuple):
            joined[name] = SampleStream(
                positions, tuple(item for group in values for item in group)
            )
        else:
            joined[name] = SampleStream(positions, np.concatenate(values))
    return joined
