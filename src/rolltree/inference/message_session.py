"""Sessions for clients that send messages: the server renders prompts, the session tracks tokens.

`MessageSession.respond` makes a call: `read_outcome` parses the server's response, and
`MessageSession.complete` turns it into the record. A prompt extends an earlier call only if its ids
begin with that call's ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from rolltree._helpers.untrusted import read_json
from rolltree.inference.call import Answer, CallTree, ModelCall, record_of
from rolltree.inference.message_index import MessageIndex
from rolltree.inference.parse import read_answer
from rolltree.inference.request_fields import outgoing
from rolltree.inference.session import check_message_type
from rolltree.inference.token_fields import TokenFields
from rolltree.inference.wire import PromptReader
from rolltree.tokens.buffers import same_ids
from rolltree.values.errors import ServerError
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)

if TYPE_CHECKING:
    from rolltree.inference.retry import Outcome

AnswerT = TypeVar("AnswerT")
Ask: TypeAlias = Callable[
    [Mapping[str, Any], MessageType, "ModelCall", "MessageSession"], Awaitable["Outcome[Any]"]
]
"""Sends one request, with its messages or its prompt in the first argument."""


async def send_with_token_fields(
    tokens: TokenFields, send: Callable[[bool], Awaitable[AnswerT]]
) -> AnswerT:
    """Send a request with the fields that request ids, or without them if they are rejected.

    `send(with_tokens)` makes the request. A rejection that the fields did not cause is raised.
    """
    undecided = tokens.may_be_refused  # read first: a concurrent call may settle it meanwhile
    try:
        return await send(True)
    except ServerError as error:
        if error.status not in (400, 422) or not undecided:
            raise
        first = error
    try:
        # If that is refused, too, the fields were not the cause.
        answer = await send(False)
    except ServerError:
        raise first from None
    tokens.refuse(f"it answered {first.status} when they were requested")
    return answer


def read_outcome(
    outcome: Outcome[Any], call: ModelCall, tokens: TokenFields, version: int
) -> Answer:
    """Parse a server's answer to messages, a string or ids; record whether it returns ids.

    `version` is the policy version of tokens for which the server reports none.

    Raises:
        BadResponse: the response contains no answer.
        TokenError: its token data contradicts itself.
    """
    sent_ids = call.prompt if isinstance(call.prompt, np.ndarray) else None
    answer = read_answer(
        outcome.value,
        call.message_type if sent_ids is None else "completion",
        version,
        sent_ids,
        with_ids=tokens.wanted,
        max_tokens=call.sampling.max_tokens,
        check=sent_ids is not None,  # the token tree checks what a session puts into it
    )
    if sent_ids is not None:
        answer.num_prompt_tokens = len(sent_ids)
    # `prove` checks them: ids outside the vocabulary are another model's.
    if answer.completion_ids is not None and answer.prompt_ids is not None:
        tokens.prove(answer.prompt_ids, answer.completion_ids)
        if not tokens.usable_logprobs(call.sampling):
            answer.logprobs = None
    elif tokens.wanted:
        tokens.lack("its answer has none")
    answer.add_outcome(outcome)
    return answer


class MessageSession:
    """The calls of one rollout, for a client that sends messages."""

    def __init__(self, tokens: TokenFields) -> None:
        self._tokens = tokens
        self._calls = CallTree()
        self._index = MessageIndex()
        self.reader = PromptReader()

    async def respond(
        self, call: ModelCall, ask: Ask, version: int, *, keeps_raw: bool = False
    ) -> ModelResponse:
        """Send messages, a string or ids, and read the tokens of the answer if it has them.

        Tokens for which the server reports no policy version get `version`. `keeps_raw`: the record
        keeps the response object.
        """
        prompt, notes = call.prompt, dict[str, str]()
        if isinstance(prompt, np.ndarray):
            outcome = await ask({"prompt": prompt.tolist()}, "completion", call, self)
        else:
            check_message_type(prompt, call.message_type)
            content: dict[str, Any] = {"prompt": prompt}
            if not isinstance(prompt, str):
                prompt = list(prompt)  # the caller may append to its list meanwhile
                call = call.with_prompt(prompt)
                content = {"messages": outgoing(prompt)}
                # Some servers reject an empty list.
                if call.tools:
                    content["tools"] = list(call.tools)
            outcome, notes = await self._ask_in_any_form(content, call, ask)
        answer = read_outcome(outcome, call, self._tokens, version)
        if notes:
            answer.info = {**answer.info, "notes": notes}
        if keeps_raw:
            answer.raw = outcome.value
        # No later prompt continues a prompt of ids.
        is_kept = not isinstance(prompt, np.ndarray)
        return self.complete(call, answer) if is_kept else record_of(answer, call)

    async def _ask_in_any_form(
        self, content: Mapping[str, Any], call: ModelCall, ask: Ask
    ) -> tuple[Outcome[Any], dict[str, str]]:
        """Send a request; if the server refuses what a model wrote earlier, in another form.

        With the outcome it returns notes on that form.
        """
        try:
            return await ask(content, call.message_type, call, self), {}
        except ServerError as error:
            # The statuses with which servers pass on that a template refused the messages.
            if error.status not in (400, 422):
                raise
            first = error
        from rolltree.inference.other_forms import other_forms, reminders

        messages = content.get("messages") or ()
        for form in other_forms(messages):
            try:
                sent = {**content, "messages": form}
                return await ask(sent, call.message_type, call, self), reminders(messages, form)
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
        raise first

    def complete(self, call: ModelCall, answer: Answer) -> ModelResponse:
        """Return the record of an answer to messages; later prompts can extend it.

        Raises:
            TokenError: its token data contradicts itself.
        """
        _fix_finish_reason(answer, call.sampling)
        # Nothing can extend a call whose ids are not known.
        if answer.prompt_ids is None:
            return record_of(answer, call)
        messages = call.prompt
        if not isinstance(messages, list):
            return self._calls.record(answer, call)
        extends, matched = self._extended(messages, call.tools, call.model, answer.prompt_ids)
        # The messages continue a call but the ids do not, so the sample breaks here.
        if matched and extends is None:
            why = "the server's prompt does not begin with the earlier ids"
            answer.info = {**answer.info, "rerendered": why}
        made = self._calls.record(answer, call, extends)
        self._index.add(messages, made.message, made.call_id, call.tools, call.model)
        return made

    def remember(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        response: ModelResponse,
    ) -> ModelResponse:
        """Add a call of this model that was made elsewhere; later prompts can extend it."""
        if response.prompt_ids is None or response.completion_ids is None:
            return response
        if isinstance(messages, str):
            return self._calls.adopt(response, None)
        extends, _ = self._extended(messages, tools, model, response.prompt_ids)
        made = self._calls.adopt(response, extends)
        self._index.add(messages, made.message, made.call_id, tools, model)
        return made

    def _extended(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        model: str | None,
        prompt_ids: IntArray,
    ) -> tuple[int | None, bool]:
        """Return the call whose ids begin the prompt, and whether its messages match a call."""
        match = self._index.find(messages, tools, model)
        if match is None:
            return None, False
        earlier = self._calls.path(match.call)
        # Never by text: only equal ids are one path.
        is_exact = same_ids(prompt_ids[: len(earlier)], earlier)
        return (match.call if is_exact else None), True


def _fix_finish_reason(answer: Answer, sampling: SamplingParams) -> None:
    """Fix finish reasons that servers get wrong: STOP with tool calls, TOOL_CALLS without."""
    assert answer.message is not None
    calls = answer.message.get("tool_calls") or []
    if answer.finish_reason == FinishReason.STOP and calls:
        answer.finish_reason = FinishReason.TOOL_CALLS
    elif answer.finish_reason == FinishReason.TOOL_CALLS:
        num_tokens = answer.num_completion_tokens
        full = sampling.max_tokens is not None and num_tokens >= sampling.max_tokens
        # Some servers report TOOL_CALLS although the last call's arguments are cut off.
        if full and not (calls and all(map(_is_complete, calls))):
            answer.finish_reason = FinishReason.LENGTH
        elif not calls:
            answer.finish_reason = FinishReason.STOP


def _is_complete(call: Mapping[str, Any]) -> bool:
    try:
        return isinstance(read_json(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
