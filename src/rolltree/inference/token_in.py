"""Token-in over HTTP: ids to vLLM's `/inference/v1/generate`, which says the version of each span.

Whether a server has the endpoint is found out by asking once; without it, ids go to
`/v1/completions`. It knows vLLM's sampling parameters. It knows nothing about messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rolltree.errors import ServerError
from rolltree.inference.dialect import check_choice
from rolltree.inference.http import HttpServer
from rolltree.inference.retry import Outcome
from rolltree.inference.wire import Response, decode_response
from rolltree.types import SamplingParams

TokenEndpoint = Literal["auto", "generate", "completions"]
"""Where prompts of ids are sent: see and fall back, vLLM's token-in endpoint, or completions."""

PATH = "/inference/v1/generate"
_ABSENT = (404, 405, 501)


class TokenInEndpoint:
    """The token-in endpoint of one server, used while it is there."""

    def __init__(self, server: HttpServer, mode: TokenEndpoint) -> None:
        check_choice("token_endpoint", mode, ("auto", "generate", "completions"))
        self._server, self._mode = server, mode
        self._known = mode == "generate"
        self.is_absent = mode == "completions"

    def takes(self, sampling: SamplingParams) -> bool:
        """Whether to ask here: stop strings and further fields are left to `/v1/completions`."""
        return not (self.is_absent or sampling.stop or any(sampling.extra.values()))

    async def ask(
        self, prompt_ids: list[int], sampling: SamplingParams, model: str
    ) -> Outcome[Response] | None:
        """Send ids; None where the server has no such endpoint.

        Raises:
            ModelError: as `HttpServer.post` says.
        """
        body = {
            "model": model,
            "token_ids": prompt_ids,
            "sampling_params": sampling_params(sampling),
        }
        try:
            outcome = await self._server.post(PATH, body, decode_response, at_root=True)
        except ServerError as error:
            if self._known or error.status not in _ABSENT:
                raise
            self.is_absent = True
            return None
        self._known = True
        return outcome


def sampling_params(sampling: SamplingParams) -> Mapping[str, Any]:
    """Return vLLM's `SamplingParams` as JSON, with the sampled tokens' logprobs asked for.

    All fields that a model folder could give another default are set.
    """
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
    }
    if sampling.max_tokens is not None:
        params["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params
