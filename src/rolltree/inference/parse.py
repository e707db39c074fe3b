"""The one parser of model responses: from whatever a server, SDK or test gives to a record.

A response may be a `ModelResponse`, a struct of `rolltree.inference.wire`, an object of the openai
package, a dict or a mock. Token ids are read from vLLM's fields: `prompt_token_ids` (of the
response for chat, of the choice for text), `token_ids` of the choice, and `"token_id:504"` as token
text. Arrays that contradict each other raise `TokenError`; arrays that are missing give None.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rolltree.errors import BadResponse, TokenError
from rolltree.inference.wire import TokenLogprob
from rolltree.tokens.buffers import as_ids, checked_logprobs
from rolltree.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    TrajectoryStepTokens,
)

_PREFIX = "token_id:"
_FINISH_REASONS = {reason.value: reason for reason in FinishReason} | {
    "function_call": FinishReason.TOOL_CALLS,
    "eos_token": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
}


TokenArrays: TypeAlias = tuple[IntArray, IntArray, FloatArray | None]
"""Prompt ids int32 `[_P]`, sampled ids int32 `[_C]` and logprobs float32 `[_C]`, if there are."""


def extract_tokens(
    response: object,
    message_type: MessageType,
    sent_ids: IntArray | None = None,
    *,
    check: bool = True,
) -> TokenArrays | None:
    """Return the tokens of a response, or None when the server gave no ids.

    `sent_ids` (int32 `[_P]`) is the prompt where it was sent as ids. Without `check` the logprobs
    are as they came: the token tree checks what enters it.

    Raises:
        TokenError: there are not as many logprobs as tokens, one is NaN or above 0, or the server
            used another prompt than it was sent.
    """
    choice = first_choice(response)
    logprobs = read(choice, "logprobs")
    completion = _ids(choice, "token_ids")
    if completion is None:
        completion = _spelled_ids(_entries(logprobs, message_type, "token", "tokens") or [])
    prompt = _ids(response, "prompt_token_ids")
    if prompt is None:
        prompt = _ids(choice, "prompt_token_ids")
    if prompt is None:
        prompt = sent_ids
    if prompt is None or completion is None:
        return None
    if sent_ids is not None and not np.array_equal(prompt, sent_ids):
        raise TokenError(
            f"the server was sent {len(sent_ids)} prompt ids and used {len(prompt)} others, so it "
            "did not sample from the recorded prompt. Does it add a token at the start?"
        )
    values = _entries(logprobs, message_type, "logprob", "token_logprobs")
    if values is None:
        return prompt, completion, None
    if not check:
        return prompt, completion, np.array(values, np.float32)
    return prompt, completion, checked_logprobs(values, len(completion))


def extract_message(response: object, message_type: MessageType) -> tuple[ChatMessage, str]:
    """Return the assistant message and its text."""
    choice = first_choice(response)
    if message_type == "completion":
        text = read(choice, "text")
        if not isinstance(text, str):
            raise BadResponse(
                "the response's first choice has no text, so there is no answer. Is this URL that "
                "of a text completions endpoint?"
            )
        return {"role": "assistant", "content": text}, text
    source = read(choice, "message")
    if source is None:
        raise BadResponse(
            "the response's first choice has no message, so there is no answer. Is this URL that "
            "of a chat completions endpoint?"
        )
    message: ChatMessage = {"role": "assistant", "content": _text(read(source, "content"))}
    for name in ("reasoning_content", "reasoning"):
        reasoning = read(source, name)
        if isinstance(reasoning, str) and reasoning:
            message["reasoning_content"] = reasoning
            break
    calls = read(source, "tool_calls")
    if isinstance(calls, list | tuple) and calls:
        message["tool_calls"] = [_tool_call(call, index) for index, call in enumerate(calls)]
    return message, str(message["content"])


def extract_finish_reason(response: object) -> FinishReason:
    """Return why the model stopped.

    Raises:
        BadResponse: the server gives a reason that no API describes.
    """
    reason = read(first_choice(response), "finish_reason")
    return finish_reason_named(reason) if isinstance(reason, str) else FinishReason.STOP


def finish_reason_named(reason: str) -> FinishReason:
    """Return the reason that a server calls `reason`.

    Raises:
        BadResponse: no API describes it.
    """
    if reason not in _FINISH_REASONS:
        raise BadResponse(
            f"the server stopped with finish_reason {reason!r}, so the answer may be incomplete. "
            "See the server's log."
        )
    return _FINISH_REASONS[reason]


def extract_usage(response: object) -> tuple[int, int]:
    """Return how many prompt and completion tokens the server counted (0, 0 when it did not)."""
    usage = read(response, "usage")
    counts = (read(usage, "prompt_tokens"), read(usage, "completion_tokens"))
    first, second = (count if isinstance(count, int) else 0 for count in counts)
    return first, second


def parse_response(
    response: object, message_type: MessageType, *, temperature: float = 1.0, version: int = 0
) -> ModelResponse:
    """Return the record of a call that was answered with `response`.

    `response` may be a record already (it is returned as it is), an object of the openai package,
    a dict of its shape, or a mock of one. `temperature` and `version` are those of the request;
    `version` is used for tokens of which the response says no policy version.

    Raises:
        BadResponse: there is no answer in it.
        TokenError: its token data contradicts itself.
    """
    if isinstance(response, ModelResponse):
        return response
    found = response_fields(response, message_type, version)
    return ModelResponse(**found, temperature=temperature, raw=response)


def response_fields(
    response: object,
    message_type: MessageType,
    version: int = 0,
    sent_ids: IntArray | None = None,
    *,
    with_ids: bool = True,
    check: bool = True,
) -> dict[str, Any]:
    """Return what a response says, as fields of `ModelResponse`; raises as `parse_response`.

    `sent_ids` (int32 `[_P]`) is the prompt where it was sent as ids. Without `with_ids` what the
    response says about ids is left alone; `check` is `extract_tokens`'s.
    """
    message, text = extract_message(response, message_type)
    tokens = extract_tokens(response, message_type, sent_ids, check=check) if with_ids else None
    num_prompt, num_completion = extract_usage(response)
    prompt_ids, completion_ids, logprobs = tokens or (None, None, None)
    versions = None
    if prompt_ids is not None and completion_ids is not None:
        num_prompt, num_completion = len(prompt_ids), len(completion_ids)
        versions = extract_versions(response, num_completion, version)
    return {
        "message": message,
        "text": text,
        "finish_reason": extract_finish_reason(response),
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "versions": versions,
        "num_prompt_tokens": num_prompt,
        "num_completion_tokens": num_completion,
        **response_head(response),
    }


def response_head(response: object) -> dict[str, Any]:
    """Return a response's `id`, `model` and `info` (`stop_reason`: the stop that was met)."""
    name, model = read(response, "id"), read(response, "model")
    stop = read(first_choice(response), "stop_reason")
    return {
        "id": name if isinstance(name, str) else "",
        "model": sys.intern(model) if type(model) is str else None,
        "info": {"stop_reason": stop} if isinstance(stop, str | int) else {},
    }


