"""The layout of a recurrence over a forest: the parent of each token, and the order of chunks.

A chunk is a run of tokens in depth-first order that all start from one state: the state after the
parent of its first token. It may branch inside, and several siblings may share one. A chunk's
level is one more than that of the chunk its start state comes from, so all chunks of a level run as
one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltree.training.layout import LongArray


@dataclass(frozen=True, slots=True)
class Level:
    """Chunks `first .. stop - 1`, which start where chunks of the level before end.

    `entry[c]` is the exit, counted inside the level before, whose state chunk `first + c` starts
    from (None: they are roots without a start state). The level's own exits are `exit_first ..
    exit_stop - 1`; exit e belongs to the level's chunk `exit_chunk[e]`.
    """

    first: int
    stop: int
    entry: Tensor | None
    exit_first: int
    exit_stop: int
    exit_chunk: Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """A forest of `_T` tokens as `_N` chunks of at most `_C` tokens, ordered by level.

    `token` `[_N, _C]` is the token at each place (`_T`: nothing, a pad), `place` `[_T]` the place
    of each token in `token.flatten()`. `seen` `[_N, _C, _C]` says whether place j is on the path
    to place i (itself included). `exit_place` is the place of each exit, a token that another
    chunk hangs below.
    """

    token: Tensor
    place: Tensor
    seen: Tensor
    exit_place: Tensor
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """Tokens by depth, for recurrences that cannot be cut into chunks.

    `tokens` is a permutation of the tokens, and `place` its inverse. Depth d has `tokens[start[d] :
    start[d + 1]]`; `entry[d - 1]` are the indices of their parents among the tokens of depth d - 1.
    """

    tokens: Tensor
    place: Tensor
    start: tuple[int, ...]
    entry: tuple[Tensor, ...]


@dataclass(eq=False)
class RecurrenceLayout:
    """The parents of a forest's tokens, `subtree_end` `[_T]`, and what is derived from them.

    Everything is computed on first use, so it costs nothing for models without such layers.
    """

    subtree_end: NDArray[np.int32]
    device: torch.device | str = "cpu"
    _chunks: dict[int, Chunks] = field(default_factory=dict)
    _taps: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def parent(self) -> LongArray:
        """The token before each token on its path, -1 for a root, `[_T]`."""
        return parents(self.subtree_end)

    def taps(self, width: int) -> tuple[Tensor, Tensor]:
        """Find the tokens whose last `width` on their path are not those before them in the row.

        Returns:
            The tokens `[E]`, and for each its ancestors, farthest first and itself last,
            `[E, width]`, with `_T` for a missing one.
        """
        if width not in self._taps:
            count = len(self.parent)
            index = np.arange(count)
            back = [index]
            for _ in range(width - 1):
                # Index -1 reads the last token's parent, which `where` drops again.
                back.append(np.where(back[-1] >= 0, self.parent[back[-1]], -1))
            ancestors = np.stack(back[::-1], axis=1)
            # What a convolution over the flat row reads; below 0 it reads padding.
            plain = index[:, None] - np.arange(width)[::-1]
            moved = np.flatnonzero((np.maximum(plain, -1) != ancestors).any(1))
            sources = np.where(ancestors[moved] >= 0, ancestors[moved], count)
            self._taps[width] = (self._to(moved), self._to(sources))
        return self._taps[width]

    def chunks(self, size: int) -> Chunks:
        """Cut the forest into chunks of at most `size` tokens."""
        if size not in self._chunks:
            self._chunks[size] = self._cut(size)
        return self._chunks[size]

    @cached_property
    def steps(self) -> Steps:
        """The tokens by depth."""
        parent, count = self.parent, len(self.parent)
        depth = np.zeros(count, np.int64)
        # In depth-first order a parent comes before its children, so its depth is known.
        for token, above in enumerate(parent.tolist()):
            depth[token] = depth[above] + 1 if above >= 0 else 0
        tokens = np.argsort(depth, kind="stable")
        place = np.empty(count, np.int64)
        place[tokens] = np.arange(count)
        start = np.searchsorted(depth[tokens], np.arange(depth.max() + 2))
        entry = [
            # Relative to the first token of the depth before.
            self._to(place[parent[tokens[low:high]]] - before)
            for before, low, high in zip(start, start[1:], start[2:], strict=False)
        ]
        return Steps(self._to(tokens), self._to(place), tuple(start.tolist()), tuple(entry))

    def _cut(self, size: int) -> Chunks:
        parent = self.parent
        firsts = chunk_starts(parent, size)
        edges = np.append(firsts, len(parent))
        owner = np.repeat(np.arange(len(firsts)), np.diff(edges))
        level = np.zeros(len(firsts), np.int64)
        # The parent's chunk comes earlier, so its level is known.
        for chunk, above in enumerate(parent[firsts].tolist()):
            level[chunk] = level[owner[above]] + 1 if above >= 0 else 0
        order = np.argsort(level, kind="stable")
        width = int(np.diff(edges).max())
        offset = np.arange(len(parent)) - firsts[owner]
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        place = rank[owner] * width + offset
        flat = np.full(len(firsts) * width, len(parent), np.int64)
        flat[place] = np.arange(len(parent))
        token = flat.reshape(-1, width)
        # A pad is on no path: with an end of 0 nothing sees it.
        end = np.append(self.subtree_end, 0)[token]
        row, column = token[:, :, None], token[:, None, :]
        seen = (column <= row) & (row < end[:, None, :])
        starts = parent[firsts[order]]  # which token each chunk follows
        exit_place: list[LongArray] = []
        levels: list[Level] = []
        edge = np.searchsorted(level[order], np.arange(level.max() + 2))
        num_exits = 0
        above = np.empty(0, np.int64)
        for depth, (first, stop) in enumerate(pairwise(edge.tolist())):
            entry = None
            if depth:
                # `above` still holds the exits of the level before.
                entry = self._to(np.searchsorted(above, place[starts[first:stop]]))
            after = starts[stop : edge[depth + 2]] if depth + 2 < len(edge) else starts[:0]
            # Chunks that hang below the same token share one exit.
            above = np.unique(place[after])  # exits of this level, as places in order
            exit_place.append(above)
            exits = self._to(above // width - first)
            levels.append(Level(first, stop, entry, num_exits, num_exits + len(above), exits))
            num_exits += len(above)
        return Chunks(
            self._to(token),
            self._to(place),
            torch.from_numpy(seen).to(self.device),
            self._to(np.concatenate(exit_place)),
            tuple(levels),
        )

    def _to(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)


def parents(subtree_end: NDArray[np.int32]) -> LongArray:
    """Return the parent of each token of a forest in depth-first order, -1 for roots, `[_T]`."""
    ends = subtree_end.tolist()
    # A token's parent is the token before it. After a leaf, it is the nearest token up the path
    # whose subtree is not over yet.
    parent = list(range(-1, len(ends) - 1))
    for before in np.flatnonzero(subtree_end[:-1] <= np.arange(1, len(ends))).tolist():
        token, above = before + 1, before
        while above >= 0 and ends[above] <= token:
            above = parent[above]
        parent[token] = above
    return np.array(parent, np.int64)


def chunk_starts(parent: LongArray, size: int) -> LongArray:
    """Return the first token of each chunk.

    A chunk takes the next token if it is below the chunk, or a sibling of the chunk's first.
    """
    above = parent.tolist()
    starts = []
    first, start = -size, -2
    for token, before in enumerate(above):
        # Roots count as siblings (parent -1), so short samples share a chunk.
        if token - first >= size or (before < first and before != start):
            first, start = token, before
            starts.append(token)
    return np.array(starts, np.int64)
