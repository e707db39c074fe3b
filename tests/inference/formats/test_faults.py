"""What models get wrong, read as it was meant or reported; and what the schema decides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from families import BAR, SPACE, deepseek, tool

from rolltree.inference import TOOL_PARSERS, ToolCalls
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.rows import TOOL_FORMATS
from rolltree.values.types import FinishReason

TOOLS = [tool("f", a="string", b="string"), tool("g", a="string"), tool("n", a="integer")]


def read(style: str, text: str, tools: Any = TOOLS) -> ToolCalls:
    return TOOL_PARSERS[style](text, tools)


def made(found: ToolCalls) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def xml(name: str, **arguments: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<function={name}>\n{''.join(parts)}</function>"


def block(*functions: str) -> str:
    return "<tool_call>\n" + "\n".join(functions) + "\n</tool_call>"


MENDED = [
    ("qwen_xml", block(xml("f", a="1"), xml("g", a="2")), [("f", {"a": "1"}), ("g", {"a": "2"})]),
    (
        "qwen_xml",
        block(xml("f", a="1")).removesuffix("\n</tool_call>") + "\n" + block(xml("g", a="2")),
        [("f", {"a": "1"}), ("g", {"a": "2"})],
    ),
    (
        "qwen_xml",
        block(xml("f", a="1", b="2").replace("\n</parameter>", "", 1)),
        [("f", {"a": "1", "b": "2"})],
    ),
    (
        "qwen_xml",
        block(xml("f", a="1", b="2")[: -len("</parameter>\n</function>")] + "</function>"),
        [("f", {"a": "1", "b": "2"})],
    ),
    ("qwen_xml", block(xml("f", a="1").removesuffix("</function>")), [("f", {"a": "1"})]),
    ("qwen_xml", xml("f", a="1"), [("f", {"a": "1"})]),
    (
        "qwen_xml",
        block(xml("f", a="x\n<parameter=z>\ny", b="2")),
        [("f", {"a": "x\n<parameter=z>\ny", "b": "2"})],
    ),
    (
        "qwen_xml",
        block(xml("f", a="a </parameter> b </function> c </tool_call> d")),
        [("f", {"a": "a </parameter> b </function> c </tool_call> d"})],
    ),
    ("qwen_xml", '<tool_call>\n<function=f>\n{"a": "1"}\n</function>', [("f", {"a": "1"})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1"}}\n'
        '<tool_call>{"name": "g", "arguments": {"a": "2"}}</tool_call>',
        [("f", {"a": "1"}), ("g", {"a": "2"})],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1"}}', [("f", {"a": "1"})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1"}}}</tool_call>',
        [("f", {"a": "1"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"1\\"}"}</tool_call>',
        [("f", {"a": "1"})],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call>',
        [("f", {}), ("g", {})],
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        [("f", {"a": "1"}), ("g", {"a": "2"})],
    ),
    (
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value>  x </arg_value>"
        "<arg_key>b</arg_key><arg_value></tool_call></arg_value></tool_call>",
        [("f", {"a": "  x ", "b": "</tool_call>"})],
    ),
    (
        "glm",
        "<tool_call>f\n<arg_key>a\n<arg_value>1</arg_value>\n</tool_call>",
        [("f", {"a": "1"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f{"a": "{}"}[TOOL_CALLS]g{"a": "2"}',
        [("f", {"a": "{}"}), ("g", {"a": "2"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"arguments": {"name": "f"}, "name": "g"}]',
        [("g", {"name": "f"})],
    ),
    (
        "deepseek",
        f"{deepseek('tool', 'call', 'begin')}f{deepseek('tool', 'sep')}"
        '{"a": "```json\\n{}\\n```"}' + deepseek("tool", "call", "end"),
        [("f", {"a": "```json\n{}\n```"})],
    ),
    ("llama3", '{"name": "f", "arguments": {"a": "1"}}', [("f", {"a": "1"})]),
    (
        "llama3",
        '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}',
        [("f", {}), ("g", {})],
    ),
    (
        "llama4",
        "[f(a='Martha\\'s', b='\"x\"'), g()]",
        [("f", {"a": "Martha's", "b": '"x"'}), ("g", {})],
    ),
    ("llama4", '{"name": "f", "parameters": {"a": "1"}}', [("f", {"a": "1"})]),
    (
        "lfm2",
        "<|tool_call_start|>[f(a='sed -n '1,2p' x')]<|tool_call_end|>",
        [("f", {"a": "sed -n '1,2p' x"})],
    ),
    ("lfm2", "<|tool_call_start|> [n(a=07)]<|tool_call_end|>", [("n", {"a": 7})]),
    ("lfm2", "<|tool_call_start|>[f(a='x\ny')]<|tool_call_end|>", [("f", {"a": "x\ny"})]),
    ("lfm2", "<|tool_call_start|>[shop.order(a={'k', 'l'})]<|tool_call_end|>", None),
    (
        "olmo3",
        "<function_calls>f(a=null, b=true)\ng()</function_calls>",
        [("f", {"a": None, "b": True}), ("g", {})],
    ),
    (
        "kimi_k2",
        "<|tool_call_begin|>f:0 <|tool_call_argument_begin|>{}<|tool_call_end|>",
        [("f", {})],
    ),
    (
        "granite",
        '<tool_call>[{"arguments": {"a": "1"}, "name": "f"}, {"name": "g"}]',
        [("f", {"a": "1"}), ("g", {})],
    ),
    (
        "lfm2",
        '<|tool_call_start|>{"name": "f", "arguments": {"a": "1"}}<|tool_call_end|>',
        [("f", {"a": "1"})],
    ),
    ("gemma3", "```tool_code\nf(a='1')\ng()\n```", [("f", {"a": "1"}), ("g", {})]),
    ("gemma3", "```tool_code\n[f(a='```\\n```')]```", [("f", {"a": "```\n```"})]),
    ("gemma3", "```tool_code\nf(a='1')", [("f", {"a": "1"})]),
    (
        "xlam",
        '[\n  {"arguments": {"a": "1"}, "name": "f"},\n  {"name": "g", "arguments": {}}\n]',
        [("f", {"a": "1"}), ("g", {})],
    ),
    ("xlam", '```json\n[{"name": "f", "arguments": {"a": "1"}}]\n```', [("f", {"a": "1"})]),
    ("xlam", '{"name": "f", "arguments": {"a": "1"}}', [("f", {"a": "1"})]),
    ("xlam", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "1"}}]', [("f", {"a": "1"})]),
    (
        "xlam",
        '<tool_call>[{"name": "f", "arguments": {"a": "1"}}]</tool_call>',
        [("f", {"a": "1"})],
    ),
    ("gemma4", '<|tool_call>:f{a:<|"|>1<|"|>}<tool_call|>', [("f", {"a": "1"})]),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
        [("f", {"a": "1"})],
    ),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>", [("f", {"a": "1"})]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n',
        [("f", {"a": "1"})],
    ),
]
UNCLOSED = {
    "glm": "<tool_call>{}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
    "qwen_xml": "<tool_call>\n<function={}>\n<parameter=a>\n1\n</parameter>\n",
    "minimax_m2": '<minimax:tool_call><invoke name="{}"><parameter name="a">1</parameter>',
}


@pytest.mark.parametrize("style", UNCLOSED)
def test_a_call_at_the_end_without_its_mark_is_read_if_it_has_what_the_tool_requires(style) -> None:
    both = tool("both", a="string", b="string")
    both["function"]["parameters"]["required"] = ["a", "b"]
    for name in ("both", "unknown"):  # more may have followed
        text = UNCLOSED[style].format(name)
        found = read(style, text, [*TOOLS, both])
        assert (found.content, found.calls, len(found.problems)) == (text, (), 1)


@pytest.mark.parametrize("style", ["glm", "qwen_xml", "hermes", "minimax_m2", "seed_oss"])
def test_a_name_alone_is_reported(style: str) -> None:
    opened = TOOL_FORMATS[style].opens[0]
    for text in (f"{opened}f", f"Let me look.\n{opened}f\n"):
        found = read(style, text)
        assert (found.content, found.calls, len(found.problems)) == (text, (), 1)


WRAPPED = [style for style, row in TOOL_FORMATS.items() if row.wraps]


@pytest.mark.parametrize("style", WRAPPED)
def test_marks_around_no_call_are_reported(style: str) -> None:
    opened, closed = TOOL_FORMATS[style].wraps[:2]
    text = f"{opened}f with a = 1{closed}"
    found = read(style, text)
    assert (found.content, found.calls, len(found.problems)) == (text, (), 1)
    message = CompletionParser(tool_parser=style).parse(text, FinishReason.STOP, TOOLS).message
    assert message["parse_problems"] == list(found.problems)
    assert read(style, f"I write {opened} first.") == ToolCalls(f"I write {opened} first.")


@pytest.mark.parametrize(("style", "text", "calls"), MENDED)
def test_what_is_clear_is_read(style: str, text: str, calls: Any) -> None:
    found = read(style, text)
    if calls is None:
        assert [call.name for call in found.calls] == ["shop.order"]
    else:
        assert made(found) == calls
    assert (found.content, found.problems) == ("", ())


@pytest.mark.parametrize(
    ("style", "text", "content"),
    [
        (
            "hermes",
            'I use the <tool_call> tag. <tool_call>{"name": "g"}</tool_call>',
            "I use the <tool_call> tag.",
        ),
        ("qwen_xml", "The <tool_call> tag: " + block(xml("g")), "The <tool_call> tag:"),
        (
            "glm",
            "A <tool_call> tag. <tool_call>g\n</tool_call>",
            "A <tool_call> tag.",
        ),
        ("llama3", 'Now {"name": "g", "parameters": {}} I {see} it.', "Now  I {see} it."),
        ("llama3", '{"name": "g", "parameters": {}} I passed {"a": "b"}', 'I passed {"a": "b"}'),
        ("mistral", "Hi {x}[TOOL_CALLS]g{}", "Hi {x}"),
        ("phi4", 'With functools I call functools[{"name": "g"}]', "With functools I call"),
    ],
)
def test_text_around_a_call_is_content(style: str, text: str, content: str) -> None:
    found = read(style, text)
    assert made(found) == [("g", {})]
    assert (found.content, found.problems) == (content, ())


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", 'A <tool_call>{"name": "g"}</tool_call> and <tool_call>{"name": </tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "g"}, {"name": "f", "argum'),
        ("mistral", "[TOOL_CALLS]g{}[TOOL_CALLS]f{oops}"),
        ("llama3", '{"name": "g", "parameters": {}}; {"name": "f", "par'),
        ("llama4", "[g(), f(a=open('x'))]"),
        ("lfm2", "<|tool_call_start|>[f(a=b'z'), g()]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=1e999), g()]<|tool_call_end|>"),
        ("qwen_xml", block(xml("g")) + block("<function=f>\n<parameter=a>")),
        (
            "deepseek",
            f"<{BAR}tool{SPACE}call{SPACE}begin{BAR}>g<{BAR}tool{SPACE}sep{BAR}>{{}}"
            f"<{BAR}tool{SPACE}call{SPACE}end{BAR}><{BAR}tool{SPACE}call{SPACE}begin{BAR}>f",
        ),
        ("granite", '<|tool_call|>[{"name": "g"}, {"nome": "f"}]'),
    ],
)
def test_a_good_call_beside_a_bad_one_is_read_and_the_bad_one_named(style: str, text: str) -> None:
    found = read(style, text)
    assert made(found) == [("g", {})]
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("llama3", '{"answer": 5}'),
        ("llama3", '{"name": "Ada"}'),
        ("llama3", 'The tool {"name": "unknown", "parameters": {}} is not mine.'),
        ("llama4", "[1, 2]"),
        ("llama4", "See [note(1)] and [f] there."),
        ("hermes", "The tag <tool_call> begins a call."),
        ("glm", "The tag <tool_call> begins a call."),
        ("xlam", '[{"name": "Ada"}, {"name": "Bob"}]'),
        ("xlam", "The sum of [1, 2] is {3}."),
        ("gemma3", "```python\nf(a='1')\n```"),
        ("phi4", "I import functools in Python."),
    ],
)
def test_an_answer_is_no_call(style: str, text: str) -> None:
    assert read(style, text) == ToolCalls(text)


SCHEMAS = [
    ("string", "42", "42"),
    ("string", "null", "null"),
    ("string", '{"a": 1}', '{"a": 1}'),
    ("integer", " 42 ", 42),
    ("integer", "3.0", 3),
    ("integer", "many", "many"),
    ("number", "1.50", 1.5),
    ("number", "2", 2),
    ("boolean", "True", True),
    ("boolean", "1", "1"),
    ("null", "None", None),
    ("array", '["a"]', ["a"]),
    ("array", "['a', None]", ["a", None]),
    ("object", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ("object", "{'a': True}", {"a": True}),
    ({"type": ["integer", "null"]}, "5", 5),
    ({"type": ["integer", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
    ({"oneOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ({}, "42", "42"),
    ("float", "3.14", 3.14),
]


@pytest.mark.parametrize(("schema", "text", "value"), SCHEMAS)
@pytest.mark.parametrize("style", ["qwen_xml", "glm", "minimax_m2", "step3", "functiongemma"])
def test_the_schema_decides(style: str, schema: Any, text: str, value: Any) -> None:
    offered = tool("h", a=schema)
    offered["function"]["parameters"]["$defs"] = {"Point": {"properties": {"x": {}}}}
    spelled = {
        "qwen_xml": block(xml("h", a=text)),
        "glm": f"<tool_call>h\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "minimax_m2": f'<invoke name="h"><parameter name="a">{text}</parameter></invoke>',
        "step3": f"<{BAR}tool_call_begin{BAR}>"
        f'<steptml:invoke name="h"><steptml:parameter name="a">{text}</steptml:parameter>'
        f"</steptml:invoke><{BAR}tool_call_end{BAR}>",
        "functiongemma": "<start_function_call>call:h{a:<escape>"
        f"{text}<escape>}}<end_function_call>",
    }[style]
    ((_, arguments),) = made(read(style, spelled, [offered]))
    assert arguments == {"a": value}
    assert type(arguments["a"]) is type(value)


@pytest.mark.parametrize(
    "tools", [None, [], [{}], [{"type": "function"}], [{"function": {"name": "h"}}]]
)
def test_without_a_schema_text_stays_text(tools: Any) -> None:
    ((_, arguments),) = made(read("qwen_xml", block(xml("h", a="42")), tools))
    assert arguments == {"a": "42"}


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_problems_are_counted_not_repeated_for_ever(style: str) -> None:
    row = TOOL_FORMATS[style]
    opened = row.opens[0] if row.opens else ""
    assert len(read(style, f"{opened}{{x " * 50).problems) <= 9


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama4", "[now(), forecast(city=Paris)]"),
        ("lfm2", "<|tool_call_start|>[now(), forecast(city=Paris)]<|tool_call_end|>"),
        ("olmo3", "<function_calls>now()\nforecast(city=Paris)</function_calls>"),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"city": "Paris"}]'),
    ],
)
def test_a_bad_call_beside_a_good_one_stays_in_the_content(name, text):
    found = read(name, text, [tool("now"), tool("forecast", city="string")])
    assert made(found) == [("now", {})]
    assert "Paris" in found.content
    assert len(found.problems) == 1
