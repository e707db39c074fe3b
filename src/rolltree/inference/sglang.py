"""A client for SGLang's native `/generate`: ids in, ids and logprobs out.

Prompts are rendered here, so a `ChatRenderer` is needed. The fields are those of SGLang's
documentation: `input_ids`, `sampling_params`, `return_logprob`; `output_ids` and
`meta_info.output_token_logprobs`, triples (logprob, id, text). It leaves out SGLang's
OpenAI-compatible endpoints, which `OpenAIClient` talks to (without ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import numpy as np

from rolltree.errors import BadResponse, ConfigError, TokenError, UnsupportedSetting
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.completion import cut_at_stop
from rolltree.inference.http import HttpServer
from rolltree.inference.parse import finish_reason_named
from rolltree.inference.retry import RetryPolicy
from rolltree.inference.session import Prompt, TokenSession
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


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Meta(msgspec.Struct):
    id: str = ""
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_version: str | int | None = None


class GenerateAnswer(msgspec.Struct):
    """What `/generate` answers, as far as it is used."""

    meta_info: _Meta
    output_ids: list[int] | None = None


_UNLIMITED = 2**20  # SGLang's default is 128; it cuts at the context window
_DECODER = msgspec.json.Decoder(GenerateAnswer)


def decode_answer(body: bytes) -> GenerateAnswer:
    """Decode an answer of `/generate`.

    Raises:
        BadResponse: it is not JSON, or not of this shape.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadResponse(
            f"the answer is not one of SGLang's /generate ({error}). Is the base URL the server's "
            "root, without /v1?"
        ) from error


def sampled_of(answer: GenerateAnswer, version: int) -> dict[str, Any]:
    """Return what was sampled, as arguments of `TokenSession.complete`.

    `version` is the policy's where the server gives no number.

    Raises:
        TokenError: there are no ids or no logprobs, or they contradict each other.
        BadResponse: the request was aborted with an error, or ended for an unknown reason.
    """
    meta = answer.meta_info
    triples = meta.output_token_logprobs
    if triples is None:
        raise TokenError(
            "SGLang's answer has no output_token_logprobs although return_logprob was set; the "
            "call cannot be trained. Which version of SGLang is it?"
        )
    ids = [token for _, token, _ in triples]
    if answer.output_ids is not None and answer.output_ids != ids:
        raise TokenError(
            f"SGLang's output_ids ({len(answer.output_ids)}) are not the ids of its logprobs "
            f"({len(ids)}), so the ratio of policies would be computed for the wrong tokens."
        )
    finish = meta.finish_reason
    if finish is None or (finish.type == "abort" and finish.message):
        why = finish.message if finish else "it gives no finish_reason"
        raise BadResponse(f"SGLang did not finish the request: {why}. The call has no answer.")
    label = str(meta.weight_version)
    return {
        "ids": ids,
        "logprobs": np.array([value for value, _, _ in triples], np.float32),  # None: NaN, refused
        "finish_reason": finish_reason_named(finish.type),
        "versions": int(label) if label.isdecimal() else version,
        "id": meta.id or "",
        "info": {} if finish.matched is None else {"stop_reason": finish.matched},
    }


