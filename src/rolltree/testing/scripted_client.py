"""A model for unit tests, in this process: it says what a script says.

`ScriptedClient` is a full `ModelClient`: prompts are rendered, continued token by token and
remembered as with a real engine, and every answer has ids and logprobs. It knows nothing about
HTTP; for that there is `ScriptedServer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.session import (
    Prompt,
    TokenSession,
)
from rolltree.testing.script import Script, ScriptedTokens, ScriptSource, tokens_of
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.types import (
    GenerateRequest,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One call that a `ScriptedClient` got."""

    messages: Messages
    tools: tuple[ToolSchema, ...]
    sampling: SamplingParams
    model: str
    prompt: Prompt | None


class ScriptedClient:
    """A `ModelClient` that answers from a script, with exact byte-level ids and logprobs.

    Answers in a row start anew in every session, so that each rollout meets the same model; calls
    without a session go through the row once. `calls` lists every call of all sessions.

    Example:
        >>> client = ScriptedClient(["12", "13"])
        >>> client = ScriptedClient(lambda messages: messages[-1]["content"].upper())
    """

    def __init__(
        self,
        script: ScriptSource,
        *,
        model: str = "scripted",
        renderer: ChatRenderer | None = None,
        version: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        self.renderer = renderer or ChatRenderer(ByteTokenizer())
        self.calls: list[ScriptedCall] = []
        self.version = version
        self.is_closed = False
        self._model = model
        self._source = script
        self._script = Script(script)
        self.delay_s = delay_s

    @property
    def model(self) -> str:
        """The name this model goes by."""
        return self._model

    def session(self) -> ScriptedSession:
        """Return a client for one rollout, at the start of the script."""
        return ScriptedSession(self, Script(self._source))

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Give the next answer, with no memory of earlier calls."""
        return await ScriptedSession(self, self._script).chat(
            messages, tools=tools, sampling=sampling, model=model, message_type=message_type
        )

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Give the next answer; a function is asked with the decoded prompt."""
        return await self.answer_ids(self._script, request)

    async def aclose(self) -> None:
        """Note that the client was closed."""
        self.is_closed = True

    async def answer_ids(self, script: Script, request: GenerateRequest) -> ModelResponse:
        """Give `script`'s next answer to a prompt of ids."""
        text = self.renderer.decode(request.prompt_ids)
        await asyncio.sleep(self.delay_s)
        self.note(text, (), request.sampling, request.model, None)
        said = tokens_of(await script.next(text), self.renderer, request.sampling)
        return _complete(
            TokenSession(self.renderer), Prompt(request.prompt_ids), said, self, request.sampling
        )

    def note(
        self,
        messages: Messages,
        tools: Sequence[ToolSchema],
        sampling: SamplingParams,
        model: str | None,
        prompt: Prompt | None,
    ) -> None:
        """Add to `calls`."""
        kept = messages if isinstance(messages, str) else list(messages)
        call = ScriptedCall(kept, tuple(tools), sampling, model or self._model, prompt)
        self.calls.append(call)


class ScriptedSession:
    """One rollout with a `ScriptedClient`."""

    def __init__(self, client: ScriptedClient, script: Script) -> None:
        self._client = client
        self._script = script
        self._tokens = TokenSession(client.renderer)

    @property
    def model(self) -> str:
        """The name this model goes by."""
        return self._client.model

    def session(self) -> ScriptedSession:
        """Return a session of its own, at the start of the script."""
        return self._client.session()

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Give the script's next answer."""
        client = self._client
        prompt = self._tokens.prepare(messages, tools, message_type=message_type, model=model)
        client.note(messages, tools or (), sampling, model, prompt)
        await asyncio.sleep(client.delay_s)
        answer = await self._script.next(messages)
        said = tokens_of(answer, client.renderer, sampling)
        return _complete(self._tokens, prompt, said, client, sampling)

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Give the script's next answer to a prompt of ids."""
        return await self._client.answer_ids(self._script, request)

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


def _complete(
    session: TokenSession,
    prompt: Prompt,
    said: ScriptedTokens,
    client: ScriptedClient,
    sampling: SamplingParams,
) -> ModelResponse:
    return session.complete(
        prompt,
        said.ids,
        said.logprobs,
        said.finish_reason,
        temperature=sampling.temperature,
        versions=client.version,
        text=said.text,
    )