def extract_versions(response: object, num_tokens: int, otherwise: int) -> IntArray:
    """Return the version of each sampled token, int32 `[_C]`.

    `otherwise` is what tokens get where the server reports no spans, or a label that is no number
    (vLLM's first weights are called "default").

    Raises:
        TokenError: the spans do not cover every token exactly once.
    """
    spans = read(first_choice(response), "weight_versions")
    versions = np.full(num_tokens, otherwise, np.int32)
    if not isinstance(spans, list | tuple):
        return versions
    at = 0
    for span in spans:
        start, end, label = (read(span, name) for name in ("start", "end", "version"))
        if start != at or not isinstance(end, int) or not at <= end <= num_tokens:
            raise TokenError(
                f"the server's spans of weight versions jump from token {at} to {start}:{end} of "
                f"{num_tokens}, so staleness would be counted wrongly. Check the server."
            )
        if isinstance(label, str) and label.isdecimal():
            versions[start:end] = int(label)
        at = end
    if at != num_tokens:
        raise TokenError(
            f"the server's spans of weight versions end at token {at} of {num_tokens}, so "
            "staleness would be counted wrongly. Check the server."
        )
    return versions


async def parse_response_messages(response: object, message_type: MessageType) -> Messages:
    """Return a response's answer: a list with one message, or a string for text completions."""
    record = parse_response(response, message_type)
    return record.text if message_type == "completion" else [record.message]


