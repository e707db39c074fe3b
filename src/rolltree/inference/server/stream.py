"""Streaming: chunks of a completion as server-sent events, while it is sampled.

An `AnswerStream` queues its requests when it is made, so what they cannot be is an error of the
request; leaving the stream takes them out of the batch. It knows the chunks of OpenAI's API and
vLLM's fields in them. It knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from rolltree.inference.server import answers
from rolltree.inference.server.deltas import MessageDeltas, TextDeltas, settled_text
from rolltree.inference.server.errors import error_body
from rolltree.inference.server.fields import Asked
from rolltree.inference.server.served import ServedModel, choice_seeds
from rolltree.types import FloatArray, GenerateRequest, IntArray, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.local.requests import LocalOutput

News: TypeAlias = "Token | Future[LocalOutput]"
"""What the engine's thread tells of a choice: one more token, or that it is finished."""
DONE = b"data: [DONE]\n\n"


class Token(NamedTuple):
    """A sampled token, and its logprob as it is asked for."""

    id: int
    logprob: float


@dataclass(slots=True)
class _Choice:
    """One choice: the tokens so far, and how many of them were given out."""

    prompt: IntArray
    deltas: MessageDeltas | TextDeltas
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_given: int = 0


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
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._choices: list[_Choice] = []
        self._futures: list[Future[LocalOutput]] = []
        self._outputs: dict[int, LocalOutput] = {}
        try:
            for prompt in prompts:
                for seed in choice_seeds(asked.sampling.seed, asked.n):
                    self._submit(prompt, seed)
        except BaseException:
            self._cancel()
            raise

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks as server-sent events, the last one being `[DONE]`."""
        try:
            while len(self._outputs) < len(self._choices):
                index, news = await self._events.get()
                while not self._events.empty() and not isinstance(news, Future):
                    self._take(index, news)
                    index, news = self._events.get_nowait()
                for chunk in self._chunks(index, news):
                    yield _event(chunk)
            if self._asked.include_usage:
                outputs = [self._outputs[index] for index in range(len(self._choices))]
                counted = answers.usage(self._prompts, outputs)
                yield _event(self._head | {"choices": [], "usage": counted})
        except Exception as error:  # noqa: BLE001  (told to the client: the status is long sent)
            yield _event(error_body(error)[1])
        finally:
            self._cancel()
        yield DONE

    def _submit(self, prompt: IntArray, seed: int | None) -> None:
        index = len(self._choices)
        deltas = MessageDeltas(self._served, self._tools) if self._chat else TextDeltas()
        self._choices.append(_Choice(prompt, deltas))
        request = GenerateRequest(prompt, replace(self._asked.sampling, seed=seed))
        future = self._served.engine.submit(request)
        future.add_done_callback(lambda done: self._notify(index, done))
        self._futures.append(future)

    def _notify(self, index: int, news: News) -> None:
        """Hand over news from the engine's thread; nobody waits when the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, news))
        except RuntimeError:
            self._cancel()

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _take(self, index: int, news: Token) -> None:
        self._choices[index].ids.append(news.id)
        self._choices[index].logprobs.append(news.logprob)

    def _chunks(self, index: int, news: News) -> list[dict[str, Any]]:
        if isinstance(news, Future):
            output: LocalOutput = news.result()
            self._outputs[index] = output
            return [self._chunk(index, output)]
        self._take(index, news)
        return [self._chunk(index, None)]

    def _chunk(self, index: int, output: LocalOutput | None) -> dict[str, Any]:
        choice, asked, served = self._choices[index], self._asked, self._served
        reason: str | None = None
        if output is not None:
            choice.ids = output.completion_ids.tolist()
            choice.logprobs = served.logprobs_of(output).tolist()
            reason = output.finish_reason.value
        part: dict[str, Any] = {"index": index, "logprobs": None}
        if isinstance(choice.deltas, MessageDeltas):
            if output is not None:
                message, message_reason = served.message(output, self._tools)
                part["delta"], reason = choice.deltas.last(message), message_reason.value
            else:
                part["delta"] = choice.deltas.next(self._settled(choice))
        else:
            text = served.text(output) if output is not None else self._settled(choice)
            part["text"] = choice.deltas.next(text)
        part["finish_reason"] = reason
        chunk = {**self._head, "choices": [part]}
        if asked.token_ids and not choice.num_given:
            (chunk if self._chat else part)["prompt_token_ids"] = choice.prompt.tolist()
        self._add_tokens(part, choice, output)
        choice.num_given = len(choice.ids)
        return chunk

    def _settled(self, choice: _Choice) -> str:
        return settled_text(self._served.renderer, choice.ids, self._asked.sampling)

    def _add_tokens(
        self, part: dict[str, Any], choice: _Choice, output: LocalOutput | None
    ) -> None:
        ids = np.array(choice.ids[choice.num_given :], np.int32)
        values: FloatArray = np.array(choice.logprobs[choice.num_given :], np.float32)
        if self._asked.logprobs:
            make = answers.chat_logprobs if self._chat else answers.text_logprobs
            part["logprobs"] = make(self._served, self._asked, ids, values)
        if self._asked.token_ids:
            part["token_ids"] = ids.tolist()
        if output is not None:
            part |= answers.stop_fields(self._asked, output)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
