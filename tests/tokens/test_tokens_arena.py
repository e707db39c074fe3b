"""The radix arena: places, runs and paths, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import examples, ids

from rolltree.tokens import ROOT, Place, TokenArena


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def arena() -> TokenArena:
    """Paths 5 6 7 8, 5 6 9 (branch after 6) and 4 (a second root)."""
    made = TokenArena()
    made.extend(array([5, 6, 7, 8]))
    made.extend(array([5, 6, 9]))
    made.extend(array([4]))
    return made


def test_branching_adds_a_run_and_splits_nothing(arena: TokenArena) -> None:
    assert arena.ids.tolist() == [5, 6, 7, 8, 9, 4]
    assert list(arena.run_start) == [0, 4, 5]
    assert list(arena.run_parent) == [-1, 1, -1]
    assert list(arena.run_depth) == [0, 2, 0]
    assert [arena.run_end(run) for run in range(3)] == [4, 5, 6]


def test_match_stops_inside_a_run_at_its_end_and_at_the_root(arena: TokenArena) -> None:
    assert arena.match(array([5, 6, 7, 1])) == (3, Place(2, 0))
    assert arena.match(array([5, 6, 9, 9])) == (3, Place(4, 1))
    assert arena.match(array([5, 6, 7, 8])) == (4, Place(3, 0))
    assert arena.match(array([1, 2])) == (0, ROOT)
    assert arena.match(array([])) == (0, ROOT)


def test_match_can_start_below_the_root(arena: TokenArena) -> None:
    assert arena.match(array([9]), Place(1, 0)) == (1, Place(4, 1))
    assert arena.match(array([8, 3]), Place(2, 0)) == (1, Place(3, 0))


def test_the_newest_run_grows_in_place(arena: TokenArena) -> None:
    end = arena.extend(array([4, 4, 4]))
    assert end == Place(7, 2)
    assert arena.num_runs == 3
    older = arena.extend(array([5, 6, 7, 8, 2]))
    assert older == Place(8, 3)
    assert (arena.run_parent[3], arena.run_depth[3]) == (3, 4)


def test_slices_up_and_path_follow_the_parents(arena: TokenArena) -> None:
    leaf = Place(4, 1)
    assert arena.slices(leaf, 3) == [(0, 2), (4, 5)]
    assert arena.slices(leaf, 1) == [(4, 5)]
    assert arena.slices(leaf, 0) == []
    assert arena.path(leaf).tolist() == [5, 6, 9]
    assert arena.path(ROOT).tolist() == []
    assert [arena.up(leaf, n) for n in range(4)] == [leaf, Place(1, 0), Place(0, 0), ROOT]
    assert arena.depth(leaf) == 3


def test_common_is_the_last_shared_place(arena: TokenArena) -> None:
    assert arena.common(Place(3, 0), Place(4, 1)) == Place(1, 0)
    assert arena.common(Place(4, 1), Place(0, 0)) == Place(0, 0)
    assert arena.common(Place(5, 2), Place(4, 1)) == ROOT
    assert arena.common(Place(2, 0), Place(2, 0)) == Place(2, 0)


def test_a_long_run_is_compared_in_chunks() -> None:
    arena = TokenArena()
    long = np.arange(50_000, dtype=np.int32)
    arena.extend(long)
    for position in (0, 1, 8191, 8192, 8193, 40_000, 49_999):
        other = long.copy()
        other[position] = 7_000_000
        assert arena.match(other)[0] == position
    assert arena.match(np.concatenate([long, long]))[0] == 50_000


def test_growing_keeps_earlier_views_valid() -> None:
    arena = TokenArena()
    arena.extend(np.arange(100, dtype=np.int32))
    view = arena.ids
    arena.extend(np.arange(1, 100_000, dtype=np.int32))
    assert view.tolist() == list(range(100))
    assert arena.num_tokens == 100 + 99_999


@examples(200)
@given(st.lists(ids, max_size=12))
def test_every_path_comes_back_and_every_prefix_is_stored_once(paths: list[list[int]]) -> None:
    arena = TokenArena()
    ends = [arena.extend(array(path)) for path in paths]
    for path, end in zip(paths, ends, strict=True):
        assert arena.path(end).tolist() == path
        assert arena.depth(end) == len(path)
        assert arena.place(end.token) == end or end == ROOT
        assert arena.match(array(path)) == (len(path), end)
    prefixes = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    assert arena.num_tokens == len(prefixes)
    for a, first in zip(paths, ends, strict=True):
        for b, second in zip(paths, ends, strict=True):
            shared = 0
            while shared < min(len(a), len(b)) and a[shared] == b[shared]:
                shared += 1
            assert arena.depth(arena.common(first, second)) == shared
