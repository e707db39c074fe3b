"""Anthropic's `messages` and `messages/count_tokens`.

Thinking is sent only to agents that ask for it, as Anthropic does, but always recorded. Chat
templates know text only, so a failed tool (`is_error`) without a text becomes the text "error".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from reprlib import repr as shown
from typing import Any

from rolltree._helpers.untrusted import encode_json, read_json
from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.failures import Failure
from rolltree.gateway.field_table import fields_at
from rolltree.gateway.fields import (
    NO_EFFECT,
    READ,
    Field,
    FieldsRead,
    disobeyed,
    each,
    flag,
    model_in,
    only,
    read_fields,
    read_part,
    tools_in,
)
from rolltree.gateway.messages import (
    assistant,
    joined_text,
    text_at,
    tool_call,
    unsupported_part,
)
from rolltree.gateway.protocol import Answering, WireProtocol, data_event
from rolltree.gateway.tools import left_out, tool_notes
from rolltree.values.types import ChatMessage, FinishReason, ToolSchema
from rolltree.web.guard import RequestError

_WHOLE_HISTORY = "the model reads the whole history of the request"
_ASKED_BY_AGENT = "tools are run by the agent, and all of them are offered to the model"

FIELDS = fields_at("messages")
# The edits that change nothing; without `keep`, earlier thinking would be cleared.
_NO_EDITS = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
_TOOL: dict[str, Field] = {
    **each("name description input_schema", READ),
    **each("type strict defer_loading input_examples", READ),
    **each("cache_control eager_input_streaming", NO_EFFECT),
    "allowed_callers": only(["direct"], why=_ASKED_BY_AGENT),
}
_TURN: dict[str, Field] = each("role content output_config", READ)
_TURN_OUTPUT: dict[str, Field] = {"effort": READ}
_TURN_NOTE = "the effort of one message is followed by nobody here, only that of a request"
_TEXT: dict[str, Field] = {**each("type text", READ), **each("cache_control citations", NO_EFFECT)}
_USER_BLOCKS: dict[str, dict[str, Field]] = {
    "text": _TEXT,
    "tool_result": {
        **each("type tool_use_id content is_error", READ),
        "cache_control": NO_EFFECT,
    },
}
_ASSISTANT_BLOCKS: dict[str, dict[str, Field]] = {
    "text": _TEXT,
    "thinking": {**each("type thinking", READ), **each("signature cache_control", NO_EFFECT)},
    # From a model of Anthropic's, which alone could read it.
    "redacted_thinking": {"type": READ, **each("data cache_control", NO_EFFECT)},
    "tool_use": {
        **each("type id name input", READ),
        "cache_control": NO_EFFECT,
        "caller": only({"type": "direct"}, why=_ASKED_BY_AGENT),
    },
}
# Claude Code begins its system prompt with such a line, which differs in every request.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_INVALID_JSON = "INVALID_JSON"
"""The key for arguments that are not a JSON object, from Anthropic's documentation."""
_CALL_ID = re.compile(r"toolu_[0-9a-f]{24}_(.+)", re.DOTALL)
_STOP_REASONS = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# -- requests ------------------------------------------------------------------------------------


def read_messages(body: Mapping[str, Any], session: Answering) -> AgentCall:
    """Return the call that a body of `messages` asks for."""
    given, asked, notes = read_fields(body, FIELDS)
    _check_context(given)
    tools, choice, of_tools = _tools_and_choice(given)
    output, thinking = _output(given), _part(given, "thinking").notes
    messages = _history(given.get("messages"), notes)
    if system := _system(given.get("system")):
        messages.insert(0, {"role": "system", "content": system})
    if messages[-1]["role"] == "assistant":  # prefill: the answer goes on from there
        choice |= {"add_generation_prompt": False, "continue_final_message": True}
    return AgentCall(
        messages,
        replace(asked, extra={**asked.extra, **output.sampling.extra, **choice}),
        model=model_in(given),
        tools=tools,
        stream=flag(given, "stream"),
        options={"thinking": _thinking(given.get("thinking", {}))},
        notes={**notes, **output.notes, **thinking, **of_tools},
    )


