"""Multimodal arrays and router replay: streams follow their tokens into every scope."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples_kit import SCOPES, examples

from rolltree.samples import build_samples
from rolltree.samples.streams import SampleStream, join_streams, move_streams, tree_streams
from rolltree.tokens import (
    ROUTED_EXPERTS,
    PlacedStream,
    StepTokens,
    TokenStream,
    TokenTree,
    Trajectory,
)
from rolltree.values.types import Sample

IMAGE_A = np.arange(12, dtype=np.float32).reshape(3, 4)
IMAGE_B = np.ones((2, 2), np.float32)
PLACEHOLDER = 7


def steps(tree: TokenTree) -> list[Any]:
    return [{"tokens": StepTokens(tree, call)} for call in range(tree.num_calls)]


def experts(first: int, count: int) -> np.ndarray:
    """Routed experts of `count` tokens: 2 layers, top 1; values name the path position."""
    return np.arange(first, first + count, dtype=np.uint16)[:, None, None].repeat(2, axis=1)


def conversation() -> TokenTree:
    """Two calls that extend each other and a third that breaks; full routing for new tokens."""
    tree = TokenTree()
    tree.insert(
        [1, PLACEHOLDER, 2],
        [3, 4],
        streams={
            "experts": TokenStream(experts(0, 5), start=0),
            "pixels": PlacedStream([IMAGE_A], [1]),
        },
    )
    tree.insert(
        [1, PLACEHOLDER, 2, 3, 4, PLACEHOLDER],
        [5],
        parent=0,
        streams={
            "experts": TokenStream(experts(5, 2), start=5),
            "pixels": PlacedStream([IMAGE_A, IMAGE_B], [1, 5]),
        },
    )
    tree.insert(
        [1, PLACEHOLDER, 9],
        [6],
        streams={
            "experts": TokenStream(experts(0, 4) + 100, start=0),
            "pixels": PlacedStream([IMAGE_A], [1]),
        },
    )
    return tree


def test_a_merged_sample_has_one_value_per_position() -> None:
    first, second = build_samples([steps(conversation())], "interleave").samples
    routed = first.info["streams"]["experts"]
    assert routed.positions.tolist() == list(range(7))
    assert routed.values[:, 0, 0].tolist() == list(range(7))
    assert routed.values.dtype == np.uint16
    pixels = first.info["streams"]["pixels"]
    assert pixels.positions.tolist() == [1, 5]
    assert [item.shape for item in pixels.values] == [(3, 4), (2, 2)]
    assert first.ids[pixels.positions].tolist() == [PLACEHOLDER, PLACEHOLDER]
    assert second.ids.tolist() == [1, PLACEHOLDER, 9, 6]
    assert second.info["streams"]["experts"].values[:, 0, 0].tolist() == [0, 1, 102, 103]


def test_in_a_tree_the_first_call_speaks_for_shared_tokens() -> None:
    (tree,) = build_samples([steps(conversation())], "tree").samples
    assert tree.ids.tolist() == [1, 7, 2, 3, 4, 7, 5, 9, 6]
    routed = tree.info["streams"]["experts"]
    assert routed.positions.tolist() == list(range(9))
    assert routed.values[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 102, 103]
    assert tree.info["streams"]["pixels"].positions.tolist() == [1, 5]


def test_groups_and_bytes_keep_streams() -> None:
    one = conversation()
    two = TokenTree.from_bytes(one.to_bytes())
    batch = build_samples([steps(one), steps(two)], "tree", group_key=lambda _: 0)
    (merged,) = batch.samples
    (alone,) = build_samples([steps(one)], "tree").samples
    for name in ("experts", "pixels"):
        left, right = merged.info["streams"][name], alone.info["streams"][name]
        assert left.positions.tolist() == right.positions.tolist()
        assert all(np.array_equal(a, b) for a, b in zip(left.values, right.values, strict=True))
    assert len(merged.records) == 2 * len(alone.records)


def test_samples_without_streams_have_none() -> None:
    tree = TokenTree()
    tree.insert([1], [2])
    for scope in SCOPES:
        assert build_samples([steps(tree)], scope).samples[0].info["streams"] == {}


def test_moving_drops_what_is_gone_and_sorts() -> None:
    dense = SampleStream(np.array([0, 1, 3], np.int32), np.array([10, 11, 13]))
    placed = SampleStream(np.array([1], np.int32), (IMAGE_A,))
    gone = SampleStream(np.array([2], np.int32), np.array([12]))
    moved = move_streams({"a": dense, "b": placed, "c": gone}, np.array([5, -1, -1, 2], np.int32))
    assert moved["a"].positions.tolist() == [2, 5]
    assert moved["a"].values.tolist() == [13, 10]  # type: ignore[union-attr]
    assert set(moved) == {"a"}


def test_joining_shifts_each_part() -> None:
    dense = SampleStream(np.array([0, 2], np.int32), np.array([1, 2]))
    placed = SampleStream(np.array([1], np.int32), (IMAGE_B,))
    joined = join_streams([{"a": dense}, {"a": dense, "b": placed}], [0, 10])
    assert joined["a"].positions.tolist() == [0, 2, 10, 12]
    assert joined["b"].positions.tolist() == [11]


@examples(75)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 4)), max_size=6))
def test_every_sampled_tokens_value_arrives_at_its_token(
    calls: list[tuple[list[int], int]],
) -> None:
    """The stream holds each token's id and depth: the packed position must agree with both."""
    tree = TokenTree()
    for prompt, count in calls:
        completion = [(len(prompt) + n) % 3 for n in range(count)]
        depths = range(len(prompt), len(prompt) + count)
        values = np.array([completion, depths], np.int32).T
        tree.insert(prompt, completion, streams={"x": values})
    for scope in SCOPES:
        for sample in build_samples([steps(tree)], scope).samples:
            stream = sample.info["streams"]["x"]
            assert sample.ids[stream.positions].tolist() == stream.values[:, 0].tolist()
            assert sample.positions[stream.positions].tolist() == stream.values[:, 1].tolist()
            assert {*(sample.records.source + 1)} <= {*stream.positions} or scope == "tree"


