"""A client for OpenAI-compatible servers: httpx and msgspec, arrays instead of response objects.

With a `ChatRenderer` it renders prompts itself and sends token ids (token-in); without one it sends
messages and takes whatever ids the server returns. It knows vLLM's token id fields. It leaves out
streaming, several servers (`pool`) and weight updates (`publish`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from rolltree.errors import ConfigError, ServerError
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.completion import cut_at_stop
from rolltree.inference.dialect import (
    LogprobsMode,
    TokenFields,
    TokenIds,
    extension_fields,
    extra_fields,
    outgoing,
    sampling_fields,
)
from rolltree.inference.http import HttpServer
from rolltree.inference.message_session import MessageSession, ask_for_tokens, generated
from rolltree.inference.parse import (
    extract_finish_reason,
    extract_message,
    extract_tokens,
    extract_versions,
    response_head,
)
from rolltree.inference.retry import Outcome, RetryPolicy
from rolltree.inference.room import DEFAULT_MAX_TOKENS, Room, cut_by_default
from rolltree.inference.session import Prompt, TokenSession, check_message_type
from rolltree.inference.token_in import TokenEndpoint, TokenInEndpoint
from rolltree.inference.wire import Decode, Response, decode_response
from rolltree.types import (
    FinishReason,
    GenerateRequest,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)

_PATHS: dict[MessageType, str] = {"chat": "/chat/completions", "completion": "/completions"}


class OpenAIClient:
    """One OpenAI-compatible server.

    Args:
        base_url: where the API is, usually ending in `/v1`.
        model: the model asked when a call names none.
        api_key: sent as a bearer token; never shown.
        renderer: renders prompts on this side and sends ids; needs a server that returns ids.
        token_ids: `"auto"` asks for ids and does without them where the server gives none (such
            calls cannot be trained), `"vllm"` insists on them, `"off"` never asks.
        logprobs_mode: what the server's logprobs are: `"raw"` the model's own (vLLM's default), or
            `"processed"` those of the distribution sampled from. Raw ones are dropped when
            temperature, top_p and the like are not neutral, since they would be wrong.
        token_endpoint: where prompts that were rendered here are sent: vLLM's
            `/inference/v1/generate`, which knows the policy version of every token, or
            `/v1/completions`; `"auto"` finds out.
        retry: how often to try again.
        timeout_s: longest wait for an answer's next bytes.
        max_connections: most requests at a time; further ones wait, which counts as `wait_s`.
        transport: an httpx transport instead of the network, for tests.

    `version`, as it is when a request is sent, is the policy version of tokens for which the server
    reports none; whoever publishes weights to the server sets it.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        renderer: ChatRenderer | None = None,
        token_ids: TokenIds = "auto",
        logprobs_mode: LogprobsMode = "raw",
        token_endpoint: TokenEndpoint = "auto",
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        max_connections: int = 256,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not model:
            raise ConfigError("model is empty, so the server cannot tell what to ask. Name one.")
        self._server = HttpServer(
            base_url,
            api_key=api_key,
            retry=retry,
            timeout_s=timeout_s,
            max_connections=max_connections,
            headers=headers,
            transport=transport,
        )
        self._model = model
        self.renderer = renderer
        self.tokens = TokenFields(token_ids, logprobs_mode, self._server.base_url)
        self.token_in = TokenInEndpoint(self._server, token_endpoint)
        self.version = 0
        self._max_tokens_field = "max_tokens"
        self._room = Room(self._server)

    def __repr__(self) -> str:
        return f"OpenAIClient({self._server.base_url!r}, {self._model!r})"

    @property
    def model(self) -> str:
        """The model asked when a call names none."""
        return self._model

    @property
    def server(self) -> HttpServer:
        """The server behind this client."""
        return self._server

    def session(self) -> OpenAISession:
        """Return a client for one rollout that remembers its calls."""
        return OpenAISession(self)

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Ask once, with no memory of earlier calls. See `ModelClient.chat`."""
        return await self.session().chat(
            messages, tools=tools, sampling=sampling, model=model, message_type=message_type
        )

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly these ids. See `ModelClient.generate`."""
        version = self.version
        outcome = await self.ask_ids(request.prompt_ids.tolist(), request.sampling, request.model)
        return generated(request, self.tokens, outcome.value, **_facts(outcome, version))

    async def check_health(self) -> None:
        """Return if the server answers at all.

        Raises:
            ModelError: it does not, or says that it is not well.
        """
        await self._server.check_health()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    async def ask(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        sampling: SamplingParams,
        model: str | None,
        decode: Decode = decode_response,
    ) -> Outcome[Response]:
        """Send one request: `content` is its messages or prompt. Asks for ids while there is hope.

        A text completion without `max_tokens` that was cut after 16 tokens is asked again with all
        that fits, and later ones are asked so at once.

        Raises:
            ModelError: as `HttpServer.post` says.
        """
        if message_type == "chat" or sampling.max_tokens is not None:
            return await self._ask(content, message_type, sampling, model, decode)
        name, prompt, room = model or self._model, content["prompt"], None
        if self._room.is_needed:
            room = await self._room.after(prompt, name)
        asked = replace(sampling, max_tokens=room)
        outcome = await self._ask(content, message_type, asked, model, decode)
        if room is None and cut_by_default(outcome.value):
            self._room.is_needed = True
            room = await self._room.after(prompt, name)
            if room is not None and room > DEFAULT_MAX_TOKENS:
                whole = replace(sampling, max_tokens=room)
                return await self._ask(content, message_type, whole, model, decode)
        return outcome

    async def _ask(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        sampling: SamplingParams,
        model: str | None,
        decode: Decode,
    ) -> Outcome[Response]:
        async def send(with_tokens: bool) -> Outcome[Response]:
            body = {
                "model": model or self._model,
                **content,
                **sampling_fields(sampling, message_type),
            }
            if with_tokens:
                body |= self.tokens.standard(message_type) | self.tokens.extension()
            body |= extension_fields(sampling) | extra_fields(sampling)
            if "max_tokens" in body and self._max_tokens_field != "max_tokens":
                body[self._max_tokens_field] = body.pop("max_tokens")
            return await self._server.post(_PATHS[message_type], body, decode)

        try:
            return await ask_for_tokens(self.tokens, send)
        except ServerError as error:
            if "max_completion_tokens" not in str(error) or self._max_tokens_field != "max_tokens":
                raise
            self._max_tokens_field = "max_completion_tokens"  # newer OpenAI models insist on it
            return await ask_for_tokens(self.tokens, send)

    async def ask_ids(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        model: str | None,
        decode: Decode = decode_response,
    ) -> Outcome[Response]:
        """Send token ids to the completions endpoint."""
        return await self.ask({"prompt": prompt_ids}, "completion", sampling, model, decode)


class OpenAISession:
    """One rollout's view of an `OpenAIClient`; connections are shared with it."""

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client
        self._by_message = MessageSession(client.tokens)
        self._by_token = None if client.renderer is None else TokenSession(client.renderer)

    @property
    def model(self) -> str:
        """The model asked when a call names none."""
        return self._client.model

    def session(self) -> OpenAISession:
        """Return a session of its own, with nothing remembered."""
        return self._client.session()

    def moved_to(self, client: OpenAIClient) -> OpenAISession:
        """Return this session on another server of the same model: its calls are remembered."""
        session = OpenAISession(client)
        session._by_message, session._by_token = self._by_message, self._by_token
        return session

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Sample the next message, continuing an earlier call where one fits."""
        check_message_type(messages, message_type)
        if self._by_token is not None and self._client.tokens.wanted:
            prompt = self._by_token.prepare(messages, tools, message_type=message_type, model=model)
            return await self._chat_by_token(self._by_token, prompt, sampling)
        content: dict[str, Any] = {"prompt": messages}
        if not isinstance(messages, str):
            messages = list(messages)
            content = {"messages": outgoing(messages)}
            if tools:
                content["tools"] = list(tools)
        version = self._client.version
        outcome = await self._client.ask(
            content, message_type, sampling, model, self._by_message.reader.decode
        )
        facts = _facts(outcome, version)
        return self._by_message.complete(
            messages, tools, message_type, model, sampling, outcome.value, **facts
        )

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly these ids."""
        return await self._client.generate(request)

    async def aclose(self) -> None:
        """Do nothing: the connections are the client's."""

    async def _chat_by_token(
        self, session: TokenSession, prompt: Prompt, sampling: SamplingParams
    ) -> ModelResponse:
        client = self._client
        version = client.version
        asked = _with_ends(sampling, session.renderer.end_ids)
        ids = prompt.ids.tolist()
        outcome = None
        kind: MessageType = "chat"  # the shape of the token-in endpoint's logprobs
        if client.token_in.takes(sampling):
            outcome = await client.token_in.ask(ids, asked, prompt.model or client.model)
        if outcome is None:
            reader = self._by_message.reader
            outcome = await client.ask_ids(ids, asked, prompt.model, reader.decode)
            kind = "completion"
        response = outcome.value
        reason = extract_finish_reason(response)
        found = extract_tokens(response, kind, prompt.ids)
        fields = response_head(response) | {"wait_s": outcome.wait_s}
        if outcome.num_retries:
            fields["info"] = {**fields["info"], "num_retries": outcome.num_retries}
        if found is None:
            client.tokens.refuse("the answer holds none")
            fields["text"] = extract_message(response, "completion")[1]
            return session.complete(
                prompt, None, None, reason, temperature=sampling.temperature, **fields
            )
        client.tokens.prove()
        _, ids, logprobs = found
        stopped = reason == FinishReason.STOP
        return session.complete(
            prompt,
            ids,
            logprobs if client.tokens.usable_logprobs(sampling) else None,
            reason,
            temperature=sampling.temperature,
            versions=extract_versions(response, len(ids), version),
            text=_text(session.renderer, ids, sampling) if stopped else None,
            **fields,
        )


def _facts(outcome: Outcome[Response], version: int) -> dict[str, Any]:
    """Return what the record keeps of a request; no token is older than `version`, its start's."""
    return {"version": version, "num_retries": outcome.num_retries, "wait_s": outcome.wait_s}


def _with_ends(sampling: SamplingParams, end_ids: Sequence[int]) -> SamplingParams:
    """Return settings that stop at the renderer's end tokens too."""
    body = dict(sampling.extra.get("extra_body", {}))
    ends = (*sampling.stop_token_ids, *body.pop("stop_token_ids", ()), *end_ids)
    extra = {**sampling.extra, "extra_body": body} if sampling.extra else {}
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)), extra=extra)


def _text(renderer: ChatRenderer, ids: IntArray, sampling: SamplingParams) -> str:
    """Return the text of an answer without what stopped it."""
    if len(ids) and int(ids[-1]) in sampling.stop_token_ids:
        return renderer.decode(ids[:-1])
    return cut_at_stop(renderer.decode_answer(ids), sampling.stop)
