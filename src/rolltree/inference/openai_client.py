"""A client for OpenAI-compatible servers (aiohttp, msgspec): arrays instead of response objects.

With a `ChatRenderer` it renders prompts itself and sends token ids (token-in); without one it sends
messages and takes whatever ids the server returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from rolltree.inference.call import ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client_base import RootClient
from rolltree.inference.context_limit import DEFAULT_MAX_TOKENS, ContextLimit, cut_by_default
from rolltree.inference.http import MAX_ANSWER_BYTES, HttpClient
from rolltree.inference.message_session import MessageSession, send_with_token_fields
from rolltree.inference.parse import (
    begin_answer,
    extract_message,
    read_tokens,
)
from rolltree.inference.request_fields import (
    check_choice,
    extension_fields,
    extra_fields,
    sampling_fields,
    token_in_fields,
)
from rolltree.inference.retry import Outcome, RetryPolicy
from rolltree.inference.session import Prompt, TokenSession, num_characters, without_ids
from rolltree.inference.spelling import check_text
from rolltree.inference.stream import (
    CompletionPosts,
    CompletionStream,
    stream_of_messages,
    stream_of_tokens,
)
from rolltree.inference.token_fields import LogprobsMode, TokenFields, TokenIds
from rolltree.inference.transport import Transport
from rolltree.inference.wire import PromptReader, Response, decode_chunk, decode_response
from rolltree.values.errors import ConfigError, ServerError
from rolltree.values.types import FinishReason, MessageType, ModelResponse, SamplingParams

TokenEndpoint = Literal["auto", "generate", "completions"]
"""For prompts of ids: try vLLM's token-in endpoint, require it, or use `/v1/completions`."""
_TOKEN_IN_PATH = "/inference/v1/generate"
_ABSENT = (404, 405, 501)
_LARGE_PROMPT = 200_000
"""Characters of a prompt above which the server is asked for its context before tokenizing."""
_PATHS: dict[MessageType, str] = {"chat": "/chat/completions", "completion": "/completions"}


class OpenAIMemory(MessageSession):
    """The memory of a session: its calls by message, and by token if prompts are rendered here."""

    def __init__(self, tokens: TokenFields, renderer: ChatRenderer | None) -> None:
        super().__init__(tokens)
        self.by_token = None if renderer is None else TokenSession(renderer)