async def parse_response_tokens(
    response: object, message_type: MessageType
) -> TrajectoryStepTokens | None:
    """Return a response's tokens as lists (spec 1), or None when ids or logprobs are missing.

    Raises:
        TokenError: the token data contradicts itself.
    """
    found = parse_response(response, message_type)
    if found.prompt_ids is None or found.completion_ids is None or found.logprobs is None:
        return None
    return TrajectoryStepTokens(
        prompt_ids=found.prompt_ids.tolist(),
        prompt_mask=[0] * len(found.prompt_ids),
        completion_ids=found.completion_ids.tolist(),
        completion_mask=[1] * len(found.completion_ids),
        completion_logprobs=found.logprobs.tolist(),
    )


def read(value: object, name: str) -> Any:
    """Return `value[name]` of a mapping or `value.name` of an object, or None."""
    if isinstance(value, msgspec.Struct):
        return getattr(value, name, None)
    if isinstance(value, dict | Mapping):
        return value.get(name)
    return getattr(value, name, None)


def first_choice(response: object) -> object:
    """Return the response's first choice.

    Raises:
        BadResponse: there is none.
    """
    choices = read(response, "choices")
    if not isinstance(choices, list | tuple) or not choices:
        raise BadResponse(
            f"the server's answer ({type(response).__name__}) holds no choices, so there is no "
            "completion. Is the base URL that of an OpenAI-compatible API (it often ends in /v1)?"
        )
    return choices[0]


def _entries(
    logprobs: object, message_type: MessageType, field: str, column: str
) -> list[Any] | None:
    """Return one value per sampled token: a field of `content` (chat) or a column (text)."""
    if message_type == "completion":
        values = read(logprobs, column)
        return list(values) if isinstance(values, list | tuple) else None
    content = read(logprobs, "content")
    if not isinstance(content, list | tuple):
        return None
    if content and type(content[0]) is TokenLogprob:  # ours: nothing to find out per entry
        return list(map(attrgetter(field), content))
    return [read(entry, field) for entry in content]


def _ids(holder: object, name: str) -> IntArray | None:
    value = read(holder, name)
    if not isinstance(value, list | tuple | np.ndarray):
        return None
    if type(value) is list and isinstance(holder, msgspec.Struct):  # integers, the decoder says
        with suppress(OverflowError):
            ids = np.array(value, np.int32)
            if not len(ids) or np.minimum.reduce(ids) >= 0:
                return ids
    return as_ids(value, name)


def _spelled_ids(texts: list[Any]) -> IntArray | None:
    """Return ids given as token texts `"token_id:504"`, or None."""
    if not texts or not all(isinstance(text, str) and text.startswith(_PREFIX) for text in texts):
        return None
    try:
        ids = [int(text.removeprefix(_PREFIX)) for text in texts]
    except ValueError as error:
        raise TokenError(
            f"the server's token texts start with {_PREFIX!r} and hold no id ({error}), so the "
            "sampled ids are not known. Check the server."
        ) from error
    return as_ids(ids, "token_id")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _tool_call(call: object, index: int) -> dict[str, Any]:
    if isinstance(call, str):  # a call that a data set stored as JSON
        call = json.loads(call)
    function = read(call, "function")
    identifier = read(call, "id")
    return {
        "id": identifier if isinstance(identifier, str) else f"call_{index}",
        "type": "function",
        "function": {
            "name": _text(read(function, "name")),
            "arguments": _text(read(function, "arguments")),
        },
    }
