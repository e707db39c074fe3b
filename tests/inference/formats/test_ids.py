"""Marks that are tokens are read as ids: what a model spells in letters is text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families import tool

from rolltree.inference import ChatRenderer
from rolltree.inference.deltas import MessageDeltas, SettledText
from rolltree.testing import ByteTokenizer
from rolltree.values.types import FinishReason, SamplingParams

TEMPLATE = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
)
TOOLS = [tool("f", a="string")]
CASES = {
    "glm": (
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        ["<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>"],
        ["</arg_value>", "</tool_call>"],
    ),
    "gemma4": (
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
        ["<|tool_call>", "call:f{a:", '<|"|>'],
        ['<|"|>', "}", "<tool_call|>"],
    ),
    "lfm2": (
        ["<|tool_call_start|>", "<|tool_call_end|>"],
        ["<|tool_call_start|>", "[f(a='"],
        ["')]", "<|tool_call_end|>"],
    ),
    "qwen_xml": (
        ["<tool_call>", "</tool_call>"],
        ["<tool_call>", "<function=f><parameter=a>\n"],
        ["\n</parameter></function>", "</tool_call>"],
    ),
    "hermes": (
        ["<tool_call>", "</tool_call>"],
        ["<tool_call>", '{"name": "f", "arguments": {"a": "'],
        ['"}}', "</tool_call>"],
    ),
}


class Speller:
    """Encodes pieces: those that are marks as ids, all others in letters."""

    def __init__(self, style: str, **settings: Any) -> None:
        self.marks = CASES[style][0]
        special = [*self.marks, "<think>", "</think>", "<|end|>"]
        self.renderer = ChatRenderer(
            ByteTokenizer(TEMPLATE, special, "<|end|>"), tool_parser=style, **settings
        )

    def ids(self, *pieces: str) -> list[int]:
        vocabulary, ids = self.renderer.vocabulary, []
        for piece in pieces:
            spelled = vocabulary.without_control(piece) if piece not in self.marks else piece
            for mark in [*self.marks, "<think>", "</think>"]:
                if piece != mark:
                    spelled = spelled.replace(mark, mark[0] + "\udfff" + mark[1:])
            ids += vocabulary.encode(spelled).tolist()
        return ids


@pytest.mark.parametrize("style", CASES)
def test_letters_inside_a_value_are_not_the_mark(style: str) -> None:
    marks, head, tail = CASES[style]
    speller = Speller(style)
    value = "a " + " ".join(marks).replace('"', "" if style == "hermes" else '"') + " b"
    ids = speller.ids(*head, value, *tail)
    message = speller.renderer.parse(ids, FinishReason.STOP, TOOLS).message
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": value}
    assert message["content"] == ""
    assert "parse_problems" not in message


@pytest.mark.parametrize("style", CASES)
def test_a_call_in_letters_is_content(style: str) -> None:
    _, head, tail = CASES[style]
    speller = Speller(style)
    text = "".join([*head, "x", *tail])
    ids = speller.ids(f"You would write {text}.")
    if style == "qwen_xml":  # its inner tags are letters for everybody
        return
    message = speller.renderer.parse(ids, FinishReason.STOP, TOOLS).message
    assert message == {"role": "assistant", "content": f"You would write {text}."}


@pytest.mark.parametrize("style", CASES)
def test_a_stream_of_ids_gives_the_message_of_the_whole(style: str) -> None:
    marks, head, tail = CASES[style]
    speller = Speller(style, reasoning="think")
    renderer = speller.renderer
    thought = renderer.vocabulary.encode("<think>").tolist()
    ended = renderer.vocabulary.encode("</think>").tolist()
    ids = [
        *thought,
        *speller.ids("in letters: </think>, "),
        *ended,
        *speller.ids(f"Say {marks[0]}: "),
        *speller.ids(*head, "x", *tail),
    ]
    whole = renderer.parse(ids, FinishReason.STOP, TOOLS).message
    assert whole["reasoning_content"] == "in letters: </think>, "
    assert whole["content"] == f"Say {marks[0]}:"
    settled = SettledText(renderer, SamplingParams())
    deltas = MessageDeltas(renderer, TOOLS, settled.places)
    parts = [deltas.next(settled.add(token)) for token in ids]
    parts.append(deltas.last(whole))
    for name in ("reasoning_content", "content"):
        assert "".join(part.get(name) or "" for part in parts) == whole[name]


def test_without_ids_every_spelling_counts() -> None:
    speller = Speller("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    assert speller.renderer.parse_text(text, FinishReason.STOP, TOOLS).message["tool_calls"]
