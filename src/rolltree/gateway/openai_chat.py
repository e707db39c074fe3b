"""OpenAI's `chat/completions` and `completions`, with vLLM's fields for the ids of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from reprlib import repr as shown
from typing import Any, TypeAlias

import numpy as np

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerDelta, AnswerHead
from rolltree.gateway.failures import Failure, openai_error
from rolltree.gateway.field_table import fields_at
from rolltree.gateway.fields import (
    flag,
    includes_usage,
    model_in,
    notes_on_form,
    num_choices,
    read_fields,
    tools_in,
)
from rolltree.gateway.protocol import Answering, WireProtocol, data_event
from rolltree.gateway.tools import OfferedTools, chat_call, chat_tools
from rolltree.inference.deltas import one_call_each, outgoing_message
from rolltree.inference.engine import TopLogprobs
from rolltree.inference.routed_experts import encode_routing
from rolltree.values.types import (
    FloatArray,
    IntArray,
    ModelResponse,
    SamplingParams,
)
from rolltree.web.guard import RequestError

Decode: TypeAlias = Callable[[list[int]], str]
DONE = b"data: [DONE]\n\n"
TEXT_OBJECT = "text_completion"
# OpenAI's default for text completions.
_TEXT_MAX_TOKENS = 16
# The most completions of one request: prompts times `n`.
_MAX_COMPLETIONS = 1024
_ONE_OF_SAMPLED = "only logprobs of sampled tokens are known"
CHAT_FIELDS = fields_at("chat/completions")
TEXT_FIELDS = fields_at("completions")
# What both have, and vLLM's requests with ids.
COMPLETION_FIELDS = {name: TEXT_FIELDS[name] for name in TEXT_FIELDS.keys() & CHAT_FIELDS.keys()}


# -- requests ------------------------------------------------------------------------------------


def read_chat(body: Mapping[str, Any], session: Answering) -> AgentCall:
    """Return the call that a body of `chat/completions` asks for."""
    given, asked, notes = read_fields(body, CHAT_FIELDS)
    offered, asked = tools_and_choice(given, asked)
    if given.get("logprobs", False) not in (True, False):
        raise RequestError(f"{_ONE_OF_SAMPLED}: logprobs is true or false.", param="logprobs")
    options = answer_options(given)
    asked = with_top_logprobs(asked, given.get("top_logprobs", 0), session)
    if asked.extra.get("top_logprobs") and not given.get("logprobs"):
        raise RequestError("top_logprobs is for logprobs: true. Send both.", param="top_logprobs")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise RequestError(
            "an answer either continues the final message or begins a turn. Leave "
            "continue_final_message or add_generation_prompt out.",
            param="add_generation_prompt",
        )
    if offered.custom:
        options["options"]["custom_tools"] = offered.custom
    return AgentCall(
        session.messages(given.get("messages")),
        asked,
        tools=tuple(offered.tools),
        notes={**notes, **offered.notes, **notes_on_form(given)},
        **options,
    )


def read_text(body: Mapping[str, Any], session: Answering) -> AgentCall:
    """Return the call that a body of `completions` asks for."""
    given, asked, notes = read_fields(body, TEXT_FIELDS)
    # vLLM and OpenAI: so many, with that of the sampled token. One asks for no others here.
    number = given.get("logprobs", 0)
    if number not in (0, 1):
        asked = with_top_logprobs(asked, number, session, "logprobs")
    # Null asks for no limit; a missing field, for OpenAI's default.
    if not {"max_tokens", "max_completion_tokens"} & body.keys():
        asked = replace(asked, max_tokens=_TEXT_MAX_TOKENS)
    options, prompt = answer_options(given), given.get("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts: list[object] = prompt if isinstance(prompt, list) and several else [prompt]
    if len(prompts) * options["n"] > _MAX_COMPLETIONS:
        raise RequestError(
            f"{len(prompts)} prompts with n = {options['n']} are more than {_MAX_COMPLETIONS} "
            "completions. Send several requests.",
            param="prompt",
        )
    first, *others = [
        each if isinstance(each, str) else ids_in(each, session, "prompt") for each in prompts
    ]
    return AgentCall(
        first,
        asked,
        message_type="completion",
        more_prompts=tuple(others),
        notes={**notes, **notes_on_form(given)},
        **options,
    )


def with_top_logprobs(
    asked: SamplingParams, number: object, session: Answering, name: str = "top_logprobs"
) -> SamplingParams:
    """Return settings that ask for the `number` likeliest tokens at each place.

    Raises:
        RequestError: it is not a number from 0 to 20, or the model's server gives none.
    """
    if type(number) is not int or not 0 <= number <= 20:
        raise RequestError(f"{name} = {shown(number)} is not a number from 0 to 20.", param=name)
    if not number:
        return asked
    if not session.gives_top_logprobs:
        raise RequestError(
            f"{name} = {number} cannot be obeyed: of a model behind a server {_ONE_OF_SAMPLED}; "
            "the embedded engine gives others, too. Leave it out.",
            param=name,
        )
    return replace(asked, extra={**asked.extra, "top_logprobs": number})


def ids_in(value: object, session: Answering, where: str) -> IntArray:
    """Return a prompt of token ids, int32 `[_P]`.

    Raises:
        PromptTooLong: it cannot fit the context.
        RequestError: it is not a list of ids.
    """
    if isinstance(value, list):
        session.check_size(len(value), "ids")
    # Not `isinstance`: JSON's true would be id 1.
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise RequestError(f"{where} is neither a string nor a list of token ids.", param=where)
    return np.array(value, np.int32)


def answer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that say how many answers are wanted, and in which form."""
    logprobs = given.get("logprobs", False)
    wanted = {
        "include_usage": includes_usage(given),
        "logprobs": logprobs is True or type(logprobs) is int,
        "token_ids": flag(given, "return_token_ids"),
        "tokens_as_ids": flag(given, "return_tokens_as_token_ids"),
    }
    return {
        "model": model_in(given),
        "stream": flag(given, "stream"),
        "n": num_choices(given),
        "options": {name: True for name, is_wanted in wanted.items() if is_wanted},
    }


