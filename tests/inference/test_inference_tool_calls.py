from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import TOOL_PARSERS, ToolCall, ToolCalls
from rolltree.inference.formats.calls import call_messages
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.rows import tool_format
from rolltree.values.types import FinishReason

BAR, SPACE = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', SPACE)}{BAR}>"


V3 = (
    deepseek("tool calls begin")
    + deepseek("tool call begin")
    + "function"
    + deepseek("tool sep")
    + 'add\n```json\n{"a": 2}\n```'
    + deepseek("tool call end")
    + deepseek("tool calls end")
)
V31 = (
    deepseek("tool calls begin")
    + deepseek("tool call begin")
    + "add"
    + deepseek("tool sep")
    + '{"a": 2}'
    + deepseek("tool call end")
    + deepseek("tool calls end")
)
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"

ADD = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
STYLES = [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "Hm."),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', ""),
    ("llama3", '{"name": "add", "parameters": {"a": 2}}', ""),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2}}', ""),
    ("mistral", 'Hm. [TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]', "Hm."),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 2}', ""),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]xyz[ARGS]{"a": 2}', ""),
    ("deepseek", "Hm." + V3, "Hm."),
    ("deepseek", V31, ""),
    ("glm", "Hm.\n" + GLM, "Hm."),
    ("qwen_xml", "Hm.\n" + XML, "Hm."),
]


@pytest.mark.parametrize(("style", "text", "content"), STYLES)
def test_one_call_in_every_style(style: str, text: str, content: str) -> None:
    found = TOOL_PARSERS[style](text, ADD)
    assert found.calls == (ToolCall("add", '{"a": 2}'),)
    assert found.content == content
    assert found.problems == ()


SEVERAL = [
    ("hermes", '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>'),
    ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "a"}, {"name": "b"}]'),
    ("mistral", "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"),
    ("glm", "<tool_call>a\n</tool_call>\n<tool_call>b\n</tool_call>"),
    ("qwen_xml", XML.replace("add", "a") + "\n" + XML.replace("add", "b")),
]


@pytest.mark.parametrize(("style", "text"), SEVERAL)
def test_several_calls_keep_their_order(style: str, text: str) -> None:
    assert [call.name for call in TOOL_PARSERS[style](text).calls] == ["a", "b"]


BROKEN = [
    ("hermes", "<tool_call>{oops}</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2}'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>[1]</tool_call>"),
    ("llama3", '{"name": "add", "parameters": {'),
    ("llama3", '<|python_tag|>{"answer": 5}'),
    ("llama3", '{"name": 5}'),
    ("mistral", "[TOOL_CALLS]nothing"),
    ("mistral", "[TOOL_CALLS][1]"),
    ("deepseek", deepseek("tool call begin") + "add" + deepseek("tool call end")),
    ("glm", "<tool_call>\n<arg_key>a</arg_key>\n</tool_call>"),
    ("qwen_xml", "<tool_call>add</tool_call>"),
]


@pytest.mark.parametrize(("style", "text"), BROKEN)
def test_a_malformed_call_stays_in_the_content_and_is_named(style: str, text: str) -> None:
    found = TOOL_PARSERS[style](text)
    assert found.calls == ()
    assert found.content == text
    assert len(found.problems) == 1


@pytest.mark.parametrize("text", ['{"answer": 5}', "{x} is a set", '{"a": {"b": 1'])
def test_an_answer_in_json_is_no_call_of_llamas(text: str) -> None:
    assert TOOL_PARSERS["llama3"](text) == ToolCalls(text)


def test_a_good_call_beside_a_bad_one_is_read() -> None:
    text = 'A <tool_call>{oops}</tool_call> B <tool_call>{"name": "add"}</tool_call>'
    found = TOOL_PARSERS["hermes"](text)
    assert found.calls == (ToolCall("add", "{}"),)
    assert found.content == "A <tool_call>{oops}</tool_call> B"
    assert found.problems[0].startswith("tool call 0: ")


def test_the_schema_gives_values_their_type_in_tagged_styles() -> None:
    text = (
        "<tool_call>f\n<arg_key>s</arg_key><arg_value>a b</arg_value>"
        '<arg_key>l</arg_key><arg_value>[1, "x"]</arg_value></tool_call>'
    )
    properties = {"s": {"type": "string"}, "l": {"type": "array"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    typed, bare = TOOL_PARSERS["glm"](text, tools), TOOL_PARSERS["glm"](text)
    assert json.loads(typed.calls[0].arguments) == {"s": "a b", "l": [1, "x"]}
    assert json.loads(bare.calls[0].arguments) == {"s": "a b", "l": '[1, "x"]'}


def test_unicode_arguments_are_written_as_they_are() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"t": "é"}}</tool_call>'
    assert TOOL_PARSERS["hermes"](text).calls[0].arguments == '{"t": "é"}'


