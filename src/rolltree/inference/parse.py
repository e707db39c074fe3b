"""The parser of model responses: makes a record of what a server, an SDK or a test returns.

A response may be a `ModelResponse`, a struct of `rolltree.inference.wire`, an object of the openai
package, a dict or a mock. Token ids are read from vLLM's fields: `prompt_token_ids` (of the
response for chat, of the choice for text), `token_ids` of the choice, and token texts of the form
`"token_id:504"`. Arrays that contradict each other or the request raise `TokenError`, missing ones
become None. An incomplete answer raises `BadResponse`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rolltree.inference.call import Answer, ModelCall, record_of
from rolltree.inference.routed_experts import decode_routing
from rolltree.inference.wire import Response, TokenLogprob, call_texts, read, sent_calls, sent_text
from rolltree.tokens.buffers import UnusableLogprobs, UnusableRouting, as_ids, checked_logprobs
from rolltree.values.errors import BadResponse, TokenError
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    TrajectoryStepTokens,
)

_PREFIX = "token_id:"
_UNSET = object()
_MAX_COUNT = 2**31 - 1  # of tokens and of versions, which are stored as int32
_COMPLETE = [reason for reason in FinishReason if reason != FinishReason.ABORT]
_FINISH_REASONS = {reason.value: reason for reason in _COMPLETE} | {
    "function_call": FinishReason.TOOL_CALLS,
    "tool_use": FinishReason.TOOL_CALLS,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    # What a server that reads calls or watches its answers says of what the model wrote.
    "malformed_function_call": FinishReason.STOP,
    **dict.fromkeys(("safety", "recitation", "refusal"), FinishReason.CONTENT_FILTER),
    # vLLM cuts an answer that repeats itself, if it is asked to.
    "repetition": FinishReason.LENGTH,
}


TokenArrays: TypeAlias = "tuple[IntArray, IntArray, FloatArray | None]"
"""Prompt ids int32 `[_P]`, sampled ids int32 `[_C]` and logprobs float32 `[_C]` or None."""


def extract_tokens(
    response: object,
    message_type: MessageType,
    sent_ids: IntArray | None = None,
    *,
    max_tokens: int | None = None,
    check: bool = True,
) -> TokenArrays | None:
    """Return the tokens of a response, or None when the server gave no ids.

    A completion without ids is empty if its text is, as from servers that cut the end token.

    `sent_ids` (int32 `[_P]`) is the prompt if it was sent as ids, `max_tokens` the request's
    limit. Without `check` the logprobs are returned unchecked: the token tree checks its input.

    Raises:
        UnusableLogprobs: a logprob is NaN, a placeholder, or above 0.
        TokenError: the numbers of logprobs and tokens differ, the server used a different prompt
            from the one it was sent, the prompt is empty, or the completion has more than
            `max_tokens`.
    """
    choice = first_choice(response)
    logprobs = read(choice, "logprobs")
    completion = _ids(choice, "token_ids")
    # vLLM may write ids as the token texts of its logprobs, instead of `token_ids` or in addition
    # to it. In that case both have to agree.
    if completion is None or names_ids(logprobs):
        texts = sampled_entries(logprobs, message_type, "token", "tokens") or []
        if completion is None or not len(completion):
            completion = spelled_ids(texts)
        elif not _spell(texts, completion):
            spelled = spelled_ids(texts)
            if spelled is not None and not np.array_equal(completion, spelled):
                raise TokenError(
                    "the server's sampled ids are not those that its logprobs name, so it is not "
                    "known what the model sampled. Is there a proxy that mixes up answers?"
                )
    prompt = _ids(response, "prompt_token_ids")
    if prompt is None:
        prompt = _ids(choice, "prompt_token_ids")
    if prompt is None:
        # A server that reports no prompt ids used the ones that it was sent.
        prompt = sent_ids
    if prompt is None or completion is None or (not len(completion) and _says(choice)):
        return None
    if sent_ids is not None and not np.array_equal(prompt, sent_ids):
        raise TokenError(
            f"the server was sent {len(sent_ids)} prompt ids but used {len(prompt)} different "
            "ones, so it did not sample from the recorded prompt. Does it add a token at the start?"
        )
    if not len(prompt):
        raise TokenError(
            "the server's answer has no prompt ids (an empty list), so what the model was given is "
            "not known. Check the server."
        )
    check_num_sampled(len(completion), max_tokens)
    values = sampled_entries(logprobs, message_type, "logprob", "token_logprobs")
    if not len(completion):
        return prompt, completion, np.zeros(0, np.float32)
    if values is None:
        return prompt, completion, None
    if not check:
        # None becomes NaN, for which `CallTree` drops them all.
        return prompt, completion, np.array(values, np.float32)
    return prompt, completion, checked_logprobs(values, len(completion))


def check_num_sampled(num_tokens: int, max_tokens: int | None) -> None:
    """Reject a completion with more than `max_tokens`.

    Raises:
        TokenError: the completion cannot have this many tokens.
    """
    if max_tokens is not None and num_tokens > max_tokens:
        raise TokenError(
            f"the server answered with {num_tokens} sampled ids to a request with max_tokens = "
            f"{max_tokens}, so they are not the answer to it. Is there a proxy that mixes up "
            "answers?"
        )


def extract_message(response: object, message_type: MessageType) -> tuple[ChatMessage, str]:
    """Return the assistant message and its text.

    Raises:
        BadResponse: there is no message, or no text.
    """
    choice = first_choice(response)
    if message_type == "completion":
        text = read(choice, "text")
        if not isinstance(text, str):
            raise BadResponse(
                "the response's first choice has no text, so there is no answer. Is this the URL "
                "of a text completions endpoint?"
            )
        return {"role": "assistant", "content": sent_text(text)}, text
    source = read(choice, "message")
    if source is None:
        raise BadResponse(
            "the response's first choice has no message, so there is no answer. Is this the URL "
            "of a chat completions endpoint?"
        )
    message: ChatMessage = {"role": "assistant", "content": sent_text(read(source, "content"))}
    # The name changed between versions of vLLM.
    for name in ("reasoning_content", "reasoning"):
        if reasoning := sent_text(read(source, name)):
            message["reasoning_content"] = reasoning
            break
    if calls := sent_calls(read(source, "tool_calls")):
        message["tool_calls"] = [_tool_call(call, index) for index, call in enumerate(calls)]
    return message, str(message["content"])


def extract_finish_reason(response: object) -> FinishReason:
    """Return the reason why the model stopped.

    Raises:
        BadResponse: the finish reason is null or unknown, or the server broke off.
    """
    return _finish_reason(first_choice(response))


def _finish_reason(choice: object) -> FinishReason:
    # Null means that the server broke off; an object without the field is a mock.
    reason = read(choice, "finish_reason", otherwise=_UNSET)
    if reason is None or isinstance(reason, str | int | float | list | dict):
        return finish_reason_named(reason)
    return FinishReason.STOP  # a dict or a mock without the field


def finish_reason_named(reason: object) -> FinishReason:
    """Return the `FinishReason` for a server's `reason`.

    Raises:
        BadResponse: the reason is unknown, or it is "abort" (the server broke off).
    """
    found = _FINISH_REASONS.get(reason.lower()) if isinstance(reason, str) else None
    if found is None:
        raise BadResponse(
            f"the server stopped with finish_reason {str(reason)[:80]!r}, so the answer may be "
            "incomplete. Was the server stopped, or the request cancelled? See the server's log."
        )
    return found


def extract_usage(response: object) -> tuple[int, int]:
    """Return the server's counts of prompt and completion tokens (0 for a missing count).

    Raises:
        BadResponse: a count is negative or above 2^31.
    """
    usage = read(response, "usage")
    counts = (read(usage, "prompt_tokens"), read(usage, "completion_tokens"))
    # A mock's attributes are mocks, not integers.
    first, second = (count if isinstance(count, int) else 0 for count in counts)
    if not (0 <= first <= _MAX_COUNT and 0 <= second <= _MAX_COUNT):
        raise BadResponse(
            f"the server's usage counts {str(first)[:20]} prompt tokens and {str(second)[:20]} "
            "completion tokens, which is impossible; budgets would be wrong. Check the server."
        )
    return first, second


def parse_response(
    response: object, message_type: MessageType, *, temperature: float = 1.0, version: int = 0
) -> ModelResponse:
    """Return the record of a call that was answered with `response`.

    `response` may be a record already (it is returned as it is), an object of the openai package,
    or a dict or a mock with the same fields. `temperature` and `version` are those of the request;
    `version` is used for tokens without a policy version in the response.

    Raises:
        BadResponse: the response has no answer.
        TokenError: its token data contradicts itself.
    """
    if isinstance(response, ModelResponse):
        return response
    answer = read_answer(response, message_type, version)
    answer.raw = response
    sampling = SamplingParams(temperature=temperature)
    return record_of(answer, ModelCall("", sampling))


def read_answer(
    response: object,
    message_type: MessageType,
    version: int = 0,
    sent_ids: IntArray | None = None,
    *,
    with_ids: bool = True,
    max_tokens: int | None = None,
    check: bool = True,
) -> Answer:
    """Return a response's `Answer`; raises as `parse_response`.

    Without `with_ids` the response's token ids are not read. The other arguments are those of
    `read_tokens`.
    """
    message, text = extract_message(response, message_type)
    answer = begin_answer(response)
    answer.message, answer.text = message, text
    num_prompt, num_completion = extract_usage(response)
    answer.num_prompt_tokens, answer.num_completion_tokens = num_prompt, num_completion
    if not with_ids or not read_tokens(
        answer, response, message_type, version, sent_ids, max_tokens=max_tokens, check=check
    ):
        return answer
    # Only a real server's usage is compared with its ids: a mock's may be anything.
    is_a_servers = isinstance(response, Response) or _is_openai(response)
    # 0 means that the server does not count.
    if is_a_servers and num_prompt not in (0, answer.num_prompt_tokens):
        raise TokenError(
            f"the server's usage counts {num_prompt} prompt tokens, but it reports "
            f"{answer.num_prompt_tokens} prompt ids, so these are not what the model was given. "
            "Check the server."
        )
    return answer


def begin_answer(response: object) -> Answer:
    """Return an `Answer` with a response's finish reason, id, model and `info["stop_reason"]`.

    Raises:
        BadResponse: as in `extract_finish_reason`.
    """
    name, model = read(response, "id"), read(response, "model")
    choice = first_choice(response)
    stop = read(choice, "stop_reason")
    return Answer(
        _finish_reason(choice),
        id=sent_text(name),
        # Interned, since thousands of answers name the same model.
        model=sys.intern(sent_text(model)) if type(model) is str else None,
        info={"stop_reason": stop} if isinstance(stop, str | int) else {},
    )


def read_tokens(
    answer: Answer,
    response: object,
    message_type: MessageType,
    version: int,
    sent_ids: IntArray | None = None,
    *,
    max_tokens: int | None = None,
    check: bool = True,
) -> bool:
    """Store a response's tokens in `answer`; return False if the server gave no ids.

    `version` is the policy version of tokens for which the response reports none. The other
    arguments and the errors are those of `extract_tokens`, but logprobs that cannot be used are
    dropped.
    """
    extract = partial(extract_tokens, response, message_type, sent_ids, max_tokens=max_tokens)
    unusable = None
    try:
        tokens = extract(check=check)
    except UnusableLogprobs as error:
        tokens, unusable = extract(check=False), error
    if tokens is None:
        return False
    answer.prompt_ids, ids, answer.logprobs = tokens
    answer.completion_ids = ids
    if unusable is not None:
        answer.drop_logprobs(unusable)
    num_prompt, num_sampled = len(answer.prompt_ids), len(ids)
    answer.num_prompt_tokens, answer.num_completion_tokens = num_prompt, num_sampled
    choice = first_choice(response)
    answer.versions = extract_versions(choice, num_sampled, version)
    routing = read(choice, "routed_experts")
    try:
        answer.routed_experts = decode_routing(routing, num_prompt + num_sampled)
    except UnusableRouting as error:
        answer.drop_logprobs(error)
    return True


def extract_versions(choice: object, num_tokens: int, otherwise: int) -> IntArray:
    """Return the version of each sampled token of a response's choice, int32 `[_C]`.

    Tokens get `otherwise` if the server reports no spans for them, or a label that is not a number
    (vLLM labels its first weights "default").

    Raises:
        TokenError: the spans do not cover every token exactly once, or a version is above 2^31.
    """
    # New weights may arrive in the middle of an answer.
    spans = read(choice, "weight_versions")
    versions = np.full(num_tokens, otherwise, np.int32)
    if not isinstance(spans, list | tuple):
        return versions
    at = 0
    for span in spans:
        start, end, label = (read(span, name) for name in ("start", "end", "version"))
        # Every token belongs to exactly one span.
        if start != at or not isinstance(end, int) or not at <= end <= num_tokens:
            raise TokenError(
                f"the server's spans of weight versions jump from token {at} to {start}:{end} of "
                f"{num_tokens}, so staleness would be counted wrongly. Check the server."
            )
        versions[start:end] = version_named(label, otherwise)
        at = end
    if at != num_tokens:
        raise TokenError(
            f"the server's spans of weight versions end at token {at} of {num_tokens}, so "
            "staleness would be counted wrongly. Check the server."
        )
    return versions


def version_named(label: object, otherwise: int) -> int:
    """Return the policy version that `label` names; `otherwise` if it is not a number.

    Raises:
        TokenError: the version is above 2^31.
    """
    text = str(label) if isinstance(label, str | int) else ""
    if not text.isdecimal():
        return otherwise
    # Longer texts are not converted, since a million digits would take long.
    number = int(text) if len(text) < 11 else _MAX_COUNT + 1
    if number > _MAX_COUNT:
        raise TokenError(
            f"the server's weight version {text[:40]!r} is above {_MAX_COUNT}, so it is "
            "not that of a training step. Check the server."
        )
    return number


async def parse_response_messages(response: object, message_type: MessageType) -> Messages:
    """Return a response's answer: a list with one message, or a string for text completions."""
    record = parse_response(response, message_type)
    return record.text if message_type == "completion" else [record.message]


