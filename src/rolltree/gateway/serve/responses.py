"""Writes completions as OpenAI's JSON with vLLM's token fields, whole or as server-sent events.

Ids and logprobs have one entry per sampled token, including the end token. A stream sends every
token when it is sampled, and its text as soon as later tokens cannot change it
(`rolltree.inference.deltas`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from rolltree.gateway.serve.model_server import ServedModel, choice_seeds
from rolltree.gateway.serve.requests import ParsedRequest, error_body
from rolltree.inference.deltas import (
    MessageDeltas,
    SettledText,
    TextDeltas,
    one_call_each,
    outgoing_message,
)
from rolltree.inference.engine import EngineOutput, SampledToken
from rolltree.inference.routed_experts import encode_routing
from rolltree.values.types import FloatArray, GenerateRequest, IntArray, SamplingParams

logger = logging.getLogger("rolltree.inference")
DONE = b"data: [DONE]\n\n"


class Responses:
    """Builds the JSON of the answers to one request."""

    has_text: ClassVar[bool] = True
    """Whether answers have text, which needs the tokenizer."""

    def __init__(self, served: ServedModel, request: ParsedRequest) -> None:
        self.served, self.request = served, request
        self.head = self._head()
        # A chat has one prompt, so its ids are not repeated in every choice.
        self.choices_have_prompts = self.has_text and not request.chat

    def _head(self) -> dict[str, Any]:
        request = self.request
        kind = "chat.completion" if request.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{request.request_id}",
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": self.served.name,
        }

    def whole(self, prompts: Sequence[IntArray], outputs: Sequence[EngineOutput]) -> dict[str, Any]:
        """Return a completion; `outputs` has `n` per prompt in turn (chat has one prompt)."""
        request, choices = self.request, []
        for index, output in enumerate(outputs):
            values = self.served.logprobs_of(output)
            choice = {"index": index, "logprobs": None, **self.ending(output)}
            choice |= self.tokens(output.completion_ids, values)
            if request.chat:
                message, reason = self.served.message(output, request.tools)
                choice |= {"message": outgoing_message(message), "finish_reason": reason.value}
            elif self.has_text:
                choice["text"] = self.served.text(output)
            if request.token_ids and self.choices_have_prompts:
                choice["prompt_token_ids"] = prompts[index // request.n].tolist()
            choices.append(choice)
        answer = self.head | {"choices": choices, "usage": token_usage(prompts, outputs)}
        if request.token_ids and not self.choices_have_prompts:
            answer["prompt_token_ids"] = prompts[0].tolist()
        return answer

    def ending(self, output: EngineOutput) -> dict[str, Any]:
        """Return the fields of a choice that are known when it ends."""
        fields = {"finish_reason": output.finish_reason.value, "stop_reason": output.stop}
        if self.has_text and not self.request.token_ids:
            return fields
        return fields | {"weight_versions": version_spans(output.versions)} | routing(output)

    def tokens(self, ids: IntArray, values: FloatArray) -> dict[str, Any]:
        """Return the requested fields of sampled tokens; `ids` and `values` are `[_T]`."""
        request, fields = self.request, dict[str, Any]()
        if request.token_ids:
            fields["token_ids"] = ids.tolist()
        if not request.logprobs:
            return fields
        texts = [
            f"token_id:{token}" if request.tokens_as_ids else self.served.renderer.decode([token])
            for token in ids.tolist()
        ]
        write = chat_logprobs if request.chat else text_logprobs
        return fields | {"logprobs": write(texts, values.tolist())}


class TokenResponses(Responses):
    """The answers of vLLM's token-in endpoint: ids, logprobs and version spans, no text."""

    has_text = False

    def _head(self) -> dict[str, Any]:
        head = {"request_id": self.request.request_id}
        if self.request.stream:
            return head
        return head | {"model": self.served.name, "created": int(time.time())}

    def tokens(self, ids: IntArray, values: FloatArray) -> dict[str, Any]:
        """Return the fields of sampled tokens; the ids are always among them."""
        listed = ids.tolist()
        if not self.request.logprobs:
            return {"token_ids": listed}
        content = [
            {"token": f"token_id:{i}", "token_id": i, "logprob": value, "top_logprobs": []}
            for i, value in zip(listed, values.tolist(), strict=True)
        ]
        return {"token_ids": listed, "logprobs": {"content": content}}


