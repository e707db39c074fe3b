"""Reasoning in every family's marks, complete, cut off, and with calls."""

from __future__ import annotations

from typing import Any

import pytest

from rolltree.inference import REASONING_FORMATS
from rolltree.inference.formats.reader import CompletionParser
from rolltree.values.types import FinishReason

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
MARKED = [name for name, row in REASONING_FORMATS.items() if row.start]
EACH = pytest.mark.parametrize("name", MARKED)


def read(name: str, text: str, tools: Any = None, start: str = "", calls: str = "hermes") -> Any:
    parser = CompletionParser(reasoning=name, tool_parser=calls, start=start)
    message = parser.parse(text, FinishReason.STOP, tools).message
    return message.get("reasoning_content"), message["content"], message.get("tool_calls", [])


@EACH
def test_reasoning_is_split_off(name: str) -> None:
    row = REASONING_FORMATS[name]
    for text in ("so", "so\nit is", "a < b </x> {}"):
        answer = f"{row.start}{text}{row.end}\n\nThe rest\nof it"
        assert read(name, answer) == (text, "The rest\nof it", [])
        inside = f"{text}{row.end}The rest"
        assert read(name, inside, start=f"Ask.{row.start}\n") == (text, "The rest", [])


@EACH
def test_reasoning_without_its_end_was_cut_off(name: str) -> None:
    row = REASONING_FORMATS[name]
    assert read(name, f"{row.start}so it") == ("so it", "", [])
    assert read(name, "so it", start=row.start) == ("so it", "", [])


@EACH
def test_an_answer_without_reasoning_is_content(name: str) -> None:
    assert read(name, "It is 4.") == (None, "It is 4.", [])
    assert read(name, "") == (None, "", [])


@EACH
def test_calls_after_reasoning_are_read_and_those_in_it_are_thoughts(name: str) -> None:
    row = REASONING_FORMATS[name]
    reasoning, content, calls = read(name, f"{row.start}a{row.end}Go.{CALL}", [{}])
    assert (reasoning, content, len(calls)) == ("a", "Go.", 1)
    reasoning, content, calls = read(name, f"{row.start}a {CALL}{row.end}no", [{}])
    assert (reasoning, content, calls) == (f"a {CALL}", "no", [])


@EACH
def test_a_call_ends_reasoning_that_never_ends(name: str) -> None:
    row = REASONING_FORMATS[name]
    reasoning, content, calls = read(name, f"{row.start}I look.\n{CALL}", [{}])
    assert (reasoning, content, len(calls)) == ("I look.", "", 1)
    assert read(name, f"{row.start}I say <tool_call> and", [{}])[2] == []


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("gemma4", "<|channel>thought\nReal<channel|>Final", "Real", "Final"),
        ("gemma4", "<|channel>thousand<channel|>Done", "thousand", "Done"),
        ("gemma4", "<|channel>thought\n<channel|>", "", ""),
        ("gemma4", "Before\n<|channel>a<channel|>\nrest", "a", "Before\n\nrest"),
        (
            "cohere",
            "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>foo<|END_RESPONSE|>",
            "a",
            "foo",
        ),
        ("cohere", "<|START_RESPONSE|>foo<|END_RESPONSE|>", None, "foo"),
        ("answer", "<think>\na\n</think>\n<answer>\nfoo\n</answer>", "a", "foo"),
        ("response", "<think>a</think><response>foo</response>", "a", "foo"),
        ("mistral", "\n[THINK]a[/THINK]foo", "a", "foo"),
        ("granite", "Here is my thought process:aHere is my response:foo", "a", "foo"),
        ("think", "<think>a</think>b</think>c", "a", "b</think>c"),
        ("think", "a</think>b", None, "a</think>b"),
    ],
)
def test_what_is_special_of_a_family(name: str, text: str, reasoning: Any, content: str) -> None:
    assert read(name, text) == (reasoning, content, [])


def test_cohere_thinks_and_acts() -> None:
    text = (
        "<|START_THINKING|>I look.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {"q": "x"}},\n'
        '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>'
    )
    reasoning, content, calls = read("cohere", text, [{}], calls="cohere")
    assert (reasoning, content) == ("I look.", "")
    assert [call["id"] for call in calls] == ["0", "1"]


class Responding:
    """A tokenizer's `parse_response`, as transformers has it."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __call__(self, text: str, *, prefix: str) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_response_template_comes_first_and_the_schema_types_its_arguments() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": "4", "s": "4"}}}
    found = {"thinking": "hm", "content": "Go.", "tool_calls": [call]}
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    parser = CompletionParser("<tool_call>", respond=Responding(found))
    message = parser.parse("whatever", FinishReason.STOP, tools).message
    assert (message["reasoning_content"], message["content"]) == ("hm", "Go.")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"n": 4, "s": "4"}'
    assert CompletionParser(tool_parser="hermes", respond=Responding(found)).respond is None
    broken = CompletionParser(respond=Responding(ValueError("no JSON")))
    message = broken.parse("text", FinishReason.STOP, tools).message
    assert message["content"] == "text"
    assert message["parse_problems"] == ["response_template: no JSON"]


def test_a_template_that_only_opens_the_reasoning_shows_its_format():
    parser = CompletionParser("{{ '<|im_start|>assistant\\n<think>' }}", start="assistant\n<think>")
    message = parser.parse("Hm.</think>\nIt is 4.", FinishReason.STOP).message
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is 4.")


def test_a_mark_around_the_calls_ends_reasoning_that_was_not_closed():
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    parser = CompletionParser(tool_parser="kimi_k2", reasoning="think", start="<think>")
    text = (
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    message = parser.parse(text, FinishReason.STOP, [tool]).message
    assert message["reasoning_content"].strip() == "Hm."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