def context(sample: Sample, position: int) -> tuple[int, ...]:
    order = np.arange(sample.num_tokens)
    return tuple(sample.ids[(order <= position) & (position < sample.subtree_end)].tolist())


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=4),  # prompt
            st.integers(1, 3),  # sampled tokens
            st.integers(0, 3),  # the first position with a value
            st.integers(0, 2),  # the turn
        ),
        max_size=6,
    )
)
def test_every_scope_carries_the_streams_of_every_token_on_its_paths(
    calls: list[tuple[list[int], int, int, int]],
) -> None:
    """Also of prefix tokens that an earlier call gave values for; the first call's value wins."""
    tree = TokenTree()
    first: dict[tuple[int, ...], int] = {}
    for number, (prompt, count, start, turn) in enumerate(calls):
        path = [*prompt, *[(len(prompt) + n) % 3 for n in range(count)]]
        start = min(start, len(path))
        values = np.full(len(path) - start, number)
        placed = PlacedStream([np.full(number, number)], [start] if start < len(path) else [])
        if start == len(path):
            placed = PlacedStream([], [])
        tree.insert(
            prompt,
            path[len(prompt) :],
            turn=turn,
            streams={"x": TokenStream(values, start=start), "image": placed},
        )
        for depth in range(start, len(path)):
            first.setdefault(tuple(path[: depth + 1]), number)
    for scope in SCOPES:
        for sample in build_samples([steps(tree)], scope).samples:
            wanted = {
                position: first[context(sample, position)]
                for position in range(sample.num_tokens)
                if context(sample, position) in first
            }
            stream = sample.info["streams"].get("x", SampleStream(np.empty(0), np.empty(0)))
            got = zip(stream.positions.tolist(), np.asarray(stream.values).tolist(), strict=True)
            assert dict(got) == wanted


def test_an_image_of_the_prompt_reaches_calls_after_a_break_in_every_scope() -> None:
    """The second call restates the image's token, and only the first call carries the image."""
    tree = TokenTree()
    image = {"pixels": PlacedStream([IMAGE_A], [1])}
    tree.insert([1, PLACEHOLDER, 2], [3, 4], turn=0, streams=image)
    tree.insert([1, PLACEHOLDER, 2, 4], [5], turn=1)
    for scope in SCOPES:
        for sample in build_samples([steps(tree)], scope).samples:
            pixels = sample.info["streams"]["pixels"]
            assert sample.ids[pixels.positions].tolist() == [PLACEHOLDER]
            assert pixels.values[0] is not None


def test_an_edited_step_keeps_versions_and_streams() -> None:
    """Masking a token by hand used to lose the versions and the streams of the whole call."""
    trajectory = Trajectory()
    tree = trajectory.tree
    tree.insert([1], [2, 3], versions=[4, 5], temperature=0.5, streams={"x": np.array([7, 8])})
    made: Any = {"tokens": StepTokens(tree, 0), "extras": {}}
    made["tokens"]["completion_mask"] = [0, 1]
    (sample,) = build_samples([[made]], "step").samples
    assert sample.records.weight.tolist() == [0, 1]
    assert sample.records.version.tolist() == [4, 5]
    assert sample.records.temperature.tolist() == [0.5, 0.5]
    assert sample.info["streams"]["x"].values.tolist() == [7, 8]
    made["tokens"]["completion_ids"] = [9]
    made["tokens"]["completion_mask"] = [1]
    made["tokens"]["completion_logprobs"] = [-0.5]
    (changed,) = build_samples([[made]], "step").samples
    assert (changed.records.target.tolist(), changed.records.version.tolist()) == ([9], [4])
    assert changed.info["streams"] == {}


def test_routed_experts_of_the_newest_weights_count_and_other_streams_keep_the_first() -> None:
    tree = TokenTree()
    for prompt, versions, first in (
        ([1, 2], [0, 1], 10),  # the weights came in the middle of the answer
        ([1, 2], [0, 0], 20),
        ([1, 2, 3, 4, 5], [2, 3], 30),
        ([1, 2, 9], [3, 3], 40),  # as new as the one before, and later
    ):
        values = TokenStream(experts(first, len(prompt) + 1), start=0)
        streams = {ROUTED_EXPERTS: values, "other": values}
        tree.insert(prompt, [3, 4], versions=versions, streams=streams)
    found = tree_streams(tree)
    routed, other = (found[name].values[:, 0, 0].tolist() for name in (ROUTED_EXPERTS, "other"))
    assert routed == [30, 31, 32, 33, 34, 35, 42, 43]
    assert other == [10, 11, 12, 33, 34, 35, 42, 43]
