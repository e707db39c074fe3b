"""Parsers of tool calls as models write them, one per format: text in, content and calls out.

A parser is a function from text to `ToolCalls` that takes linear time. A malformed call does not
raise: it stays in the content, and `problems` says what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rolltree._helpers.untrusted import between, read_json, read_json_start, shorten, well_formed

MAX_PROBLEMS = 8
"""How many unreadable calls of one message are reported to the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is a JSON object as text, as in OpenAI's messages.

    `id` is the one that the model wrote, if its format has ids; otherwise None.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """A parsed completion: its text, its calls, and what could not be parsed."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


ToolParser: TypeAlias = Callable[[str], ToolCalls]


def parse_none(text: str) -> ToolCalls:
    """Leave the text as it is."""
    return ToolCalls(text)


def parse_hermes(text: str) -> ToolCalls:
    r"""Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _parse_blocks(text, _closed_by(_HERMES, text), _from_json)


def parse_glm(text: str) -> ToolCalls:
    """Read `<tool_call>name` with `<arg_key>`/`<arg_value>` pairs (GLM 4.5 and later)."""
    return _parse_blocks(text, _closed_by(_HERMES, text), _from_pairs)


def parse_qwen_xml(text: str) -> ToolCalls:
    """Read `<tool_call><function=name><parameter=key>value` (Qwen3-Coder, Qwen 3.5, Nemotron)."""
    return _parse_blocks(text, _closed_by(_HERMES, text), _from_xml)


def parse_deepseek(text: str) -> ToolCalls:
    """Read DeepSeek V3 and R1 (fenced JSON) and V3.1 (bare JSON) calls."""
    found = _parse_blocks(text, _closed_by(_DEEPSEEK, text), _from_deepseek)
    content = _DEEPSEEK_LIST.sub("", found.content).strip()
    # If there are problems the marks stay, so that the content is what the model wrote.
    return found if found.problems else ToolCalls(content, found.calls)


def parse_llama3(text: str) -> ToolCalls:
    """Read Llama 3's JSON style: `{"name": ..., "parameters": {...}}`, several joined by `;`."""
    tag, body = "<|python_tag|>", text.strip().removeprefix("<|python_tag|>").strip()
    # An answer may be JSON, too, and no call.
    if not body.startswith("{") or ('"name"' not in body and tag not in text):
        return ToolCalls(text)
    calls, at = [], 0
    while at < len(body):
        try:
            value, at = read_json_start(body, at)
            # All or nothing: text between the calls would be lost.
            calls.append(_from_value(value))
        except ValueError as error:
            return ToolCalls(text, (), (f"not a tool call in JSON: {error}",))
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return ToolCalls("", tuple(calls))


def parse_mistral(text: str) -> ToolCalls:
    """Read `[TOOL_CALLS][{...}, ...]` and the later `[TOOL_CALLS]name[ARGS]{...}`.

    Both forms may contain the id that the results refer to: `"id": ...` or `[CALL_ID]...`.
    Mistral's templates accept only nine letters and digits; other ids are ignored.
    """
    content, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return ToolCalls(text)
    try:
        if body.lstrip().startswith("["):
            calls = [_with_id(_from_value(value), value.get("id")) for value in _list(body)]
        else:
            calls = [_from_named(part) for part in body.split("[TOOL_CALLS]")]
    except ValueError as error:
        return ToolCalls(text, (), (f"not a list of tool calls: {error}",))
    return ToolCalls(content.strip(), tuple(calls))


def parse_harmony(text: str) -> ToolCalls:
    """Read gpt-oss's messages to a tool: a header with `to=functions.NAME`, a JSON object."""
    return _parse_blocks(text, _harmony_calls(text), _from_harmony)


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

# In this order: "glm" and "qwen_xml" use `<tool_call>`, too, so they precede "hermes".
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

    A call keeps the id that the model wrote, unless an earlier call has the same. Other ids are
    nine letters and digits (some templates require this) and depend only on the index and `text`,
    so the same completion always gives the same message.
    """
    # Results refer to a call by its id, so ids must be unique.
    written = [call.id for call in calls]
    return [
        {
            "id": call.id if call.id and call.id not in written[:index] else _made_id(index, text),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def _made_id(index: int, text: str) -> str:
    return hashlib.blake2b(f"{index}:{text}".encode(errors="surrogatepass")).hexdigest()[:9]


def _deepseek(*words: str) -> str:
    """Return a special token of DeepSeek, with U+FF5C for bars and U+2581 for spaces."""
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


# The end of the text closes a match as well, or an open call would make the search quadratic.
_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(
    rf"{_deepseek('call', 'begin')}(.*?)({_deepseek('call', 'end')}|\Z)",
    re.DOTALL,
)
_DEEPSEEK_LIST = re.compile(f"{_deepseek('calls', 'begin')}|{_deepseek('calls', 'end')}")
_DEEPSEEK_SEPARATOR = _deepseek("sep")
_MESSAGE = "<|message|>"
_START, _CHANNEL = "<|start|>", "<|channel|>"
_TO, _LEADING_TO = re.compile(r"\bto="), re.compile(r"\s*to=")
_MESSAGE_END = re.compile(r"<\|(?:call|end)\|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_ARG_VALUE = re.compile(r"\s*<arg_value>")


@dataclass(frozen=True, slots=True)
class _Block:
    """A call, `text[start:end]`; `body` is the part to parse, None if the call is not closed."""

    start: int
    end: int
    body: str | None


def _closed_by(pattern: re.Pattern[str], text: str) -> Iterator[_Block]:
    """Yield the matches of a pattern whose groups are the body and the end mark."""
    for match in pattern.finditer(text):
        yield _Block(match.start(), match.end(), match[1] if match[2] else None)


def _harmony_calls(text: str) -> Iterator[_Block]:
    """Yield the messages to tools: a header that names a tool, the body's mark, and the body."""
    at = 0
    while (middle := text.find(_MESSAGE, at)) >= 0:
        start = _header_start(text, at, middle)
        at = middle + len(_MESSAGE)
        if start is not None and _TO.search(text, start, middle):
            found = _MESSAGE_END.search(text, at)
            stop, at = (found.start(), found.end()) if found else (len(text), len(text))
            yield _Block(start, at, text[start:stop])


