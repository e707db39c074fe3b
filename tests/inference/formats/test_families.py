"""Every family's calls are read right, whatever stands in them and around them."""

from __future__ import annotations

import json

import pytest
from families import FAMILIES, QUOTES_STRINGS, tool
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import TOOL_PARSERS, ToolCalls
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.rows import TOOL_FORMATS
from rolltree.values.types import FinishReason

TOOLS = [
    tool("write", path="string", text="string"),
    tool("count", n="integer", x="number", yes="boolean", items="array", table="object"),
    tool("now"),
]
EACH = pytest.mark.parametrize("family", FAMILIES)


def read(family: str, text: str) -> ToolCalls:
    return TOOL_PARSERS[FAMILIES[family][0]](text, TOOLS)


def spell(family: str, name: str, **arguments: object) -> str:
    return str(FAMILIES[family][1](name, arguments))


def made(found: ToolCalls) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


VALUES = {
    "plain": {"path": "a.txt", "text": "hello"},
    "looks like a number": {"path": "42", "text": "1.50"},
    "looks like a word of JSON": {"path": "true", "text": "null"},
    "looks like JSON": {"path": '{"a":1}', "text": "[1, 2]"},
    "empty": {"path": "", "text": " "},
    "lines": {"path": "a", "text": "def f():\n    return 1\n\n\n    # end"},
    "quotes": {"path": "it's", "text": 'say "no", or \\n'},
    "markup": {"path": "<b>x</b>", "text": "a < b && c > d {e} [f] (g)"},
    "other scripts": {"path": "你好", "text": "🎉 é"},
    "a fence": {"path": "x", "text": "```json\n{}\n```"},
}


@EACH
@pytest.mark.parametrize("kind", VALUES)
def test_texts_stay_the_texts_that_they_are(family: str, kind: str) -> None:
    found = read(family, spell(family, "write", **VALUES[kind]))
    assert made(found) == [("write", VALUES[kind])]
    assert (found.content, found.problems) == ("", ())


@EACH
def test_other_types_are_those_of_the_schema(family: str) -> None:
    arguments = {"n": 42, "x": 1.5, "yes": True, "items": ["a", 1], "table": {"k": {"m": 2}}}
    assert made(read(family, spell(family, "count", **arguments))) == [("count", arguments)]


@EACH
def test_a_call_needs_no_arguments(family: str) -> None:
    assert made(read(family, spell(family, "now"))) == [("now", {})]


@EACH
def test_text_before_a_call_is_content(family: str) -> None:
    if family == "Llama 4":
        family = "Llama 3"
    found = read(family, "Let me look.\n" + spell(family, "write", path="a", text="b"))
    assert made(found) == [("write", {"path": "a", "text": "b"})]
    assert (found.content, found.problems) == ("Let me look.", ())


@EACH
def test_text_after_a_call_is_not_lost(family: str) -> None:
    found = read(family, spell(family, "now") + "\nDone.")
    assert made(found) == [("now", {})]
    assert found.content == "Done."


@EACH
def test_two_calls_keep_their_order(family: str) -> None:
    between = "; " if family.startswith("Llama 3") else "\n"
    text = spell(family, "write", path="a", text="b") + between + spell(family, "now")
    if family == "Mistral 7B":
        text = text.replace("]\n[TOOL_CALLS][", ", ")
    assert [name for name, _ in made(read(family, text))] == ["write", "now"]


@EACH
def test_a_call_that_was_cut_off_is_kept_and_named(family: str) -> None:
    text = spell(family, "write", path="a", text="some longer text")
    text = text[: text.index("longer")]
    found = read(family, text)
    assert found.calls == ()
    assert found.content == text
    assert found.problems


@EACH
def test_a_good_call_before_one_that_was_cut_off_is_read(family: str) -> None:
    broken = spell(family, "write", path="a", text="some longer text")
    between = "; " if family.startswith("Llama 3") else "\n"
    text = spell(family, "now") + between + broken[: broken.index("longer")]
    if family == "Mistral 7B":
        text = text.replace("]\n[TOOL_CALLS][", ", ")
    found = read(family, text)
    assert made(found) == [("now", {})]
    assert found.problems
    assert "some" in found.content


def closes_by_text(family: str) -> bool:
    """Whether letters cannot be told from marks in the text alone (by ids they can)."""
    row = TOOL_FORMATS[FAMILIES[family][0]]
    return row.name in QUOTES_STRINGS or row.grammar in ("python", "harmony", "pairs")


@pytest.mark.parametrize("family", [name for name in FAMILIES if not closes_by_text(name)])
def test_a_value_may_contain_the_marks_of_its_format(family: str) -> None:
    for mark in TOOL_FORMATS[FAMILIES[family][0]].marks:
        arguments = {"path": "a", "text": f"the mark {mark} ends"}
        found = read(family, spell(family, "write", **arguments))
        assert made(found) == [("write", arguments)], mark


@EACH
@given(data=st.data())
def test_any_cutting_into_chunks_gives_the_same_message(family: str, data: st.DataObject) -> None:
    row = FAMILIES[family][0]
    pieces = [
        *("Text. ", "\n", "<think>", "hm", "</think>", " ", "<", "{", "[", "x", "</", "<|"),
        spell(family, "write", path="a", text="b {c}"),
        spell(family, "now")[:-3],
        spell(family, "now"),
        *TOOL_FORMATS[row].marks,
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parser = CompletionParser(tool_parser=row, reasoning="harmony" if row == "harmony" else "think")
    for tools in (TOOLS, None):
        whole = parser.parse(text, FinishReason.STOP, tools).message
        reading = parser.reading(tools)
        settled = [reading.advance(text[:cut]) for cut in cuts]
        assert reading.finish(text) == whole
        for reasoning, content in settled:
            assert str(whole.get("reasoning_content", "")).startswith(reasoning)
            assert str(whole["content"]).startswith(content)
