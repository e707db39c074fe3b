"""OpenAI's `chat/completions` and `completions`.

Logprobs of sampled tokens are available; in a stream they come with the last chunk. A text
completion takes one prompt, as a string or as ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from reprlib import repr as shown
from typing import Any

import numpy as np

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.fields import (
    NO_EFFECT,
    READ,
    Field,
    each,
    model_in,
    only,
    passed,
    read_fields,
    tools_in,
)
from rolltree.gateway.messages import chat_messages
from rolltree.gateway.protocol import WireProtocol, data_event
from rolltree.gateway.serve.requests import (
    TEXT_MAX_TOKENS,
    Failure,
    flag,
    includes_usage,
    is_tool,
    num_choices,
    openai_error,
)
from rolltree.gateway.serve.responses import DONE, chat_logprobs, text_logprobs
from rolltree.gateway.session import GatewaySession
from rolltree.inference.deltas import one_call_each, outgoing_message
from rolltree.inference.request_fields import FIELDS, RequestField
from rolltree.values.types import IntArray, SamplingParams, ToolSchema
from rolltree.web.guard import RequestError

_ONE_OF_SAMPLED = "only logprobs of sampled tokens are recorded"
_ONLY_NEUTRAL = {
    "add_special_tokens": "the chat template decides which tokens a prompt has",
    "best_of": "every sample is a separate call",
    "continue_final_message": "answers are sampled from their start",
    "echo": "an answer has only what was sampled",
    "include_stop_str_in_output": "an answer ends before its stop string",
    "modalities": "only text can be recorded as tokens",
    "suffix": "text can only be continued at its end",
    "top_logprobs": _ONE_OF_SAMPLED,
}
"""Fields that no server behind the gateway may obey, and why."""
_HIDDEN = each(
    "add_generation_prompt chat_template documents kv_transfer_params prompt_logprobs "
    "return_routed_experts return_token_ids return_tokens_as_token_ids truncate_prompt_tokens",
    READ,
).keys()
_USES: dict[str, Field] = {
    "setting": Field("sampling"),
    "note": NO_EFFECT,
    "asking": READ,
}


def _use(name: str, field: RequestField) -> Field:
    if name in _ONLY_NEUTRAL:
        return only(*field.neutral, why=_ONLY_NEUTRAL[name])
    # What is left, the model's server obeys or refuses.
    return _USES.get(field.kind) or passed(*field.neutral)


_COMMON: dict[str, Field] = {
    **each("model", READ),
    **{
        name: _use(name, field)
        for name, field in FIELDS.items()
        if field.kind != "client" and name not in _HIDDEN
    },
}
CHAT_FIELDS: dict[str, Field] = {**_COMMON, **each("messages tools tool_choice", READ)}
TEXT_FIELDS: dict[str, Field] = {**_COMMON, "prompt": READ}
del TEXT_FIELDS["tool_choice"]


# -- requests ------------------------------------------------------------------------------------


def read_chat(body: Mapping[str, Any], session: GatewaySession) -> AgentCall:
    """Return the call that a body of `chat/completions` asks for."""
    given, asked = read_fields(body, CHAT_FIELDS)
    tools, asked = tools_and_choice(given, asked)
    if given.get("logprobs", False) not in (True, False):
        raise RequestError(f"{_ONE_OF_SAMPLED}: logprobs is true or false.", param="logprobs")
    messages = chat_messages(given.get("messages"))
    return _call(given, AgentCall(messages, asked, tools=tools))


def read_text(body: Mapping[str, Any], session: GatewaySession) -> AgentCall:
    """Return the call that a body of `completions` asks for."""
    given, asked = read_fields(body, TEXT_FIELDS)
    if given.get("logprobs", 0) not in (0, 1):
        raise RequestError(f"{_ONE_OF_SAMPLED}: logprobs is 0 or 1.", param="logprobs")
    # Null asks for no limit; a missing field, for OpenAI's default.
    if not {"max_tokens", "max_completion_tokens"} & body.keys():
        asked = replace(asked, max_tokens=TEXT_MAX_TOKENS)
    prompt: str | IntArray
    match given.get("prompt"):
        case str(text) | [str(text)]:
            prompt = text
        case [*ids] | [[*ids]] if ids and all(type(i) is int and 0 <= i < 2**31 for i in ids):
            prompt = np.array(ids, np.int32)
        case _:
            raise RequestError(
                "prompt is neither one string nor one list of token ids. Send several prompts in "
                "several requests: each is a separate call.",
                param="prompt",
            )
    return _call(given, AgentCall(prompt, asked, message_type="completion"))


def _call(given: Mapping[str, Any], call: AgentCall) -> AgentCall:
    stream, n = flag(given, "stream"), num_choices(given)
    if stream and n > 1:
        raise RequestError("n above 1 is not streamed. Ask without stream, or n times.", param="n")
    logprobs = given.get("logprobs", False)
    return replace(
        call,
        stream=stream,
        n=n,
        model=model_in(given),
        options={
            "include_usage": includes_usage(given),
            "logprobs": logprobs is True or type(logprobs) is int,
        },
    )


def tools_and_choice(
    given: Mapping[str, Any], asked: SamplingParams
) -> tuple[tuple[ToolSchema, ...], SamplingParams]:
    """Return the tools that the prompt offers, and the settings with a forced choice, if any.

    A choice other than "auto" and "none" is left to the model's server to obey or refuse.

    Raises:
        RequestError: `tools` is not a list of function tools; it names the first that is not one.
    """
    tools, choice = tools_in(given), given.get("tool_choice", "auto")
    for index, tool in enumerate(tools):
        if not is_tool(tool) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(
                f"tools[{index}] is of type {shown(kind)}; only functions that the agent runs "
                "itself can be offered.",
                param=f"tools[{index}]",
            )
    if choice not in ("auto", "none"):
        asked = replace(asked, extra={**asked.extra, "tool_choice": choice})
    return (() if choice == "none" else tuple(tools)), asked


# -- answers -------------------------------------------------------------------------------------


def write_choices(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the response body for the answers to a chat, or for the completions of a text."""
    is_chat, choices = call.message_type == "chat", []
    for index, answer in enumerate(answers):
        said: dict[str, Any] = {"text": answer.text}
        if is_chat:
            said = {"message": {**outgoing_message(answer.message), "refusal": None}}
        ending = {"finish_reason": answer.finish_reason.value, "logprobs": _logprobs(call, answer)}
        choices.append({"index": index, **said, **ending})
    head = _head(answers[0].head, "chat.completion" if is_chat else "text_completion")
    return head | {"choices": choices, "usage": chat_usage(answers)}


