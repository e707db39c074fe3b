"""Merging: the rollouts of a group share every common prefix and lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokens_serialize import rich_tree, same
from tokens_kit import examples, ids, logprobs_for

from rolltree.tokens import PlacedStream, TokenTree
from rolltree.values.errors import TokenError


def test_merging_into_an_empty_tree_is_a_copy() -> None:
    source, target = rich_tree(), TokenTree()
    assert target.merge(source) == 0
    same(source, target)


def test_siblings_share_their_prompt() -> None:
    one, two = TokenTree(), TokenTree()
    one.insert([1, 2, 3], [4, 5], logprobs=[-0.1, -0.2])
    two.insert([1, 2, 3], [4, 6], logprobs=[-0.3, -0.4])
    two.insert([1, 2, 3, 4, 6, 7], [8], parent=0)
    assert one.merge(two) == 1
    assert one.num_tokens == 8
    assert one.path_ids(2).tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert (one.parent(1), one.parent(2)) == (None, 1)
    assert one.logprobs(1).tolist() == pytest.approx([-0.3, -0.4])  # type: ignore[union-attr]
    assert two.num_calls == 2


def test_streams_survive_and_share_blobs() -> None:
    one, two = TokenTree(), TokenTree()
    image = np.ones((2, 2))
    for tree in (one, two):
        streams = {"image": PlacedStream([image], [0]), "x": np.array([[1, 2]])}
        tree.insert([7], [1], streams=streams)
    one.merge(two)
    assert len(one.extra.blobs) == 1
    for call in (0, 1):
        assert one.stream("image", call).values[0].tolist() == image.tolist()  # type: ignore[union-attr]
        assert one.stream("x", call).values.tolist() == [[1, 2]]  # type: ignore[union-attr]


def test_streams_of_another_kind_are_refused_before_anything_is_merged() -> None:
    one, two = TokenTree(), TokenTree()
    one.insert([1], [2], streams={"x": np.zeros(1, np.float32)})
    two.insert([1], [2], streams={"x": np.zeros(1, np.int32)})
    with pytest.raises(TokenError, match="one kind of value"):
        one.merge(two)
    assert one.num_calls == 1


def test_saving_after_a_merge_stays_incremental() -> None:
    tree, other = rich_tree(), TokenTree()
    before = tree.to_bytes()
    other.insert([5, 6, 1], [1], logprobs=[-0.75])
    other.insert([5, 6, 1], [2], logprobs=[-0.5])
    first = tree.merge(other)
    same(tree, TokenTree.from_bytes(before + tree.to_bytes(since=first)))


trees = st.lists(st.tuples(ids, ids), max_size=6)


@examples(150)
@given(st.lists(trees, min_size=1, max_size=4))
def test_a_merged_tree_equals_one_tree_of_all_calls(
    groups: list[list[tuple[list[int], list[int]]]],
) -> None:
    merged, whole = TokenTree(), TokenTree()
    expected = []
    for seed, calls in enumerate(groups):
        part = TokenTree()
        for prompt, completion in calls:
            logprobs = logprobs_for(completion, seed)
            part.insert(prompt, completion, logprobs=logprobs, agent=str(seed))
            whole.insert(prompt, completion, logprobs=logprobs, agent=str(seed))
            expected.append((prompt, completion))
        merged.merge(part)
    same(whole, merged)
    for call, (prompt, completion) in enumerate(expected):
        assert merged.prompt_ids(call).tolist() == prompt
        assert merged.completion_ids(call).tolist() == completion
