from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inference_templates import TOOLS

from rolltree.inference.formats.reader import CompletionParser, cut_at_stop
from rolltree.values.errors import UnknownName
from rolltree.values.types import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def test_plain_text_is_the_content() -> None:
    parsed = CompletionParser().parse("12", STOP)
    assert parsed.message == {"role": "assistant", "content": "12"}
    assert parsed.text == "12"
    assert parsed.finish_reason == STOP


def test_reasoning_is_split_off_and_kept() -> None:
    parser = CompletionParser(reasoning="think")
    parsed = parser.parse("<think>\nfive and seven\n</think>\n\n12", STOP)
    assert parsed.message["reasoning_content"] == "five and seven"
    assert parsed.message["content"] == "12"
    assert parsed.text == "<think>\nfive and seven\n</think>\n\n12"


def test_reasoning_opened_by_the_prompt() -> None:
    parser = CompletionParser("{{ '</think>' }}", start="<|assistant|><think>\n")
    assert parser.parse("hm</think>12", STOP).message == {
        "role": "assistant",
        "content": "12",
        "reasoning_content": "hm",
    }


def test_reasoning_that_was_cut_short_leaves_no_content() -> None:
    parser = CompletionParser(reasoning="think")
    parsed = parser.parse("<think>\nfive and", LENGTH)
    assert parsed.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "five and",
    }
    assert parsed.finish_reason == LENGTH


def test_tags_are_content_where_the_template_knows_no_reasoning() -> None:
    text = "<think>a</think><answer>12</answer>"
    parsed = CompletionParser("no reasoning here").parse(text, STOP)
    assert parsed.message == {"role": "assistant", "content": text}


def test_a_stray_closing_tag_is_content() -> None:
    assert CompletionParser(reasoning="think").parse("a</think>b", STOP).message == {
        "role": "assistant",
        "content": "a</think>b",
    }


def test_tool_calls_are_read_only_with_tools() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parser = CompletionParser(tool_parser="hermes")
    assert parser.parse(text, STOP).message == {"role": "assistant", "content": text}
    parsed = parser.parse(text, STOP, TOOLS)
    assert parsed.finish_reason == FinishReason.TOOL_CALLS
    assert parsed.message["content"] == ""
    assert parsed.message["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_a_length_stop_stays_a_length_stop() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call> and then'
    parsed = CompletionParser(tool_parser="hermes").parse(text, LENGTH, TOOLS)
    assert parsed.finish_reason == LENGTH
    assert len(parsed.message["tool_calls"]) == 1


def test_a_malformed_call_is_an_answer_with_its_problem() -> None:
    parsed = CompletionParser(tool_parser="hermes").parse("<tool_call>{</tool_call>", STOP, TOOLS)
    assert parsed.message["content"] == "<tool_call>{</tool_call>"
    assert parsed.finish_reason == STOP
    assert "tool_calls" not in parsed.message
    assert len(parsed.message["parse_problems"]) == 1


def test_calls_inside_reasoning_are_thoughts() -> None:
    text = '<think><tool_call>{"name": "add"}</tool_call></think>no'
    parsed = CompletionParser(tool_parser="hermes", reasoning="think").parse(text, STOP, TOOLS)
    assert "tool_calls" not in parsed.message
    assert parsed.message["content"] == "no"


def test_unknown_styles_are_named() -> None:
    with pytest.raises(UnknownName):
        CompletionParser(tool_parser="herms")


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [("ab", (), "ab"), ("a\nb", ("\n",), "a"), ("abc", ("c", "b"), "a"), ("abc", ("x",), "abc")],
)
def test_text_is_cut_at_the_first_stop(text: str, stop: tuple[str, ...], cut: str) -> None:
    assert cut_at_stop(text, stop) == cut


@given(st.text(), st.lists(st.text(min_size=1), max_size=3))
def test_no_stop_string_survives(text: str, stop: list[str]) -> None:
    cut = cut_at_stop(text, stop)
    assert text.startswith(cut)
    assert not any(string in cut for string in stop)
