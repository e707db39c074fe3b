"""Tool calls as models write them: text in, content and calls out, one parser per style.

A parser is a function from text to `ToolCalls`. What a model wrote wrongly is an answer, not a
crash: it stays in the content and is named in `problems`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is a JSON object as text, as in OpenAI's messages."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """What a completion says: text beside its calls, the calls, and what could not be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


ToolParser: TypeAlias = Callable[[str], ToolCalls]


def parse_none(text: str) -> ToolCalls:
    """Leave the text as it is."""
    return ToolCalls(text)


def parse_hermes(text: str) -> ToolCalls:
    r"""Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _parse_blocks(text, _HERMES, _from_json)


def parse_glm(text: str) -> ToolCalls:
    """Read `<tool_call>name` with `<arg_key>`/`<arg_value>` pairs (GLM 4.5 and later)."""
    return _parse_blocks(text, _HERMES, _from_pairs)


def parse_qwen_xml(text: str) -> ToolCalls:
    """Read `<tool_call><function=name><parameter=key>value` (Qwen3-Coder, Qwen 3.5, Nemotron)."""
    return _parse_blocks(text, _HERMES, _from_xml)


def parse_deepseek(text: str) -> ToolCalls:
    """Read DeepSeek V3 and R1 (fenced JSON) and V3.1 (bare JSON) calls."""
    found = _parse_blocks(text, _DEEPSEEK, _from_deepseek)
    content = _DEEPSEEK_LIST.sub("", found.content).strip()
    return found if found.problems else ToolCalls(content, found.calls)


def parse_llama3(text: str) -> ToolCalls:
    """Read Llama 3's JSON style: `{"name": ..., "parameters": {...}}`, several joined by `;`."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return ToolCalls(text)
    calls, decoder, at = [], json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
            calls.append(_from_value(value))
        except ValueError as error:
            return ToolCalls(text, (), (f"not a tool call in JSON: {error}",))
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return ToolCalls("", tuple(calls))


def parse_mistral(text: str) -> ToolCalls:
    """Read `[TOOL_CALLS][{...}, ...]` and the later `[TOOL_CALLS]name[ARGS]{...}`."""
    content, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return ToolCalls(text)
    try:
        if body.lstrip().startswith("["):
            calls = [_from_value(value) for value in json.loads(body)]
        else:
            calls = [_from_named(part) for part in body.split("[TOOL_CALLS]")]
    except ValueError as error:
        return ToolCalls(text, (), (f"not a list of tool calls: {error}",))
    return ToolCalls(content.strip(), tuple(calls))


def parse_harmony(text: str) -> ToolCalls:
    """Read gpt-oss's messages to a tool: a header with `to=functions.NAME`, a JSON object."""
    return _parse_blocks(text, _HARMONY, _from_harmony)


TOOL_PARSERS: dict[str, ToolParser] = {
    "none": parse_none,
    "hermes": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "deepseek": parse_deepseek,
    "glm": parse_glm,
    "qwen_xml": parse_qwen_xml,
    "harmony": parse_harmony,
}

_MARKERS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
    ("tool\u2581call\u2581begin", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ('"parameters": dictionary', "llama3"),
)


def find_tool_parser(template: str) -> str:
    """Return the name of the parser whose marker a chat template mentions, or "none"."""
    return next((name for marker, name in _MARKERS if marker in template), "none")


def call_messages(calls: tuple[ToolCall, ...], text: str) -> list[dict[str, Any]]:
    """Return the calls as OpenAI's `tool_calls`.

    The ids are nine letters and digits (some templates insist) and depend on `text` alone, so the
    same completion always gives the same message.
    """
    return [
        {
            "id": hashlib.blake2b(f"{index}:{text}".encode()).hexdigest()[:9],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def _deepseek(*words: str) -> str:
    """Return a special token of DeepSeek's, which has U+FF5C for bars and U+2581 for spaces."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(
    rf"{_deepseek('call', 'begin')}(.*?)({_deepseek('call', 'end')}|\Z)",
    re.DOTALL,
)
_DEEPSEEK_LIST = re.compile(f"{_deepseek('calls', 'begin')}|{_deepseek('calls', 'end')}")
_DEEPSEEK_SEPARATOR = _deepseek("sep")
_HARMONY = re.compile(
    r"((?:<\|start\|>assistant|<\|channel\|>|\A(?=\s*to=))"
    r"(?:(?!<\|(?:message|start)\|>).)*?\bto=(?:(?!<\|message\|>).)*?(<\|message\|>).*?)"
    r"(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_blocks(
    text: str, pattern: re.Pattern[str], read: Callable[[str], ToolCall]
) -> ToolCalls:
    """Read every block that `pattern` finds; what cannot be read stays in the content."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    content: list[str] = []
    at = 0
    for match in pattern.finditer(text):
        content.append(text[at : match.start()])
        at = match.end()
        try:
            if not match[2]:
                raise ValueError("the call is not closed")
            calls.append(read(match[1].strip()))
        except ValueError as error:
            problems.append(f"tool call {len(calls) + len(problems)}: {error}")
            content.append(match[0])
    content.append(text[at:])
    joined = "".join(content)
    return ToolCalls(joined.strip() if calls else joined, tuple(calls), tuple(problems))


def _from_json(body: str) -> ToolCall:
    return _from_value(json.loads(body))


def _from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a call is a JSON object with a "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {value['name']} are not a JSON object")
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _from_named(part: str) -> ToolCall:
    name, _, arguments = part.partition("[ARGS]")
    name = name.partition("[CALL_ID]")[0]
    return _from_value({"name": name.strip(), "arguments": json.loads(arguments)})


def _from_pairs(body: str) -> ToolCall:
    name = body.partition("<arg_key>")[0].strip()
    if not name or "\n" in name:
        raise ValueError("a call starts with the tool's name on a line of its own")
    return _from_value({"name": name, "arguments": {k: _value(v) for k, v in _PAIR.findall(body)}})


def _from_xml(body: str) -> ToolCall:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        raise ValueError("a call is <function=NAME>...</function>")
    return _from_value(
        {"name": match[1], "arguments": {k: _value(v) for k, v in _PARAMETER.findall(match[2])}}
    )


def _from_harmony(body: str) -> ToolCall:
    header, _, arguments = body.partition("<|message|>")
    name = _RECIPIENT.search(header)
    if name is None:
        raise ValueError("a call names its tool as to=functions.NAME")
    return _from_value({"name": name[1], "arguments": json.loads(arguments)})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_deepseek(body: str) -> ToolCall:
    head, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        raise ValueError("a call has no separator between its name and its arguments")
    name = head.strip()
    if "```json" in rest:
        name, _, rest = rest.partition("```json")
        rest = rest.rpartition("```")[0]
    return _from_value({"name": name.strip(), "arguments": json.loads(rest)})
