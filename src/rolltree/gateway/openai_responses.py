"""OpenAI's `responses`: input and output are items, and a response can continue an earlier one.

The items of one assistant turn (reasoning, text, function calls) are one message here. Reasoning is
sent as `reasoning_text`, or as a summary that leaves nothing out if the request asks for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import repr as shown
from typing import Any

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.fields import (
    NO_EFFECT,
    READ,
    Field,
    each,
    only,
    passed,
    read_fields,
    sampling,
    settings,
)
from rolltree.gateway.messages import assistant, joined_text, tool_call
from rolltree.gateway.openai_chat import tools_and_choice
from rolltree.gateway.protocol import SessionView, SideHandler, WireProtocol, data_event
from rolltree.inference.server.requests import Failure, RequestError, flag, unknown_field
from rolltree.types import ChatMessage, FinishReason

_KEPT_HERE = "a session keeps its responses only. Send input, or previous_response_id"
RESPONSE_FIELDS: dict[str, Field] = {
    **each("model input instructions previous_response_id stream stream_options", READ),
    **each("tools tool_choice text reasoning include metadata store max_tool_calls", READ),
    **each("user safety_identifier prompt_cache_key prompt_cache_options", READ),
    **settings("temperature top_p"),
    "max_output_tokens": sampling("max_tokens"),
    "parallel_tool_calls": passed(True),
    **each("service_tier prompt_cache_retention", NO_EFFECT),
    "background": only(False, why="a response is sampled while its request waits"),
    "truncation": only("disabled", why="an input that is too long is refused, never cut"),
    "top_logprobs": only(0, why="chat/completions gives logprobs, of sampled tokens"),
    "conversation": only(why=_KEPT_HERE),
    "prompt": only(why="the gateway keeps no prompt templates. Send instructions and input"),
    "context_management": only([], why="the gateway compacts nothing; the agent may"),
    "moderation": only(why="the gateway moderates nothing"),
    "image": only({}, why="only text can be recorded as tokens"),
    "access_programs": only({}, why="there are none here"),
}
_ENCRYPTED = "reasoning.encrypted_content"
# Details of items that hosted tools and images bring, which never occur here.
_INCLUDABLE = (
    _ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "previous_response_id": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "store": True,
    "include": [],
}
"""What a response has of its request, and what stands there if nothing was asked."""
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_CACHE_FIELDS = ("mode", "ttl", "prewarm")
_TEXT_FIELDS = ("format", "verbosity")
_REASONING_FIELDS = ("effort", "summary", "generate_summary", "context", "mode")
# An answer's id has 24 digits; other servers' ids are longer.
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{24})(?:_[0-9]+)?")
_RESPONSE_ID = re.compile(r"resp_(.+)")


# -- requests ------------------------------------------------------------------------------------


def read_responses(body: Mapping[str, Any], session: SessionView) -> AgentCall:
    """Return the call that a body of `responses` asks for."""
    given, asked = read_fields(body, RESPONSE_FIELDS)
    passed_on = {**_read_reasoning(given), **_read_text(given)}
    asked = replace(asked, extra={**asked.extra, **passed_on})
    tools, asked = tools_and_choice(_chat_tools(given), asked)
    _check_rest(given)
    history = _History(session, _earlier(given, session))
    history.add_input(given.get("input"), is_continued="previous_response_id" in given)
    model = given.get("model", "")
    if not isinstance(model, str):
        raise RequestError("model is not a name.", param="model")
    return AgentCall(
        history.messages(),
        asked,
        model=model,
        tools=tools,
        stream=flag(given, "stream"),
        options=_options(body, given),
    )


def _options(body: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the response repeats of its request, and `include`."""
    repeated = {name: body.get(name) for name in _REPEATED}
    return {
        "object": "response",
        **{
            name: _REPEATED[name] if repeated[name] is None else repeated[name] for name in repeated
        },
        "text": {"format": {"type": "text"}, **_object(given, "text", _TEXT_FIELDS)},
        "reasoning": {
            "effort": None,
            "summary": None,
            **_object(given, "reasoning", _REASONING_FIELDS),
        },
        "background": False,
        "truncation": "disabled",
        "service_tier": "default",
    }


