"""Streaming: chunks of a completion as server-sent events, while it is sampled.

Every token is a chunk of its own, given out when it is sampled, and the answer's end is one more;
text that a later token may change is held back. Requests are queued when the stream is made, so
what cannot be answered is an error of the request. It knows the chunks of OpenAI's API and vLLM's
fields in them. It knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rolltree.inference.engine import EngineOutput, SampledToken
from rolltree.inference.server import answers
from rolltree.inference.server.deltas import MessageDeltas, TextDeltas, settled_text
from rolltree.inference.server.errors import error_body
from rolltree.inference.server.fields import Asked
from rolltree.inference.server.served import ServedModel, choice_seeds
from rolltree.types import FloatArray, GenerateRequest, IntArray, ToolSchema

logger = logging.getLogger("rolltree.inference")
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class _Choice:
    """One choice: its tokens so far, and what it is when it is finished."""

    index: int
    prompt: IntArray
    deltas: MessageDeltas | TextDeltas
    ids: list[int] = field(default_factory=list)
    output: EngineOutput | None = None


class AnswerStream:
    """The chunks of one chat completion (one prompt) or text completion.

    To be made where an event loop runs.

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
        self._news: asyncio.Queue[tuple[_Choice, SampledToken | Future[EngineOutput]]] = (
            asyncio.Queue()
        )
        self._choices: list[_Choice] = []
        self._answers: list[Future[EngineOutput]] = []
        try:
            for prompt in prompts:
                for seed in choice_seeds(asked.sampling.seed, asked.n):
                    self._begin(prompt, seed)
        except BaseException:
            self._cancel()
            raise

    def _begin(self, prompt: IntArray, seed: int | None) -> None:
        deltas = MessageDeltas(self._served, self._tools) if self._chat else TextDeltas()
        choice = _Choice(len(self._choices), prompt, deltas)
        tell = partial(self._tell, choice)
        request = GenerateRequest(prompt, replace(self._asked.sampling, seed=seed))
        answer = self._served.engine.submit(request, tell)
        answer.add_done_callback(tell)
        self._choices.append(choice)
        self._answers.append(answer)

    def _tell(self, choice: _Choice, news: SampledToken | Future[EngineOutput]) -> None:
        """Hand news from the engine's thread over to the loop, unless that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, (choice, news))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks as server-sent events, the last one being `[DONE]`."""
        try:
            while any(choice.output is None for choice in self._choices):
                choice, news = await self._news.get()
                if isinstance(news, Future):
                    choice.output = news.result()
                    yield _event(self._last_chunk(choice, choice.output))
                else:
                    yield _event(self._chunk(choice, news))
            if self._asked.include_usage:
                outputs = [choice.output for choice in self._choices if choice.output is not None]
                counted = answers.usage(self._prompts, outputs)
                yield _event(self._head | {"choices": [], "usage": counted})
        except Exception as error:  # told to the client, since the status is long sent
            status, body = error_body(error)
            if status >= 500:
                logger.error("a stream of %s broke off", self._served.name, exc_info=error)
            yield _event(body)
        finally:
            self._cancel()
        yield DONE

    def _cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    def _chunk(self, choice: _Choice, token: SampledToken) -> dict[str, Any]:
        """Return what one more token adds."""
        is_first = not choice.ids
        choice.ids.append(token.id)
        text = settled_text(self._served.renderer, choice.ids, self._asked.sampling)
        new = {"delta" if self._chat else "text": choice.deltas.next(text)}
        ids, values = np.array([token.id], np.int32), self._served.logprobs_of(token)
        return self._with_tokens(choice, ids, values, new, is_first)

    def _last_chunk(self, choice: _Choice, output: EngineOutput) -> dict[str, Any]:
        """Return what the rest of an answer adds, and how it ended."""
        new = slice(len(choice.ids), None)
        values = self._served.logprobs_of(output)[new]
        part = answers.stop_fields(self._asked, output)
        if isinstance(choice.deltas, TextDeltas):
            part["finish_reason"] = output.finish_reason.value
            part["text"] = choice.deltas.next(self._served.text(output))
        else:
            message, reason = self._served.message(output, self._tools)
            part |= {"delta": choice.deltas.last(message), "finish_reason": reason.value}
        return self._with_tokens(choice, output.completion_ids[new], values, part, not choice.ids)

    def _with_tokens(
        self, choice: _Choice, ids: IntArray, values: FloatArray, new: dict[str, Any], first: bool
    ) -> dict[str, Any]:
        """Return a chunk: what is `new` of a choice, with its new tokens as they were asked for."""
        part = {"index": choice.index, "logprobs": None, "finish_reason": None, **new}
        chunk = {**self._head, "choices": [part]}
        if self._asked.logprobs:
            make = answers.chat_logprobs if self._chat else answers.text_logprobs
            part["logprobs"] = make(self._served, self._asked, ids, values)
        if self._asked.token_ids:
            part["token_ids"] = ids.tolist()
            if first:
                (chunk if self._chat else part)["prompt_token_ids"] = choice.prompt.tolist()
        return chunk


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