def text_logprobs(texts: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    """Return the logprobs of a text completion's tokens in OpenAI's format."""
    listed = {"tokens": list(texts), "token_logprobs": list(values)}
    return {**listed, "top_logprobs": None, "text_offset": []}


def chat_logprobs(texts: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    """Return the logprobs of a chat completion's tokens in OpenAI's format."""
    content = [
        {
            "token": text,
            "logprob": value,
            # The text of a token that is a part of a character is a replacement character, whose
            # bytes are not the token's.
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in zip(texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_usage(prompts: Sequence[IntArray], outputs: Sequence[EngineOutput]) -> dict[str, Any]:
    """Return the usage; a prompt counts once for all its choices, `n` per prompt in turn."""
    num_prompt = sum(map(len, prompts))
    num_completion = sum(len(output.completion_ids) for output in outputs)
    # Later choices find in the cache what the first one computed.
    firsts = outputs[:: len(outputs) // len(prompts)]
    num_cached = sum(output.num_cached_tokens for output in firsts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def routing(output: EngineOutput) -> dict[str, str]:
    """Return vLLM's field for the routed experts of an MoE model, if the engine recorded them."""
    found = output.routed_experts
    return {} if found is None else {"routed_experts": encode_routing(found)}


def version_spans(versions: IntArray) -> list[dict[str, Any]]:
    """Return policy versions int32 `[_C]` as vLLM's spans: tokens `[start, end)` had `version`.

    >>> version_spans(np.array([3, 3, 4], np.int32))
    [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 3}]
    """
    if not len(versions):
        return []
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    ends = [*starts[1:], len(versions)]
    return [
        {"version": str(int(versions[start])), "start": start, "end": end}
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(slots=True)
class _Choice:
    """One choice of a stream: its tokens so far, and its output when it is finished."""

    index: int
    prompt: IntArray
    deltas: MessageDeltas | TextDeltas
    text: SettledText
    ids: list[int] = field(default_factory=list)
    output: EngineOutput | None = None


class ResponseStream:
    """The chunks of one request's answers, in the form of `responses`.

    The constructor queues the requests, so a request that cannot be answered gets an error status
    instead of a stream. Construct it in a running event loop.

    Raises:
        ModelError: as the engine's `submit` does.
    """

    def __init__(self, responses: Responses, prompts: Sequence[IntArray]) -> None:
        self._responses, self._prompts = responses, prompts
        self._served = responses.served
        self._request = request = responses.request
        self._loop = asyncio.get_running_loop()
        # One queue for all choices, so that chunks are sent in the order of sampling.
        self._news: asyncio.Queue[tuple[_Choice, SampledToken | Future[EngineOutput]]]
        self._news = asyncio.Queue()
        self._choices: list[_Choice] = []
        self._answers: list[Future[EngineOutput]] = []
        try:
            for prompt in prompts:
                for seed in choice_seeds(request.sampling.seed, request.n):
                    self._begin(prompt, replace(request.sampling, seed=seed))
        except BaseException:  # all choices or none
            self._cancel()
            raise

    def _begin(self, prompt: IntArray, sampling: SamplingParams) -> None:
        tools, renderer = self._request.tools, self._served.renderer
        deltas = MessageDeltas(renderer, tools) if self._request.chat else TextDeltas()
        settled = SettledText(renderer, sampling)
        choice = _Choice(len(self._choices), prompt, deltas, settled)
        tell = partial(self._tell, choice)
        # The engine's thread calls `tell` with the tokens and then with the finished answer, so
        # the answer comes after its last token.
        answer = self._served.engine.submit(GenerateRequest(prompt, sampling), tell)
        answer.add_done_callback(tell)
        self._choices.append(choice)
        self._answers.append(answer)

    def _tell(self, choice: _Choice, news: SampledToken | Future[EngineOutput]) -> None:
        """Hand news from the engine's thread over to the event loop, unless that is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, (choice, news))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks as server-sent events, then `[DONE]`."""
        try:
            while any(choice.output is None for choice in self._choices):
                choice, news = await self._news.get()
                if isinstance(news, Future):
                    choice.output = news.result()
                    for chunk in self._last_chunks(choice, choice.output):
                        yield _event(chunk)
                else:
                    yield _event(self._chunk(choice, news))
            if self._request.include_usage:
                outputs = [choice.output for choice in self._choices if choice.output is not None]
                counted = token_usage(self._prompts, outputs)
                yield _event(self._responses.head | {"choices": [], "usage": counted})
        except Exception as error:
            # As an event, since the status has already been sent.
            status, body = error_body(error)
            # Only the server's own failures are logged, not the client's mistakes.
            if status >= 500:
                logger.error("a stream of %s broke off", self._served.name, exc_info=error)
            yield _event(body)
        finally:
            # Also runs when the client disconnects, which closes this generator.
            self._cancel()
        yield DONE

    def _cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    def _chunk(self, choice: _Choice, token: SampledToken) -> dict[str, Any]:
        """Return the chunk for one more token."""
        is_first = not choice.ids
        choice.ids.append(token.id)
        new = dict[str, Any]()
        if self._responses.has_text:
            text = choice.text.add(token.id)
            new["delta" if self._request.chat else "text"] = choice.deltas.next(text)
        ids, values = np.array([token.id], np.int32), self._served.logprobs_of(token)
        return self._with_tokens(choice, ids, values, new, is_first)

    def _last_chunks(self, choice: _Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """Return the last chunks of a choice, with the rest of its tokens and its finish reason."""
        new = slice(len(choice.ids), None)
        ids, values = output.completion_ids[new], self._served.logprobs_of(output)[new]
        part, earlier = self._responses.ending(output), list[dict[str, Any]]()
        if isinstance(choice.deltas, TextDeltas):
            if self._responses.has_text:
                part["text"] = choice.deltas.next(self._served.text(output))
        else:
            message, reason = self._served.message(output, self._request.tools)
            *earlier, delta = one_call_each(choice.deltas.last(message))
            part |= {"delta": delta, "finish_reason": reason.value}
        return [
            *(self._with_tokens(choice, ids[:0], values[:0], {"delta": d}, False) for d in earlier),
            self._with_tokens(choice, ids, values, part, not choice.ids),
        ]

    def _with_tokens(
        self, choice: _Choice, ids: IntArray, values: FloatArray, new: dict[str, Any], first: bool
    ) -> dict[str, Any]:
        """Return a chunk with the `new` fields of a choice and the requested fields of its ids."""
        part = {"index": choice.index, "logprobs": None, "finish_reason": None, **new}
        part |= self._responses.tokens(ids, values)
        chunk = {**self._responses.head, "choices": [part]}
        if self._request.token_ids and first:
            holder = part if self._responses.choices_have_prompts else chunk
            holder["prompt_token_ids"] = choice.prompt.tolist()
        return chunk


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
