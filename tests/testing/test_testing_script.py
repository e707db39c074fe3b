from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import ChatRenderer
from rolltree.testing import ByteTokenizer, ScriptedAnswer
from rolltree.testing.script import Script, as_answer, scripted_logprobs, tokens_of
from rolltree.values.errors import BadResponse
from rolltree.values.types import FinishReason, SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())
END = 258


async def test_a_row_ends_with_an_error_that_says_so() -> None:
    script = Script(["a", ScriptedAnswer("b")])
    assert [(await script.next("?")).text for _ in range(2)] == ["a", "b"]
    with pytest.raises(BadResponse, match="asked for one more"):
        await script.next("?")
    assert script.num_answers == 3


async def test_one_string_is_one_answer() -> None:
    assert (await Script("whole").next("?")).text == "whole"


async def test_a_function_sees_the_prompt() -> None:
    script = Script(lambda prompt: {"role": "assistant", "content": f"<{prompt}>"})
    assert (await script.next("x")).text == "<x>"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls_are_spelled_in_hermes_style(arguments: object) -> None:
    calls = [{"function": {"name": name, "arguments": arguments}} for name in ("f", "g")]
    text = as_answer({"role": "assistant", "content": None, "tool_calls": calls}).text
    pieces = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    parsed = [json.loads(piece) for piece in pieces.split("</tool_call><tool_call>")]
    assert parsed == [{"name": name, "arguments": {"a": 1}} for name in ("f", "g")]


@pytest.mark.parametrize("arguments", ['{"a": ', "", "nonsense", "[" * 100_000])
def test_arguments_that_are_not_json_are_spelled_as_they_are(arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    text = as_answer({"role": "assistant", "content": "so", "tool_calls": calls}).text
    assert text == f'so<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


def test_an_end_token_is_sampled_unless_the_answer_was_cut() -> None:
    whole = tokens_of(ScriptedAnswer("ab"), RENDERER, SamplingParams())
    cut = tokens_of(ScriptedAnswer("ab", FinishReason.LENGTH), RENDERER, SamplingParams())
    assert whole.ids.tolist() == [97, 98, END]
    assert cut.ids.tolist() == [97, 98]
    assert whole.text == cut.text == "ab"


def test_given_ids_are_taken_as_they_are() -> None:
    odd = ScriptedAnswer("ignored", ids=[97, END, 98], logprobs=[-1.0, -2.0, -3.0])
    said = tokens_of(odd, RENDERER, SamplingParams())
    assert said.ids.tolist() == [97, END, 98]
    assert said.logprobs.tolist() == [-1.0, -2.0, -3.0]


@given(
    st.text("abc", max_size=12),
    st.one_of(st.none(), st.integers(1, 15)),
    st.lists(st.text("abc", min_size=1, max_size=2), max_size=2),
)
def test_the_first_reason_to_stop_wins(text: str, limit: int | None, stop: list[str]) -> None:
    sampling = SamplingParams(max_tokens=limit, stop=tuple(stop))
    said = tokens_of(ScriptedAnswer(text), RENDERER, sampling)
    full = [*text.encode(), END]
    assert said.ids.tolist() == full[: len(said.ids)]
    assert said.ids.dtype == np.int32
    assert said.logprobs.tolist() == scripted_logprobs(said.ids).tolist()
    assert limit is None or len(said.ids) <= limit
    spelled = RENDERER.decode_answer(said.ids)
    if any(string in spelled for string in stop):
        assert said.finish_reason == FinishReason.STOP
        assert not any(string in said.text for string in stop)
        assert not any(string in spelled[:-1] for string in stop)
        assert said.stop in stop
        assert spelled.endswith(said.stop)
    elif len(said.ids) < len(full):
        assert said.finish_reason == FinishReason.LENGTH
        assert len(said.ids) == limit
    else:
        assert said.finish_reason == FinishReason.STOP
        assert said.stop is None
        assert said.text == text
