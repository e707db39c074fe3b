"""The served model: it turns prompts into ids, ids into answers, and takes new weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from rolltree._helpers.untrusted import encode_json
from rolltree.gateway.calls import (
    AgentAnswer,
    AgentCall,
    AnswerDelta,
    AnswerHead,
    CallOrigin,
    DeltaTokens,
)
from rolltree.gateway.messages import checked_messages
from rolltree.inference.call import ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client import check_shown_tools
from rolltree.inference.deltas import TokenListener
from rolltree.inference.engine import EngineOutput, EngineThread, SampledToken
from rolltree.inference.request_fields import (
    PLAIN,
    RENDERING,
    Rendering,
    asks_for_form,
    hints_in,
    split_rendering,
)
from rolltree.scale.weights.receive import WeightReceiver
from rolltree.values.types import (
    ChatMessage,
    FloatArray,
    GenerateRequest,
    IntArray,
    Messages,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)
from rolltree.web.guard import RequestError

logger = logging.getLogger("rolltree.gateway")
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
        self.opened_s = time.time()
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
        rendering: Rendering = PLAIN,
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
        renderer = self.renderer.with_variables(rendering.variables)
        check_shown_tools(renderer, tools, self.name)
        for note in renderer.notes(messages, tools).values():
            _log_note(self.name, note)
        if rendering.continues:
            return renderer.vocabulary.encode_start(renderer.begun_text(messages, tools))
        return renderer.render(messages, tools, add_generation_prompt=opener)

    def text_prompt(self, text: str) -> IntArray:
        """Return the prompt for a string, int32 `[_T]`; raises `PromptTooLong` as `chat_prompt`."""
        self._check_size(len(text))
        return self.renderer.encode_text(text)

    # -- calls, as protocols make them (`rolltree.gateway.protocol.Answering`) ---------------------

    keeps_answers: ClassVar[bool] = False

    @property
    def gives_top_logprobs(self) -> bool:
        """Whether the engine can."""
        return "top_logprobs" in self.engine.extra_settings

    drop_fields: ClassVar[Sequence[str]] = ()

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.name

    def messages(self, value: object) -> list[ChatMessage]:
        """Return OpenAI's chat messages as they came, once they are checked."""
        return checked_messages(value)

    def check_size(self, size: int, what: str) -> None:
        """Raise `PromptTooLong` for so many "ids" if the context cannot hold them."""
        self._check_size(size, what, longest=1)

    def sampling_for(self, asked: SamplingParams) -> SamplingParams:
        """Return what was asked for."""
        return asked

    def conversation(self, answer_id: str) -> list[ChatMessage]:
        """Refuse: nothing is kept."""
        raise self._kept_nothing()

    def answer(self, answer_id: str) -> AgentAnswer:
        """Refuse: nothing is kept."""
        raise self._kept_nothing()

    def _kept_nothing(self) -> RequestError:
        return RequestError(
            "this server keeps no answers, so none can be referred to. Send the whole conversation "
            "with each request, or use `rolltree gateway`, whose sessions keep them.",
            status=404,
        )

    async def count_tokens(self, call: AgentCall) -> int:
        """Return how many tokens the prompt of a call has."""
        rendering, _ = split_rendering(call.sampling)
        return len((await self._prompts(call, rendering))[0])

    async def write(self, call: AgentCall, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the body that `work` writes, away from the event loop if it decodes tokens."""
        return work() if call.options.get("only_ids") else await self.run(work)

    def delivered(self, answer: AgentAnswer) -> None:
        """Do nothing: nothing is kept."""

    def check_model(self, name: str) -> None:
        """Raise `RequestError` unless `name` is the served model's, or empty."""
        if name not in ("", self.name):
            raise RequestError(
                f"The model {shown(name)} does not exist here; this server has {self.name!r}.",
                status=404,
                param="model",
            )

    def _check(self, call: AgentCall) -> None:
        """Refuse what the engine would ignore, before the prompt is rendered."""
        self.check_model(call.model)
        for name, why in call.notes.items():
            _log_note(name, why)
        hints = hints_in(call.sampling.extra)
        for name, value in call.sampling.extra.items():
            if name in hints:  # the engine logs it
                continue
            if name == "tool_choice" and self.engine.takes_grammars:
                continue
            if name in RENDERING and call.message_type == "chat":
                continue
            if name not in self.engine.extra_settings:
                raise RequestError(
                    f"the embedded engine does not support {name} = {shown(value)} and would "
                    "ignore it. Leave it out, or use a server that supports it (vLLM).",
                    param=name,
                )

    async def _ready(self, call: AgentCall) -> tuple[AgentCall, _Rendered]:
        """Return a call with the settings of the engine, and how its chat is rendered and read."""
        self._check(call)
        rendering, sampling = split_rendering(call.sampling)
        call = call if sampling is call.sampling else replace(call, sampling=sampling)
        has_form = asks_for_form(sampling.extra) and self.engine.takes_grammars
        if not has_form and rendering == PLAIN:
            return call, _Rendered(self.renderer)

        def done() -> tuple[AgentCall, _Rendered]:
            renderer, begun = self.renderer.with_variables(rendering.variables), ""
            if rendering != PLAIN:
                from rolltree.inference.rendering import check_rendering

                check_rendering(rendering, sampling, call.message_type)
            if rendering.continues and isinstance(call.prompt, list):
                begun = str(call.prompt[-1].get("content") or "")
            rendered = _Rendered(renderer, rendering, begun)
            if not has_form:
                return call, rendered
            from rolltree.inference.constraints import constrained

            is_chat = call.message_type == "chat"
            asked = constrained(sampling, renderer if is_chat else None, call.tools)
            self.engine.prepare(asked)
            return replace(call, sampling=asked), rendered

        return await self.run(done)

    async def _prompts(self, call: AgentCall, rendering: Rendering = PLAIN) -> list[IntArray]:
        """Return the prompt of each answer."""
        given = (call.prompt, *call.more_prompts)

        def prompt(value: Messages | IntArray) -> IntArray:
            if isinstance(value, np.ndarray):
                return value
            if isinstance(value, str):
                return self.text_prompt(value)
            return self.chat_prompt(value, list(call.tools) or None, rendering)

        # Not in a thread for ids, which need no tokenizer.
        if all(isinstance(value, np.ndarray) for value in given):
            prompts = [prompt(value) for value in given]
        else:
            prompts = await self.run(lambda: [prompt(value) for value in given])
        return [each for each in prompts for _ in range(call.n)]

    async def answers(self, call: AgentCall, origin: CallOrigin) -> list[AgentAnswer]:
        """Answer a call.

        Cancelling the task takes all answers out of the batch, as does the failure of one.

        Raises:
            RequestError: the call is not for this model, or has a setting that would be ignored.
            ModelError: as the engine's `submit` does.
            TokenError: a prompt is empty or has an id outside the vocabulary.
        """
        call, rendered = await self._ready(call)
        prompts, head = await self._prompts(call, rendered.how), self._head(call, origin)
        futures: list[Future[EngineOutput]] = []
        try:
            for each, prompt in zip(call.singles(), prompts, strict=True):
                futures.append(self.engine.submit(GenerateRequest(prompt, each.sampling)))
            outputs = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for future in futures:
                # Finished futures ignore it.
                future.cancel()

        def finished() -> list[AgentAnswer]:
            return [
                self._finished(head, call, rendered, index, prompts[index], output)
                for index, output in enumerate(outputs)
            ]

        return finished() if call.options.get("only_ids") else await self.run(finished)

    async def stream(
        self, call: AgentCall, origin: CallOrigin
    ) -> AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None]:
        """Yield the head, a delta for every sampled token but the last, and each whole answer.

        Closing the generator cancels the sampling. Raises as `answers`.
        """
        call, rendered = await self._ready(call)
        prompts, head = await self._prompts(call, rendered.how), self._head(call, origin)
        loop = asyncio.get_running_loop()
        # One queue for all answers, so that deltas are sent in the order of sampling.
        events: asyncio.Queue[tuple[_Streamed, SampledToken | Future[EngineOutput]]]
        events = asyncio.Queue()

        def put(answer: _Streamed, event: SampledToken | Future[EngineOutput]) -> None:
            # From the engine's thread; RuntimeError: the loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, (answer, event))

        futures: list[Future[EngineOutput]] = []
        try:
            for index, each in enumerate(call.singles()):
                prompt = prompts[index]
                report = partial(put, _Streamed(self, call, rendered, index, prompt))
                request = GenerateRequest(prompt, each.sampling)
                futures.append(self.engine.submit(request, report))
                # Called after the last token, in the same thread.
                futures[-1].add_done_callback(report)
            yield head
            num_open = len(futures)
            while num_open:
                answer, event = await events.get()
                if isinstance(event, SampledToken):
                    yield answer.delta(event)
                    continue
                num_open -= 1
                output = event.result()
                whole = self._finished(head, call, rendered, answer.index, answer.prompt, output)
                yield whole.after("".join(answer.reasoning), "".join(answer.content))
        finally:
            for future in futures:
                future.cancel()

    def _head(self, call: AgentCall, origin: CallOrigin) -> AnswerHead:
        name = call.options.get("request_id") or origin.request_id or secrets.token_hex(12)
        return AnswerHead(name, self.name, int(time.time()))

    def _finished(
        self,
        head: AnswerHead,
        call: AgentCall,
        rendered: _Rendered,
        index: int,
        prompt: IntArray,
        output: EngineOutput,
    ) -> AgentAnswer:
        reason, text = output.finish_reason, ""
        if not call.options.get("only_ids"):
            text = self.text(output)
        message: ChatMessage = {"role": "assistant", "content": text}
        if call.message_type == "chat":
            ids = output.completion_ids
            parsed = rendered.renderer.parse_text(
                text, reason, call.tools or None, ids, rendered.begun
            )
            message, reason = parsed.message, parsed.finish_reason
        response = ModelResponse(
            message,
            text,
            reason,
            prompt,
            output.completion_ids,
            self.logprobs_of(output),
            output.versions,
            call.sampling.temperature,
            time_s=max(time.time() - head.created_s, 0.0),
            routed_experts=output.routed_experts,
        )
        return AgentAnswer(
            head,
            message,
            reason,
            response,
            stop=output.stop,
            num_prompt_tokens=len(prompt),
            num_completion_tokens=len(output.completion_ids),
            num_cached_tokens=output.num_cached_tokens,
            options=call.options,
            decode=self.renderer.decode,
            index=index,
            top=output.top if self.logprobs == "processed" else output.raw_top,
        )

    def text(self, output: EngineOutput) -> str:
        """Return an answer's text without the stop string or token that ended it."""
        if output.stop is None:
            return self.renderer.decode_answer(output.completion_ids)
        if isinstance(output.stop, str):
            return self.renderer.decode(output.completion_ids).partition(output.stop)[0]
        return self.renderer.decode(output.completion_ids[:-1])

    def logprobs_of(self, output: EngineOutput | SampledToken) -> FloatArray:
        """Return the logprobs of an answer's tokens, or of a single token, float32 `[_C]`."""
        processed = self.logprobs == "processed"
        if isinstance(output, SampledToken):
            value = output.logprob if processed else output.raw_logprob
            return np.array([value], np.float32)
        values = output.logprobs if processed else output.raw_logprobs
        assert values is not None
        return values

    # -- weights and the end -----------------------------------------------------------------------

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


