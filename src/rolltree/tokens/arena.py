"""A radix tree of token ids: an append-only int32 arena that is cut into runs, and its calls.

A token is identified by its index in the arena, which never changes. A run is a contiguous piece of
the arena that hangs below one parent token; a branch inside a run is an entry of a dictionary, so
nothing is ever split or moved. Therefore the ends of calls are permanent, serialization is
append-only, and merging is a walk over runs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rolltree.tokens.buffers import concat
from rolltree.values.types import IntArray

# After a mismatch, ids are compared in pieces of this size, since the first difference may come
# early in a long run.
_COMPARE_TOKENS = 8192
# Branch points per run that are tried before its own continuation (design/0001).
_MAX_GUESSES = 8
# Makes ids unsigned for the keys of branches. Negative ids, which are still possible here, match no
# stored id.
_MASK = 0xFFFFFFFF


class Place(NamedTuple):
    """A token of the arena and the run that holds it; `ROOT` is the place before any token."""

    token: int
    run: int


ROOT = Place(-1, -1)
NO_TURN = -1


class TokenArena:
    """Token ids in insertion order plus runs: `run_start`, `run_parent` (token), `run_depth`.

    Run r covers the arena from `run_start[r]` to `run_start[r + 1]`. `run_depth[r]` is the number
    of tokens before its first token on the path from the root.
    """

    __slots__ = (
        "_branch_tokens",
        "_branches",
        "_bytes",
        "_ids",
        "num_tokens",
        "run_depth",
        "run_parent",
        "run_parent_run",
        "run_start",
    )

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ids: IntArray = np.empty(0, dtype=np.int32)
        self.num_tokens = 0
        self.run_start = array("i")
        self.run_parent = array("i")
        self.run_parent_run = array("i")
        self.run_depth = array("i")
        # (parent token + 1) << 32 | first id -> run; plus 1, because the root is -1.
        self._branches: dict[int, int] = {}
        # run -> its first `_MAX_GUESSES` branch points.
        self._branch_tokens: dict[int, list[int]] = {}

    @property
    def ids(self) -> IntArray:
        """All ids in arena order, a view `[num_tokens]`. Do not write to it."""
        return self._ids[: self.num_tokens]

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return len(self.run_start)

    @property
    def nbytes(self) -> int:
        """Bytes held, with the buffer's unused space and an estimate for the dictionaries."""
        tables = 104 * len(self._branches) + 200 * len(self._branch_tokens)
        return len(self._bytes) + 16 * self.num_runs + tables

    def run_end(self, run: int) -> int:
        """Return the arena index after the last token of `run`."""
        return self.run_start[run + 1] if run + 1 < len(self.run_start) else self.num_tokens

    def place(self, token: int) -> Place:
        """Return the place of a token index; its run is found by bisection."""
        return Place(token, bisect_right(self.run_start, token) - 1)

    def depth(self, place: Place) -> int:
        """Return the number of tokens on the path from the root to `place`, including `place`."""
        token, run = place
        return self.run_depth[run] + token - self.run_start[run] + 1 if run >= 0 else 0

    def match(self, ids: IntArray, place: Place = ROOT) -> tuple[int, Place]:
        """Walk down from `place` while `ids` match; return how many matched, and the place reached.

        One `memcmp` per run, no Python per token.
        """
        token, run = place
        num_ids, matched = len(ids), 0
        if not num_ids:
            return 0, place
        # Items of a memoryview are Python integers, and its slices are not copies.
        raw = ids.data
        raw_bytes = raw.cast("B")
        stored, starts, branches = self._bytes, self.run_start, self._branches
        branch_tokens, last_run = self._branch_tokens, len(starts) - 1
        while matched < num_ids:
            if run >= 0:
                end = starts[run + 1] if run < last_run else self.num_tokens
                count = min(end - token - 1, num_ids - matched)
                # If a prompt left this run before, later ones often leave it at the same token.
                for branch in branch_tokens.get(run, ()) if count else ():
                    size = branch - token
                    if 0 <= size < count and branches.get(
                        ((branch + 1) << 32) | (raw[matched + size] & _MASK)
                    ):
                        # A hit is never 0 (false), since run 0 hangs below the root.
                        count = size
                        break
                if count:
                    piece = raw_bytes[4 * matched : 4 * (matched + count)]
                    agreed = count
                    # `memcmp` in place takes less than half the time of numpy's `==` (design/0001).
                    if not stored.startswith(piece, 4 * token + 4):
                        agreed = self._agreement(ids, matched, token + 1, count)
                    matched += agreed
                    token += agreed
                    if matched == num_ids:
                        break
            child = branches.get(((token + 1) << 32) | (raw[matched] & _MASK))
            if child is None:
                break
            run, token = child, starts[child]
            matched += 1
        return matched, Place(token, run)

    def _agreement(self, ids: IntArray, start: int, follow: int, count: int) -> int:
        """Return how many of `count` ids match, from `ids[start]` and arena index `follow` on."""
        for done in range(0, count, _COMPARE_TOKENS):
            size = min(_COMPARE_TOKENS, count - done)
            differs = (
                ids[start + done : start + done + size]
                != self._ids[follow + done : follow + done + size]
            )
            first = int(differs.argmax())
            if differs[first]:
                return done + first
        return count

    def extend(self, ids: IntArray, place: Place = ROOT) -> Place:
        """Walk down from `place` by `ids`, adding what is missing; return the last place."""
        if place.token == self.num_tokens - 1:  # nothing continues the newest token yet
            return self.append(ids, place)
        matched, place = self.match(ids, place)
        return self.append(ids[matched:], place) if matched < len(ids) else place

    def append(self, ids: IntArray, place: Place) -> Place:
        """Add `ids` below `place`, where nothing continues with `ids[0]` yet."""
        if not len(ids):
            return place
        start = self.num_tokens
        end = start + len(ids)
        if 4 * end > len(self._bytes):
            self._resize(end + end // 2 + 256)
        self._ids[start:end] = ids
        self.num_tokens = end
        token, run = place
        # Ids below the newest token make its run longer, and all others begin a new run. So no run
        # is ever split (design/0001).
        if run < 0 or token != start - 1:
            new_run = len(self.run_start)
            self.run_start.append(start)
            self.run_parent.append(token)
            self.run_parent_run.append(run)
            self.run_depth.append(self.depth(place))
            self._branches[((token + 1) << 32) | int(ids[0])] = new_run
            if run >= 0:
                known = self._branch_tokens.setdefault(run, [])
                if len(known) < _MAX_GUESSES and token not in known:
                    known.append(token)
            run = new_run
        return Place(end - 1, run)

    def trim(self) -> None:
        """Free memory that is reserved beyond the stored tokens."""
        if 4 * self.num_tokens < len(self._bytes):
            self._resize(self.num_tokens)

    def _resize(self, capacity: int) -> None:
        # Not resized in place, since readers may hold arrays that are views of the old buffer.
        grown = bytearray(4 * capacity)
        used = 4 * self.num_tokens
        grown[:used] = memoryview(self._bytes)[:used]
        self._bytes = grown
        self._ids = np.frombuffer(grown, dtype=np.int32)

    def slices(self, place: Place, count: int) -> list[tuple[int, int]]:
        """Return the arena ranges of the last `count` tokens of the path to `place`, in order.

        `count` may not exceed the path's length.
        """
        token, run = place
        starts, parents, parent_runs = self.run_start, self.run_parent, self.run_parent_run
        parts: list[tuple[int, int]] = []
        # From the last token upwards, so the ranges come out in reverse.
        while count > 0:
            low, after = starts[run], token + 1
            if low < after - count:
                low = after - count
            parts.append((low, after))
            count -= after - low
            token, run = parents[run], parent_runs[run]
        parts.reverse()
        return parts

    def path(self, place: Place, count: int | None = None) -> IntArray:
        """Return a copy of the last `count` ids (default: all) of the path to `place`."""
        wanted = self.depth(place) if count is None else count
        ids = self._ids
        return concat([ids[low:high] for low, high in self.slices(place, wanted)], np.int32)

    def path_view(self, place: Place, count: int) -> IntArray:
        """Return the last `count` ids of the path to `place`, read-only; no copy if in one run."""
        ids = self._ids
        parts = [ids[low:high] for low, high in self.slices(place, count)]
        joined = parts[0] if len(parts) == 1 else concat(parts, np.int32)
        joined.flags.writeable = False
        return joined

    def up(self, place: Place, count: int) -> Place:
        """Return the place `count` tokens above `place` on its path."""
        token, run = place
        while run >= 0:
            above = token - self.run_start[run]
            if count <= above:
                return Place(token - count, run)
            count -= above + 1
            token, run = self.run_parent[run], self.run_parent_run[run]
        return ROOT

    def common(self, left: Place, right: Place) -> Place:
        """Return the last place that the paths to `left` and `right` share."""
        # Parents have lower numbers than their children, so the run with the higher number is not
        # above the other one.
        while left.run != right.run:
            if left.run > right.run:
                left = Place(self.run_parent[left.run], self.run_parent_run[left.run])
            else:
                right = Place(self.run_parent[right.run], self.run_parent_run[right.run])
        return left if left.token <= right.token else right

    def absorb(self, other: TokenArena) -> IntArray:
        """Add all tokens of `other`; return the new arena index of each of its tokens.

        It walks over runs, parents first, in O(unique tokens) at memcmp speed.
        """
        mapped = np.empty(other.num_tokens, dtype=np.int32)
        for run in range(other.num_runs):
            start, end = other.run_start[run], other.run_end(run)
            parent = other.run_parent[run]
            # Parents come first, so the parent's token is already mapped.
            place = self.place(int(mapped[parent])) if parent >= 0 else ROOT
            last = self.extend(other.ids[start:end], place)
            position = start
            for low, high in self.slices(last, end - start):
                mapped[position : position + high - low] = np.arange(low, high, dtype=np.int32)
                position += high - low
        return mapped


def _column() -> array[int]:
    return array("i")


@dataclass(slots=True, eq=False)
class CallTable:
    """One row per call, as columns of machine integers.

    `prompt_token` and `end_token` are arena indices of the last prompt token and the last token
    (-1: none); `parent` is the call whose path this prompt was known to extend (-1: none);
    `num_tokens` and `num_runs` are the sizes of the arena after the call, for incremental saving.
    """

    prompt_token: array[int] = field(default_factory=_column)
    prompt_run: array[int] = field(default_factory=_column)
    end_token: array[int] = field(default_factory=_column)
    end_run: array[int] = field(default_factory=_column)
    prompt_len: array[int] = field(default_factory=_column)
    num_sampled: array[int] = field(default_factory=_column)
    parent: array[int] = field(default_factory=_column)
    agent: array[int] = field(default_factory=_column)
    turn: array[int] = field(default_factory=_column)
    num_tokens: array[int] = field(default_factory=_column)
    num_runs: array[int] = field(default_factory=_column)

    def __len__(self) -> int:
        return len(self.end_token)

    def append(
        self,
        prompt_end: Place,
        end: Place,
        *,
        prompt_len: int,
        num_sampled: int,
        parent: int,
        agent: int,
        turn: int,
        num_tokens: int,
        num_runs: int,
    ) -> None:
        """Add the row of a call."""
        self.prompt_token.append(prompt_end.token)
        self.prompt_run.append(prompt_end.run)
        self.end_token.append(end.token)
        self.end_run.append(end.run)
        self.prompt_len.append(prompt_len)
        self.num_sampled.append(num_sampled)
        self.parent.append(parent)
        self.agent.append(agent)
        self.turn.append(turn)
        self.num_tokens.append(num_tokens)
        self.num_runs.append(num_runs)

    def end(self, call: int) -> Place:
        """Return the place of a call's last token."""
        return Place(self.end_token[call], self.end_run[call])

    def prompt_end(self, call: int) -> Place:
        """Return the place of a call's last prompt token."""
        return Place(self.prompt_token[call], self.prompt_run[call])
