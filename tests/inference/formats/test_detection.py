"""Which rows a chat template shows, and what is said when it shows none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from families import tool
from manners import MANNERS

from chat_templates import all_templates
from rolltree.cli.doctor import examine
from rolltree.inference import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ChatRenderer,
    ReasoningFormat,
    ToolFormat,
)
from rolltree.inference.client import check_shown_tools
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.models import resolve_model
from rolltree.testing import ByteTokenizer
from rolltree.values.errors import ConfigError, UnknownName
from rolltree.values.types import FinishReason

BARE = "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
WITH_TOOLS = BARE + "{{- tools | tojson if tools else '' }}"
TOOLS = [tool("add", a="integer")]


def renderer(source: str, **settings: Any) -> ChatRenderer:
    return ChatRenderer(ByteTokenizer(source, ["<|end|>"], "<|end|>"), **settings)


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.found_by])
def test_each_format_is_found_by_what_a_template_shows(name: str) -> None:
    for shown in TOOL_FORMATS[name].found_by:
        assert CompletionParser(f"... {shown} ...").tool_parser in (name, "phi4")


@pytest.mark.parametrize("name", [name for name, row in REASONING_FORMATS.items() if row.found_by])
def test_each_mark_of_reasoning_is_found(name: str) -> None:
    for shown in REASONING_FORMATS[name].found_by:
        assert CompletionParser(f"... {shown} ...").reasoning == name


SHOWING = {
    **{name: template.source for name, template in all_templates().items()},
    **{name: manner.source for name, manner in MANNERS.items()},
}
SHOWING = {name: source for name, source in SHOWING.items() if "tools" in source}


def test_minimax_writes_results_as_others_mark_answers() -> None:
    parser = CompletionParser("<minimax:tool_call> <response>{{ m.content }}</response> </think>")
    message = parser.parse("<think>Hm.</think>In <response> tags.", FinishReason.STOP).message
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "In <response> tags.")


@pytest.mark.parametrize("start", ["", "Here are my reasoning steps:\n"])
def test_reasoning_that_is_marked_in_words_is_read(start: str) -> None:
    parser = CompletionParser("[BEGIN FINAL RESPONSE]", start=start)
    opened = "" if start else "Here are my reasoning steps:\n"
    text = f"{opened}Hm.\n[BEGIN FINAL RESPONSE]\nIt is 4.\n[END FINAL RESPONSE]\n"
    message = parser.parse(text, FinishReason.STOP).message
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "It is 4.")


EXPECTED = {
    "one call": "llama3",
    "items": "qwen_xml",
    "alternating": "mistral",
    "two roles": "none",
    "channels": "harmony",
    "fenced": "deepseek",
}


def test_every_template_of_the_suites_is_detected_or_has_no_tools() -> None:
    for name, template in all_templates().items():
        found = template.renderer().formats[0]
        assert found == EXPECTED.get(name, found)
        if "tool_call>" in template.source or "TOOL_CALLS" in template.source:
            assert found != "none", name


def test_a_template_with_tools_in_an_unknown_format_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="tool_parser=ToolFormat"):
        check_shown_tools(renderer(WITH_TOOLS), TOOLS, "mine")
    check_shown_tools(renderer(WITH_TOOLS), None, "mine")
    for chosen in ("none", "hermes", ToolFormat("mine", "json", ("<c>",), ("</c>",))):
        check_shown_tools(renderer(WITH_TOOLS, tool_parser=chosen), TOOLS, "mine")


def test_a_tool_that_is_called_like_a_word_of_the_template_is_not_taken_for_shown() -> None:
    made = renderer("{{- 'You may search now.<tool_call>' }}" + BARE)
    with pytest.raises(ConfigError, match="ignores tools"):
        check_shown_tools(made, [tool("search"), tool("now")], "mine")
    check_shown_tools(renderer("{{- 'Search now.<tool_call>' }}" + WITH_TOOLS), [tool("now")], "m")


def test_unknown_marks_of_reasoning_are_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    source = BARE + "{# {{ m.reasoning_content }} #}"
    with caplog.at_level(logging.WARNING):
        renderer(source, reasoning="none")
        assert not caplog.records
        renderer(source)
    assert "ReasoningFormat" in caplog.text


def test_a_row_of_your_own_is_read() -> None:
    mine = ToolFormat("mine", "json", ("<c>",), ("</c>",))
    thoughts = ReasoningFormat("mine", "<t>", "</t>")
    made = renderer(WITH_TOOLS, tool_parser=mine, reasoning=thoughts)
    text = '<t>hm</t>Hi <c>{"name": "add", "arguments": {"a": 1}}</c>'
    message = made.parse_text(text, FinishReason.STOP, TOOLS).message
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "Hi"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert made.formats == ("mine", "mine")


def test_unknown_names_are_named() -> None:
    with pytest.raises(UnknownName, match="hermes"):
        CompletionParser(tool_parser="hermez")
    with pytest.raises(UnknownName, match="think"):
        CompletionParser(reasoning="thinks")


def test_doctor_says_which_rows_a_model_shows() -> None:
    said = CliRunner().invoke(examine, ["tiny"])
    assert said.exit_code == 0, said.output
    assert "tool calls" in said.output
    assert "reasoning" in said.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, which gets one chat template after the other."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SHOWING)
def test_doctor_names_the_row_of_every_template_with_tools(checkpoint: Path, name: str) -> None:
    (checkpoint / "chat_template.jinja").write_text(SHOWING[name], encoding="utf-8")
    said = CliRunner().invoke(examine, [str(checkpoint), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.output)["tool calls"]
    if name in MANNERS:
        assert found == MANNERS[name].row
    elif name in EXPECTED:
        assert found == EXPECTED[name]
    # Never a silent "none": what is not known is refused, and the answer says so.
    assert found in TOOL_FORMATS or "unknown: a run with tools is refused" in found
    assert found != "none"


def test_doctor_says_that_an_unknown_format_is_refused(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
    said = CliRunner().invoke(examine, [str(checkpoint)])
    assert "unknown: a run with tools is refused (docs/tools.md)" in said.output