def _header_start(text: str, low: int, high: int) -> int | None:
    """Return the start of the header in `text[low:high]`; None if it is not the assistant's."""
    last = text.rfind(_START, low, high)
    if last < 0 and low == 0 and _LEADING_TO.match(text):  # the prompt has the header's start
        return 0
    if last >= 0 and text.startswith("assistant", last + len(_START)):
        return last
    channel = text.find(_CHANNEL, max(low, last), high)
    return channel if channel >= 0 else None


def _parse_blocks(
    text: str, blocks: Iterable[_Block], read: Callable[[str], ToolCall]
) -> ToolCalls:
    """Read every block; what cannot be read stays in the content."""
    calls: list[ToolCall] = []
    problems: list[str] = []
    content: list[str] = []
    at = num_problems = 0
    for block in blocks:
        content.append(text[at : block.start])
        at = block.end
        try:
            if block.body is None:
                raise ValueError("the call is not closed")
            calls.append(read(block.body.strip()))
        except ValueError as error:
            if num_problems < MAX_PROBLEMS:
                problems.append(f"tool call {len(calls) + num_problems}: {error}")
            num_problems += 1
            # The history shows the model what it wrote, and the problem what was wrong with it.
            content.append(text[block.start : block.end])
    content.append(text[at:])
    if num_problems > MAX_PROBLEMS:
        problems.append(f"{num_problems - MAX_PROBLEMS} more calls cannot be read")
    joined = "".join(content)
    return ToolCalls(joined.strip() if calls else joined, tuple(calls), tuple(problems))


def _from_json(body: str) -> ToolCall:
    return _from_value(read_json(body))


def _from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a call is a JSON object with a "name"')
    # Llama writes "parameters".
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some models write the object as a JSON string, as in OpenAI's messages.
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {shorten(value['name'], 64)} are not a JSON object")
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(well_formed(value["name"]), well_formed(text))


def _list(body: str) -> list[Any]:
    value = read_json(body)
    if not isinstance(value, list):
        raise ValueError("the calls are a JSON list")
    return value


def _from_named(part: str) -> ToolCall:
    head, _, arguments = part.partition("[ARGS]")
    name, _, written = head.partition("[CALL_ID]")
    call = _from_value({"name": name.strip(), "arguments": read_json(arguments)})
    return _with_id(call, written.strip())


def _with_id(call: ToolCall, written: Any) -> ToolCall:
    # Mistral's templates refuse other ids.
    if isinstance(written, str) and _MISTRAL_ID.fullmatch(written):
        return replace(call, id=written)
    return call


def _from_pairs(body: str) -> ToolCall:
    name = body.partition("<arg_key>")[0].strip()
    if not name or "\n" in name:
        raise ValueError("a call starts with the tool's name on its own line")
    return _from_value({"name": name, "arguments": dict(_pairs(body))})


def _from_xml(body: str) -> ToolCall:
    match = _FUNCTION.fullmatch(body)
    if match is None:
        raise ValueError("a call is <function=NAME>...</function>")
    return _from_value({"name": match[1], "arguments": dict(_parameters(match[2]))})


def _pairs(body: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of GLM's tags."""
    at = 0
    while (start := body.find("<arg_key>", at)) >= 0:
        closed = body.find("</arg_key>", start)
        value = _ARG_VALUE.match(body, closed + len("</arg_key>")) if closed >= 0 else None
        at = body.find("</arg_value>", value.end()) if value is not None else -1
        if value is None or at < 0:
            raise ValueError("an <arg_key> is not followed by an <arg_value>, or is not closed")
        yield body[start + len("<arg_key>") : closed], _value(body[value.end() : at])


def _parameters(body: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of `<parameter=name>value</parameter>`."""
    for part in between(body, "<parameter=", "</parameter>"):
        name, closed, value = part.partition(">")
        if not closed or not name or "\n" in name:
            raise ValueError("a parameter is <parameter=NAME>...</parameter>")
        # The format puts the value on lines of its own; further line breaks belong to the value.
        yield name, _value(value.removeprefix("\n").removesuffix("\n"))


def _from_harmony(body: str) -> ToolCall:
    header, _, arguments = body.partition("<|message|>")
    name = _RECIPIENT.search(header)
    if name is None:
        raise ValueError("a call names its tool as to=functions.NAME")
    return _from_value({"name": name[1], "arguments": read_json(arguments)})


def _value(text: str) -> Any:
    try:
        return read_json(text)
    # These formats write strings without quotes.
    except ValueError:
        return text


def _from_deepseek(body: str) -> ToolCall:
    head, separator, rest = body.partition(_DEEPSEEK_SEPARATOR)
    if not separator:
        raise ValueError("a call has no separator between its name and its arguments")
    name = head.strip()
    # V3 and R1 fence the arguments, V3.1 does not.
    if "```json" in rest:
        name, _, rest = rest.partition("```json")
        rest = rest.rpartition("```")[0]
    return _from_value({"name": name.strip(), "arguments": read_json(rest)})
