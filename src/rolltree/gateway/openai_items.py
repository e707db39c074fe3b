"""The items of OpenAI's `responses`: a request's items become messages, an answer becomes items.

The items of one assistant turn (reasoning, text, function calls) become one message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from reprlib import repr as shown
from typing import Any

from rolltree.gateway.calls import AgentAnswer
from rolltree.gateway.fields import unknown_field
from rolltree.gateway.messages import (
    assistant,
    input_arguments,
    input_of,
    joined_text,
    text_at,
    tool_call,
)
from rolltree.gateway.openai_chat import TokenSpans, chat_logprobs
from rolltree.gateway.protocol import Answering
from rolltree.gateway.tools import name_in
from rolltree.inference.engine import TopLogprobs
from rolltree.values.types import ChatMessage, FinishReason, FloatArray, IntArray
from rolltree.web.guard import RequestError

ENCRYPTED = "reasoning.encrypted_content"
"""The entry of `include` that requests reasoning in a form that only the gateway can read."""
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that requests the logprobs of the text's tokens."""
# The ids of this gateway's answers have 24 hex digits; other servers' have more or fewer.
_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{24})(?:_[0-9]+)?")


# -- of a request --------------------------------------------------------------------------------

ITEM_DEFAULTS: dict[str, tuple[object, ...]] = {
    "async": (False,),
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "defer_loading": (False,),
}
"""Fields of tools and items that are accepted with the value that asks for the default."""
# Fields that servers put on every item, or that clients add when they parse one.
_NOTED = frozenset(["id", "type", "status", "phase", "created_by", "parsed_arguments"])


@dataclass(slots=True)
class _Turn:
    """The items of an assistant turn. `answer_id` is known if the items have the gateway's ids."""

    answer_id: str | None
    text: str | None = None
    reasoning: str = ""
    calls: list[ChatMessage] = field(default_factory=list)


class ItemHistory:
    """Turns items into messages, with one message for each turn of the assistant."""

    def __init__(self, session: Answering, earlier: list[ChatMessage]) -> None:
        self._session = session
        self._parts: list[ChatMessage | _Turn] = list(earlier)
        # The turn that further items may belong to, and whether an output came after it.
        self._turn: _Turn | None = None
        self._has_output = False

    def messages(self) -> list[ChatMessage]:
        """Return the messages so far."""
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
            raise RequestError("input must be text or a list of at least one item.", param="input")
        for index, item in enumerate(value):
            self.add(item, f"input[{index}]")

    def add(self, item: object, where: str) -> None:
        """Add one item; `where` is its place in the request, for errors."""
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
            if not is_known and value not in ITEM_DEFAULTS.get(name, ()):
                raise unknown_field(f"{where}.{name}", [f"{where}.{known}" for known in names])
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
        arguments = text_at(item.get("arguments"), f"{where}.arguments")
        self._turn_of(item, "call").calls.append(_call(item, arguments, where))

    def _add_custom_call(self, item: Mapping[str, Any], where: str) -> None:
        arguments = input_arguments(text_at(item.get("input"), f"{where}.input"))
        self._turn_of(item, "call").calls.append(_call(item, arguments, where))

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        text = joined_text(item.get("output"), f"{where}.output")
        call_id = text_at(item.get("call_id"), f"{where}.call_id")
        self._parts.append({"role": "tool", "content": text, "tool_call_id": call_id})
        self._has_output = True

    def _add_reference(self, item: Mapping[str, Any], where: str) -> None:
        item_id = text_at(item.get("id"), f"{where}.id")
        answer_id = _answer_id(item_id)
        if answer_id is not None:
            answer = self._session.answer(answer_id)
            for known in output_items(answer, answer.options):
                if known["id"] == item_id:
                    self.add(known, where)
                    return
        raise RequestError(
            f"{where} refers to {shown(item_id)}, an item that this session did not produce. Send "
            "the item itself.",
            status=404,
            param=where,
        )

    def _turn_of(self, item: Mapping[str, Any], kind: str) -> _Turn:
        """Return the turn that an item belongs to, or begin a new turn for it."""
        answer_id, turn = _answer_id(item.get("id")), self._turn
        if turn is not None:
            if answer_id is not None and turn.answer_id is not None:
                # Even after an output, since some agents put each output after its own call.
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
    "message": (frozenset(["role", "content"]), ItemHistory._add_message),
    "reasoning": (
        frozenset(["content", "summary", "encrypted_content"]),
        ItemHistory._add_reasoning,
    ),
    "function_call": (
        frozenset(["call_id", "name", "namespace", "arguments"]),
        ItemHistory._add_call,
    ),
    "function_call_output": (frozenset(["call_id", "output", "name"]), ItemHistory._add_output),
    "custom_tool_call": (
        frozenset(["call_id", "name", "namespace", "input"]),
        ItemHistory._add_custom_call,
    ),
    "custom_tool_call_output": (frozenset(["call_id", "output", "name"]), ItemHistory._add_output),
    "item_reference": (frozenset(), ItemHistory._add_reference),
}
"""The accepted types of items: their fields, and the method that adds one."""