@pytest.mark.parametrize("style", TOOL_PARSERS)
@given(text=st.text(max_size=60))
def test_no_text_is_an_error_and_none_is_lost(style: str, text: str) -> None:
    found = TOOL_PARSERS[style](text)
    if not found.calls:
        assert found.content == text or style == "deepseek"


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
@given(
    arguments=st.dictionaries(
        st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5), st.booleans())
    )
)
def test_arguments_come_back_as_they_went(style: str, arguments: dict[str, object]) -> None:
    key = "parameters" if style == "llama3" else "arguments"
    body = json.dumps({"name": "f", key: arguments})
    wrapped = {
        "hermes": f"<tool_call>{body}</tool_call>",
        "llama3": body,
        "mistral": f"[TOOL_CALLS][{body}]",
    }[style]
    calls = TOOL_PARSERS[style](wrapped).calls
    assert len(calls) == 1
    assert json.loads(calls[0].arguments) == arguments


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<tool_call>\n<function=x>", "qwen_xml"),
        ("[TOOL_CALLS]", "mistral"),
        (deepseek("tool call begin"), "deepseek"),
        ('{"name": function name, "parameters": dictionary of', "llama3"),
        ("nothing", "none"),
    ],
)
def test_the_style_is_found_in_the_template(template: str, name: str) -> None:
    assert tool_format("auto", template).name == name


def test_call_ids_depend_on_the_text_alone() -> None:
    calls = (ToolCall("a", "{}"), ToolCall("a", "{}"))
    first, again, other = (call_messages(calls, text) for text in ("x", "x", "y"))
    assert first == again
    assert len({call["id"] for call in [*first, *other]}) == 4
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in first)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "123456789"}]', ["123456789"]),
        ("[TOOL_CALLS]a[CALL_ID]abcDEF123[ARGS]{}", ["abcDEF123"]),
        ('[TOOL_CALLS][{"name": "a", "id": "short"}]', [None]),
        ('[TOOL_CALLS][{"name": "a", "id": 123456789}]', [None]),
        ('[TOOL_CALLS][{"name": "a", "id": "12345678\u00e9"}]', [None]),
        ('[TOOL_CALLS][{"name": "a"}]', [None]),
    ],
)
def test_the_id_that_a_model_wrote_is_kept(text: str, ids: list[str | None]) -> None:
    calls = TOOL_PARSERS["mistral"](text).calls
    assert [call.id for call in calls] == ids
    for made, written in zip(call_messages(calls, text), ids, strict=True):
        assert len(made["id"]) == 9
        assert written in (None, made["id"])


def test_two_calls_never_share_an_id() -> None:
    calls = tuple(ToolCall("a", "{}", "123456789") for _ in range(3))
    ids = [call["id"] for call in call_messages(calls, "x")]
    assert ids[0] == "123456789"
    assert len(set(ids)) == 3


HARMONY = (
    "<|channel|>analysis<|message|>Need a sum.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Adding.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 2, "b": 3}'
)


def test_harmony_reasoning_preamble_and_call() -> None:
    parser = CompletionParser("{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert (parser.tool_parser, parser.reasoning) == ("harmony", "harmony")
    parsed = parser.parse(HARMONY, FinishReason.STOP, [{"type": "function"}])
    assert parsed.message["reasoning_content"] == "Need a sum."
    assert parsed.message["content"] == "Adding."
    (call,) = parsed.message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert parsed.finish_reason == FinishReason.TOOL_CALLS
    final = parser.parse(
        "<|channel|>analysis<|message|>5<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 5.",
        FinishReason.STOP,
    )
    assert final.message == {
        "role": "assistant",
        "content": "It is 5.",
        "reasoning_content": "5",
    }


@pytest.mark.parametrize(
    "text",
    [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
        '<|start|>assistant to=add<|channel|>commentary<|message|>{"a": 1}<|call|>',
    ],
)
def test_harmony_headers_come_in_several_orders(text: str) -> None:
    assert TOOL_PARSERS["harmony"](text).calls == (ToolCall("add", '{"a": 1}'),)


def test_several_harmony_calls_and_a_broken_one() -> None:
    call = "<|start|>assistant<|channel|>commentary to=functions.{}<|message|>{}<|call|>"
    text = "Go." + call.format("a", "{}") + call.format("b", "{oops}") + call.format("c", "{}")
    found = TOOL_PARSERS["harmony"](text)
    assert [each.name for each in found.calls] == ["a", "c"]
    assert found.content == "Go." + call.format("b", "{oops}")
    assert found.problems[0].startswith("tool call 1: ")


@pytest.mark.parametrize("text", ["plain", "<|channel|>ana", "a <|message", "", "to=functions.x"])
def test_unfinished_harmony_is_content(text: str) -> None:
    parser = CompletionParser("<|channel|>")
    assert parser.parse(text, FinishReason.LENGTH, [{}]).message["content"] == text
