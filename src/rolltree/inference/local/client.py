"""An engine in this process as a `ModelClient`: messages in, exact tokens out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from rolltree.errors import UnsupportedSetting
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.engine import EngineOutput, EngineThread
from rolltree.inference.local.engine import LocalEngine
from rolltree.inference.session import Prompt, TokenSession
from rolltree.types import (
    GenerateRequest,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)


class LocalClient:
    """A `ModelClient` over an engine in this process.

    Args:
        engine: the engine that answers.
        tokenizer: that of the engine's model, with its chat template.
        model_name: the name this model goes by.
        renderer: renders prompts and reads answers; None makes one from the tokenizer.
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
        self._session: TokenSession | None = None

    @property
    def model(self) -> str:
        """The name of the model behind this client."""
        return self._model

    def session(self) -> LocalClient:
        """Return a client for one rollout, whose prompts continue its own calls exactly."""
        client = LocalClient(self.engine, self.tokenizer, self._model, renderer=self.renderer)
        client._session = TokenSession(self.renderer)
        return client

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Sample the next assistant message, or continue a string (`message_type="completion"`).

        Raises:
            ModelError: as `LocalEngine.generate`; `UnsupportedSetting` for another model's name.
        """
        self._check_model(model)
        session = self._session or TokenSession(self.renderer)
        prompt = session.prepare(messages, tools, message_type=message_type)
        output = await self.engine.generate(GenerateRequest(prompt.ids, sampling))
        return self._complete(session, prompt, output, sampling)

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly `request.prompt_ids`; raises as `chat` does."""
        self._check_model(request.model)
        output = await self.engine.generate(request)
        session, prompt = TokenSession(self.renderer), Prompt(request.prompt_ids)
        return self._complete(session, prompt, output, request.sampling)

    def _complete(
        self, session: TokenSession, prompt: Prompt, output: EngineOutput, sampling: SamplingParams
    ) -> ModelResponse:
        return session.complete(
            prompt,
            output.completion_ids,
            output.logprobs,
            output.finish_reason,
            temperature=sampling.temperature,
            versions=output.versions,
            text=self._text_before_stop(output),
            wait_s=output.wait_s,
            info={"num_cached_tokens": output.num_cached_tokens},
        )

    async def aclose(self) -> None:
        """Close the engine; a session leaves it open."""
        if self._session is None:
            await self.engine.aclose()

    def _text_before_stop(self, output: EngineOutput) -> str | None:
        """Return the text without the stop that ended it; None where only an end token may be."""
        if output.stop is None:
            return None
        if isinstance(output.stop, str):
            return self.renderer.decode(output.completion_ids).partition(output.stop)[0]
        return self.renderer.decode(output.completion_ids[:-1])

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise UnsupportedSetting(
                f"this engine runs {self._model!r} and no other model, but {model!r} was asked "
                "for, and its answer would pass for that model's. Leave the model's name out."
            )


def local_client(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "local",
    renderer: ChatRenderer | None = None,
    eos_token_ids: Sequence[int] = (),
    **engine_options: Any,
) -> LocalClient:
    """Return a client over a new engine for `model`, with end tokens and stop strings set up.

    An answer ends with any of: `eos_token_ids`, the model's generation config's, the tokenizer's
    and the chat template's end tokens. `engine_options` are `LocalEngine`'s. Closing the client
    closes the engine.

    Raises:
        ConfigError: see `LocalEngine` and `ChatRenderer`.
        UnsupportedSetting: the embedded engine cannot run this model.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = [*eos_token_ids, *(configured if isinstance(configured, list) else [configured])]
    ends = [int(token) for token in known if token is not None]
    renderer = renderer or ChatRenderer(tokenizer, end_ids=ends)
    engine = LocalEngine(
        model,
        eos_token_ids=sorted({*ends, *renderer.end_ids}),
        decode_text=copy.deepcopy(tokenizer).decode,  # the engine's thread needs one of its own
        **engine_options,
    )
    return LocalClient(engine, tokenizer, name, renderer=renderer)
