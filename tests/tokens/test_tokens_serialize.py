"""Bytes and back: in one piece, call by call, and never from damaged data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import LONG, examples, ids, logprobs_for

from rolltree.tokens import PlacedStream, TokenStream, TokenTree
from rolltree.tokens.serialize import Reader, Writer, chunks
from rolltree.values.errors import TokenError


def rich_tree() -> TokenTree:
    tree = TokenTree()
    tree.insert([5, 6], [7], logprobs=[-0.1], agent="a", turn=0)
    tree.insert(
        [5, 6],
        [8, 9],
        logprobs=[-0.5, -0.25],
        versions=[1, 2],
        mask=[0, 0.5],
        temperature=[0.5, 1],
        streams={
            "experts": np.arange(4, dtype=np.uint8).reshape(2, 2),
            "image": PlacedStream([np.ones((2, 2)), np.zeros(3, np.float16)], [0, 1]),
        },
    )
    tree.insert([5, 6, 8, 9, 70_000], [11], parent=1, agent="b", prompt_mask=[0, 0, 1, 1, 0])
    tree.insert(
        [5, 6, 7, 3],
        [],
        streams={
            "experts": TokenStream(np.ones((1, 2), np.uint8), start=3),
            "image": PlacedStream([np.ones((2, 2))], [3]),
        },
    )
    tree.insert([], [2, 2])
    return tree


def same(one: TokenTree, two: TokenTree, parents: bool = True) -> None:
    assert (one.num_calls, one.num_tokens) == (two.num_calls, two.num_tokens)
    for call in range(one.num_calls):
        for read in ("prompt_ids", "completion_ids", "temperature", "versions", "mask"):
            assert getattr(one, read)(call).tolist() == getattr(two, read)(call).tolist()
        assert one.prompt_mask(call).tolist() == two.prompt_mask(call).tolist()
        for read in ("agent", "turn", "parent") if parents else ("agent", "turn"):
            assert getattr(one, read)(call) == getattr(two, read)(call)
        first, second = one.logprobs(call), two.logprobs(call)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.tobytes() == second.tobytes()
        for name in one.extra.names():
            left, right = one.stream(name, call), two.stream(name, call)
            assert type(left) is type(right)
            if isinstance(left, PlacedStream) and isinstance(right, PlacedStream):
                assert np.array_equal(left.positions, right.positions)
                for a, b in zip(left.values, right.values, strict=True):
                    assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
            elif isinstance(left, TokenStream) and isinstance(right, TokenStream):
                assert left.start == right.start
                assert left.values.dtype == right.values.dtype
                assert np.array_equal(left.values, right.values)


def test_whole_tree_and_back() -> None:
    tree = rich_tree()
    twin = TokenTree.from_bytes(tree.to_bytes())
    same(tree, twin)
    assert twin.to_bytes() == tree.to_bytes()


def test_one_piece_per_call_concatenates_to_the_whole() -> None:
    tree, pieces = TokenTree(), []
    source = rich_tree()
    for call in range(source.num_calls):
        tree.copy_call(source, call)
        pieces.append(tree.to_bytes(since=call))
    twin = TokenTree.from_bytes(b"".join(pieces))
    same(source, twin, parents=False)
    twin.insert([5, 6, 7, 3], [4])  # a loaded tree goes on growing
    assert twin.num_tokens == source.num_tokens + 1


def test_a_piece_costs_what_is_new() -> None:
    tree = TokenTree()
    tree.insert(np.arange(50_000), [1])
    tree.insert_suffix(0, [2, 3], [4])
    assert len(tree.to_bytes(since=1)) < 400
    assert len(tree.to_bytes(since=2)) < 350


def test_empty_tree() -> None:
    assert TokenTree.from_bytes(TokenTree().to_bytes()).num_calls == 0
    with pytest.raises(TokenError, match="no bytes"):
        TokenTree.from_bytes(b"")


def test_pieces_out_of_order_are_refused() -> None:
    tree = rich_tree()
    late = tree.to_bytes(since=2)
    with pytest.raises(TokenError, match="continues after call 2"):
        TokenTree.from_bytes(late)
    with pytest.raises(TokenError, match="continues after call 0"):
        TokenTree.from_bytes(tree.to_bytes() * 2)
    with pytest.raises(TokenError, match="has 5 calls"):
        tree.to_bytes(since=6)


@examples(150)
@given(st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    blob = bytearray(rich_tree().to_bytes())
    cut = data.draw(st.booleans())
    if cut:
        blob = blob[: data.draw(st.integers(1, len(blob) - 1))]
    else:
        position = data.draw(st.integers(0, len(blob) - 1))
        blob[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TokenError, match="not a token tree"):
        TokenTree.from_bytes(bytes(blob))


def inserted_again(tree: TokenTree) -> TokenTree:
    """Return the calls of a tree, each one inserted by what can be read of it."""
    made = TokenTree()
    for call in range(tree.num_calls):
        made.insert(
            tree.prompt_ids(call),
            tree.completion_ids(call),
            logprobs=tree.logprobs(call),
            temperature=tree.temperature(call),
            versions=tree.versions(call),
            mask=tree.mask(call),
            prompt_mask=tree.prompt_mask(call),
            agent=tree.agent(call),
            turn=tree.turn(call),
            parent=tree.parent(call),
            verify=True,
            streams=tree.streams(call),
        )
    return made


def forged(body: bytes) -> TokenTree | None:
    """Return the tree of a body under a correct checksum, None if it is refused."""
    writer = Writer()
    writer._parts.append(body)
    try:
        return TokenTree.from_bytes(writer.chunk())
    except TokenError:
        return None


@examples(300)
@given(st.data())
def test_forged_contents_are_refused_or_could_have_been_inserted(data: st.DataObject) -> None:
    """A correct checksum over wrong contents: TokenError, or a tree that `insert` can make."""
    body = bytearray(rich_tree().to_bytes()[16:])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] = data.draw(st.integers(0, 255))
    tree = forged(bytes(body))
    if tree is not None:
        same(tree, inserted_again(tree))
        same(tree, TokenTree.from_bytes(tree.to_bytes()))


def test_a_flipped_bit_is_refused_or_could_have_been_inserted() -> None:
    body = rich_tree().to_bytes()[16:]
    bits, refused = range(0, 8 * len(body), 1 if LONG else 19), 0
    for bit in bits:
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        tree = forged(bytes(flipped))
        refused += tree is None
        if tree is not None:
            same(tree, inserted_again(tree))
    assert refused > len(bits) / 2  # most of the rest are other ids, labels and values


@examples(100)
@given(st.lists(st.tuples(ids, ids), max_size=8), st.integers(0, 8))
def test_any_cut_point_gives_the_same_tree(
    calls: list[tuple[list[int], list[int]]], cut: int
) -> None:
    tree, first = TokenTree(), b""
    for index, (prompt, completion) in enumerate(calls):
        if index == cut:
            first = tree.to_bytes()
        tree.insert(prompt, completion, logprobs=logprobs_for(completion, index))
    if cut >= len(calls):
        first, cut = tree.to_bytes(), len(calls)
    same(tree, TokenTree.from_bytes(first + tree.to_bytes(since=cut)))


def test_integers_take_the_narrowest_type() -> None:
    for value, size in ((255, 1), (-1, 1), (256, 2), (70_000, 4), (2**40, 8)):
        writer = Writer()
        writer.ints([value])
        blob = writer.chunk()
        assert len(blob) == 16 + 2 + 4 + size
        assert chunks(blob)[0].ints().tolist() == [value]


def test_unknown_array_types_are_refused_both_ways() -> None:
    with pytest.raises(TokenError, match="cannot be stored"):
        Writer().array(np.array(["text"]))
    with pytest.raises(TokenError, match="unknown array type"):
        Reader(memoryview(b"\xff\x01\x00\x00\x00\x00")).array()
    with pytest.raises(TokenError, match="runs past the end"):
        Reader(memoryview(b"\x00\x01\xff\xff\xff\xff")).array()
    text = Writer()
    text.text("x")
    broken = bytearray(text.chunk()[16:])
    broken[-1] = 0xFF
    with pytest.raises(TokenError, match="UTF-8"):
        Reader(memoryview(bytes(broken))).text()


def test_a_call_may_be_labelled_after_its_piece_was_saved():
    tree = TokenTree()
    tree.insert([1, 2], [3])
    first = tree.to_bytes()
    tree.label(0, agent="a")
    tree.insert([1, 2, 4], [5], agent="b")
    tree.insert([1, 2, 3, 4], [5], agent="a", parent=0)
    pieces = first + tree.to_bytes(since=1)
    tree.label(1, agent="c")
    tree.insert([9], [9], agent="c")
    read = TokenTree.from_bytes(pieces + tree.to_bytes(since=3))
    assert [read.agent(call) for call in range(4)] == ["", "b", "a", "c"]
    read.label(0, agent="a")  # as whoever saved the pieces has to
    read.label(1, agent="c")
    assert read.to_bytes() == tree.to_bytes()