def chat_usage(answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the counts of prompt and sampled tokens; the prompt of several answers counts once."""
    num_prompt = answers[0].num_prompt_tokens
    num_sampled = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_cached_tokens},
    }


def _head(head: AnswerHead, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
        "id": f"{prefix}-{head.id}",
        "object": kind,
        "created": head.created_s,
        "model": head.model,
    }


def _logprobs(call: AgentCall, answer: AgentAnswer) -> dict[str, Any] | None:
    if not call.options.get("logprobs"):
        return None
    ids, values = answer.response.completion_ids, answer.response.logprobs
    if ids is None or values is None or answer.decode is None:
        raise RequestError(
            "the model's server gave no logprobs with the sampled tokens, so they cannot be "
            "returned.",
            param="logprobs",
        )
    texts = [answer.decode([token]) for token in ids.tolist()]
    write = chat_logprobs if call.message_type == "chat" else text_logprobs
    return write(texts, values.tolist())


class ChatEvents:
    """The chunks of one streamed chat or text completion."""

    def __init__(self, call: AgentCall) -> None:
        self._call, self._is_chat = call, call.message_type == "chat"
        self._base: dict[str, Any] = {}

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return the chunk with the role; a text completion has none."""
        self._base = _head(head, "chat.completion.chunk" if self._is_chat else "text_completion")
        opening = {"role": "assistant", "content": ""}
        return [self._chunk({"delta": opening})] if self._is_chat else []

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the chunks of a delta."""
        if not self._is_chat:
            return [self._chunk({"text": delta.content})]
        new: dict[str, Any] = {}
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.content:
            new["content"] = delta.content
        if delta.tool_calls:
            new["tool_calls"] = [{"index": i, **each} for i, each in enumerate(delta.tool_calls)]
        return [self._chunk({"delta": part}) for part in one_call_each(new)]

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the chunk with the finish reason, the usage if requested, and the end."""
        nothing: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        logprobs = _logprobs(self._call, answer)
        last = self._chunk(nothing, answer.finish_reason.value, logprobs)
        if not self._call.options.get("include_usage"):
            return [last, DONE]
        counted = data_event(self._base | {"choices": [], "usage": chat_usage([answer])})
        return [last, counted, DONE]

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the error as an event; the official client raises it."""
        return [data_event(openai_error(failure)), DONE]

    def _chunk(self, new: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, **new, "finish_reason": reason, "logprobs": logprobs}
        return data_event({**self._base, "choices": [choice]})


CHAT = WireProtocol(
    "chat/completions", "/chat/completions", CHAT_FIELDS, read_chat, write_choices, ChatEvents
)
TEXT = WireProtocol(
    "completions", "/completions", TEXT_FIELDS, read_text, write_choices, ChatEvents
)
