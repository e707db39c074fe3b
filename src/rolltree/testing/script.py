"""The script of a scripted model: a list of answers or a function of the prompt, with tokens.

It turns an answer's text into the ids and logprobs that an engine with this tokenizer would have
reported, and obeys `max_tokens`, `stop` and `stop_token_ids`. Nothing is sampled, so temperature,
top_p, top_k and seed have no effect.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rolltree.inference.chat import ChatRenderer
from rolltree.values.errors import BadResponse, UnsupportedSetting
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    IntArray,
    Messages,
    SamplingParams,
)


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One answer. If None, `ids` (with the end token) and `logprobs` are made from the text."""

    text: str
    finish_reason: FinishReason = FinishReason.STOP
    ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None


AnswerLike: TypeAlias = str | ChatMessage | ScriptedAnswer
"""An answer's text, an assistant message (tool calls are spelled in Hermes style), or both."""
ScriptSource: TypeAlias = (
    Sequence[AnswerLike] | Callable[[Messages], AnswerLike | Awaitable[AnswerLike]]
)
"""Answers in the order of the calls, or a function from the prompt to its answer."""


class Script:
    """A cursor over a list of answers, or a function that is called each time."""

    def __init__(self, source: ScriptSource) -> None:
        self.source = [source] if isinstance(source, str) else source
        self.num_answers = 0

    async def next(self, prompt: Messages) -> ScriptedAnswer:
        """Return the next answer.

        Raises:
            BadResponse: all answers of the list have been returned.
        """
        # Taken before anything is awaited, so that concurrent calls get different answers.
        number, self.num_answers = self.num_answers, self.num_answers + 1
        if callable(self.source):
            given = self.source(prompt)
            return as_answer(await given if inspect.isawaitable(given) else given)
        if number >= len(self.source):
            raise BadResponse(
                f"the script has {len(self.source)} answers and was asked for one more. Add "
                "answers, or pass a function that answers any prompt."
            )
        return as_answer(self.source[number])


@dataclass(frozen=True, slots=True)
class ScriptedTokens:
    """An answer as an engine reports it: `ids` int32 `[_C]`, `logprobs` float32 `[_C]`.

    `stop` is the stop string that ended it, which `text` does not have.
    """

    ids: IntArray
    logprobs: FloatArray
    finish_reason: FinishReason
    text: str
    stop: str | None = None


def as_answer(answer: AnswerLike) -> ScriptedAnswer:
    """Return `answer` as a `ScriptedAnswer`."""
    if isinstance(answer, ScriptedAnswer):
        return answer
    if isinstance(answer, str):
        return ScriptedAnswer(answer)
    calls = [f"<tool_call>{_spelled(call)}</tool_call>" for call in answer.get("tool_calls") or ()]
    return ScriptedAnswer((answer.get("content") or "") + "".join(calls))


def scripted_logprobs(ids: Sequence[int] | IntArray) -> FloatArray:
    """Return made-up logprobs that tell tokens apart, float32 `[_C]`, in [-1, -1/16].

    >>> scripted_logprobs([0, 15, 16]).tolist()
    [-0.0625, -1.0, -0.0625]
    """
    return -((np.asarray(ids, np.int64) % 16 + 1) / 16).astype(np.float32)


def tokens_of(
    answer: ScriptedAnswer, renderer: ChatRenderer, sampling: SamplingParams
) -> ScriptedTokens:
    """Return the answer's tokens, cut where `sampling` ends them.

    Raises:
        UnsupportedSetting: `max_tokens` is below 1.
    """
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise UnsupportedSetting(
            f"max_tokens = {sampling.max_tokens} leaves no token to generate. Ask for at least 1."
        )
    given = answer.ids
    if given is None:
        given = renderer.encode_text(answer.text, start=False).tolist()
        if answer.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS):
            # An engine reports the sampled end token; an answer that was cut has none.
            given = [*given, renderer.end_ids[0]]
    ids, reason, num_stop = _ended(list(given), answer.finish_reason, renderer, sampling)
    text = renderer.decode_answer(ids[: len(ids) - num_stop] if num_stop == 1 else ids)
    end, stop = min(
        ((text.find(each), each) for each in sampling.stop if each in text),
        default=(len(text), None),
    )
    logprobs = answer.logprobs
    values = scripted_logprobs(ids) if logprobs is None else np.array(logprobs, np.float32)
    # A wrong number of logprobs is kept, for tests of it.
    if logprobs is None or len(values) == len(given):
        values = values[: len(ids)]
    return ScriptedTokens(np.array(ids, np.int32), values, reason, text[:end], stop)


def _ended(
    ids: list[int], reason: FinishReason, renderer: ChatRenderer, sampling: SamplingParams
) -> tuple[list[int], FinishReason, int]:
    """Cut `ids` where sampling would end; the last value is 1 after a stop token id, else 0."""
    # Most answers have none, and long ones are not decoded again after every token.
    whole = renderer.decode(ids) if sampling.stop else ""
    has_stop = any(stop in whole for stop in sampling.stop)
    for index, token in enumerate(ids):
        # A stop string may span tokens, so all are decoded each time.
        text = renderer.decode(ids[: index + 1]) if has_stop else ""
        if token in sampling.stop_token_ids and token not in renderer.end_ids:
            return ids[: index + 1], FinishReason.STOP, 1
        if any(stop in text for stop in sampling.stop):
            return ids[: index + 1], FinishReason.STOP, 0
        if index + 1 == sampling.max_tokens and index + 1 < len(ids):
            return ids[: index + 1], FinishReason.LENGTH, 0
    return ids, reason, 0


def _spelled(call: ChatMessage) -> str:
    """Return a call as JSON, or as a model spells it whose arguments are not JSON."""
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    given = "{}" if arguments is None else arguments
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {given}}}'
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
