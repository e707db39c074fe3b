"""Messages in the form that the gateway keeps: OpenAI's, with plain text as their content.

Agents send the same history in many forms: with text in one block or in several, with empty fields
or without. Converted to one form, equal histories compare equal, so that the gateway finds the
earlier call that a prompt continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from reprlib import repr as shown
from typing import Any, cast

import msgspec

from rolltree._helpers.untrusted import encode_json, read_json
from rolltree.values.types import ChatMessage
from rolltree.web.guard import RequestError

INPUT = "input"
"""The argument of a function that stands for a custom tool, which takes text."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of content parts that are text, and the field that has the text."""
_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_READ = frozenset(
    ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"]
)
# Fields that servers and frameworks add to an assistant's message; prompts do not need them.
_OF_ANSWERS = frozenset(
    [
        "annotations",
        "audio",
        "function_call",
        "images",
        "parse_problems",
        "provider_specific_fields",
        "reasoning_details",
        "refusal",
        "thinking_blocks",
    ]
)


def rejoined(messages: list[ChatMessage], answers: Mapping[str, str]) -> list[ChatMessage]:
    """Return the messages with the calls of an answer in one message, as the model wrote them.

    Some agents (goose) send each call as a message of its own, followed by its result. `answers`
    names the answer that each call's id is from.
    """
    joined: list[ChatMessage] = []
    at: int | None = None  # of the message that the next call may belong to
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            before = () if at is None else joined[at].get("tool_calls") or ()
            ids = [each.get("id") for each in (*before, *calls)]
            one = {answers.get(each or "") for each in ids}
            is_split = len(one) == 1 and None not in one and len(set(ids)) == len(ids)
            if at is not None and is_split and not _says(message):
                joined[at] = {**joined[at], "tool_calls": [*before, *calls]}
                continue
            at = len(joined)
        elif message["role"] != "tool":
            at = None
        joined.append(message)
    return joined


def _says(message: ChatMessage) -> bool:
    return bool(message.get("content") or message.get("reasoning_content"))


def joined_text(content: object, where: str) -> str:
    """Return the text of a content, which is a string, null, or a list of text parts to join.

    Raises:
        RequestError: a part is not text; the error names it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where} is neither text nor a list of parts.", param=where)
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else None
        if isinstance(part, Mapping) and isinstance(kind, str) and kind in TEXT_PARTS:
            text = part.get(name := TEXT_PARTS[kind])
            if not isinstance(text, str):
                where = f"{where}[{index}]"
                raise RequestError(f"{where} has no text in {name!r}.", param=where)
        if not isinstance(text, str):
            raise unsupported_part(kind, f"{where}[{index}]")
        texts.append(text)
    return "".join(texts)


def unsupported_part(kind: object, where: str) -> RequestError:
    """Return the error for a content part that is not text."""
    return RequestError(
        f"{where} is a part of type {shown(kind)}, but only text can be recorded as the tokens "
        "that the model saw. Send text.",
        param=where,
    )


def tool_call(call_id: str, name: str, arguments: object) -> ChatMessage:
    """Return a tool call in OpenAI's shape; arguments that are not text become JSON."""
    if not isinstance(arguments, str):
        arguments = encode_json({} if arguments is None else arguments).decode()
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def input_of(arguments: str) -> str:
    """Return the text for a custom tool: the argument, or what the model wrote in its place.

    >>> input_of('{"input": "ls"}'), input_of("ls")
    ('ls', 'ls')
    """
    with suppress(ValueError):
        match read_json(arguments):
            case {"input": str(text), **rest} if not rest:
                return text
    return arguments


def input_arguments(text: str) -> str:
    """Undo `input_of`."""
    return encode_json({INPUT: text}).decode()


def assistant(
    content: str, tool_calls: Sequence[ChatMessage] = (), reasoning: str = ""
) -> ChatMessage:
    """Return an assistant's message."""
    message: ChatMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


def chat_messages(value: object, where: str = "messages") -> list[ChatMessage]:
    """Return OpenAI's chat messages in the gateway's form.

    Raises:
        RequestError: they are not messages, or have a part that cannot be passed on; it is named.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where} is not a list of at least one message.", param=where)
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(value)]


def _message(value: object, where: str) -> ChatMessage:
    if type(value) is dict and len(value) == 2:  # by far the most frequent
        role, content = value.get("role"), value.get("content")
        if type(content) is str and type(role) is str and role in _ROLES and role != "tool":
            return {"role": _ROLES[role], "content": content}
    if not isinstance(value, Mapping) or value.get("role") not in _ROLES:
        role = value.get("role") if isinstance(value, Mapping) else value
        raise RequestError(
            f"{where} has the role {shown(role)}; known are {', '.join(_ROLES)}.", param=where
        )
    role = _ROLES[value["role"]]
    for name, part in value.items():
        known = name in _READ or (role == "assistant" and name in _OF_ANSWERS)
        if not known and part not in (None, "", [], {}):
            raise RequestError(
                f"{where}.{name} is unknown here and would be ignored.", param=f"{where}.{name}"
            )
    content = joined_text(value.get("content"), f"{where}.content")
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning") or ""
        calls = value.get("tool_calls") or []
        if not isinstance(reasoning, str) or not isinstance(calls, list):
            raise RequestError(f"{where} is not an assistant's message.", param=where)
        made = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        message = assistant(content, made, reasoning)
    else:
        message = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = text_at(value.get("tool_call_id") or "", where)
    if value.get("name"):
        message["name"] = text_at(value["name"], where)
    return message


def _call(value: Any, where: str) -> ChatMessage:
    match value:
        case {"type": "custom", "custom": {"name": name, "input": text}}:
            arguments = input_arguments(text_at(text, f"{where}.custom.input"))
            call_id = text_at(value.get("id") or "", where)
            return tool_call(call_id, text_at(name, f"{where}.custom.name"), arguments)
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} is not a function call.", param=where)
    name = text_at(function.get("name"), f"{where}.function.name")
    return tool_call(text_at(value.get("id") or "", where), name, function.get("arguments") or "")


def text_at(value: object, where: str) -> str:
    """Return a value of the request that must be text; raise `RequestError` if it is not."""
    if not isinstance(value, str):
        raise RequestError(f"{where} has {shown(value)} instead of text.", param=where)
    return value


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[str | _Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


def checked_messages(value: object) -> list[ChatMessage]:
    """Return `value` as it is, if it is a list of chat messages.

    A model that is served without sessions gets them in this form: templates read fields that the
    gateway's form does not have.

    Raises:
        RequestError: it is not; the message names the place.
    """
    try:
        msgspec.convert(value, list[_Message])
    except msgspec.ValidationError as error:
        raise RequestError(
            f"messages is not a list of chat messages: {error}.", param="messages"
        ) from error
    return cast(list[ChatMessage], value)
