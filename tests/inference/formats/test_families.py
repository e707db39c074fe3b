"""Every family's calls are read right, whatever stands in them and around them."""

from __future__ import annotations

import json

import pytest
from families import FAMILIES, QUOTES_STRINGS, TOOLS, answer, spell, texts
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import TOOL_PARSERS, ToolCalls
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.rows import TOOL_FORMATS
from rolltree.values.types import FinishReason

EACH = pytest.mark.parametrize("family", FAMILIES)


def read(family: str, text: str) -> ToolCalls:
    return TOOL_PARSERS[FAMILIES[family][0]](text, TOOLS)


def made(found: ToolCalls) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


@EACH
@pytest.mark.parametrize("kind", texts("Llama 3"))
def test_calls_are_what_the_model_wrote(family: str, kind: str) -> None:
    text, calls = texts(family)[kind]
    found = read(family, text)
    assert (made(found), found.problems) == (calls, ())
    assert found.content == {"text before": "Let me look.", "text after": "Done."}.get(kind, "")


@EACH
def test_two_blocks_are_read_like_one_with_two_calls(family: str) -> None:
    text = spell(family, "write", path="a", text="b") + "\n" + spell(family, "now")
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
    whole = answer(family, spell(family, "now"), broken)
    found = read(family, whole[: whole.index("longer")])
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
