"""OpenAI's `responses`: input and output are items, and a response can continue an earlier one.

Every response is kept with its session, whatever `store` says; without sessions, none is.
Reasoning is sent as `reasoning_text`; if the request asks for a summary, the whole reasoning is
sent as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any

import numpy as np

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead, DeltaTokens
from rolltree.gateway.failures import Failure, openai_error
from rolltree.gateway.field_table import fields_at
from rolltree.gateway.fields import (
    READ,
    Field,
    FieldsRead,
    disobeyed,
    each,
    flag,
    model_in,
    notes_on_form,
    read_fields,
    read_part,
    tools_in,
    unknown_field,
)
from rolltree.gateway.messages import text_at
from rolltree.gateway.openai_chat import tools_and_choice, with_top_logprobs
from rolltree.gateway.openai_items import (
    CUT_REASONS,
    ENCRYPTED,
    ITEM_DEFAULTS,
    LOGPROBS,
    MESSAGE_ITEM,
    ItemHistory,
    TextItem,
    call_item,
    input_items,
    last_status,
    logprobs_of,
    output_items,
    reasoning_item_kind,
    text_logprobs,
    wants_logprobs,
)
from rolltree.gateway.protocol import Answering, SideHandler, WireProtocol, data_event
from rolltree.gateway.tools import (
    TOOL_NOTES,
    custom_tool,
    function_tool,
    left_out,
    name_in,
    tool_notes,
)
from rolltree.values.types import ChatMessage, SamplingParams, ToolSchema
from rolltree.web.guard import RequestError

RESPONSE_FIELDS = fields_at("responses")
# Fields of items from hosted tools and images, which never occur here; and the encrypted reasoning.
_INCLUDABLE = (
    ENCRYPTED,
    LOGPROBS,
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
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "store": True,
    "include": [],
}
"""The request's fields that a response repeats, with their values if the request has none."""
_UNSHOWN = frozenset(["include", "logprobs", "namespaces", "custom_tools"])
"""The options that a response does not show."""
_SETTINGS = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("name", "description", "format")
_NAMESPACE_FIELDS = ("name", "description", "tools")
_FORMAT: dict[str, Field] = each("type name description schema strict", READ)
_RESPONSE_ID = re.compile(r"resp_(.+)")


# -- requests ------------------------------------------------------------------------------------


def read_responses(body: Mapping[str, Any], session: Answering) -> AgentCall:
    """Return the call that a body of `responses` asks for."""
    given, asked, notes = read_fields(body, RESPONSE_FIELDS)
    _, reasoning, wished = _part(given, "reasoning")
    text, style, _ = _part(given, "text")
    passed_on = {**reasoning.extra, **style.extra, **_response_format(text.get("format", {}))}
    asked = replace(asked, extra={**asked.extra, **passed_on})
    asked = with_top_logprobs(asked, given.get("top_logprobs", 0), session)
    offered = _Tools(given)
    chosen, asked = tools_and_choice({"tools": offered.tools, "tool_choice": offered.choice}, asked)
    _check_rest(given)
    history = ItemHistory(session, _earlier(given, session))
    history.add_input(given.get("input"), is_continued="previous_response_id" in given)
    return AgentCall(
        history.messages(),
        asked,
        model=model_in(given),
        tools=tuple(chosen.tools),
        stream=flag(given, "stream"),
        options={
            **_options(body, given, session.sampling_for(asked), session.keeps_answers),
            **({"logprobs": True} if LOGPROBS in given.get("include", []) else {}),
            **offered.options,
        },
        notes={**notes, **wished, **offered.notes, **chosen.notes, **notes_on_form(given)},
    )


def _part(given: Mapping[str, Any], name: str) -> FieldsRead:
    return read_part(given.get(name, {}), fields_at("responses", name), name)


