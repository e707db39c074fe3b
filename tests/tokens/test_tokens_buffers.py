"""What may enter a tree, and floats that read as people write them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import examples

from rolltree.inference.parse import extract_tokens
from rolltree.tokens import TokenTree
from rolltree.tokens.buffers import (
    GrowBuffer,
    as_ids,
    check_new_ids,
    checked_logprobs,
    readable_floats,
)
from rolltree.values.errors import TokenError


def test_int32_arrays_pass_without_a_copy() -> None:
    ids = np.array([1, 2], dtype=np.int32)
    assert as_ids(ids, "x") is ids


@pytest.mark.parametrize(
    "values", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), range(1, 3)]
)
def test_other_integers_are_converted(values: object) -> None:
    ids = as_ids(values, "x")  # type: ignore[arg-type]
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2]


def test_empty_and_strided_ids() -> None:
    assert as_ids([], "x").tolist() == []
    strided = np.arange(6, dtype=np.int32)[::2]
    assert as_ids(strided, "x").flags.c_contiguous


@pytest.mark.parametrize("values", [[1.5], [[1]], ["a"], [True], [2**31], [-1], [None], 3, [2**70]])
def test_what_is_no_token_id_is_refused_by_name(values: object) -> None:
    with pytest.raises(TokenError, match="prompt_ids"):
        as_ids(values, "prompt_ids")  # type: ignore[arg-type]


def test_negative_new_ids_are_refused_with_their_position() -> None:
    with pytest.raises(TokenError, match="-100 at offset 2"):
        check_new_ids(np.array([3, 4, -100], np.int32), "completion_ids")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1.0, -9999.0])
def test_placeholder_logprobs_are_refused(bad: float) -> None:
    with pytest.raises(TokenError, match="sampled token 1 is"):
        checked_logprobs([-0.5, bad, -0.5], 3)


def test_every_way_in_refuses_the_same_logprobs() -> None:
    """A server's answer, a recorded step and the tree agree on -9999 and on rounding above 0."""
    for value, passes in ((-9999.0, False), (2e-3, False), (5e-4, True), (-999.0, True)):
        response = {
            "prompt_token_ids": [1],
            "choices": [{"token_ids": [2], "logprobs": {"content": [{"logprob": value}]}}],
        }
        ways = (
            lambda value=value: checked_logprobs([value], 1),
            lambda value=value: TokenTree().insert([1], [2], logprobs=[value]),
            lambda response=response: extract_tokens(response, "chat"),
        )
        for way in ways:
            if passes:
                way()
            else:
                with pytest.raises(TokenError, match="placeholder"):
                    way()
    assert checked_logprobs([5e-4], 1).tolist() == [0.0]


def test_logprobs_of_another_length_are_refused() -> None:
    with pytest.raises(TokenError, match="3 sampled tokens"):
        checked_logprobs([-0.5, -0.5], 3)


def test_a_certain_token_has_logprob_zero() -> None:
    assert checked_logprobs([0.0, -1e-9], 2).tolist() == [0.0, np.float32(-1e-9)]


def test_grow_buffer_keeps_item_shapes() -> None:
    buffer = GrowBuffer(np.int16, (2, 3))
    for step in range(40):
        assert buffer.extend(np.full((step, 2, 3), step, np.int16)) == step * (step - 1) // 2
    assert buffer.view(3, 6).tolist() == np.full((3, 2, 3), 3).tolist()
    assert buffer.size == 780
    assert buffer.nbytes <= 780 * 12 * 1.5 + 2000


def test_readable_floats_by_hand() -> None:
    values = [-0.1, 0.0, -1.5, 1e-7, -123456.0, -25 / 1024, -0.024414062, 3.4e38]
    read = readable_floats(np.array(values, np.float32))
    assert read[:6] == values[:6]  # short decimals and exact binary fractions
    assert read[6] == float(np.float32(-0.024414062))  # more digits: the exact value
    assert readable_floats(np.empty(0, np.float32)) == []


@examples(200)
@given(st.lists(st.floats(-1000, 0, width=32), max_size=20))
def test_readable_floats_lose_no_bit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assert np.array(readable_floats(array), np.float32).tobytes() == array.tobytes()


@examples(200)
@given(st.integers(-999_999, 0), st.integers(0, 12))
def test_decimals_of_six_digits_read_as_written(digits: int, places: int) -> None:
    value = float(f"{digits}e-{places}")
    assert readable_floats(np.array([value], np.float32)) == [value]
