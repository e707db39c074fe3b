"""The served model: it turns prompts into ids, ids into answers, and takes new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from rolltree._helpers.untrusted import encode_json
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client import check_shown_tools
from rolltree.inference.engine import EngineOutput, EngineThread, SampledToken
from rolltree.scale.weights.receive import WeightReceiver
from rolltree.values.errors import TokenError
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    SamplingParams,
    ToolSchema,
)

ResultT = TypeVar("ResultT")
ServedLogprobs = Literal["processed", "raw"]
"""Which logprobs are returned: of the distribution that was sampled from, or the model's own."""


class ServedModel:
    """One engine with the name it is served under.

    Args:
        engine: samples ids.
        renderer: the model's chat template and tokenizer.
        name: the model's name in requests.
        load_weights: copies the weights of a folder into the engine's model, in place, and raises
            before it changes anything if they do not fit; None serves without weight updates.
        receiver: copies weights that a trainer sends into it; None serves without transfers.
        logprobs: which logprobs answers contain.
    """

    def __init__(
        self,
        engine: EngineThread[Any],
        renderer: ChatRenderer,
        name: str,
        *,
        load_weights: Callable[[Path], None] | None = None,
        receiver: WeightReceiver | None = None,
        logprobs: ServedLogprobs = "processed",
    ) -> None:
        self.engine, self.renderer, self.name = engine, renderer, name
        self.logprobs: ServedLogprobs = logprobs
        self.created = int(time.time())
        # vLLM's name for the initial weights, until a trainer sets a version.
        self.weight_version = "default"
        self._load_weights, self.receiver = load_weights, receiver
        self._pauses = AsyncExitStack()
        # Two concurrent updates would leave a mixture of both.
        self._updating = asyncio.Lock()
        # One thread, since tokenizers are not thread-safe. Not the event loop's: a long prompt
        # takes tens of milliseconds, during which `/health` and every stream would wait.
        self._worker = ThreadPoolExecutor(1, "rolltree-render")
        self.is_paused = self._closed = False

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers requests."""
        return not self._closed and self.engine.is_alive

    @property
    def can_reload(self) -> bool:
        """Whether `reload` can be used."""
        return self._load_weights is not None

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Do `work` (rendering, tokenizing, decoding) away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _check_size(self, size: int, what: str = "characters", longest: int | None = None) -> None:
        self.renderer.vocabulary.check_size(size, self.engine.max_context, what, longest)

    def chat_prompt(
        self,
        messages: list[ChatMessage],
        tools: Sequence[ToolSchema] | None,
        *,
        opener: bool = True,
    ) -> IntArray:
        """Return the prompt for a conversation, int32 `[_T]`.

        Raises:
            PromptTooLong: it cannot fit the context.
            TemplateError: the template rejects it.
            ConfigError: the template ignores tools.
        """
        self._check_size(len(encode_json([messages, tools])), "bytes as JSON")
        check_shown_tools(self.renderer, tools, self.name)
        return self.renderer.render(messages, tools, add_generation_prompt=opener)

    def text_prompt(self, prompt: object) -> IntArray:
        """Return the prompt for a string or a list of ids, int32 `[_T]`.

        Raises:
            PromptTooLong: it cannot fit the context.
            TokenError: it is neither a string nor a list of ids.
        """
        if isinstance(prompt, str):
            self._check_size(len(prompt))
            return self.renderer.encode_text(prompt)
        if isinstance(prompt, list):
            self._check_size(len(prompt), "ids", longest=1)
        if not isinstance(prompt, list) or not all(
            # Not `isinstance`: JSON's true would be id 1.
            type(token) is int and 0 <= token < 2**31
            for token in prompt
        ):
            raise TokenError("a prompt is neither a string nor a list of token ids.")
        return np.array(prompt, np.int32)

    async def sample(
        self, prompts: Sequence[IntArray], sampling: SamplingParams, n: int = 1
    ) -> list[EngineOutput]:
        """Return `n` completions of each prompt in turn.

        The first completion of each prompt has the given seed, the others have derived seeds.
        Cancelling the task takes all of them out of the batch, as does the failure of one.

        Raises:
            ModelError: as the engine's `submit` does.
            TokenError: a prompt is empty or has an id outside the vocabulary.
        """
        futures: list[Future[EngineOutput]] = []
        try:
            for prompt in prompts:
                for seed in choice_seeds(sampling.seed, n):
                    request = GenerateRequest(prompt, replace(sampling, seed=seed))
                    futures.append(self.engine.submit(request))
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                # Finished futures ignore it.
                future.cancel()

    def text(self, output: EngineOutput) -> str:
        """Return an answer's text without the stop string or token that ended it."""
        if output.stop is None:
            return self.renderer.decode_answer(output.completion_ids)
        if isinstance(output.stop, str):
            return self.renderer.decode(output.completion_ids).partition(output.stop)[0]
        return self.renderer.decode(output.completion_ids[:-1])

    def message(
        self, output: EngineOutput, tools: Sequence[ToolSchema] | None
    ) -> tuple[ChatMessage, FinishReason]:
        """Return an answer as a message, and its finish reason."""
        parsed = self.renderer.parse_text(self.text(output), output.finish_reason, tools)
        return parsed.message, parsed.finish_reason

    def logprobs_of(self, output: EngineOutput | SampledToken) -> FloatArray:
        """Return the logprobs of an answer's tokens, or of a single token, float32 `[_C]`."""
        processed = self.logprobs == "processed"
        if isinstance(output, SampledToken):
            value = output.logprob if processed else output.raw_logprob
            return np.array([value], np.float32)
        values = output.logprobs if processed else output.raw_logprobs
        assert values is not None
        return values

    async def pause(self) -> None:
        """Stop decoding until `resume`; requests are kept."""
        async with self._updating:
            if not self.is_paused:
                await self._pauses.enter_async_context(self.engine.paused())
                self.is_paused = True

    async def resume(self) -> None:
        """Continue decoding."""
        async with self._updating:
            await self._pauses.aclose()
            self._pauses = AsyncExitStack()
            self.is_paused = False

    async def reload(self, folder: Path) -> None:
        """Replace the weights by those in `folder` (safetensors); cached keys are dropped.

        Raises:
            ConfigError: they do not fit the model, which is unchanged.
        """
        assert self._load_weights is not None
        async with self._updating, self.engine.paused():
            # Paused, because a step during the copy would sample from a mixture of old and new
            # weights. `publish` drops the keys that the old weights made.
            await asyncio.to_thread(self._load_weights, folder)
            self.engine.publish(self.engine.version)

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Replace the weights by those that the trainer sends; cached keys are dropped.

        Raises:
            ConfigError: they do not fit the model, which is unchanged, or no trainer has connected.
            ModelError: the transfer broke off; the weights may be half replaced.
        """
        assert self.receiver is not None
        async with self._updating, self.engine.paused():
            # Paused, as for `reload`; if it breaks off, the publisher leaves this server paused
            # (design/0012).
            await asyncio.to_thread(self.receiver.receive, info)
            self.engine.publish(self.engine.version)

    async def set_version(self, version: int | None = None) -> None:
        """Drop cached keys; later tokens carry `version` (None keeps the current version)."""
        async with self._updating, self.engine.paused():
            self.engine.publish(self.engine.version if version is None else version)
            if version is not None:
                self.weight_version = str(version)

    async def aclose(self) -> None:
        """Stop the engine; requests in flight end with an error."""
        self._closed = True
        if self.receiver is not None:
            self.receiver.close()
        await self.resume()
        await self.engine.aclose()
        self._worker.shutdown(wait=False, cancel_futures=True)


def choice_seeds(seed: int | None, n: int) -> list[int | None]:
    """Return a seed per choice: the given seed, then seeds derived from it.

    >>> choice_seeds(None, 2), choice_seeds(7, 1)
    ([None, None], [7])
    """
    if seed is None:
        return [None] * n
    # Not `seed + index`, which would give requests with neighbouring seeds the same answers.
    derived = [np.random.SeedSequence([seed % 2**64, index]) for index in range(1, n)]
    return [seed, *(int(sequence.generate_state(1, np.uint64)[0]) for sequence in derived)]