def _options(
    body: Mapping[str, Any], given: Mapping[str, Any], obeyed: SamplingParams, is_kept: bool
) -> dict[str, Any]:
    """Return the fields that the response repeats, and `include`; settings as they are obeyed."""
    settings = {name: getattr(obeyed, key) for name, key in _SETTINGS.items()}
    passed_on = {name: obeyed.extra.get(name) for name in obeyed.extra.keys() & _REPEATED.keys()}
    passed_on.pop("tool_choice", None)  # in the form of chat completions
    repeated = {name: body.get(name) for name in _REPEATED} | passed_on | settings
    if not is_kept:
        # What is not kept cannot be read from a reference, which "encrypted" reasoning is here.
        include = [name for name in given.get("include", []) if name != ENCRYPTED]
        repeated |= {"store": False, "include": include}
    repeated["tools"] = [_shown_tool(tool) for tool in given.get("tools", [])]
    effort, text = obeyed.extra.get("reasoning_effort"), _given_in(given, "text")
    if text.get("format", {}).get("type") == "json_schema":
        text["format"] = {"description": None, "strict": False, **text["format"]}
    return {
        "object": "response",
        **{
            name: _REPEATED[name] if repeated[name] is None else repeated[name] for name in repeated
        },
        "text": {"format": {"type": "text"}, **text},
        "reasoning": {"summary": None, **_given_in(given, "reasoning"), "effort": effort},
        "background": False,
        "truncation": "disabled",
        "service_tier": "default",
    }


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as a response shows it: a function with all fields that it has in the API."""
    if tool["type"] != "function":
        return tool
    return {**dict.fromkeys(_TOOL_FIELDS), **tool}


def _given_in(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.get(name, {}).items() if value is not None}


def _response_format(value: object) -> dict[str, Any]:
    wanted = read_part(value, _FORMAT, "text.format").given
    match wanted:
        case {"type": "json_object", **rest} if not rest:
            return {"response_format": {"type": "json_object"}}
        case {"type": "json_schema", **schema}:
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case _ if wanted in ({}, {"type": "text"}):
            return {}
    raise disobeyed(
        "text.format", wanted, "known are text, json_object (without a schema) and json_schema"
    )


class _Tools:
    """The tools of a request and its `tool_choice`, in the form of chat completions.

    `options` has what the items of calls need to name tools as the agent does.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.tools: list[ToolSchema] = []
        self.notes: dict[str, str] = {}
        self._namespaces: dict[str, dict[str, str]] = {}
        self._custom: list[str] = []
        for index, tool in enumerate(tools_in(given)):
            self._add(tool, f"tools[{index}]")
        self.choice = _chat_choice(given.get("tool_choice", "auto"))

    @property
    def options(self) -> dict[str, Any]:
        named = {"namespaces": self._namespaces, "custom_tools": self._custom}
        return {name: value for name, value in named.items() if value}

    def _add(self, tool: Any, where: str, namespace: str = "") -> None:
        match tool:
            case {"type": "function" | "custom" as kind}:
                is_custom = kind == "custom"
                self.notes |= tool_notes(tool)
                own = _own_fields(tool, _CUSTOM_FIELDS if is_custom else _TOOL_FIELDS, where)
                name = text_at(own.get("name"), f"{where}.name")
                own["name"] = name_in(namespace, name, where)
                if namespace:
                    self._namespaces[own["name"]] = {"name": name, "namespace": namespace}
                if is_custom:
                    self._custom.append(own["name"])
                self.tools.append(custom_tool(own, where) if is_custom else function_tool(own))
            case {"type": "namespace"} if not namespace:
                own = _own_fields(tool, _NAMESPACE_FIELDS, where)
                name = text_at(own.get("name"), f"{where}.name")
                for index, inner in enumerate(tools_in(own, f"{where}.tools")):
                    self._add(inner, f"{where}.tools[{index}]", name)
            case {"type": str(kind)} if kind != "namespace":
                self.notes |= left_out(kind)
            case _:
                raise RequestError(f"{where} is not a tool: {shown(tool)}.", param=where)


