"""Laws of merging and of saving piece by piece, over random trees with streams of every kind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokens_serialize import same
from tokens_kit import examples, ids, logprobs_for

from rolltree.tokens import PlacedStream, TokenStream, TokenTree
from rolltree.values.errors import TokenError

IMAGES = [np.full((2, number + 1), number, np.float32) for number in range(3)]
number = st.integers(0, 3)


@st.composite
def one_call(draw: st.DrawFn) -> dict[str, Any]:
    """Return the arguments of one `insert`, with any mixture of streams."""
    prompt, completion = draw(ids), draw(ids)
    size, total = len(completion), len(prompt) + len(completion)
    call: dict[str, Any] = {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "agent": draw(st.sampled_from(["", "a", "b"])),
        "turn": draw(st.none() | number),
        "versions": draw(st.sampled_from([0, 3, list(range(size))])),
        "temperature": draw(st.sampled_from([1.0, [0.5 + i for i in range(size)]])),
        "mask": draw(st.sampled_from([None, [i % 2 for i in range(size)]])),
        "prompt_mask": draw(st.sampled_from([None, [1.0] * len(prompt)])),
    }
    if draw(st.booleans()):
        call["logprobs"] = logprobs_for(completion, draw(number))
    streams: dict[str, Any] = {}
    if draw(st.booleans()):
        streams["experts"] = np.arange(size * 4, dtype=np.uint8).reshape(size, 2, 2)
    if total and draw(st.booleans()):
        start = draw(st.integers(0, total - 1))
        streams["scores"] = TokenStream(np.arange(total - start) / 4, start=start)
    if total and draw(st.booleans()):
        places = draw(st.lists(st.integers(0, total - 1), max_size=3, unique=True))
        streams["image"] = PlacedStream([IMAGES[place % 3] for place in places], places)
    return call | {"streams": streams}


calls = st.lists(one_call(), max_size=6)


def tree_of(*groups: list[dict[str, Any]]) -> TokenTree:
    tree = TokenTree()
    for group in groups:
        for call in group:
            tree.insert(**call)
    return tree


class TestMerge:
    @examples(80)
    @given(calls, calls)
    def test_merging_is_inserting_the_calls_of_both(self, one: Any, two: Any) -> None:
        merged = tree_of(one)
        assert merged.merge(tree_of(two)) == len(one)
        same(merged, tree_of(one, two))

    @examples(60)
    @given(calls, calls, calls)
    def test_the_order_of_merging_does_not_matter(self, one: Any, two: Any, three: Any) -> None:
        left = tree_of(one)
        left.merge(tree_of(two))
        left.merge(tree_of(three))
        right, tail = tree_of(one), tree_of(two)
        tail.merge(tree_of(three))
        right.merge(tail)
        same(left, right)

    @examples(60)
    @given(calls, calls)
    def test_the_number_of_tokens_does_not_depend_on_who_comes_first(
        self, one: Any, two: Any
    ) -> None:
        left, right = tree_of(one), tree_of(two)
        left.merge(tree_of(two))
        right.merge(tree_of(one))
        assert left.num_tokens == right.num_tokens
        paths = lambda tree: sorted(  # noqa: E731
            tree.path_ids(call).tolist() for call in range(tree.num_calls)
        )
        assert paths(left) == paths(right)

    @examples(60)
    @given(calls)
    def test_merging_with_itself_adds_calls_and_no_tokens(self, one: Any) -> None:
        tree, twin = tree_of(one), tree_of(one)
        tokens = tree.num_tokens
        tree.merge(twin)
        assert (tree.num_tokens, tree.num_calls) == (tokens, 2 * len(one))

    @examples(60)
    @given(calls)
    def test_nothing_is_neutral_and_the_other_stays_as_it_was(self, one: Any) -> None:
        tree = tree_of(one)
        before = tree.to_bytes()
        assert tree.merge(TokenTree()) == len(one)
        assert tree.to_bytes() == before
        TokenTree().merge(tree)
        assert tree.to_bytes() == before

    def test_by_hand(self) -> None:
        one, two = TokenTree(), TokenTree()
        one.insert([1, 2], [3])
        two.insert([1, 2], [3, 4])
        two.insert([1, 2, 3], [5])
        two.insert([9], [9])
        assert one.merge(two) == 1
        # 1 2 3 is shared, 4 and 5 hang below it, 9 9 is apart.
        assert one.num_tokens == 7
        assert [one.path_ids(call).tolist() for call in range(4)] == [
            [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [9, 9],
        ]  # fmt: skip
        assert one.find([1, 2, 3, 5, 5]) == 4
        assert one.insert([1, 2, 3, 4], [6], parent=1) == 4
        assert one.num_tokens == 8

    def test_agents_are_numbered_anew(self) -> None:
        one, two = TokenTree(), TokenTree()
        one.insert([1], [2], agent="a")
        for agent in ("b", "a", ""):
            two.insert([1], [2], agent=agent)
        one.merge(two)
        assert [one.agent(call) for call in range(4)] == ["a", "b", "a", ""]
        assert one.agents == ["a", "b", ""]

    @examples(60)
    @given(calls, st.data())
    def test_copying_every_call_is_merging(self, one: Any, data: st.DataObject) -> None:
        source, target = tree_of(one), TokenTree()
        for call in range(len(one)):
            assert target.copy_call(source, call) == call
        same(source, target)


class TestPieces:
    @examples(80)
    @given(calls, st.data())
    def test_any_pieces_concatenate_to_the_whole(self, made: Any, data: st.DataObject) -> None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(made)), max_size=4)))
        tree, pieces, saved = TokenTree(), [], 0
        for index, call in enumerate(made):
            while cuts and cuts[0] == index:
                pieces.append(tree.to_bytes(since=saved))
                saved = tree.num_calls
                cuts.pop(0)
            tree.insert(**call)
        pieces.append(tree.to_bytes(since=saved))
        twin = TokenTree.from_bytes(b"".join(pieces))
        same(tree, twin)
        assert twin.to_bytes() == tree.to_bytes()

    @examples(60)
    @given(calls, calls)
    def test_a_loaded_tree_grows_like_the_one_it_was_saved_from(self, one: Any, two: Any) -> None:
        tree = tree_of(one)
        twin = TokenTree.from_bytes(tree.to_bytes())
        for call in two:
            assert tree.insert(**call) == twin.insert(**call)
        same(tree, twin)
        assert tree.to_bytes(since=len(one)) == twin.to_bytes(since=len(one))

    @examples(40)
    @given(calls, calls)
    def test_a_piece_after_a_merge_brings_what_the_merge_brought(self, one: Any, two: Any) -> None:
        tree = tree_of(one)
        saved = tree.to_bytes()
        tree.merge(tree_of(two))
        same(tree, TokenTree.from_bytes(saved + tree.to_bytes(since=len(one))))

    @examples(40)
    @given(calls)
    def test_bytes_do_not_depend_on_how_the_tree_came_to_be(self, made: Any) -> None:
        tree = tree_of(made)
        for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree)), tree_of(made)):
            assert twin.to_bytes() == tree.to_bytes()

    @examples(60)
    @given(st.lists(one_call(), min_size=1, max_size=5), st.data())
    def test_a_lost_or_doubled_piece_is_refused(self, made: Any, data: st.DataObject) -> None:
        tree, pieces = TokenTree(), []
        for index, call in enumerate(made):
            tree.insert(**call)
            pieces.append(tree.to_bytes(since=index))
        hit = data.draw(st.integers(0, len(pieces) - 1))
        if data.draw(st.booleans()):
            wrong = [*pieces[: hit + 1], *pieces[hit:]]
        elif hit < len(pieces) - 1:
            wrong = [*pieces[:hit], *pieces[hit + 1 :]]
        else:
            return
        with pytest.raises(TokenError, match="continues after call"):
            TokenTree.from_bytes(b"".join(wrong))

    @examples(100)
    @given(st.lists(one_call(), min_size=1, max_size=4), st.data())
    def test_no_flipped_bit_passes(self, made: Any, data: st.DataObject) -> None:
        blob = bytearray(tree_of(made).to_bytes())
        bit = data.draw(st.integers(0, 8 * len(blob) - 1))
        blob[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TokenError, match="not a token tree"):
            TokenTree.from_bytes(bytes(blob))

    @examples(60)
    @given(st.lists(one_call(), min_size=1, max_size=3), st.data())
    def test_a_torn_tail_is_refused_and_the_front_is_whole(
        self, made: Any, data: st.DataObject
    ) -> None:
        """A writer killed while it appends the second piece: the first is still a tree."""
        front = tree_of(made)
        grown = tree_of(made)
        grown.insert([1, 2, 3], [0])
        first, second = front.to_bytes(), grown.to_bytes(since=len(made))
        cut = data.draw(st.integers(1, len(second) - 1))
        with pytest.raises(TokenError, match="not a token tree"):
            TokenTree.from_bytes(first + second[:cut])
        same(front, TokenTree.from_bytes(first))

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_is_read_and_none_is_kept(self, kind: Any) -> None:
        source = tree_of([{"prompt_ids": [1, 2], "completion_ids": [3], "logprobs": [-0.5]}])
        raw = bytearray(source.to_bytes())
        buffer = raw if kind is bytearray else kind(raw)
        twin = TokenTree.from_bytes(buffer)
        for index in range(len(raw)):
            raw[index] = 0
        same(source, twin)
        twin.insert([1, 2, 3, 4], [5], logprobs=[-0.25])
        assert twin.path_ids(1).tolist() == [1, 2, 3, 4, 5]

    @examples(60)
    @given(st.binary(max_size=60))
    def test_foreign_bytes_are_refused(self, blob: bytes) -> None:
        if not blob:
            return
        with pytest.raises(TokenError, match="not a token tree"):
            TokenTree.from_bytes(blob)