async def parse_response_tokens(
    response: object, message_type: MessageType
) -> TrajectoryStepTokens | None:
    """Return a response's tokens as lists, or None when ids or logprobs are missing.

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


def first_choice(response: object) -> object:
    """Return the response's first choice.

    Raises:
        BadResponse: there are no choices, or the index of the first one is not 0.
    """
    if type(response) is Response and response.choices and response.choices[0].index == 0:
        return response.choices[0]  # as most are; every answer is asked for it five times
    choices = read(response, "choices")
    if not isinstance(choices, list | tuple) or not choices:
        raise BadResponse(
            f"the server's answer ({type(response).__name__}) holds no choices, so there is no "
            "completion. Is the base URL that of an OpenAI-compatible API (it often ends in /v1)?"
        )
    index = read(choices[0], "index")
    # A mock's index is neither an integer nor a string.
    if isinstance(index, int | str) and index != 0:
        raise BadResponse(
            f"the server was asked for one answer, but its first choice has the index "
            f"{str(index)[:40]}, so it may be another request's. Is there a proxy that mixes up "
            "answers?"
        )
    return choices[0]


def _says(choice: object) -> bool:
    """Whether a choice has a text or a message that is not empty."""
    message = read(choice, "message")
    parts = [read(message, name) for name in ("content", "reasoning_content", "reasoning")]
    parts += [read(message, "tool_calls"), read(choice, "text")]
    return any(isinstance(part, str | list | tuple | dict) and len(part) for part in parts)


def names_ids(logprobs: object) -> bool:
    """Whether the first token's text is its id, as on vLLM's token-in endpoint."""
    tokens, content = read(logprobs, "tokens"), read(logprobs, "content")
    first = tokens[0] if isinstance(tokens, list) and tokens else None
    if isinstance(content, list) and content:
        first = read(content[0], "token")
    return isinstance(first, str) and first.startswith(_PREFIX)


def sampled_entries(
    logprobs: object, message_type: MessageType, field: str, column: str
) -> list[Any] | None:
    """Return one value per sampled token: a field of `content` (chat) or a column (text)."""
    if message_type == "completion":
        values = read(logprobs, column)
        return list(values) if isinstance(values, list | tuple) else None
    content = read(logprobs, "content")
    if not isinstance(content, list | tuple):
        return None
    if content and type(content[0]) is TokenLogprob:  # decoded here, so all entries have this type
        return list(map(attrgetter(field), content))
    return [read(entry, field) for entry in content]


def _ids(holder: object, name: str) -> IntArray | None:
    value = read(holder, name)
    if not isinstance(value, list | tuple | np.ndarray):
        return None
    # The fast path for answers of our own client. What it cannot convert goes to `as_ids`, whose
    # errors name the field.
    if type(value) is list and isinstance(holder, msgspec.Struct):  # the decoder checked for ints
        with suppress(OverflowError):
            ids = np.array(value, np.int32)
            if not len(ids) or np.minimum.reduce(ids) >= 0:
                return ids
    return as_ids(value, name)


def spelled_ids(texts: list[Any]) -> IntArray | None:
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


def _spell(texts: list[Any], ids: IntArray) -> bool:
    """Whether the texts are the ids as `"token_id:504"`."""
    # Numbers as JSON take a third of the time of `str` for each, and this runs for every answer.
    numbers = msgspec.json.encode(ids.tolist())[1:-1].decode()
    try:
        return "".join(texts) == _PREFIX + numbers.replace(",", _PREFIX)
    except TypeError:  # one of the texts is not a string
        return False


def _is_openai(response: object) -> bool:
    return type(response).__module__.partition(".")[0] == "openai"


def _tool_call(call: object, index: int) -> dict[str, Any]:
    identifier, name, arguments = call_texts(call)
    return {
        # Tool results refer to a call by its id.
        "id": identifier or f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