def _own_fields(tool: Mapping[str, Any], known: tuple[str, ...], where: str) -> dict[str, Any]:
    for name, value in tool.items():
        is_default = value is None or value in ITEM_DEFAULTS.get(name, ())
        if name not in ("type", *known, *TOOL_NOTES) and not is_default:
            raise unknown_field(f"{where}.{name}", [f"{where}.{each}" for each in known])
    return {name: tool[name] for name in known if tool.get(name) is not None}


def _chat_choice(choice: object) -> object:
    match choice:
        case "auto" | "none" | "required":
            return choice
        case {"type": "function" | "custom", "name": str(name), **rest} if not rest.keys() - {
            "namespace"
        }:
            name = name_in(rest.get("namespace"), name, "tool_choice")
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*allowed], **rest} if not rest:
            listed = [_chat_choice(one) for one in allowed]
            if all(isinstance(one, dict) for one in listed):
                allowance = {"mode": mode, "tools": listed}
                return {"type": "allowed_tools", "allowed_tools": allowance}
    raise disobeyed("tool_choice", choice, "only tools that the agent runs can be chosen")


def _check_rest(given: Mapping[str, Any]) -> None:
    """Check the fields that change nothing here: values that ask for more are refused."""
    for name in ("stream_options", "prompt_cache_options", "background_options"):
        _part(given, name)
    include = given.get("include", [])
    for name in include if isinstance(include, list) else [include]:
        if not isinstance(include, list) or name not in _INCLUDABLE:
            why = "known are " + ", ".join(_INCLUDABLE)
            raise disobeyed("include", name, why)
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise RequestError("metadata is not an object of strings.", param="metadata")
    if not isinstance(given.get("instructions", ""), str):
        raise RequestError("instructions is not text.", param="instructions")
    flag(given, "store")


def _earlier(given: Mapping[str, Any], session: Answering) -> list[ChatMessage]:
    """Return the messages before the input: the instructions, and the continued conversation."""
    instructions, found = given.get("instructions"), list[ChatMessage]()
    if "previous_response_id" in given:
        answer = _earlier_answer(session, given["previous_response_id"], "previous_response_id")
        found = session.conversation(answer.head.id)
        # As in OpenAI's API, instructions apply only to their own response.
        if answer.options["instructions"] is not None:
            found = found[1:]
    if instructions is None:
        return found
    return [{"role": "system", "content": instructions}, *found]


def _earlier_answer(session: Answering, response_id: object, param: str) -> AgentAnswer:
    known = _RESPONSE_ID.fullmatch(response_id) if isinstance(response_id, str) else None
    answer = session.answer(known[1]) if known else None
    if answer is None or answer.options.get("object") != "response":
        raise RequestError(
            f"this session gave no response {shown(response_id)}.", status=404, param=param
        )
    return answer


# -- answers -------------------------------------------------------------------------------------