def _call(item: Mapping[str, Any], arguments: str, where: str) -> ChatMessage:
    name = name_in(item.get("namespace"), text_at(item.get("name"), f"{where}.name"), where)
    return tool_call(text_at(item.get("call_id"), f"{where}.call_id"), name, arguments)


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


# -- of an answer --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextItem:
    """A kind of item with text: the type of its part, and the names of its stream events."""

    part_type: str
    text_event: str
    part_event: str = "response.content_part"
    index: str = "content_index"

    def part(self, text: str) -> dict[str, Any]:
        """Return the item's only part."""
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self is MESSAGE_ITEM else {}
        return {"type": self.part_type, "text": text, **more}

    def item(
        self, answer_id: str, options: Mapping[str, Any], parts: list[dict[str, Any]], status: str
    ) -> dict[str, Any]:
        """Return the item; `parts` has its part, or is empty while it has no text."""
        if self is MESSAGE_ITEM:
            item = {"id": f"msg_{answer_id}", "type": "message", "status": status}
            return {**item, "role": "assistant", "content": parts}
        item_id = f"rs_{answer_id}"
        item = {"id": item_id, "type": "reasoning", "status": status}
        said = {"summary": parts} if self is SUMMARY_ITEM else {"summary": [], "content": parts}
        if ENCRYPTED in options["include"]:
            # Only a reference: the session keeps the reasoning itself.
            item["encrypted_content"] = item_id
        return {**item, **said}


MESSAGE_ITEM = TextItem("output_text", "response.output_text")
REASONING_ITEM = TextItem("reasoning_text", "response.reasoning_text")
SUMMARY_ITEM = TextItem(
    "summary_text",
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
    "summary_index",
)


def reasoning_item_kind(options: Mapping[str, Any]) -> TextItem:
    """Return the kind of the reasoning's item: a summary, if the request asks for one."""
    asked = options["reasoning"]
    return SUMMARY_ITEM if asked.get("summary") or asked.get("generate_summary") else REASONING_ITEM


