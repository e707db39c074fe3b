"""A client for SGLang's native `/generate`: ids in, ids and logprobs out.

Written from SGLang's documentation and tested only with a stand-in server. For SGLang's
OpenAI-compatible endpoints use `OpenAIClient` (without ids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rolltree.errors import BadResponse, ConfigError, TokenError, UnsupportedSetting
from rolltree.inference.call import Answer
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client_base import TokenClient, check_model
from rolltree.inference.engine import extra_of
from rolltree.inference.http import MAX_ANSWER_BYTES, HttpClient
from rolltree.inference.parse import check_num_sampled, finish_reason_named, version_named
from rolltree.inference.retry import RetryPolicy
from rolltree.inference.transport import Transport
from rolltree.inference.wire import UNREADABLE
from rolltree.types import FinishReason, GenerateRequest, SamplingParams


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
    """The fields of a `/generate` response that are used."""

    meta_info: _Meta
    output_ids: list[int] | None = None


# One pass over an answer that repeats three values per token.
_DECODER = msgspec.json.Decoder(GenerateAnswer)


def decode_answer(body: bytes) -> GenerateAnswer:
    """Decode a response of `/generate`.

    Raises:
        BadResponse: it is not JSON, or has a different shape.
    """
    try:
        return _DECODER.decode(body)
    except UNREADABLE as error:
        raise BadResponse(
            f"the answer is not one of SGLang's /generate ({error}). Is the base URL the server's "
            "root, without /v1?"
        ) from error


def sampled_of(answer: GenerateAnswer, version: int) -> Answer:
    """Return the sampled answer.

    `version` is the policy version to use if the server does not report a number.

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
    # The server sends both. If they differ, it is not known which ids were sampled.
    if answer.output_ids is not None and answer.output_ids != ids:
        raise TokenError(
            f"SGLang's output_ids ({len(answer.output_ids)}) are not the ids of its logprobs "
            f"({len(ids)}), so the ratio of policies would be computed for the wrong tokens."
        )
    finish = meta.finish_reason
    if finish is None or (finish.type == "abort" and finish.message):
        why = finish.message if finish else "it gives no finish_reason"
        raise BadResponse(f"SGLang did not finish the request: {why}. The call has no answer.")
    return Answer(
        finish_reason_named(finish.type),
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array([value for value, _, _ in triples], np.float32),  # None: NaN, refused
        versions=np.full(len(ids), version_named(meta.weight_version, version), np.int32),
        id=meta.id or "",
        info={} if finish.matched is None else {"stop_reason": finish.matched},
    )


class SGLangClient(TokenClient):
    """A client of one SGLang server, which it sends token ids.

    Args:
        base_url: the server's root, such as `http://127.0.0.1:30000`.
        model: the model's name here; SGLang serves one model, and requests do not name it.
        renderer: renders prompts and reads answers.
        api_key, retry, timeout_s, deadline_s, max_connections, max_answer_bytes, transport: as
            `OpenAIClient`'s.

    SGLang's logprobs are at the request's temperature, but before top_p and top_k; with either,
    they are not those of the sampled distribution, and are dropped. Seeds have an effect only on a
    server started with --enable-deterministic-inference. Do not set SGLANG_RETURN_ORIGINAL_LOGPROB
    on the server: its logprobs are wrong then at temperatures other than 1.
    """

    version: int = 0

    def __init__(
        self,
        base_url: str,
        model: str,
        renderer: ChatRenderer,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        deadline_s: float | None = None,
        max_connections: int = 256,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        transport: Transport | None = None,
    ) -> None:
        if not model:
            raise ConfigError("model is empty; name the model that the server runs.")
        self._server = HttpClient(
            base_url,
            api_key=api_key,
            retry=retry,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_connections=max_connections,
            max_answer_bytes=max_answer_bytes,
            transport=transport,
        )
        self._model, self.renderer = model, renderer

    @property
    def model(self) -> str:
        """The name of the model behind this client."""
        return self._model

    @property
    def server(self) -> HttpClient:
        """The server behind this client."""
        return self._server

    async def check_health(self) -> None:
        """Return if the server is healthy; raises like `HttpClient.check_health`."""
        await self._server.check_health()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    async def sample(self, request: GenerateRequest, on_token: Any = None) -> Answer:
        """Send ids and return the sampled answer.

        Raises:
            UnsupportedSetting: the call names a different model, or has fields that SGLang lacks.
            ModelError: as in `HttpClient.post`.
        """
        check_model(request.model, self._model)
        sampling = request.sampling
        body = {
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling_params(sampling, self.renderer.end_ids),
            "return_logprob": True,
            # No logprobs of the prompt.
            "logprob_start_len": -1,
        }
        outcome = await self._server.post("/generate", body, decode_answer)
        answer = sampled_of(outcome.value, self.version)
        ids = answer.completion_ids
        assert ids is not None
        check_num_sampled(len(ids), sampling.max_tokens)
        if answer.finish_reason == FinishReason.STOP:
            answer.text = self.renderer.answer_text(ids, sampling)
        # SGLang computes logprobs before these cuts, so they are not those of the sampled
        # distribution.
        if sampling.top_p != 1.0 or sampling.top_k:
            answer.logprobs = None
        answer.add_outcome(outcome)
        return answer


def sampling_params(sampling: SamplingParams, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return SGLang's `sampling_params`; `end_ids` end an answer too.

    Raises:
        UnsupportedSetting: `sampling` has fields that are not sent to SGLang.
    """
    further = extra_of(sampling)
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
        # None becomes null, which means up to the context window. Without the field SGLang cuts at
        # 128 tokens, and it refuses numbers beyond the window.
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(dict.fromkeys((*sampling.stop_token_ids, *end_ids))),
        # The renderer reads tool calls and reasoning from special tokens.
        "skip_special_tokens": False,
        # All sampled tokens are trained, including those of the stop string.
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params