async def count_tokens(
    session: Answering, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Answer `messages/count_tokens`."""
    return {"input_tokens": await session.count_tokens(read_messages(body, session))}


def _part(given: Mapping[str, Any], name: str) -> FieldsRead:
    return read_part(given.get(name, {}), fields_at("messages", name), name)


def _thinking(asked: Mapping[str, Any]) -> str:
    """Return whether thinking is "shown", "omitted" (its text is left out) or "hidden"."""
    if asked.get("type", "disabled") == "disabled":
        return "hidden"
    return "omitted" if asked.get("display") == "omitted" else "shown"


def _output(given: Mapping[str, Any]) -> FieldsRead:
    """Return what `output_config` (and `output_format`, its old name) asks for."""
    found = _part(given, "output_config")
    wanted = found.given.get("format", given.get("output_format"))
    if wanted is None:
        return found
    form = read_part(wanted, each("type schema", READ), "output_config.format").given
    if form.get("type") != "json_schema":
        raise RequestError(
            f"output_config.format is of type {shown(form.get('type'))}; known is json_schema.",
            param="output_config.format",
        )
    named = {"name": "output", "schema": form.get("schema"), "strict": True}
    response_format = {"type": "json_schema", "json_schema": named}
    extra = {**found.sampling.extra, "response_format": response_format}
    return found._replace(sampling=replace(found.sampling, extra=extra))


def _check_context(given: Mapping[str, Any]) -> None:
    """Raise an error if `context_management` asks for anything to be cleared."""
    where = "context_management.edits"
    edits = _part(given, "context_management").given.get("edits", [])
    if not isinstance(edits, list):
        raise RequestError(f"{where} is not a list.", param=where)
    for index, edit in enumerate(edits):
        if edit not in _NO_EDITS:
            raise disobeyed(f"{where}[{index}]", edit, _WHOLE_HISTORY)


def _tools_and_choice(
    given: Mapping[str, Any],
) -> tuple[tuple[ToolSchema, ...], dict[str, Any], dict[str, str]]:
    """Return the tools that the prompt offers, the settings of a forced choice, and notes."""
    notes: dict[str, str] = {}
    read = (_tool(tool, f"tools[{index}]", notes) for index, tool in enumerate(tools_in(given)))
    tools = [tool for tool in read if tool is not None]
    choice = _part({"tool_choice": {"type": "auto"}, **given}, "tool_choice").given
    kind, forced = choice.get("type"), dict[str, Any]()
    if kind == "none":
        tools = []
    elif kind == "any":
        forced["tool_choice"] = "required"
    elif kind == "tool":
        name = choice.get("name")
        forced["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind != "auto":
        raise RequestError(
            f"tool_choice is of type {shown(kind)}; known are auto, any, tool and none.",
            param="tool_choice",
        )
    if flag(choice, "disable_parallel_tool_use"):
        forced["parallel_tool_calls"] = False
    return tuple(tools), forced, notes


def _tool(value: object, where: str, notes: dict[str, str]) -> ToolSchema | None:
    """Return a tool as a function, or None for one that Anthropic describes or runs itself."""
    if isinstance(value, Mapping) and value.get("type") not in (None, "custom"):
        notes.update(left_out(text_at(value["type"], f"{where}.type")))
        return None
    tool = read_part(value, _TOOL, where).given
    notes.update(tool_notes(tool))
    function: dict[str, Any] = {"name": text_at(tool.get("name"), f"{where}.name")}
    if tool.get("description"):
        function["description"] = text_at(tool["description"], f"{where}.description")
    function["parameters"] = tool.get("input_schema", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _system(value: object) -> str:
    if isinstance(value, list):
        value = [
            {**part, "text": _BILLING.sub("", part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in value
        ]
    text = joined_text(value, "system")
    return text if isinstance(value, list) else _BILLING.sub("", text)


def _history(value: object, notes: dict[str, str]) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages is not a list of at least one message.", param="messages")
    history: list[ChatMessage] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        turn = read_part(message, _TURN, where).given
        if turn.get("output_config"):
            read_part(turn["output_config"], _TURN_OUTPUT, f"{where}.output_config")
            notes["messages.output_config"] = _TURN_NOTE
        role, content = turn.get("role"), turn.get("content")
        if role == "user":
            history += _user_turn(content, f"{where}.content")
        elif role == "assistant":
            _add_assistant(history, content, f"{where}.content")
        elif role == "system":
            history.append({"role": "system", "content": joined_text(content, f"{where}.content")})
        else:
            raise RequestError(
                f"{where} has the role {shown(role)}; known are user, assistant and system.",
                param=f"{where}.role",
            )
    return history


def _user_turn(content: object, where: str) -> Iterable[ChatMessage]:
    """Yield a message for each tool result, and one for each run of text between them."""
    texts: list[str] = []
    blocks = list(_blocks(content, _USER_BLOCKS, where))
    for index, (kind, block) in enumerate(blocks):
        at = f"{where}[{index}]"
        if kind == "text":
            texts.append(text_at(block.get("text"), f"{at}.text"))
            continue
        if texts:
            yield {"role": "user", "content": "".join(texts)}
            texts = []
        result = joined_text(block.get("content"), f"{at}.content")
        yield {
            "role": "tool",
            "content": result or ("error" if flag(block, "is_error") else ""),
            "tool_call_id": _own_id(text_at(block.get("tool_use_id"), f"{at}.tool_use_id")),
        }
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _add_assistant(history: list[ChatMessage], content: object, where: str) -> None:
    """Append an assistant's turn, or continue the last message if it is the assistant's."""
    before = history.pop() if history and history[-1]["role"] == "assistant" else assistant("")
    texts = {"text": [before["content"]], "thinking": [before.get("reasoning_content", "")]}
    calls = list(before.get("tool_calls", ()))
    for index, (kind, block) in enumerate(_blocks(content, _ASSISTANT_BLOCKS, where)):
        at = f"{where}[{index}]"
        if kind in texts:
            texts[kind].append(text_at(block.get(kind), f"{at}.{kind}"))
        elif kind == "tool_use":
            name, call_id = text_at(block.get("name"), f"{at}.name"), text_at(block.get("id"), at)
            arguments = _arguments(block.get("input", {}), f"{at}.input")
            calls.append(tool_call(_own_id(call_id), name, arguments))
    history.append(assistant("".join(texts["text"]), calls, "".join(texts["thinking"])))


def _blocks(
    content: object, known: Mapping[str, Mapping[str, Field]], where: str
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the type and the fields of each block; a string is one block of text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} is neither text nor a list of blocks.", param=where)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in known:
            raise unsupported_part(kind, f"{where}[{index}]")
        yield kind, read_part(block, known[kind], f"{where}[{index}]").given


# -- answers -------------------------------------------------------------------------------------


def write_message(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the response body for an answer."""
    answer = answers[0]
    thinking, content = call.options["thinking"], []
    if answer.reasoning and thinking != "hidden":
        said = answer.reasoning if thinking == "shown" else ""
        signature = _signature(answer.head)
        content.append({"type": "thinking", "thinking": said, "signature": signature})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    content += [_tool_use(answer.head, each) for each in answer.tool_calls]
    return {
        **_head(answer.head),
        # Agents take the first block of an answer without checking that it has one.
        "content": content or [{"type": "text", "text": ""}],
        **_ending(call, answer),
        "usage": _usage(answer),
    }


def _head(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _signature(head: AnswerHead) -> str:
    # It is not checked, but agents take thinking without a signature for another provider's, and
    # send it back as text.
    return head.id


def _tool_use(head: AnswerHead, call: ChatMessage) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        # Agents keep results by id, and the ids in a model's text need not be unique.
        "id": f"toolu_{head.id}_{call['id']}",
        "name": function["name"],
        "input": _input(function["arguments"]),
    }


def _own_id(call_id: str) -> str:
    """Return a tool call's id without the prefix that `_tool_use` adds."""
    found = _CALL_ID.fullmatch(call_id)
    return found[1] if found else call_id


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object; text that is not a JSON object is wrapped in one."""
    if not arguments:
        return {}
    with suppress(ValueError):
        value = read_json(arguments)
        if isinstance(value, dict) and value.keys() != {_INVALID_JSON}:
            return value
    return {_INVALID_JSON: arguments}


def _arguments(value: object, where: str) -> object:
    """Undo `_input`."""
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {shown(value)}, not an object.", param=where)
    wrapped = value.get(_INVALID_JSON)
    return wrapped if len(value) == 1 and isinstance(wrapped, str) else value


def _ending(call: AgentCall, answer: AgentAnswer) -> dict[str, Any]:
    reason = _STOP_REASONS.get(answer.finish_reason)
    # The session's own stop strings are not shown to the agent.
    if reason is None and answer.stop in call.sampling.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": reason or "end_turn", "stop_sequence": None}


def _usage(answer: AgentAnswer | None) -> dict[str, Any]:
    """Return the token counts; cached prompt tokens are counted apart from the others."""
    num_cached = 0 if answer is None else answer.num_cached_tokens
    return {
        "input_tokens": 0 if answer is None else answer.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": 0 if answer is None else answer.num_completion_tokens,
    }


def anthropic_error(failure: Failure) -> dict[str, Any]:
    """Return the body of a failure in Anthropic's format."""
    other = "invalid_request_error" if failure.status < 500 else "api_error"
    message, details = failure.message, {"error_code": failure.code}
    if failure.code == "context_length_exceeded":
        # Agents recognize these words and shorten their history.
        message = f"prompt is too long: {message}"
    if failure.param is not None:
        details["param"] = failure.param
    kind = _ERROR_TYPES.get(failure.status, other)
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}