def call_item(
    answer_id: str, index: int, call: ChatMessage, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the item of a finished tool call.

    In `options`, `custom_tools` lists the names of custom tools, and `namespaces` has the names
    that functions have in a namespace.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    item = {"status": "completed", "call_id": call["id"]}
    item |= options.get("namespaces", {}).get(name, {"name": name})
    if name in options.get("custom_tools", ()):
        own = {"id": f"ctc_{answer_id}_{index}", "type": "custom_tool_call"}
        return {**own, **item, "input": input_of(arguments)}
    return {
        "id": f"fc_{answer_id}_{index}",
        "type": "function_call",
        **item,
        "arguments": arguments,
    }


def input_items(messages: Sequence[ChatMessage], answer_id: str) -> list[dict[str, Any]]:
    """Return the items of the messages before an answer, with unique ids."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **values: Any) -> None:
        item_id = f"{prefix}_in_{answer_id}_{len(items)}"
        items.append({"id": item_id, "type": kind, "status": "completed", **values})

    for message in messages:
        role, text = message["role"], str(message.get("content") or "")
        if role == "tool":
            call_id = message["tool_call_id"]
            add("fco", "function_call_output", call_id=call_id, output=text)
            continue
        if reasoning := message.get("reasoning_content"):
            add("rs", "reasoning", summary=[], content=[REASONING_ITEM.part(reasoning)])
        calls = message.get("tool_calls") or ()
        if role == "assistant" and (text or not calls):
            add("msg", "message", role=role, content=[MESSAGE_ITEM.part(text)])
        elif role != "assistant":
            add("msg", "message", role=role, content=[{"type": "input_text", "text": text}])
        for call in calls:
            function = call["function"]
            named = {"name": function["name"], "arguments": function["arguments"]}
            add("fc", "function_call", call_id=call["id"], **named)
    return items


CUT_REASONS = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
    FinishReason.ABORT: None,
}
"""The finish reasons of incomplete answers, with the protocol's names for them."""


def last_status(answer: AgentAnswer) -> str:
    """Return the status of an answer and of its last item."""
    return "incomplete" if answer.finish_reason in CUT_REASONS else "completed"


def wants_logprobs(options: Mapping[str, Any]) -> bool:
    """Return whether the request asks for the logprobs of the answer's text."""
    return LOGPROBS in options["include"] or bool(options.get("top_logprobs"))


def text_logprobs(answer: AgentAnswer, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `logprobs` of an answer's text, if the request asks for them.

    Raises:
        RequestError: the model's server gave no ids or logprobs.
    """
    ids, values, decode = answer.response.completion_ids, answer.response.logprobs, answer.decode
    if not wants_logprobs(options):
        return {}
    if ids is None or values is None or decode is None:
        raise RequestError(
            "the model's server gave no ids and logprobs of the sampled tokens, so they cannot be "
            "returned.",
            param="include",
        )
    return {"logprobs": logprobs_of(answer.text, ids, values, decode, answer.top)}


def logprobs_of(
    text: str,
    ids: IntArray,
    values: FloatArray,
    decode: Callable[[list[int]], str],
    top: Sequence[TopLogprobs],
) -> list[dict[str, Any]]:
    """Return the entries of the tokens that spell a text; of all, if it is not found in theirs."""
    listed = ids.tolist()
    entries = list(zip_longest(listed, values.tolist(), top[: len(listed)], fillvalue=()))
    # Tokens of reasoning, marks and the end are sampled, too, and are not part of the text.
    start = decode(listed).rfind(text)
    if start >= 0:
        spans = map(TokenSpans(decode).add, listed)
        stop = start + len(text)
        entries = [
            entry
            for entry, (begin, end) in zip(entries, spans, strict=True)
            if end > start and begin < stop
        ]

    def spell(token: int) -> str:
        return decode([token])

    content: list[dict[str, Any]] = chat_logprobs(entries, spell)["content"]
    return content


def output_items(answer: AgentAnswer, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an answer."""
    answer_id, items, kind = answer.head.id, list[dict[str, Any]](), reasoning_item_kind(options)
    if answer.reasoning:
        parts = [kind.part(answer.reasoning)]
        items.append(kind.item(answer_id, options, parts, "completed"))
    # An empty answer is an item, too: without it, the turn would be missing from the next input.
    if answer.text or not answer.tool_calls:
        parts = [MESSAGE_ITEM.part(answer.text) | text_logprobs(answer, options)]
        items.append(MESSAGE_ITEM.item(answer_id, options, parts, "completed"))
    for index, call in enumerate(answer.tool_calls):
        items.append(call_item(answer_id, index, call, options))
    items[-1]["status"] = last_status(answer)
    return items
