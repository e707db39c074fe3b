"""The message side of a rollout: a server renders the prompt, this side keeps track of the tokens.

`MessageSession.complete` turns a server's response into a `ModelResponse`. A prompt whose ids begin
with an earlier call's ids is said to extend it, after comparing them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from rolltree.errors import ServerError
from rolltree.inference.message_index import MessageIndex
from rolltree.inference.parse import response_fields
from rolltree.inference.request_fields import TokenFields
from rolltree.inference.session import CallTree
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
from rolltree.untrusted import read_json

AnswerT = TypeVar("AnswerT")


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


def generated(
    request: GenerateRequest, tokens: TokenFields, response: object, **fields: Any
) -> ModelResponse:
    """Return the record of a token-in request; its ids are None if none came back.

    `fields` are as `MessageSession.complete`'s.

    Raises:
        TokenError: the answer's token data contradicts itself.
    """
    found = _read(response, "completion", tokens, request.sampling, request.prompt_ids, **fields)
    found["num_prompt_tokens"] = len(request.prompt_ids)
    return ModelResponse(**found)


class MessageSession:
    """The calls of one rollout, for a client that sends messages."""

    def __init__(self, tokens: TokenFields) -> None:
        self._tokens = tokens
        self._calls = CallTree()
        self._index = MessageIndex()
        self.reader = PromptReader()

    def complete(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        message_type: MessageType,
        model: str | None,
        sampling: SamplingParams,
        response: object,
        **fields: Any,
    ) -> ModelResponse:
        """Return the record of `response` to `messages`; later prompts can continue it.

        `fields`: `version`, the policy's for tokens of which the server says none, `num_retries`,
        `wait_s` and `raw`, the response object to keep.

        Raises:
            BadResponse: the response has no answer in it.
            TokenError: its token data contradicts itself.
        """
        found = _read(response, message_type, self._tokens, sampling, None, check=False, **fields)
        message = found["message"]
        found["finish_reason"] = _finish_reason(
            found["finish_reason"], message, found["num_completion_tokens"], sampling
        )
        prompt_ids = found["prompt_ids"]
        if prompt_ids is None:
            return ModelResponse(**found)
        if isinstance(messages, str):
            return self._calls.insert(ModelResponse(**found))
        extends, matched = self._extended(messages, tools, model, prompt_ids)
        if matched and extends is None:
            why = "the server's prompt does not begin with the earlier ids"
            found["info"] = {**found["info"], "rerendered": why}
        made = self._calls.insert(ModelResponse(**found, extends=extends))
        self._index.add(messages, message, made.call_id, tools, model)
        return made

    def remember(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        response: ModelResponse,
    ) -> ModelResponse:
        """Take in a call of this model that was made elsewhere; later prompts can continue it."""
        if response.prompt_ids is None or response.completion_ids is None:
            return response
        if isinstance(messages, str):
            return self._calls.insert(replace(response, extends=None))
        extends, _ = self._extended(messages, tools, model, response.prompt_ids)
        made = self._calls.insert(replace(response, extends=extends))
        self._index.add(messages, made.message, made.call_id, tools, model)
        return made

    def _extended(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        prompt_ids: IntArray,
    ) -> tuple[int | None, bool]:
        """Return the call that a prompt extends, id for id, and whether messages match one."""
        match = self._index.find(messages, tools, model)
        if match is None:
            return None, False
        earlier = self._calls.path(match.call)
        is_exact = np.array_equal(prompt_ids[: len(earlier)], earlier)
        return (match.call if is_exact else None), True


def _read(
    response: object,
    message_type: MessageType,
    tokens: TokenFields,
    sampling: SamplingParams,
    sent_ids: IntArray | None,
    *,
    check: bool = True,
    version: int = 0,
    num_retries: int = 0,
    wait_s: float = 0.0,
    raw: object = None,
) -> dict[str, Any]:
    """Return the fields of the record of `response`, and note what it says about token ids."""
    found = response_fields(
        response,
        message_type,
        version,
        sent_ids,
        with_ids=tokens.wanted,
        max_tokens=sampling.max_tokens,
        check=check,
    )
    if found["completion_ids"] is not None:
        ids = (found["prompt_ids"], found["completion_ids"])
        tokens.prove(*(array for array in ids if array is not None))
        if not tokens.usable_logprobs(sampling):
            found["logprobs"] = None
    elif tokens.wanted:
        tokens.refuse("the answer holds none")
    if num_retries:
        found["info"] = {**found["info"], "num_retries": num_retries}
    return {**found, "temperature": sampling.temperature, "wait_s": wait_s, "raw": raw}


def _finish_reason(
    reason: FinishReason, message: ChatMessage, num_tokens: int, sampling: SamplingParams
) -> FinishReason:
    """Fix finish reasons that servers get wrong: STOP with tool calls, TOOL_CALLS without."""
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
        return isinstance(read_json(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