class MessageEvents:
    """The events of one streamed answer."""

    def __init__(self, call: AgentCall) -> None:
        self._call, self._thinking = call, call.options["thinking"]
        self._head = AnswerHead("", "", 0)
        self._num_blocks, self._open = 0, ""

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return the event with the message, which is still empty."""
        self._head = head
        usage = _usage(None) | {"input_tokens": head.num_prompt_tokens or 0}
        return [_event("message_start", message=_head(head) | {"usage": usage})]

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Yield the events of blocks that begin, continue or end."""
        if delta.reasoning and self._thinking != "hidden":
            yield from self._enter("thinking", thinking="", signature="")
            if self._thinking == "shown":
                yield self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            yield from self._enter("text", text="")
            yield self._delta("text_delta", text=delta.content)
        for call in delta.tool_calls:
            block = _tool_use(self._head, call)
            arguments = encode_json(block["input"]).decode()
            yield from self._leave()
            yield from self._enter(**block | {"input": {}})
            yield self._delta("input_json_delta", partial_json=arguments)

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Yield the end of the last block, the stop reason, and the usage."""
        yield from self.delta(answer.rest)
        if not self._num_blocks:
            yield from self._enter("text", text="")
        yield from self._leave()
        yield _event("message_delta", delta=_ending(self._call, answer), usage=_usage(answer))
        yield _event("message_stop")

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the error; the official client raises it."""
        return [data_event(anthropic_error(failure), "error")]

    def _enter(self, type: str, **fields: Any) -> Iterable[bytes]:
        if self._open == type:
            return
        yield from self._leave()
        block = {"type": type, **fields}
        yield _event("content_block_start", index=self._num_blocks, content_block=block)
        self._open, self._num_blocks = type, self._num_blocks + 1

    def _leave(self) -> Iterable[bytes]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_signature(self._head))
        yield _event("content_block_stop", index=self._num_blocks - 1)
        self._open = ""

    def _delta(self, type: str, **new: Any) -> bytes:
        at = self._num_blocks - 1
        return _event("content_block_delta", index=at, delta={"type": type, **new})


def _event(name: str, **fields: Any) -> bytes:
    return data_event({"type": name, **fields}, name)


MESSAGES = WireProtocol(
    name="messages",
    path="/messages",
    fields=FIELDS,
    read=read_messages,
    write=write_message,
    events=MessageEvents,
    error=anthropic_error,
    sides={("POST", "/messages/count_tokens"): count_tokens},
    ping=_event("ping"),
)
