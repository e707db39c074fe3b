"""The message side of a rollout: a server renders the prompt, this side keeps track of the tokens.

`MessageSession.complete` turns a server's response into a `ModelResponse`. A prompt whose ids begin
with an earlier call's ids is said to extend it, after comparing them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rolltree.errors import ServerError
from rolltree.inference.buffer import IdPath
from rolltree.inference.dialect import TokenFields
from rolltree.inference.memory import CallMemory
from rolltree.inference.parse import (
    extract_finish_reason,
    extract_message,
    extract_tokens,
    extract_usage,
    extract_versions,
)
from rolltree.inference.wire import PromptReader
from rolltree.types import (
    ChatMessage,
    FinishReason,
    GenerateRequest,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class _Call:
    call_id: int
    path: IdPath | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response and what it cost: `raw` is what is kept in the record, `version` the policy's.

    `retries` and `wait_s` are those of the request.
    """

    response: object
    raw: object
    num_retries: int = 0
    wait_s: float = 0.0
    version: int = 0


class AnswerHead(Mapping[str, Any]):
    """What is kept of a server's response beside its message and tokens, read by key or attribute.

    >>> AnswerHead("chatcmpl-1", "tiny", None)["id"]
    'chatcmpl-1'
    """

    __slots__ = ("id", "model", "stop_reason")

    def __init__(self, id: str | None, model: str | None, stop_reason: str | int | None) -> None:
        self.id = id
        self.model = model
        self.stop_reason = stop_reason

    def __getitem__(self, key: str) -> Any:
        if key not in self.__slots__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__slots__)

    def __len__(self) -> int:
        return len(self.__slots__)

    def __repr__(self) -> str:
        return repr(dict(self))


async def ask_for_tokens(
    tokens: TokenFields, send: Callable[[bool], Awaitable[AnswerT]]
) -> AnswerT:
    """Send a request with the fields that ask for ids, or without them where they are rejected.

    `send(with_tokens)` makes the request. A rejection that the fields did not cause is raised.
    """
    asked = tokens.may_be_refused  # before sending: a call beside this one may settle it
    try:
        return await send(True)
    except ServerError as error:
        if error.status not in (400, 422) or not asked:
            raise
        first = error
    try:
        answer = await send(False)
    except ServerError:
        raise first from None
    tokens.refuse(f"it answered {first.status} when asked for them")
    return answer


def generated(request: GenerateRequest, tokens: TokenFields, answer: Answer) -> ModelResponse:
    """Return the `ModelResponse` that `answer` to `request` is; its ids are None if none came back.

    Raises:
        TokenError: the answer's token data contradicts itself.
    """
    response = answer.response
    message, text = extract_message(response, "completion")
    found = extract_tokens(response, "completion", request.prompt_ids)
    num_completion = extract_usage(response)[1]
    if found is not None:
        tokens.prove()
        num_completion = len(found.completion_ids)
    elif tokens.wanted:
        tokens.refuse("the answer holds none")
    usable = found is not None and tokens.usable_logprobs(request.sampling)
    return ModelResponse(
        message=message,
        text=text,
        finish_reason=extract_finish_reason(response),
        prompt_ids=found.prompt_ids if found else None,
        completion_ids=found.completion_ids if found else None,
        logprobs=found.logprobs if found and usable else None,
        versions=extract_versions(response, num_completion, answer.version) if found else None,
        temperature=request.sampling.temperature,
        raw=answer.raw,
        num_prompt_tokens=len(request.prompt_ids),
        num_completion_tokens=num_completion,
        wait_s=answer.wait_s,
        info={"num_retries": answer.num_retries} if answer.num_retries else {},
    )


class MessageSession:
    """The calls of one rollout, for a client that sends messages."""

    def __init__(self, tokens: TokenFields) -> None:
        self._tokens = tokens
        self._memory: CallMemory[_Call] = CallMemory()
        self.reader = PromptReader()

    def complete(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        message_type: MessageType,
        model: str | None,
        sampling: SamplingParams,
        answer: Answer,
    ) -> ModelResponse:
        """Return the `ModelResponse` that `answer` to `messages` is, and remember the call.

        Raises:
            BadResponse: the response has no answer in it.
            TokenError: its token data contradicts itself.
        """
        response = answer.response
        message, text = extract_message(response, message_type)
        found = extract_tokens(response, message_type) if self._tokens.wanted else None
        if found is not None:
            self._tokens.prove()
        elif self._tokens.wanted:
            self._tokens.refuse("the answer holds none")
        num_prompt, num_completion = extract_usage(response)
        prompt_ids = completion_ids = logprobs = versions = None
        if found is not None:
            prompt_ids, completion_ids = found.prompt_ids, found.completion_ids
            num_prompt, num_completion = len(prompt_ids), len(completion_ids)
            versions = extract_versions(response, num_completion, answer.version)
            if self._tokens.usable_logprobs(sampling):
                logprobs = found.logprobs
        history = [{"role": "text", "content": messages}] if isinstance(messages, str) else messages
        match = None if isinstance(messages, str) else self._memory.find(history, tools, model)
        info: dict[str, Any] = {"num_retries": answer.num_retries} if answer.num_retries else {}
        extends, path = None, None
        if prompt_ids is not None and completion_ids is not None:
            extends, path = _continue(match.call if match else None, prompt_ids)
            prompt_ids = path.ids
            path = path.extended(completion_ids)
            if match is not None and extends is None:
                info["rerendered"] = "the server's prompt does not begin with the earlier ids"
        made = ModelResponse(
            message=message,
            text=text,
            finish_reason=_finish_reason(
                extract_finish_reason(response), message, num_completion, sampling
            ),
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            versions=versions,
            temperature=sampling.temperature,
            extends=extends,
            raw=answer.raw,
            num_prompt_tokens=num_prompt,
            num_completion_tokens=num_completion,
            wait_s=answer.wait_s,
            info=info,
        )
        self._memory.add(history, message, _Call(made.call_id, path), tools, model)
        return made


def _continue(call: _Call | None, prompt_ids: IntArray) -> tuple[int | None, IdPath]:
    """Return the call that the prompt extends and the prompt as a path."""
    if call is not None and call.path is not None:
        size = len(call.path)
        if len(prompt_ids) >= size and np.array_equal(prompt_ids[:size], call.path.ids):
            return call.call_id, call.path.extended(prompt_ids[size:])
    return None, IdPath.of(prompt_ids)


def _finish_reason(
    reason: FinishReason, message: ChatMessage, num_tokens: int, sampling: SamplingParams
) -> FinishReason:
    """Mend what servers confuse: a stop with tool calls, a length stop reported as tool calls."""
    calls = message.get("tool_calls") or []
    if reason == FinishReason.STOP and calls:
        return FinishReason.TOOL_CALLS
    if reason == FinishReason.TOOL_CALLS:
        full = sampling.max_tokens is not None and num_tokens >= sampling.max_tokens
        if full and not (calls and all(_is_complete(call) for call in calls)):
            return FinishReason.LENGTH
        if not calls:
            return FinishReason.STOP
    return reason


def _is_complete(call: Mapping[str, Any]) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
