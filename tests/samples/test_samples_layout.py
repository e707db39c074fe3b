"""Depth-first layout of runs, by hand, and its cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples_kit import check_structure, examples, flat_of, groups, state

from rolltree.samples import build_samples
from rolltree.samples.assemble import _arange, layout
from rolltree.tokens import TokenTree, Trajectory
from rolltree.values.types import State
from step_kit import step


def tree_of(*paths: list[int]) -> TokenTree:
    tree = TokenTree()
    for path in paths:
        tree.insert(path[:-1], path[-1:])
    return tree


def test_runs_stay_whole_and_deeper_branches_come_first() -> None:
    tree = tree_of([1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 4, 7], [8, 9], [1, 2, 3, 4])
    laid = layout(tree, range(5))
    assert laid.ids.tolist() == [1, 2, 3, 4, 5, 7, 6, 8, 9]
    assert laid.positions.tolist() == [0, 1, 2, 3, 4, 4, 2, 0, 1]
    assert laid.subtree_end.tolist() == [7, 7, 6, 6, 5, 6, 7, 9, 9]
    assert laid.packed.tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8]


def test_only_needed_tokens_are_laid_out() -> None:
    tree = tree_of([1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 6, 8])
    laid = layout(tree, [2])
    assert laid.ids.tolist() == [1, 2, 6, 8]
    assert laid.subtree_end.tolist() == [4, 4, 4, 4]
    assert laid.packed.tolist() == [0, 1, -1, -1, -1, 2, -1, 3]
    assert layout(tree, []).ids.tolist() == []


def test_several_branches_at_one_token_and_at_a_runs_end() -> None:
    tree = tree_of([1, 2], [1, 3], [1, 4], [1, 2, 5], [1, 2, 6], [1, 3, 7])
    laid = layout(tree, range(6))
    assert sorted(laid.ids.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert laid.subtree_end[0] == 7
    for child, size in ((2, 3), (3, 2), (4, 1)):
        at = laid.ids.tolist().index(child)
        assert laid.subtree_end[at] - at == size


@examples(75)
@given(groups, st.randoms(use_true_random=False))
def test_any_choice_of_steps_lays_out_exactly_their_prefixes(
    states: list[State], random: object
) -> None:
    for one in states:
        chosen = [made for made in one["trajectory"] if random.random() < 0.6]  # type: ignore[attr-defined]
        kept = Trajectory(tree=getattr(one["trajectory"], "tree", None))
        kept.extend(chosen)
        paths = [
            made["tokens"]["prompt_ids"] + made["tokens"]["completion_ids"]
            for made in chosen
            if made["tokens"] is not None
        ]
        prefixes = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
        for sample in build_samples([kept], "tree").samples:
            check_structure(sample)
            assert sample.num_tokens == len(prefixes)


def test_flat_samples_of_one_path_share_memory_and_cannot_be_written() -> None:
    steps = [step([1, 2], [3]), step([1, 2, 3, 4], [5])]
    first, second = build_samples([state(Trajectory(steps))], "step").samples
    assert np.shares_memory(first.ids, second.ids)
    assert np.shares_memory(first.positions, second.positions)
    for array in (first.ids, first.positions, first.subtree_end):
        assert not array.flags.writeable
    assert flat_of([first, second]) == [[1, 2, 3], [1, 2, 3, 4, 5]]


def test_shared_positions_grow() -> None:
    long = _arange(5000)
    assert np.array_equal(long, np.arange(5000))
    assert _arange(3).tolist() == [0, 1, 2]
    assert _arange(0).tolist() == []


def test_a_thousand_nested_branches_do_not_recurse() -> None:
    tree = TokenTree()
    path: list[int] = []
    for _ in range(1000):
        tree.insert(np.array([*path, 2], np.int32), [3])
        path.append(1)
    laid = layout(tree, range(1000))
    assert len(laid.ids) == tree.num_tokens == 999 + 2 * 1000
    assert laid.positions.max() == 1000
