"""Streaming: chunks of a completion as server-sent events, while it is sampled.

An answer is sampled in slices of a few tokens, each of which continues the ids before it; thanks to
the engine's prefix cache a slice costs its own tokens. A slice starts its random numbers anew, so a
sampled answer with a seed, which must be the one that the seed gives without streaming, and an
answer with stop strings, which may lie across two slices, come in one piece. First slices are
queued when the stream is made, so what cannot be answered is an error of the request. It knows the
chunks of OpenAI's API and vLLM's fields in them. It knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rolltree.inference.server import answers
from rolltree.inference.server.deltas import MessageDeltas, TextDeltas, settled_text
from rolltree.inference.server.errors import error_body
from rolltree.inference.server.fields import Asked
from rolltree.inference.server.served import ServedModel, choice_seeds
from rolltree.types import FinishReason, GenerateRequest, IntArray, SamplingParams, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.local.requests import LocalOutput

DONE = b"data: [DONE]\n\n"
SLICE_TOKENS = 8


@dataclass(slots=True)
class _Choice:
    """One choice: how much of it was given out, and what it is when it is finished."""

    prompt: IntArray
    deltas: MessageDeltas | TextDeltas
    num_given: int = 0
    output: LocalOutput | None = None


@dataclass(frozen=True, slots=True)
class _News:
    """What is known of a choice: all of its tokens so far, or why there will be no more."""

    index: int
    output: LocalOutput | None
    is_last: bool
    error: Exception | None = None


class AnswerStream:
    """The chunks of one chat completion (one prompt) or text completion.

    Raises:
        ModelError: as the engine's `submit`.
    """

    def __init__(
        self,
        served: ServedModel,
        asked: Asked,
        prompts: Sequence[IntArray],
        *,
        chat: bool,
        tools: Sequence[ToolSchema] | None = None,
    ) -> None:
        self._served, self._asked, self._chat, self._tools = served, asked, chat, tools
        self._prompts = prompts
        self._head = answers.head(served, chat=chat, stream=True)
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._choices: list[_Choice] = []
        self._first: list[Future[LocalOutput]] = []
        self._tasks: list[asyncio.Task[None]] = []
        try:
            for prompt in prompts:
                for seed in choice_seeds(asked.sampling.seed, asked.n):
                    deltas = MessageDeltas(served, tools) if chat else TextDeltas()
                    self._choices.append(_Choice(prompt, deltas))
                    self._first.append(self._submit(prompt, 0, seed))
        except BaseException:
            self._cancel()
            raise

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks as server-sent events, the last one being `[DONE]`."""
        self._tasks = [
            asyncio.create_task(self._follow(index, future))
            for index, future in enumerate(self._first)
        ]
        try:
            while any(choice.output is None for choice in self._choices):
                news = await self._news.get()
                if news.error is not None:
                    raise news.error
                yield _event(self._chunk(news))
            if self._asked.include_usage:
                outputs = [choice.output for choice in self._choices if choice.output is not None]
                counted = answers.usage(self._prompts, outputs)
                yield _event(self._head | {"choices": [], "usage": counted})
        except Exception as error:  # noqa: BLE001  (told to the client: the status is long sent)
            yield _event(error_body(error)[1])
        finally:
            self._cancel()
        yield DONE

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for future in self._first:
            future.cancel()

    def _submit(self, ids: IntArray, num_sampled: int, seed: int | None) -> Future[LocalOutput]:
        sampling = replace(self._asked.sampling, seed=seed)
        if in_slices(sampling):
            left = SLICE_TOKENS
            if sampling.max_tokens is not None:
                left = min(left, sampling.max_tokens - num_sampled)
            sampling = replace(sampling, max_tokens=left)
        return self._served.engine.submit(GenerateRequest(ids, sampling))

    async def _follow(self, index: int, future: Future[LocalOutput]) -> None:
        """Sample one choice to its end and tell of every slice."""
        prompt, limit = self._choices[index].prompt, self._asked.sampling.max_tokens
        output: LocalOutput | None = None
        is_last = False
        try:
            while not is_last:
                part = await asyncio.wrap_future(future)
                output = part if output is None else joined(output, part)
                num_sampled = len(output.completion_ids)
                is_last = (
                    part.finish_reason != FinishReason.LENGTH
                    or not in_slices(self._asked.sampling)
                    or (limit is not None and num_sampled >= limit)
                    or len(prompt) + num_sampled >= self._served.engine.max_context
                )
                self._news.put_nowait(_News(index, output, is_last))
                if not is_last:
                    ids = np.concatenate([prompt, output.completion_ids])
                    future = self._submit(ids, num_sampled, None)
        except Exception as error:  # noqa: BLE001  (told to the client)
            self._news.put_nowait(_News(index, None, True, error))

    def _chunk(self, news: _News) -> dict[str, Any]:
        choice, output = self._choices[news.index], news.output
        assert output is not None
        part: dict[str, Any] = {"index": news.index, "logprobs": None, "finish_reason": None}
        if news.is_last:
            choice.output = output
            part["finish_reason"] = output.finish_reason.value
        if isinstance(choice.deltas, TextDeltas):
            text = self._served.text(output) if news.is_last else self._settled(output)
            part["text"] = choice.deltas.next(text)
        elif news.is_last:
            message, reason = self._served.message(output, self._tools)
            part |= {"delta": choice.deltas.last(message), "finish_reason": reason.value}
        else:
            part["delta"] = choice.deltas.next(self._settled(output))
        chunk = {**self._head, "choices": [part]}
        if self._asked.token_ids and not choice.num_given:
            (chunk if self._chat else part)["prompt_token_ids"] = choice.prompt.tolist()
        new = slice(choice.num_given, None)
        choice.num_given = len(output.completion_ids)
        ids, values = output.completion_ids[new], self._served.logprobs_of(output)[new]
        if self._asked.logprobs:
            make = answers.chat_logprobs if self._chat else answers.text_logprobs
            part["logprobs"] = make(self._served, self._asked, ids, values)
        if self._asked.token_ids:
            part["token_ids"] = ids.tolist()
        if news.is_last:
            part |= answers.stop_fields(self._asked, output)
        return chunk

    def _settled(self, output: LocalOutput) -> str:
        ids = output.completion_ids.tolist()
        return settled_text(self._served.renderer, ids, self._asked.sampling)


def in_slices(sampling: SamplingParams) -> bool:
    """Whether slices give what one piece would."""
    return not sampling.stop and (sampling.seed is None or sampling.temperature == 0)


def joined(first: LocalOutput, then: LocalOutput) -> LocalOutput:
    """Return two slices of an answer as one."""
    return replace(
        then,
        completion_ids=np.concatenate([first.completion_ids, then.completion_ids]),
        logprobs=np.concatenate([first.logprobs, then.logprobs]),
        raw_logprobs=np.concatenate([first.raw_logprobs, then.raw_logprobs]),
        versions=np.concatenate([first.versions, then.versions]),
        num_prompt_tokens=first.num_prompt_tokens,
        num_cached_tokens=first.num_cached_tokens,
        wait_s=first.wait_s + then.wait_s,
    )


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
