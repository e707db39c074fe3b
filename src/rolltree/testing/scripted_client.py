"""A model for unit tests that answers from a script, in this process.

`ScriptedClient` is a full `ModelClient`: prompts are rendered, continued token by token and
remembered as with a real engine, and every answer has ids and logprobs. `ScriptedServer` does the
same over HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from rolltree.inference.call import Answer, ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client_base import RootClient
from rolltree.inference.deltas import TokenListener
from rolltree.inference.engine import SampledToken
from rolltree.inference.session import Prompt, TokenSession
from rolltree.testing.script import Script, ScriptedTokens, ScriptSource, tokens_of
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.types import Messages, ModelResponse, SamplingParams, ToolSchema


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One call that a `ScriptedClient` got."""

    messages: Messages
    tools: tuple[ToolSchema, ...]
    sampling: SamplingParams
    model: str
    prompt: Prompt | None


class _ScriptedMemory(TokenSession):
    """The calls of one rollout, and the position in its script."""

    def __init__(self, renderer: ChatRenderer, script: Script) -> None:
        super().__init__(renderer)
        self.script = script


class ScriptedClient(RootClient[_ScriptedMemory]):
    """A `ModelClient` that answers from a script, with exact byte-level ids and logprobs.

    A list of answers starts over in every session, so that each rollout gets the same model; calls
    without a session share one pass through the list. `calls` has the calls of all sessions.

    An answer comes after `delay_s`, and each of its tokens takes `token_delay_s` more, so a caller
    that streams the answer gets one token at a time.

    Example:
        >>> client = ScriptedClient(["12", "13"])
        >>> client = ScriptedClient(lambda messages: messages[-1]["content"].upper())
    """

    version: int = 0

    def __init__(
        self,
        script: ScriptSource,
        *,
        model: str = "scripted",
        renderer: ChatRenderer | None = None,
        version: int = 0,
        delay_s: float = 0.0,
        token_delay_s: float = 0.0,
    ) -> None:
        self.renderer = renderer or ChatRenderer(ByteTokenizer())
        self.calls: list[ScriptedCall] = []
        self.version = version
        self.is_closed = False
        self._model = model
        self._source = script
        self._script = Script(script)
        self.delay_s, self.token_delay_s = delay_s, token_delay_s

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._model

    def new_memory(self) -> _ScriptedMemory:
        """Return the memory of a new session, at the start of the script."""
        return _ScriptedMemory(self.renderer, Script(self._source))

    async def call(self, call: ModelCall) -> ModelResponse:
        """Return the next answer, without memory of earlier calls."""
        return await self.respond(call, _ScriptedMemory(self.renderer, self._script))

    async def respond(self, call: ModelCall, memory: _ScriptedMemory) -> ModelResponse:
        """Return the script's next answer; a function is called with messages or decoded ids."""
        tokens: TokenSession = memory
        if isinstance(call.prompt, np.ndarray):
            asked: Messages = self.renderer.decode(call.prompt)
            tokens = TokenSession(self.renderer)
            prompt = Prompt(call.prompt)
        else:
            asked = call.prompt if isinstance(call.prompt, str) else list(call.prompt)
            prompt, _ = memory.prepare_call(call)
        # `ScriptedCall.prompt` shows how a prompt was continued; given ids were not rendered.
        rendered = None if isinstance(call.prompt, np.ndarray) else prompt
        tools, model = tuple(call.tools or ()), call.model or self._model
        self.calls.append(ScriptedCall(asked, tools, call.sampling, model, rendered))
        # Also for 0 s: a model that answers without yielding to the loop would hide bugs that occur
        # with a real one.
        await asyncio.sleep(self.delay_s)
        reply = tokens_of(await memory.script.next(asked), self.renderer, call.sampling)
        await self._stream(reply, call, tokens, prompt)
        answer = Answer(
            reply.finish_reason,
            text=reply.text,
            completion_ids=reply.ids,
            logprobs=reply.logprobs,
            versions=np.full(len(reply.ids), self.version, np.int32),
            info={} if reply.stop is None else {"stop_reason": reply.stop},
        )
        return tokens.complete(prompt, answer, call)

    async def _stream(
        self, reply: ScriptedTokens, call: ModelCall, memory: TokenSession, prompt: Prompt
    ) -> None:
        """Report all tokens except the last one by one, as an engine does."""
        if call.on_delta is None:
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s * len(reply.ids))
            return
        renderer = memory.renderer_of(prompt)
        listener = TokenListener(renderer, call, prompt.begun, len(prompt.ids))
        for token, logprob in zip(reply.ids[:-1].tolist(), reply.logprobs.tolist(), strict=False):
            await asyncio.sleep(self.token_delay_s)
            listener.put(SampledToken(token, logprob, None, self.version))
        await asyncio.sleep(self.token_delay_s)

    async def aclose(self) -> None:
        """Record that the client was closed."""
        self.is_closed = True