def tools_and_choice(
    given: Mapping[str, Any], asked: SamplingParams
) -> tuple[OfferedTools, SamplingParams]:
    """Return the tools that the prompt offers, and the settings with a forced choice, if any.

    A choice other than "auto" and "none" is left to the model's server to obey or refuse.

    Raises:
        RequestError: `tools` is not a list of tools; it names the first that is not one.
    """
    offered, choice = chat_tools(tools_in(given)), given.get("tool_choice", "auto")
    match choice:
        case {"type": "custom", "custom": {"name": name}}:
            choice = {"type": "function", "function": {"name": name}}
    if choice not in ("auto", "none"):
        asked = replace(asked, extra={**asked.extra, "tool_choice": choice})
    if choice == "none":
        offered.tools = []
    return offered, asked


# -- answers -------------------------------------------------------------------------------------


class CompletionWriter:
    """Writes the answers to one request for completions, as one body or as chunks.

    Ids and logprobs have an entry per sampled token, also for the end token. They are in the chunk
    of their token if the model reports tokens one by one, and else in the last chunk.
    """

    def __init__(self, call: AgentCall) -> None:
        self._call, self._is_chat = call, call.message_type == "chat"
        self._custom = call.options.get("custom_tools", ())
        self._wants_ids = call.options.get("token_ids", False)
        self._wants_logprobs = call.options.get("logprobs", False)
        # A chat has one prompt, so its ids are not repeated in every choice.
        self._choices_have_prompts = not self._is_chat
        self._base: dict[str, Any] = {}
        # How many ids of each answer were sent, whose prompts were, and the finished answers.
        self._num_sent: dict[int, int] = {}
        self._spans: dict[int, TokenSpans] = {}
        self._prompted: set[int] = set()
        self._ended: dict[int, AgentAnswer] = {}

    def whole(self, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
        """Return the response body for all answers."""
        choices, prompts = [], list[dict[str, Any]]()
        for index, answer in enumerate(answers):
            choice = {"index": index, "logprobs": None, **self._content(answer)}
            choice |= self._ending(answer) | self._tokens_after(0, replace(answer, index=index))
            prompts.append(self._prompt(answer.response.prompt_ids))
            choices.append(choice | prompts[-1] if self._choices_have_prompts else choice)
        body = self._head(answers[0].head) | {"choices": choices}
        body["usage"] = completion_usage(self._call, answers)
        return body if self._choices_have_prompts else body | prompts[0]

    def begin(self, head: AnswerHead) -> Iterable[bytes]:
        """Return nothing: the first chunk of a choice has its role."""
        self._base = self._head(head)
        return ()

    def delta(self, delta: AnswerDelta) -> Iterable[bytes]:
        """Return the chunks of a delta."""
        tokens, more = delta.tokens, dict[str, Any]()
        if tokens is None:
            return self._chunks(delta, more, None)
        if self._wants_ids or self._wants_logprobs:
            more = self._tokens(delta.index, tokens.ids, tokens.logprobs, tokens.decode, tokens.top)
        chunks = self._chunks(delta, more, tokens.prompt_ids)
        self._num_sent[delta.index] += len(tokens.ids)
        return chunks

    def end(self, answer: AgentAnswer) -> Iterable[bytes]:
        """Return the chunk with the finish reason; after the last answer the usage, and the end."""
        more = self._tokens_after(self._num_sent.get(answer.index, 0), answer)
        chunks = self._chunks(answer.rest, more | self._ending(answer), answer.response.prompt_ids)
        self._ended[answer.index] = answer
        if len(self._ended) < self._call.num_answers:
            return chunks
        if self._call.options.get("include_usage"):
            usage = completion_usage(self._call, [self._ended[i] for i in sorted(self._ended)])
            chunks.append(data_event(self._base | {"choices": [], "usage": usage}))
        return [*chunks, DONE]

    def fail(self, failure: Failure) -> Iterable[bytes]:
        """Return the error as an event; the official client raises it."""
        return [data_event(openai_error(failure)), DONE]

    def _head(self, head: AnswerHead) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", TEXT_OBJECT)
        if self._is_chat and self._call.stream:
            kind += ".chunk"
        return {
            "id": f"{prefix}-{head.id}",
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }

    def _content(self, answer: AgentAnswer) -> dict[str, Any]:
        if self._is_chat:
            message = outgoing_message(answer.message)
            if self._custom and message.get("tool_calls"):
                calls = [chat_call(call, self._custom) for call in message["tool_calls"]]
                message["tool_calls"] = calls
            return {"message": {**message, "refusal": None}}
        return {"text": answer.text}

    def _parts(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        if not self._is_chat:
            return [{"text": delta.content}]
        new: dict[str, Any] = {}
        if delta.index not in self._num_sent:
            new = {"role": "assistant", "content": ""}
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if delta.content:
            new["content"] = delta.content
        if delta.tool_calls:
            calls = [chat_call(call, self._custom) for call in delta.tool_calls]
            new["tool_calls"] = [{"index": i, **each} for i, each in enumerate(calls)]
        return [{"delta": part} for part in one_call_each(new)]

    def _chunks(
        self, delta: AnswerDelta, more: Mapping[str, Any], prompt_ids: IntArray | None
    ) -> list[bytes]:
        """Return the chunks of a delta; the last one has `more` fields."""
        *parts, last = self._parts(delta)
        empty: dict[str, Any] = {"index": delta.index, "logprobs": None, "finish_reason": None}
        if self._wants_ids:
            empty["token_ids"] = []
        chunks = [{**self._base, "choices": [{**empty, **part}]} for part in parts]
        chunks.append({**self._base, "choices": [{**empty, **last, **more}]})
        self._num_sent.setdefault(delta.index, 0)
        if prompt_ids is not None and delta.index not in self._prompted:
            self._prompted.add(delta.index)
            head = chunks[0]
            holder = head["choices"][0] if self._choices_have_prompts else head
            holder |= self._prompt(prompt_ids)
        return [data_event(chunk) for chunk in chunks]

    def _prompt(self, ids: IntArray | None) -> dict[str, Any]:
        if not self._wants_ids:
            return {}
        return {"prompt_token_ids": None if ids is None else ids.tolist()}

    def _ending(self, answer: AgentAnswer) -> dict[str, Any]:
        asked, stop = self._call.sampling, answer.stop
        # The session's own stop strings are not shown to the agent.
        is_asked = stop in asked.stop or stop in asked.stop_token_ids
        reason = answer.finish_reason.value
        ending = {"finish_reason": reason, "stop_reason": stop if is_asked else None}
        return ending | version_fields(answer.response) if self._wants_ids else ending

    def _tokens_after(self, num_sent: int, answer: AgentAnswer) -> dict[str, Any]:
        """Return the fields of an answer's tokens after those that were sent."""
        if not (self._wants_ids or self._wants_logprobs):
            return {}
        ids, values = answer.response.completion_ids, answer.response.logprobs
        if ids is None or values is None or answer.decode is None:
            raise RequestError(
                "the model's server gave no ids and logprobs of the sampled tokens, so they cannot "
                "be returned.",
                param="logprobs" if self._wants_logprobs else "return_token_ids",
            )
        rest = slice(num_sent, None)
        return self._tokens(answer.index, ids[rest], values[rest], answer.decode, answer.top[rest])

    def _tokens(
        self,
        index: int,
        ids: IntArray,
        values: FloatArray,
        decode: Decode,
        top: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        listed = ids.tolist()
        fields: dict[str, Any] = {"token_ids": listed} if self._wants_ids else {}
        if not self._wants_logprobs:
            return fields
        if self._call.options.get("tokens_as_ids"):

            def spell(token: int) -> str:
                return f"token_id:{token}"
        else:

            def spell(token: int) -> str:
                return decode([token])

        entries = list(zip_longest(listed, values.tolist(), top[: len(listed)], fillvalue=()))
        if self._is_chat:
            return fields | {"logprobs": chat_logprobs(entries, spell)}
        spans = self._spans.setdefault(index, TokenSpans(decode))
        offsets = [spans.add(token)[0] for token in listed]
        return fields | {"logprobs": _text_logprobs(entries, spell) | {"text_offset": offsets}}


def write_completion(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the response body for the answers to a chat, or for the completions of a text."""
    return CompletionWriter(call).whole(answers)


def completion_usage(call: AgentCall, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """Return the counts of prompt and sampled tokens; a prompt of several answers counts once."""
    # Later answers find in the cache what the first one computed.
    firsts = answers[:: call.n]
    num_prompt = sum(answer.num_prompt_tokens for answer in firsts)
    num_sampled = sum(answer.num_completion_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.num_cached_tokens for answer in firsts)
        },
    }


def version_fields(response: ModelResponse) -> dict[str, Any]:
    """Return vLLM's fields for the versions and the routed experts of tokens, if recorded."""
    versions, experts = response.versions, response.routed_experts
    fields: dict[str, Any] = (
        {} if versions is None else {"weight_versions": version_spans(versions)}
    )
    return fields if experts is None else fields | {"routed_experts": encode_routing(experts)}


def version_spans(versions: IntArray) -> list[dict[str, Any]]:
    """Return policy versions int32 `[_C]` as vLLM's spans: tokens `[start, end)` had `version`.

    >>> version_spans(np.array([3, 3, 4], np.int32))
    [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 3}]
    """
    if not len(versions):
        return []
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    return [
        {"version": str(int(versions[start])), "start": start, "end": end}
        for start, end in zip(starts, ends, strict=True)
    ]


_MOST_IN_CHARACTER = 8
Entry: TypeAlias = tuple[Any, ...]
"""A sampled token, its logprob, and the likeliest tokens at its place."""


def _text_logprobs(entries: Sequence[Entry], spell: Callable[[int], str]) -> dict[str, Any]:
    """Return the logprobs of a text completion's tokens in OpenAI's format."""
    top = [
        {**{spell(each): logprob for each, logprob in likeliest}, spell(token): value}
        for token, value, likeliest in entries
        if likeliest
    ]
    return {
        "tokens": [spell(token) for token, *_ in entries],
        "token_logprobs": [value for _, value, _ in entries],
        "top_logprobs": top or None,
    }


class TokenSpans:
    """The characters of each token in the text of all, which are added one by one."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # Tokens are decoded after those before them: some tokenizers leave out a first space.
        self._window: list[int] = []
        self._num_read = self._size = 0

    def add(self, token: int) -> tuple[int, int]:
        """Return where the text of the next token begins and ends."""
        self._window.append(token)
        text, begin = self._decode(self._window), self._size
        # The tokens of one character share it. A text that never becomes one is not awaited.
        if text.endswith("\ufffd") and len(self._window) - self._num_read < _MOST_IN_CHARACTER:
            return begin, begin + 1
        self._size += len(text) - len(self._decode(self._window[: self._num_read]))
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return max(begin, self._size - len(self._decode([token]))), self._size


def chat_logprobs(entries: Sequence[Entry], spell: Callable[[int], str]) -> dict[str, Any]:
    """Return the logprobs of a chat completion's tokens in OpenAI's format."""

    def written(token: int, logprob: float) -> dict[str, Any]:
        text = spell(token)
        # The text of a token that is a part of a character is a replacement character, whose
        # bytes are not the token's.
        spelled = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelled}

    content = [
        {**written(token, value), "top_logprobs": [written(*each) for each in likeliest]}
        for token, value, likeliest in entries
    ]
    return {"content": content, "refusal": None}


CHAT = WireProtocol(
    "chat/completions",
    "/chat/completions",
    CHAT_FIELDS,
    read_chat,
    write_completion,
    CompletionWriter,
    echoes_id=True,
)
TEXT = WireProtocol(
    "completions",
    "/completions",
    TEXT_FIELDS,
    read_text,
    write_completion,
    CompletionWriter,
    echoes_id=True,
)