@lru_cache(256)
def _log_note(name: str, why: str) -> None:
    logger.warning("%s: %s", name, why)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """What renders a call's chat and reads its answers, and the beginning that the prompt has."""

    renderer: ChatRenderer
    how: Rendering = PLAIN
    begun: str = ""


class _Streamed:
    """The deltas of one streamed answer."""

    def __init__(
        self,
        served: ServedModel,
        call: AgentCall,
        rendered: _Rendered,
        index: int,
        prompt: IntArray,
    ) -> None:
        self._served, self.index, self.prompt = served, index, prompt
        self.reasoning, self.content = list[str](), list[str]()
        self._parts: list[ChatMessage] = []
        self._tokens: TokenListener | None = None
        if not call.options.get("only_ids"):
            tools = call.tools or None
            asked = ModelCall(call.prompt, call.sampling, tools=tools, on_delta=self._parts.append)
            self._tokens = TokenListener(rendered.renderer, asked, rendered.begun)

    def delta(self, token: SampledToken) -> AnswerDelta:
        """Return the delta for one more token."""
        self._parts.clear()
        if self._tokens is not None:
            self._tokens.take(token.id)
        new = self._parts[0] if self._parts else {}
        reasoning, content = new.get("reasoning_content", ""), new.get("content", "")
        self.reasoning.append(reasoning)
        self.content.append(content)
        ids, values = np.array([token.id], np.int32), self._served.logprobs_of(token)
        served = self._served
        top = (token.top if served.logprobs == "processed" else token.raw_top,)
        tokens = DeltaTokens(ids, values, self.prompt, served.renderer.decode, top)
        return AnswerDelta(reasoning, content, (), self.index, tokens, len(self.prompt))
