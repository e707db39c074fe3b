"""Between what a client returns and what environments read: one small response object.

It knows the shape of OpenAI's chat and text completions, as objects, dicts or mocks, and where
vLLM puts token ids. It knows nothing about HTTP. It leaves out parsing of tool calls from text,
which the inference room does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rolltree.errors import BadResponse
from rolltree.types import ChatMessage, FinishReason, Generation, MessageType

OVERLONG = "overlong-prompt"
"""The `id` of the response that stands for a prompt that does not fit (spec 1)."""

_call_ids = itertools.count(-1, -1)  # negative: never equal to a client's own call id


class ModelResponse:
    """One answer of the model, with OpenAI's attributes built when they are read.

    `response.choices[0].message.content`, `.tool_calls`, `.finish_reason` and `.usage` work as on
    a `ChatCompletion`; `generation` holds the tokens.
    """

    __slots__ = ("generation", "id", "message_type")

    def __init__(
        self, generation: Generation | None, message_type: MessageType, id: str = ""
    ) -> None:
        self.generation = generation
        self.message_type = message_type
        self.id = id

    @property
    def choices(self) -> list[SimpleNamespace]:
        """The one choice, or none for a prompt that did not fit."""
        if self.generation is None:
            return []
        message = self.generation.message
        calls = [
            SimpleNamespace(
                id=call.get("id"),
                type="function",
                function=SimpleNamespace(**call.get("function", {})),
            )
            for call in message.get("tool_calls") or ()
        ]
        spoken = SimpleNamespace(
            role="assistant",
            content=message.get("content"),
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
        )
        return [
            SimpleNamespace(
                index=0,
                message=spoken,
                text=self.generation.text,
                finish_reason=self.generation.finish_reason.value,
            )
        ]

    @property
    def usage(self) -> SimpleNamespace:
        """Token counts as OpenAI names them."""
        prompt = self.generation.num_prompt_tokens if self.generation else 0
        completion = self.generation.num_completion_tokens if self.generation else 0
        return SimpleNamespace(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
        )


def to_generation(response: Any, message_type: MessageType) -> Generation:
    """Return the generation of a `ModelResponse`, an OpenAI response, a dict or a mock.

    Token ids are taken when prompt ids, completion ids and logprobs are all there and are numbers;
    otherwise the generation has none.

    Raises:
        BadResponse: there is no choice with a message (chat) or a text (completion).
    """
    if isinstance(response, Generation):
        return response
    if isinstance(response, ModelResponse) and response.generation is not None:
        return response.generation
    choices = _get(response, "choices")
    choice = choices[0] if isinstance(choices, list | tuple) and choices else None
    if choice is None:
        raise BadResponse(
            f"a model response of type {type(response).__name__} has no choices, so there is no "
            "answer to record. Return an OpenAI response, a dict of its shape, or what "
            "Environment.get_model_response returns."
        )
    message = _message(choice, message_type)
    content = message.get("content")
    prompt_ids = _ids(_get(response, "prompt_token_ids")) or _ids(_get(choice, "prompt_token_ids"))
    completion_ids = _ids(_get(choice, "token_ids"))
    logprobs = _logprobs(_get(choice, "logprobs"), message_type)
    complete = prompt_ids is not None and completion_ids is not None and logprobs is not None
    usage = _get(response, "usage")
    return Generation(
        message=message,
        text=content if isinstance(content, str) else "",
        finish_reason=_finish_reason(_get(choice, "finish_reason")),
        prompt_ids=np.asarray(prompt_ids, np.int32) if complete else None,
        completion_ids=np.asarray(completion_ids, np.int32) if complete else None,
        logprobs=np.asarray(logprobs, np.float32) if complete else None,
        versions=None,
        temperature=1.0,
        call_id=next(_call_ids),
        response=response,
        num_prompt_tokens=_count(_get(usage, "prompt_tokens"), prompt_ids),
        num_completion_tokens=_count(_get(usage, "completion_tokens"), completion_ids),
    )


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _message(choice: Any, message_type: MessageType) -> ChatMessage:
    if message_type == "completion":
        text = _get(choice, "text")
        if not isinstance(text, str):
            raise BadResponse("a completion response has no text, so there is nothing to record.")
        return {"role": "assistant", "content": text}
    given = _get(choice, "message")
    content = _get(given, "content")
    message: ChatMessage = {
        "role": "assistant",
        "content": content if isinstance(content, str) else "",
    }
    reasoning = _get(given, "reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    calls = _get(given, "tool_calls")
    if isinstance(calls, list | tuple) and calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _tool_call(call: Any) -> dict[str, Any]:
    if isinstance(call, str):  # a call that a data set stored as JSON
        call = json.loads(call)
    function = _get(call, "function")
    return {
        "id": _get(call, "id"),
        "type": "function",
        "function": {"name": _get(function, "name"), "arguments": _get(function, "arguments")},
    }


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list | tuple | np.ndarray):
        return None
    ids = [int(item) for item in value if isinstance(item, int | np.integer)]
    return ids if ids and len(ids) == len(value) else None


def _logprobs(value: Any, message_type: MessageType) -> list[float] | None:
    if message_type == "completion":
        numbers = _get(value, "token_logprobs")
    else:
        content = _get(value, "content")
        if not isinstance(content, list | tuple):
            return None
        numbers = [_get(item, "logprob") for item in content]
    if not isinstance(numbers, list | tuple) or not all(
        isinstance(n, int | float) for n in numbers
    ):
        return None
    return [float(number) for number in numbers]


def _finish_reason(value: Any) -> FinishReason:
    try:
        return FinishReason(value)
    except ValueError:
        return FinishReason.STOP


def _count(value: Any, ids: list[int] | None) -> int:
    if isinstance(value, int):
        return value
    return len(ids) if ids is not None else 0