def write_responses(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the response body for an answer."""
    return _finished(answers[0], call.options)


def _finished(answer: AgentAnswer, options: Mapping[str, Any]) -> dict[str, Any]:
    body = _response(answer.head, options, last_status(answer), output_items(answer, options))
    if answer.finish_reason in CUT_REASONS:
        body["incomplete_details"] = {"reason": CUT_REASONS[answer.finish_reason]}
    else:
        body["completed_at"] = answer.head.created_s + int(answer.response.time_s)
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
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": output,
        "usage": None,
        **{name: value for name, value in options.items() if name not in _UNSHOWN},
    }


def _num_reasoning_tokens(answer: AgentAnswer) -> int:
    """Return the number of tokens up to the end of the reasoning; 0 if it is unknown."""
    ids, decode = answer.response.completion_ids, answer.decode
    if not answer.reasoning or ids is None or decode is None:
        return 0
    tokens = ids.tolist()
    at = decode(tokens).find(answer.reasoning)
    if at < 0:  # the reasoning has several parts, with other text between them
        return 0
    # Binary search that decodes only halves: decoding every prefix would take quadratic time.
    left, begin, end = at + len(answer.reasoning), 0, len(tokens)
    while end - begin > 1:
        middle = (begin + end) // 2
        size = len(decode(tokens[begin:middle]))
        if size < left:
            begin, left = middle, left - size
        else:
            end = middle
    return end


_CALL_EVENTS = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
"""The text of a call's item, and the events that stream it."""


class ResponseEvents:
    """The events of one streamed response."""

    def __init__(self, call: AgentCall) -> None:
        self._options = call.options
        self._head = AnswerHead("", "", 0)
        self._num_events = 0
        # Finished items, and the current one, which is text or a tool call.
        self._done: list[dict[str, Any]] = []
        self._kind: TextItem | None = None
        self._item_id = ""
        self._texts: list[str] = []
        self._call: dict[str, Any] | None = None
        self._logprobs: dict[str, Any] = {}
        # Tokens whose text is still to come: what may be the begin of a mark is held back.
        self._held: list[DeltaTokens] = []
        # How many logprobs were sent with deltas, and those for the last delta.
        self._num_sent = 0
        self._rest: list[dict[str, Any]] = []

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return the events that the response was created and is in progress."""
        self._head = head
        response = _response(head, self._options, "in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the events for a delta."""
        if delta.tokens is not None:
            self._held.append(delta.tokens)
        if delta.reasoning:
            yield from self._say(reasoning_item_kind(self._options), delta.reasoning)
            self._held.clear()
        if delta.content:
            logprobs = self._logprobs_of(delta.content)
            yield from self._say(MESSAGE_ITEM, delta.content, logprobs=logprobs)
            self._num_sent += len(logprobs)
            self._held.clear()
        for index, call in enumerate(delta.tool_calls):
            yield from self._close()
            self._call = call_item(self._head.id, index, call, self._options)
            self._item_id = self._call["id"]
            text, event = _CALL_EVENTS[self._call["type"]]
            added = {**self._call, text: "", "status": "in_progress"}
            yield self._of_item("response.output_item.added", item=added)
            if self._call[text]:
                yield self._of_part(f"{event}.delta", delta=self._call[text])

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the events that end the last item, and the whole response."""
        every = text_logprobs(answer, self._options) if answer.text else {}
        self._rest = every.get("logprobs", [])[self._num_sent :]
        yield from self.delta(answer.rest)
        if self._call is None and self._kind is not MESSAGE_ITEM:
            yield from self._open(MESSAGE_ITEM)
        if self._kind is MESSAGE_ITEM:
            self._logprobs = every
        yield from self._close(last_status(answer))
        response = _finished(answer, self._options)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the error, and the response with the items so far."""
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        # The official client reads the fields of the event, the open specification its `error`.
        kind = openai_error(failure)["error"]["type"]
        yield self._event("error", **told, error={"type": kind, **told})
        unfinished = self._item("incomplete")
        output = [*self._done, *([] if unfinished is None else [unfinished])]
        response = _response(self._head, self._options, "failed", output)
        code = "invalid_prompt" if failure.status < 500 else "server_error"
        code = "rate_limit_exceeded" if failure.status == 429 else code
        response["error"] = {"code": code, "message": failure.message}
        yield self._event("response.failed", response=response)

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        if not self._held or not wants_logprobs(self._options):
            return self._rest
        ids = np.concatenate([each.ids for each in self._held])
        values = np.concatenate([each.logprobs for each in self._held])
        return logprobs_of(text, ids, values, self._held[0].decode, ())

    def _say(self, kind: TextItem, text: str, **more: Any) -> Iterator[bytes]:
        if self._kind is not kind:
            yield from self._open(kind)
        self._texts.append(text)
        yield self._of_text(f"{kind.text_event}.delta", delta=text, **more)

    def _open(self, kind: TextItem) -> Iterator[bytes]:
        yield from self._close()
        item = kind.item(self._head.id, self._options, [], "in_progress")
        self._kind, self._item_id = kind, item["id"]
        yield self._of_item("response.output_item.added", item=item)
        yield self._of_part(f"{kind.part_event}.added", part=kind.part(""))

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the current item."""
        item, kind, text = self._item(status), self._kind, "".join(self._texts)
        if item is None:
            return
        if kind is not None:
            yield self._of_text(f"{kind.text_event}.done", text=text)
            yield self._of_part(f"{kind.part_event}.done", part=kind.part(text) | self._logprobs)
        else:
            text_name, event = _CALL_EVENTS[item["type"]]
            yield self._of_part(f"{event}.done", **{text_name: item[text_name]})
        yield self._of_item("response.output_item.done", item=item)
        self._done.append(item)
        self._kind, self._call, self._texts = None, None, []

    def _item(self, status: str) -> dict[str, Any] | None:
        """Return the current item with its text so far; None if there is none."""
        if self._kind is not None:
            parts = [self._kind.part("".join(self._texts)) | self._logprobs]
            return self._kind.item(self._head.id, self._options, parts, status)
        return None if self._call is None else {**self._call, "status": status}

    def _of_text(self, name: str, **values: Any) -> bytes:
        if self._kind is MESSAGE_ITEM:
            values = {"logprobs": [], **self._logprobs, **values}
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
    session: Answering, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Return an earlier response."""
    for name in params.keys() - {"session", "agent", "id", "include_obfuscation"}:
        if (name, params[name]) != ("stream", "false"):
            raise disobeyed(name, params[name], "a response is returned whole, as it was created")
    answer = _earlier_answer(session, params["id"], "id")
    return _finished(answer, answer.options)


async def list_input_items(
    session: Answering, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Return a page of the input of an earlier response, with the conversation it continued."""
    answer = _earlier_answer(session, params["id"], "id")
    _check_page(params)
    *said, _ = session.conversation(answer.head.id)
    items = input_items(said[answer.options["instructions"] is not None :], answer.head.id)
    if params.get("order", "desc") == "desc":
        items.reverse()
    if "after" in params:
        at = next((i for i, item in enumerate(items) if item["id"] == params["after"]), None)
        if at is None:
            what = f"the input has no item {shown(params['after'])}."
            raise RequestError(what, status=404, param="after")
        items = items[at + 1 :]
    page = items[: int(params.get("limit", 20))]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


def _check_page(params: Mapping[str, str]) -> None:
    known = ("session", "agent", "id", "after", "order", "limit", "include", "include[]")
    for name in params:
        if name not in known:
            raise unknown_field(name, known)
    if params.get("order", "desc") not in ("asc", "desc"):
        raise disobeyed("order", params["order"], "known are asc and desc")
    limit = params.get("limit", "20")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise disobeyed("limit", limit, "it is a number from 1 to 100")


async def count_input_tokens(
    session: Answering, body: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, Any]:
    """Return how many tokens the input of a request has."""
    num_tokens = await session.count_tokens(read_responses(body, session))
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _refusing(what: str) -> SideHandler:
    async def refuse(
        session: Answering, body: Mapping[str, Any], params: Mapping[str, str]
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
        ("GET", "/responses/{id}/input_items"): list_input_items,
        ("DELETE", "/responses/{id}"): _refusing(
            "a response is a recorded call of the session and is deleted with it, not alone."
        ),
        ("POST", "/responses/{id}/cancel"): _refusing(
            "only background responses can be cancelled this way; hang up to cancel this one."
        ),
        ("POST", "/responses/compact"): _refusing(
            "the gateway compacts nothing. Ask the model for a summary, and send that."
        ),
        ("POST", "/responses/input_tokens"): count_input_tokens,
    },
)
