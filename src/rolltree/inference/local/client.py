"""A `ModelClient` over an engine in this process: messages in, exact tokens out."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolltree.inference.call import Answer, ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client_base import RootClient, check_model
from rolltree.inference.engine import EngineThread, SampledToken
from rolltree.inference.local.engine import LocalEngine
from rolltree.inference.request_fields import asks_for_form
from rolltree.inference.session import Prompt, TokenSession, num_characters
from rolltree.values.types import FinishReason, GenerateRequest, ModelResponse


class LocalClient(RootClient[TokenSession]):
    """A `ModelClient` over an engine in this process.

    Args:
        engine: the engine that answers.
        tokenizer: the tokenizer of the engine's model, with its chat template.
        model_name: the name of the model in calls.
        renderer: renders prompts and parses answers; None makes one from the tokenizer.
    """

    def __init__(
        self,
        engine: EngineThread[Any],
        tokenizer: Any,
        model_name: str = "local",
        *,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.renderer = renderer or ChatRenderer(tokenizer, end_ids=engine.eos_token_ids)
        self._model = model_name

    @property
    def model(self) -> str:
        """The name of this client's model."""
        return self._model

    @property
    def version(self) -> int:
        """The version of the engine's weights."""
        return self.engine.version

    @property
    def max_context(self) -> int:
        """The most tokens of a prompt and its completion."""
        return self.engine.max_context

    def new_memory(self) -> TokenSession:
        """Return the empty memory of a new session."""
        return TokenSession(self.renderer)

    async def respond(self, call: ModelCall, memory: TokenSession) -> ModelResponse:
        """Sample a completion of the prompt; a prompt of ids is not remembered.

        Raises:
            ModelError: as in `EngineThread.generate`; `UnsupportedSetting` if the request names a
                different model.
        """
        if isinstance(call.prompt, np.ndarray):
            memory, prompt = TokenSession(self.renderer), Prompt(call.prompt)
        else:
            # A tokenizer takes a minute for megabytes, and meanwhile nothing else runs.
            self.renderer.vocabulary.check_size(num_characters(call.prompt), self.max_context)
            prompt, call = memory.prepare_call(call)
        renderer = memory.renderer_of(prompt)
        on_token = None
        if call.on_delta is not None:
            from rolltree.inference.deltas import TokenListener

            on_token = TokenListener(renderer, call, prompt.begun, len(prompt.ids)).put
        sampling = call.sampling
        if asks_for_form(sampling.extra) and self.engine.takes_grammars:
            from rolltree.inference.constraints import constrained

            is_chat = isinstance(prompt.messages, list)
            sampling = constrained(sampling, renderer if is_chat else None, call.tools)
            # Compiling takes a second at worst, and meanwhile nothing else would run.
            await asyncio.to_thread(self.engine.prepare, sampling)
        request = GenerateRequest(prompt.ids, sampling, call.model)
        return memory.complete(prompt, await self._sample(request, on_token), call)

    async def _sample(
        self, request: GenerateRequest, on_token: Callable[[SampledToken], None] | None
    ) -> Answer:
        check_model(request.model, self._model)
        output = await self.engine.generate(request, on_token)
        stopped = output.finish_reason == FinishReason.STOP
        ids = output.completion_ids
        return Answer(
            output.finish_reason,
            # No text for a cut answer, whose last character may be incomplete.
            text=self.renderer.answer_text(ids, request.sampling) if stopped else None,
            completion_ids=ids,
            logprobs=output.logprobs,
            versions=output.versions,
            routed_experts=output.routed_experts,
            wait_s=output.wait_s,
            info={"num_cached_tokens": output.num_cached_tokens}
            | ({} if output.stop is None else {"stop_reason": output.stop})
            | ({"top_logprobs": output.top} if output.top else {}),
        )

    async def aclose(self) -> None:
        """Close the engine."""
        await self.engine.aclose()


def local_client(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "local",
    renderer: ChatRenderer | None = None,
    eos_token_ids: Sequence[int] = (),
    control_in_messages: bool = False,
    **engine_options: Any,
) -> LocalClient:
    """Return a client over a new engine for `model`, with end tokens and stop strings set up.

    An answer ends at any of `eos_token_ids` and the end tokens of the model's generation config,
    the tokenizer and the chat template. `control_in_messages` is passed to the `ChatRenderer` that
    is made if none is given; `engine_options` are `LocalEngine`'s. Closing the client closes the
    engine.

    Raises:
        ConfigError: see `LocalEngine` and `ChatRenderer`.
        UnsupportedSetting: the embedded engine cannot run this model.
    """
    ends = [*eos_token_ids, *configured_end_ids(model)]
    renderer = renderer or ChatRenderer(
        tokenizer, end_ids=ends, control_in_messages=control_in_messages
    )
    engine = LocalEngine(
        model,
        # The template may end turns with tokens that the model's folder does not name.
        eos_token_ids=sorted({*ends, *renderer.end_ids}),
        # A copy for the engine's thread, since two threads cannot use one fast tokenizer at once.
        decode_text=copy.deepcopy(tokenizer).decode,
        tokenizer=tokenizer,
        **engine_options,
    )
    return LocalClient(engine, tokenizer, name, renderer=renderer)


def configured_end_ids(model: Any) -> list[int]:
    """Return the end tokens of a model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = configured if isinstance(configured, list) else [configured]
    return [int(token) for token in known if token is not None]