class SGLangClient:
    """One SGLang server, asked by token ids.

    Args:
        base_url: the server's root, such as `http://127.0.0.1:30000`.
        model: the name this model goes by; SGLang serves one and takes none.
        renderer: renders prompts and reads answers.
        api_key, retry, timeout_s, max_connections, transport: as `OpenAIClient`'s.

    SGLang's logprobs are those at the request's temperature, before top_p and top_k; with these
    they are not those of the distribution sampled from, and are dropped. Seeds are obeyed only by a
    server started with --enable-deterministic-inference. A server started with
    SGLANG_RETURN_ORIGINAL_LOGPROB gives others at a temperature other than 1: do not use it.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        renderer: ChatRenderer,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        max_connections: int = 256,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not model:
            raise ConfigError("model is empty; name the model that the server runs.")
        self._server = HttpServer(
            base_url,
            api_key=api_key,
            retry=retry,
            timeout_s=timeout_s,
            max_connections=max_connections,
            transport=transport,
        )
        self._model, self.renderer, self.version = model, renderer, 0

    @property
    def model(self) -> str:
        """The name of the model behind this client."""
        return self._model

    @property
    def server(self) -> HttpServer:
        """The server behind this client."""
        return self._server

    def session(self) -> SGLangSession:
        """Return a client for one rollout, whose prompts continue its own calls exactly."""
        return SGLangSession(self)

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
        sampled = await self.ask(request.prompt_ids, request.sampling, request.model)
        session, temperature = TokenSession(self.renderer), request.sampling.temperature
        return session.complete(Prompt(request.prompt_ids), **sampled, temperature=temperature)

    async def check_health(self) -> None:
        """Return if the server is well; raises as `HttpServer.check_health`."""
        await self._server.check_health()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    async def ask(
        self, ids: IntArray, sampling: SamplingParams, model: str | None
    ) -> dict[str, Any]:
        """Send ids int32 `[_P]`; return what was sampled, for `TokenSession.complete`.

        Raises:
            UnsupportedSetting: the call names another model, or has fields that SGLang lacks.
            ModelError: as `HttpServer.post` says.
        """
        if model not in (None, self._model):
            raise UnsupportedSetting(
                f"this server runs {self._model!r}, but {model!r} was asked for, and its answer "
                "would pass for that model's. Leave the model's name out."
            )
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": sampling_params(sampling, self.renderer.end_ids),
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        outcome = await self._server.post("/generate", body, decode_answer)
        found = sampled_of(outcome.value, self.version)
        if found["finish_reason"] == FinishReason.STOP:
            found["text"] = self._text(found["ids"], sampling)
        if sampling.top_p != 1.0 or sampling.top_k:
            found["logprobs"] = None
        if outcome.num_retries:
            found["info"] = {**found["info"], "num_retries": outcome.num_retries}
        return {**found, "wait_s": outcome.wait_s}

    def _text(self, ids: list[int], sampling: SamplingParams) -> str:
        if ids and ids[-1] in sampling.stop_token_ids:
            return self.renderer.decode(ids[:-1])
        return cut_at_stop(self.renderer.decode_answer(ids), sampling.stop)


class SGLangSession:
    """One rollout's view of an `SGLangClient`."""

    def __init__(self, client: SGLangClient) -> None:
        self._client, self._calls = client, TokenSession(client.renderer)

    @property
    def model(self) -> str:
        """The name of the model behind this client."""
        return self._client.model

    def session(self) -> SGLangSession:
        """Return a session of its own, with nothing remembered."""
        return self._client.session()

    def moved_to(self, client: SGLangClient) -> SGLangSession:
        """Return this session on another server of the same model: its calls are remembered."""
        session = SGLangSession(client)
        session._calls = self._calls
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
        prompt = self._calls.prepare(messages, tools, message_type=message_type, model=model)
        sampled = await self._client.ask(prompt.ids, sampling, model)
        return self._calls.complete(prompt, **sampled, temperature=sampling.temperature)

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly these ids."""
        return await self._client.generate(request)

    async def aclose(self) -> None:
        """Do nothing: the connections are the client's."""


def sampling_params(sampling: SamplingParams, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's `sampling_params`; `end_ids` end an answer too.

    Raises:
        UnsupportedSetting: there are further fields.
    """
    further = {**sampling.extra, **sampling.extra.get("extra_body", {})}
    further.pop("extra_body", None)
    if further:
        raise UnsupportedSetting(
            f"{', '.join(sorted(further))}: only temperature, top_p, top_k, max_tokens, stop, "
            "stop_token_ids and seed are sent to SGLang; the others would be ignored."
        )
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": _UNLIMITED if sampling.max_tokens is None else sampling.max_tokens,
        "stop_token_ids": list(dict.fromkeys((*sampling.stop_token_ids, *end_ids))),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params
