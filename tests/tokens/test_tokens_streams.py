"""Streams ride along a call: constants, per-token arrays, placed arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rolltree.tokens import PlacedStream, TokenStream, TokenTree, Trajectory
from rolltree.tokens.streams import CONSTANT, SampledStream
from rolltree.values.errors import TokenError
from rolltree.values.types import FinishReason, ModelResponse


def test_constants_take_no_buffer() -> None:
    whole, stream = SampledStream(np.int32), SampledStream(np.float32)
    assert whole.check([3, 3, 3], 3, "x") == 3.0
    assert stream.check(np.float32(0.5), 3, "x") == 0.5
    assert whole.check([], 0, "x") == 0.0
    varied = whole.check([1, 2], 2, "x")
    assert isinstance(varied, np.ndarray)
    assert varied.dtype == np.int32
    stream.add(2.0)
    stream.add(np.array([1, 2], np.float32))
    stream.add(None)
    assert (stream.offset[0], stream.buffer.size) == (CONSTANT, 2)
    assert stream.get(0, 3).tolist() == [2, 2, 2]  # type: ignore[union-attr]
    assert stream.get(1, 2).tolist() == [1, 2]  # type: ignore[union-attr]
    assert stream.get(2, 2) is None
    assert (stream.raw(0, 3), stream.raw(2, 1)) == (2.0, None)
    assert [stream.value_range(call, 2) for call in range(3)] == [(2, 2), (1, 2), None]
    assert stream.value_range(0, 0) is None


def test_routed_experts_ride_on_sampled_tokens() -> None:
    tree = TokenTree()
    experts = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    tree.insert([1, 2, 3], [4, 5], streams={"experts": experts})
    stream = tree.stream("experts", 0)
    assert isinstance(stream, TokenStream)
    assert stream.start == 3
    assert np.array_equal(stream.values, experts)
    assert tree.stream("experts", 0) is not None
    assert tree.stream("other", 0) is None


def test_a_stream_may_start_in_the_prompt() -> None:
    tree = TokenTree()
    tree.insert([1, 2, 3], [4], streams={"x": TokenStream(np.arange(4.0), start=0)})
    tree.insert([1, 2, 3, 4, 5], [6], streams={"x": TokenStream(np.array([5.0, 6.0]), start=4)})
    stream = tree.stream("x", 1)
    assert isinstance(stream, TokenStream)
    assert (stream.start, stream.values.tolist()) == (4, [5.0, 6.0])


def test_images_of_different_shapes_are_kept_once() -> None:
    tree = TokenTree()
    image, other = np.ones((3, 2), np.float32), np.zeros((1, 5), np.float32)
    tree.insert([7, 7, 1], [2], streams={"pixels": PlacedStream([image, other], [0, 1])})
    tree.insert([7, 7, 1, 2, 7], [3], streams={"pixels": PlacedStream([image.copy()], [4])})
    first, second = tree.stream("pixels", 0), tree.stream("pixels", 1)
    assert isinstance(first, PlacedStream)
    assert isinstance(second, PlacedStream)
    assert [item.shape for item in first.values] == [(3, 2), (1, 5)]
    assert np.asarray(second.positions).tolist() == [4]
    assert len(tree.extra.blobs) == 2
    assert tree.nbytes > image.nbytes + other.nbytes


def test_equal_bytes_of_another_shape_or_type_are_different_arrays() -> None:
    tree = TokenTree()
    flat = np.zeros(4, np.float32)
    placed = PlacedStream([flat, flat.reshape(2, 2), flat.view(np.int32)], [0, 1, 2])
    tree.insert([1, 2, 3], [], streams={"x": placed})
    assert len(tree.extra.blobs) == 3


@pytest.mark.parametrize(
    "stream",
    [
        np.zeros(2),
        np.float32(1),
        TokenStream(np.zeros(3), start=2),
        TokenStream(np.zeros(1), start=-1),
        np.array([object()]),
        PlacedStream([np.zeros(1)], [4]),
        PlacedStream([np.zeros(1)], [-1]),
        PlacedStream([np.zeros(1)], [0, 1]),
        PlacedStream([np.array([None])], [0]),
    ],
)
def test_streams_that_do_not_fit_the_call_are_refused(stream: object) -> None:
    tree = TokenTree()
    with pytest.raises(TokenError, match="'x'"):
        tree.insert([1, 2, 3], [4], streams={"x": stream})
    assert tree.num_calls == 0


@pytest.mark.parametrize(
    "second", [np.zeros(1, np.int64), np.zeros((1, 2), np.float32), PlacedStream([], [])]
)
def test_one_name_is_one_kind_of_value(second: object) -> None:
    tree = TokenTree()
    tree.insert([1], [2], streams={"x": np.zeros(1, np.float32)})
    with pytest.raises(TokenError, match="one kind of value"):
        tree.insert([1], [2], streams={"x": second})
    placed = TokenTree()
    placed.insert([1], [2], streams={"x": PlacedStream([np.zeros(1)], [0])})
    with pytest.raises(TokenError, match="one kind of value"):
        placed.insert([1], [2], streams={"x": np.zeros(1)})


def test_routed_experts_of_another_shape_are_dropped_with_the_logprobs_of_their_call() -> None:
    """They come from a server with another model; the rollout goes on, and the call is masked."""
    trajectory = Trajectory()
    for call, layers in enumerate((2, 3)):
        response = ModelResponse(
            message={"role": "assistant", "content": "a"},
            text="a",
            finish_reason=FinishReason.STOP,
            prompt_ids=np.array([1, 2]),
            completion_ids=np.array([3 + call]),
            logprobs=np.array([-0.5], np.float32),
            call_id=call,
            routed_experts=np.zeros((2, layers, 1), np.uint8),
        )
        trajectory.append_call(prompt="q", completion="a", response=response)
    first, second = trajectory
    assert first["tokens"]["completion_logprobs"] == [-0.5]
    assert second["tokens"]["completion_logprobs"] == []
    assert "of several models" in second["response"].info["unusable_logprobs"]