def _read_reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = _object(given, "reasoning", _REASONING_FIELDS)
    for name, values, why in (
        ("summary", ("auto", "detailed"), "no model shortens the reasoning"),
        ("generate_summary", ("auto", "detailed"), "no model shortens the reasoning"),
        ("context", ("auto",), "the model's template decides which reasoning it sees again"),
        ("mode", ("standard",), "the gateway has one mode"),
    ):
        if asked.get(name) is not None and asked[name] not in values:
            raise _disobeyed(f"reasoning.{name}", asked[name], why)
    effort = asked.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}


def _read_text(given: Mapping[str, Any]) -> dict[str, Any]:
    asked, found = _object(given, "text", _TEXT_FIELDS), dict[str, Any]()
    if asked.get("verbosity") is not None:
        found["verbosity"] = asked["verbosity"]
    known = ("type", "name", "description", "schema", "strict")
    match _object(asked, "format", known, "text."):
        case {} as wanted if not wanted or wanted == {"type": "text"}:
            pass
        case {"type": "json_object"}:
            found["response_format"] = {"type": "json_object"}
        case {"type": "json_schema", **schema}:
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        case other:
            raise _disobeyed("text.format", other, "known are text, json_object and json_schema")
    return found


def _chat_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tools` and `tool_choice` as chat completions have them."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise RequestError("tools is not a list.", param="tools")
    match choice:
        case "auto" | "none" | "required":
            pass
        case {"type": "function", "name": str(name), **rest} if not rest:
            choice = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*allowed], **rest} if not rest:
            listed = [_chat_choice(one, choice) for one in allowed]
            allowance = {"mode": mode, "tools": listed}
            choice = {"type": "allowed_tools", "allowed_tools": allowance}
        case _:
            raise _unknown_choice(choice)
    converted = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    return {"tools": converted, "tool_choice": choice}


def _chat_choice(value: object, choice: object) -> dict[str, Any]:
    match value:
        case {"type": "function", "name": str(name), **rest} if not rest:
            return {"type": "function", "function": {"name": name}}
    raise _unknown_choice(choice)


def _unknown_choice(choice: object) -> RequestError:
    return _disobeyed("tool_choice", choice, "only functions that the agent runs can be chosen")


def _chat_tool(tool: object, where: str) -> object:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool  # refused by its type, as any other tool is
    for name, value in tool.items():
        is_default = value is None or value in _DEFAULTS.get(name, ())
        if name not in (*_TOOL_FIELDS, "type") and not is_default:
            raise _ignored(f"{where}.{name}")
    function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _check_rest(given: Mapping[str, Any]) -> None:
    """Refuse what the fields that change nothing here would ask for."""
    _object(given, "stream_options", ("include_obfuscation",))
    cache = _object(given, "prompt_cache_options", _CACHE_FIELDS)
    if cache.get("prewarm"):
        why = "a request is answered; nothing is read ahead of it"
        raise _disobeyed("prompt_cache_options.prewarm", True, why)
    include = given.get("include", [])
    for name in include if isinstance(include, list) else [include]:
        if not isinstance(include, list) or name not in _INCLUDABLE:
            why = "known are " + ", ".join(_INCLUDABLE)
            raise _disobeyed("include", name, why)
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RequestError("metadata is not an object of strings.", param="metadata")
    if not isinstance(given.get("instructions", ""), str):
        raise RequestError("instructions is not text.", param="instructions")
    flag(given, "store")


def _object(
    given: Mapping[str, Any], name: str, known: Sequence[str], where: str = ""
) -> dict[str, Any]:
    value, path = given.get(name), f"{where}{name}"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{path} is not an object.", param=path)
    for key in value:
        if key not in known and value[key] is not None:
            raise unknown_field(f"{path}.{key}", [f"{path}.{one}" for one in known])
    return {key: part for key, part in value.items() if part is not None}


def _disobeyed(name: str, value: object, why: str) -> RequestError:
    return RequestError(
        f"{name} = {shown(value)} cannot be obeyed: {why}. Leave it out.", param=name
    )


def _ignored(where: str) -> RequestError:
    return RequestError(f"{where} is unknown here and would be ignored.", param=where)


# -- history -------------------------------------------------------------------------------------

_DEFAULTS: dict[str, tuple[object, ...]] = {
    "async": (False,),
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "defer_loading": (False,),
}
"""Fields of tools and items that are taken with the value that asks for what happens anyway."""
# What servers note on every item, and clients add when they parse one.
_NOTED = frozenset(["id", "type", "status", "phase", "created_by", "parsed_arguments"])


@dataclass(slots=True)
class _Turn:
    """The items of one assistant turn. `answer_id` is known if its items have the gateway's ids."""

    answer_id: str | None
    text: str | None = None
    reasoning: str = ""
    calls: list[ChatMessage] = field(default_factory=list)


class _History:
    """Turns items into messages, each turn of the assistant into one."""

    def __init__(self, session: SessionView, earlier: list[ChatMessage]) -> None:
        self._session = session
        self._parts: list[ChatMessage | _Turn] = list(earlier)
        # The turn that further items may belong to, and whether a call of it was answered.
        self._turn: _Turn | None = None
        self._has_output = False

    def messages(self) -> list[ChatMessage]:
        """Return all of them."""
        return [
            assistant(part.text or "", part.calls, part.reasoning)
            if isinstance(part, _Turn)
            else part
            for part in self._parts
        ]

    def add_input(self, value: object, *, is_continued: bool) -> None:
        """Add the input of a request, which may be empty if it continues a response."""
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if value is None and is_continued:
            value = []
        if not isinstance(value, list) or not (value or is_continued):
            raise RequestError("input is neither text nor a list of items.", param="input")
        for index, item in enumerate(value):
            self.add(item, f"input[{index}]")

    def add(self, item: object, where: str) -> None:
        """Add one item; `where` it stands in the request."""
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} is not an item.", param=where)
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        found = _ITEMS.get(kind) if isinstance(kind, str) else None
        if found is None:
            raise RequestError(
                f"{where} is an item of type {shown(kind)}, which cannot be recorded as the "
                f"tokens that the model saw; known are {', '.join(_ITEMS)}.",
                param=where,
            )
        names, add = found
        for name, value in item.items():
            is_known = name in names or name in _NOTED or value in (None, "", [], {})
            if not is_known and value not in _DEFAULTS.get(name, ()):
                raise _ignored(f"{where}.{name}")
        add(self, item, where)

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role, text = item.get("role"), joined_text(item.get("content"), f"{where}.content")
        if role == "assistant":
            turn = self._turn_of(item, "text")
            turn.text = (turn.text or "") + text
        elif role in ("user", "system", "developer"):
            self._turn = None
            self._parts.append({"role": "user" if role == "user" else "system", "content": text})
        else:
            raise RequestError(
                f"{where} has the role {shown(role)}; known are user, assistant, system and "
                "developer.",
                param=where,
            )

    def _add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = _spelled(item.get("content"), "reasoning_text", f"{where}.content")
        if not text and item.get("encrypted_content"):
            text = self._decrypted(item["encrypted_content"], f"{where}.encrypted_content")
        if not text:
            text = _spelled(item.get("summary"), "summary_text", f"{where}.summary")
        self._turn_of(item, "reasoning").reasoning += text

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        name, call_id = _text_in(item, "name", where), _text_in(item, "call_id", where)
        made = tool_call(call_id, name, _text_in(item, "arguments", where))
        self._turn_of(item, "call").calls.append(made)

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        text = joined_text(item.get("output"), f"{where}.output")
        call_id = _text_in(item, "call_id", where)
        self._parts.append({"role": "tool", "content": text, "tool_call_id": call_id})
        self._has_output = True

    def _add_reference(self, item: Mapping[str, Any], where: str) -> None:
        item_id = _text_in(item, "id", where)
        answer_id = _answer_id(item_id)
        if answer_id is not None:
            answer = self._session.answer(answer_id)
            for known in _output(answer, answer.options):
                if known["id"] == item_id:
                    self.add(known, where)
                    return
        raise RequestError(
            f"{where} refers to {shown(item_id)}, an item that this session did not give. Send the "
            "item itself.",
            status=404,
            param=where,
        )

    def _turn_of(self, item: Mapping[str, Any], kind: str) -> _Turn:
        """Return the turn that an item belongs to, which may be a new one."""
        answer_id, turn = _answer_id(item.get("id")), self._turn
        if turn is not None:
            if answer_id is not None and turn.answer_id is not None:
                # Also behind an output: some agents put each output behind its own call.
                joins = answer_id == turn.answer_id
            elif self._has_output:
                joins = False
            else:
                joins = kind == "call" or bool(turn.calls) or turn.text is None
            if joins:
                turn.answer_id = turn.answer_id or answer_id
                return turn
        self._turn, self._has_output = _Turn(answer_id), False
        self._parts.append(self._turn)
        return self._turn

    def _decrypted(self, value: object, where: str) -> str:
        answer_id = _answer_id(value)
        if answer_id is None:
            raise RequestError(
                f"{where} was not made by this gateway, so nothing here can read it. Leave the "
                "item out, or send the reasoning as its content.",
                param=where,
            )
        return self._session.answer(answer_id).reasoning


_ITEMS: dict[str, tuple[frozenset[str], Any]] = {
    "message": (frozenset(["role", "content"]), _History._add_message),
    "reasoning": (
        frozenset(["content", "summary", "encrypted_content"]),
        _History._add_reasoning,
    ),
    "function_call": (frozenset(["call_id", "name", "arguments"]), _History._add_call),
    "function_call_output": (frozenset(["call_id", "output", "name"]), _History._add_output),
    "item_reference": (frozenset(), _History._add_reference),
}
"""The types of items that are taken: their fields, and what adds one."""


def _earlier(given: Mapping[str, Any], session: SessionView) -> list[ChatMessage]:
    """Return the messages before the input: the instructions, and the response continued."""
    instructions, found = given.get("instructions"), list[ChatMessage]()
    if "previous_response_id" in given:
        answer = _earlier_answer(session, given["previous_response_id"], "previous_response_id")
        found = session.conversation(answer.head.id)
        # As OpenAI has it: instructions are those of their own response only.
        if answer.options["instructions"] is not None:
            found = found[1:]
    if instructions is None:
        return found
    return [{"role": "system", "content": instructions}, *found]


def _earlier_answer(session: SessionView, response_id: object, param: str) -> AgentAnswer:
    known = _RESPONSE_ID.fullmatch(response_id) if isinstance(response_id, str) else None
    answer = session.answer(known[1]) if known else None
    if answer is None or answer.options.get("object") != "response":
        raise RequestError(
            f"this session gave no response {shown(response_id)}.", status=404, param=param
        )
    return answer


def _answer_id(value: object) -> str | None:
    known = _ITEM_ID.fullmatch(value) if isinstance(value, str) else None
    return known[1] if known else None


def _spelled(parts: object, kind: str, where: str) -> str:
    texts: list[str] = []
    for part in parts or () if isinstance(parts, list | None) else (parts,):
        match part:
            case {"type": found, "text": str(text)} if found == kind:
                texts.append(text)
            case _:
                raise RequestError(f"{where} is not a list of {kind}.", param=where)
    return "".join(texts)


def _text_in(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        where = f"{where}.{name}"
        raise RequestError(f"{where} has {shown(value)} where text belongs.", param=where)
    return value


# -- answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """An item with text: the type of its part, and how the events of both are called."""

    part_type: str
    text_event: str
    part_event: str = "response.content_part"
    index: str = "content_index"

    def part(self, text: str) -> dict[str, Any]:
        """Return its one part."""
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self is _MESSAGE else {}
        return {"type": self.part_type, "text": text, **more}

    def item(
        self, answer_id: str, options: Mapping[str, Any], parts: list[dict[str, Any]], status: str
    ) -> dict[str, Any]:
        """Return the item with its part, or with none if nothing was said yet."""
        if self is _MESSAGE:
            item = {"id": f"msg_{answer_id}", "type": "message", "status": status}
            return {**item, "role": "assistant", "content": parts}
        item_id = f"rs_{answer_id}"
        item = {"id": item_id, "type": "reasoning", "status": status}
        said = {"summary": parts} if self is _SUMMARY else {"summary": [], "content": parts}
        if _ENCRYPTED in options["include"]:
            # Stands for the reasoning, which the session keeps.
            item["encrypted_content"] = item_id
        return {**item, **said}


_MESSAGE = _Kind("output_text", "response.output_text")
_REASONING = _Kind("reasoning_text", "response.reasoning_text")
_SUMMARY = _Kind(
    "summary_text",
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
    "summary_index",
)


def _reasoning_kind(options: Mapping[str, Any]) -> _Kind:
    asked = options["reasoning"]
    return _SUMMARY if asked.get("summary") or asked.get("generate_summary") else _REASONING


def _call_item(answer_id: str, index: int, call: ChatMessage, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{answer_id}_{index}",
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
    }


_CUT = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORT: None,
}
"""Finish reasons of an answer that is not complete, as the protocol names them."""


def _last_status(answer: AgentAnswer) -> str:
    return "incomplete" if answer.finish_reason in _CUT else "completed"


def _output(answer: AgentAnswer, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer_id, items, kind = answer.head.id, list[dict[str, Any]](), _reasoning_kind(options)
    if answer.reasoning:
        parts = [kind.part(answer.reasoning)]
        items.append(kind.item(answer_id, options, parts, "completed"))
    # An empty answer is an item too: without one the turn would be missing from the next input.
    if answer.text or not answer.tool_calls:
        parts = [_MESSAGE.part(answer.text)]
        items.append(_MESSAGE.item(answer_id, options, parts, "completed"))
    for index, call in enumerate(answer.tool_calls):
        items.append(_call_item(answer_id, index, call, "completed"))
    items[-1]["status"] = _last_status(answer)
    return items


def write_responses(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the body for an answer."""
    return _finished(answers[0], call.options)


def _finished(answer: AgentAnswer, options: Mapping[str, Any]) -> dict[str, Any]:
    body = _response(answer.head, options, _last_status(answer), _output(answer, options))
    if answer.finish_reason in _CUT:
        body["incomplete_details"] = {"reason": _CUT[answer.finish_reason]}
    num_read, num_sampled = answer.num_prompt_tokens, answer.num_completion_tokens
    cached = {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0}
    body["usage"] = {
        "input_tokens": num_read,
        "input_tokens_details": cached,
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": _num_reasoning_tokens(answer)},
        "total_tokens": num_read + num_sampled,
    }
    return body


def _response(
    head: AnswerHead, options: Mapping[str, Any], status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": f"resp_{head.id}",
        "created_at": head.created_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": output,
        "usage": None,
        **{name: value for name, value in options.items() if name != "include"},
    }


def _num_reasoning_tokens(answer: AgentAnswer) -> int:
    """Return how many tokens spell the reasoning and what comes before it; 0 if it is unknown."""
    ids, decode = answer.response.completion_ids, answer.decode
    if not answer.reasoning or ids is None or decode is None:
        return 0
    tokens = ids.tolist()
    at = decode(tokens).find(answer.reasoning)
    if at < 0:  # several parts, between which others were spoken
        return 0
    # By halves, each decoded once: decoding every prefix would take quadratic time.
    left, begin, end = at + len(answer.reasoning), 0, len(tokens)
    while end - begin > 1:
        middle = (begin + end) // 2
        size = len(decode(tokens[begin:middle]))
        if size < left:
            begin, left = middle, left - size
        else:
            end = middle
    return end


class ResponseEvents:
    """The events of one streamed response."""

    def __init__(self, call: AgentCall) -> None:
        self._options = call.options
        self._head = AnswerHead("", "", 0)
        self._num_events = 0
        # Items that are done, and the one that is being said: of text, or a call.
        self._done: list[dict[str, Any]] = []
        self._kind: _Kind | None = None
        self._item_id = ""
        self._said: list[str] = []
        self._call: dict[str, Any] | None = None

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return that the response was created and is in progress."""
        self._head = head
        response = _response(head, self._options, "in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the events for what is new."""
        if delta.reasoning:
            yield from self._say(_reasoning_kind(self._options), delta.reasoning)
        if delta.content:
            yield from self._say(_MESSAGE, delta.content)
        for index, call in enumerate(delta.tool_calls):
            yield from self._close()
            self._call = _call_item(self._head.id, index, call, "completed")
            self._item_id = self._call["id"]
            added = {**self._call, "arguments": "", "status": "in_progress"}
            yield self._of_item("response.output_item.added", item=added)
            if self._call["arguments"]:
                name = "response.function_call_arguments.delta"
                yield self._of_part(name, delta=self._call["arguments"])

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the end of the last item, and the response."""
        if self._call is None and self._kind is not _MESSAGE:
            yield from self._open(_MESSAGE)
        yield from self._close(_last_status(answer))
        response = _finished(answer, self._options)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the error, and the response as far as it came."""
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        yield self._event("error", **told)
        unfinished = self._item("incomplete")
        output = [*self._done, *([] if unfinished is None else [unfinished])]
        response = _response(self._head, self._options, "failed", output)
        code = "invalid_prompt" if failure.status < 500 else "server_error"
        code = "rate_limit_exceeded" if failure.status == 429 else code
        response["error"] = {"code": code, "message": failure.message}
        yield self._event("response.failed", response=response)

    def _say(self, kind: _Kind, text: str) -> Iterator[bytes]:
        if self._kind is not kind:
            yield from self._open(kind)
        self._said.append(text)
        yield self._of_text(f"{kind.text_event}.delta", delta=text)

    def _open(self, kind: _Kind) -> Iterator[bytes]:
        yield from self._close()
        item = kind.item(self._head.id, self._options, [], "in_progress")
        self._kind, self._item_id = kind, item["id"]
        yield self._of_item("response.output_item.added", item=item)
        yield self._of_part(f"{kind.part_event}.added", part=kind.part(""))

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the item that is being said."""
        item, kind, text = self._item(status), self._kind, "".join(self._said)
        if item is None:
            return
        if kind is not None:
            yield self._of_text(f"{kind.text_event}.done", text=text)
            yield self._of_part(f"{kind.part_event}.done", part=kind.part(text))
        else:
            name = "response.function_call_arguments.done"
            yield self._of_part(name, arguments=item["arguments"])
        yield self._of_item("response.output_item.done", item=item)
        self._done.append(item)
        self._kind, self._call, self._said = None, None, []

    def _item(self, status: str) -> dict[str, Any] | None:
        """Return the item that is being said, as far as it came."""
        if self._kind is not None:
            parts = [self._kind.part("".join(self._said))]
            return self._kind.item(self._head.id, self._options, parts, status)
        return None if self._call is None else {**self._call, "status": status}

    def _of_text(self, name: str, **values: Any) -> bytes:
        if self._kind is _MESSAGE:
            values["logprobs"] = []
        return self._of_part(name, **values)

    def _of_part(self, name: str, **values: Any) -> bytes:
        index = {} if self._kind is None else {self._kind.index: 0}
        return self._of_item(name, item_id=self._item_id, **index, **values)

    def _of_item(self, name: str, **values: Any) -> bytes:
        return self._event(name, output_index=len(self._done), **values)

    def _event(self, name: str, **values: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return data_event({"type": name, "sequence_number": number, **values}, name)


# -- further paths -------------------------------------------------------------------------------


async def retrieve_response(
    session: SessionView, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Return an earlier response."""
    for name in params.keys() - {"session", "agent", "id", "include_obfuscation"}:
        if (name, params[name]) != ("stream", "false"):
            raise _disobeyed(name, params[name], "a response is given whole, as it was created")
    answer = _earlier_answer(session, params["id"], "id")
    return _finished(answer, answer.options)


async def count_input_tokens(
    session: SessionView, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Return how many tokens the input of a request has."""
    num_tokens = session.count_tokens(read_responses(body, session))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _refusing(what: str) -> SideHandler:
    async def refuse(
        session: SessionView, body: Mapping[str, Any], params: Mapping[str, str]
    ) -> dict[str, Any]:
        raise RequestError(what, status=405)

    return refuse


RESPONSES = WireProtocol(
    "responses",
    "/responses",
    RESPONSE_FIELDS,
    read_responses,
    write_responses,
    ResponseEvents,
    sides={
        ("GET", "/responses/{id}"): retrieve_response,
        ("DELETE", "/responses/{id}"): _refusing(
            "a response is a recorded call of the session and is deleted with it, not alone."
        ),
        ("POST", "/responses/{id}/cancel"): _refusing(
            "only responses in the background are cancelled so; hang up to cancel this one."
        ),
        ("POST", "/responses/compact"): _refusing(
            "the gateway compacts nothing. Ask the model for a summary, and send that."
        ),
        ("POST", "/responses/input_tokens"): count_input_tokens,
    },
)