class OpenAIClient(RootClient[OpenAIMemory]):
    """One OpenAI-compatible server.

    Args:
        base_url: where the API is, usually ending in `/v1`.
        model: the model of calls that name none.
        api_key: sent as a bearer token; never shown.
        admin_key: sent instead of `api_key` when weights are published, if given.
        renderer: renders prompts locally, so that ids are sent; needs a server that returns ids.
        token_ids: `"auto"` asks for ids and does without them if the server gives none (such
            calls cannot be trained), `"vllm"` requires them, `"off"` never asks.
        logprobs_mode: the distribution of the server's logprobs: `"raw"` the model's own
            (vLLM's default), `"processed"` the one sampled from. Raw logprobs are dropped if
            temperature, top_p and the like are not neutral, since they would be wrong.
        token_endpoint: where prompts that were rendered here are sent: vLLM's
            `/inference/v1/generate`, which reports the policy version of every token, or
            `/v1/completions`; `"auto"` tries the first. Calls with stop strings or extra fields
            always use the second.
        vocab_size: the size of the vocabulary; other ids are rejected. Not checked unless given.
        retry: how often and after which waits to retry.
        timeout_s: the longest that one attempt may take, from its connection to its last byte.
        deadline_s: the longest that one call may take from its connection on, including retries
            and the waits between them; twice `timeout_s` unless given.
        max_connections: most requests at a time; further ones wait, which counts as `wait_s`.
        max_answer_bytes: the largest answer that is read, both compressed and decompressed.
        headers: additional headers of every request.
        transport: carries requests instead of sockets, such as
            `rolltree.testing.DirectTransport`.

    Tokens for which the server reports no policy version get `version` as it was when the request
    was sent; publishing weights to the server sets it.
    """

    version: int = 0

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        renderer: ChatRenderer | None = None,
        token_ids: TokenIds = "auto",
        logprobs_mode: LogprobsMode = "raw",
        token_endpoint: TokenEndpoint = "auto",
        vocab_size: int | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        deadline_s: float | None = None,
        max_connections: int = 256,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
        transport: Transport | None = None,
    ) -> None:
        if not model:
            raise ConfigError("model is empty. Pass the name of a model that the server has.")
        self._server = HttpClient(
            base_url,
            api_key=api_key,
            admin_key=admin_key,
            retry=retry,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_connections=max_connections,
            max_answer_bytes=max_answer_bytes,
            headers=headers,
            transport=transport,
        )
        self._model = model
        self.renderer = renderer
        self.tokens = TokenFields(token_ids, logprobs_mode, self._server.base_url, vocab_size)
        self._posts = CompletionPosts(self._server)
        check_choice("token_endpoint", token_endpoint, ("auto", "generate", "completions"))
        self.token_endpoint: TokenEndpoint = token_endpoint
        """Not `"auto"` any more once it is known whether the server has the first one."""
        # That of chat; changes when the server rejects the field.
        self._max_tokens_field = "max_tokens"
        self._context_limit = ContextLimit(self._server)

    def __repr__(self) -> str:
        return f"OpenAIClient({self._server.base_url!r}, {self._model!r})"

    @property
    def model(self) -> str:
        """The model of calls that name none."""
        return self._model

    @property
    def server(self) -> HttpClient:
        """The server behind this client."""
        return self._server

    def new_memory(self) -> OpenAIMemory:
        """Return the empty memory of a new session."""
        return OpenAIMemory(self.tokens, self.renderer)

    async def respond(self, call: ModelCall, memory: OpenAIMemory) -> ModelResponse:
        """Send rendered ids if there is a renderer and the server returns ids, else the prompt."""
        by_token = memory.by_token
        # If the server returns no ids, rendering here would only risk a different template.
        if by_token is None or not self.tokens.wanted or isinstance(call.prompt, np.ndarray):
            return await memory.respond(call, self.ask, self.version)
        size = num_characters(call.prompt)
        if size > _LARGE_PROMPT:
            # A tokenizer takes a minute for megabytes, and meanwhile nothing else runs.
            limit = await self._context_limit.context(call.model or self._model)
            if limit is not None:
                by_token.renderer.vocabulary.check_size(size, limit)
        prompt, call = by_token.prepare_call(call)
        return await self._respond_by_token(by_token, prompt, call, memory.reader)

    def recall(
        self, call: ModelCall, response: ModelResponse, memory: OpenAIMemory
    ) -> ModelResponse:
        """Add a call that was made elsewhere to a session's memory.

        If the server renders prompts, only answers of the requested model keep their ids.
        """
        assert not isinstance(call.prompt, np.ndarray)
        if memory.by_token is not None and self.tokens.wanted:
            return memory.by_token.remember(call.prompt, call.tools, call.model, response)
        # Another model's ids may stand for different text here.
        if response.model != (call.model or self._model):
            return without_ids(response)
        return memory.remember(call.prompt, call.tools, call.model, response)

    async def check_health(self) -> None:
        """Check that the server answers and is healthy; without `/health` it counts as healthy.

        Raises:
            ModelError: it does not answer, or reports that it is unhealthy.
        """
        await self._server.check_health()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    async def ask(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        call: ModelCall,
        memory: MessageSession,
    ) -> Outcome[Response]:
        """Send one request, asking for ids until the server rejects that.

        `content` has the request's messages or its prompt.

        Raises:
            ModelError: as `HttpClient.post` says.
        """
        reader = memory.reader
        stream = stream_of_messages(call, reader.decode_chunk, with_ids=self.tokens.wanted)
        return await self._ask_all(content, message_type, call.sampling, call.model, reader, stream)

    async def _ask_all(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        sampling: SamplingParams,
        model: str | None,
        reader: PromptReader,
        stream: CompletionStream | None,
    ) -> Outcome[Response]:
        """Send a request; a text completion without a limit may use the rest of the context.

        A text completion without `max_tokens` that was cut after 16 tokens is requested again with
        the rest of the context as its limit, and later ones get that limit at once. A streamed
        completion cannot be requested again, so its limit is looked up first; if that is unknown,
        the completion is not streamed.
        """
        if message_type == "chat" or sampling.max_tokens is not None:
            return await self._ask(content, message_type, sampling, model, reader, stream)
        name, prompt, remaining = model or self._model, content["prompt"], None
        if self._context_limit.is_needed or stream is not None:
            remaining = await self._context_limit.remaining(prompt, name)
        if remaining is None:
            stream = None
        limited = replace(sampling, max_tokens=remaining)
        outcome = await self._ask(content, message_type, limited, model, reader, stream)
        # The cut answer is dropped instead of extended: one answer is one sample.
        if remaining is None and cut_by_default(outcome.value):
            self._context_limit.is_needed = True
            remaining = await self._context_limit.remaining(prompt, name)
            if remaining is not None and remaining > DEFAULT_MAX_TOKENS:
                limited = replace(sampling, max_tokens=remaining)
                return await self._ask(content, message_type, limited, model, reader)
        return outcome

    async def _ask(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        sampling: SamplingParams,
        model: str | None,
        reader: PromptReader,
        stream: CompletionStream | None = None,
    ) -> Outcome[Response]:
        # Read first: a concurrent call may change it meanwhile. Text completions only know the old
        # name.
        field = self._max_tokens_field if message_type == "chat" else "max_tokens"

        async def send(with_tokens: bool) -> Outcome[Response]:
            body = {
                "model": model or self._model,
                **content,
                **sampling_fields(sampling, message_type),
            }
            if with_tokens:
                body |= self.tokens.standard(message_type) | self.tokens.extension()
            # The caller's fields last: they override the defaults that are sent for ids.
            body |= extension_fields(sampling) | extra_fields(sampling)
            if "max_tokens" in body:
                body[field] = body.pop("max_tokens")
            if stream is not None:
                stream.with_ids = with_tokens and self.tokens.wanted
            return await self._posts.post(_PATHS[message_type], body, reader.decode, stream)

        try:
            return await send_with_token_fields(self.tokens, send)
        except ServerError as error:
            is_wanted = message_type == "chat" and "max_completion_tokens" in str(error)
            if not is_wanted or field != "max_tokens":
                raise
            field = self._max_tokens_field = (
                "max_completion_tokens"  # newer OpenAI models insist on it
            )
            return await send_with_token_fields(self.tokens, send)

    async def _ask_with_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        model: str,
        stream: CompletionStream | None,
    ) -> Outcome[Response] | None:
        """Send ids to the token-in endpoint; None if the server has none."""
        params = token_in_fields(sampling)
        body = {"model": model, "token_ids": prompt_ids, "sampling_params": params}
        try:
            outcome = await self._posts.post(
                _TOKEN_IN_PATH, body, decode_response, stream, at_root=True
            )
        except ServerError as error:
            # If it has answered before, it exists, and a 404 is about something else.
            if self.token_endpoint == "generate" or error.status not in _ABSENT:
                raise
            self.token_endpoint = "completions"
            return None
        self.token_endpoint = "generate"
        return outcome

    async def _respond_by_token(
        self, session: TokenSession, prompt: Prompt, call: ModelCall, reader: PromptReader
    ) -> ModelResponse:
        # Read before sending: no sampled token is older.
        version, sampling = self.version, call.sampling
        # The server stops at the end tokens in the model's folder; the template may use different
        # ones.
        asked = _with_ends(sampling, session.renderer.end_ids)
        sent = prompt.ids.tolist()
        stream = stream_of_tokens(
            call, session.renderer_of(prompt), decode_chunk, len(sent), prompt.begun
        )
        outcome = None
        kind: MessageType = "chat"  # the token-in endpoint's logprobs have the shape of chat's
        if self.token_endpoint != "completions" and _takes_ids(sampling):
            outcome = await self._ask_with_ids(sent, asked, prompt.model or self.model, stream)
        if outcome is None:
            content = {"prompt": sent}
            outcome = await self._ask_all(
                content, "completion", asked, prompt.model, reader, stream
            )
            kind = "completion"
        response = outcome.value
        answer = begin_answer(response)
        answer.add_outcome(outcome)
        max_tokens = sampling.max_tokens
        if not read_tokens(answer, response, kind, version, prompt.ids, max_tokens=max_tokens):
            self.tokens.lack("its answer has none")
            answer.text = extract_message(response, "completion")[1]
            return session.complete(prompt, answer, call)
        ids = answer.completion_ids
        assert ids is not None
        self.tokens.prove(ids)
        if not self.tokens.usable_logprobs(sampling):
            answer.logprobs = None
        renderer, text = session.renderer, response.choices[0].text
        # What stopped an answer is not part of its text; an answer cut by its length has no stop.
        ended = answer.finish_reason == FinishReason.STOP
        own = renderer.answer_text(ids, sampling) if ended else renderer.decode_answer(ids)
        # Ids that do not decode to the server's text belong to a different answer.
        if text not in (None, own):  # the token-in endpoint gives none
            vocabulary, where = renderer.vocabulary, self._server.base_url
            check_text(vocabulary, ids, text, asked.stop, where=where)
        answer.text = own
        return session.complete(prompt, answer, call)


def _takes_ids(sampling: SamplingParams) -> bool:
    """Whether the token-in endpoint takes these settings."""
    return not (sampling.stop or any(sampling.extra.values()))


def _with_ends(sampling: SamplingParams, end_ids: Sequence[int]) -> SamplingParams:
    """Return the settings with the renderer's end tokens as further stop tokens."""
    body = dict(sampling.extra.get("extra_body") or {})
    ends = (*sampling.stop_token_ids, *(body.pop("stop_token_ids", None) or ()), *end_ids)
    extra = {**sampling.extra, "extra_body": body} if sampling.extra else {}
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)), extra=extra)
