"""An OpenAI-compatible server that answers from a script, over real HTTP, and fails on demand.

It answers `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/health`, with vLLM's token
id fields made by a byte tokenizer. It has those checks of vLLM that clients depend on: context
length, unknown models, API key. It does not stream.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client import sampling_from_args
from rolltree.testing.faults import FaultRow, HttpFault
from rolltree.testing.loopback import LoopbackServer, Reply, Request
from rolltree.testing.script import Script, ScriptedTokens, ScriptSource, tokens_of
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.errors import BadResponse, ConfigError
from rolltree.values.types import IntArray, MessageType

_SERVER_ONLY = (
    *("model", "messages", "prompt", "tools", "tool_choice"),
    *("return_token_ids", "return_tokens_as_token_ids"),
)
_PATHS: dict[str, MessageType] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
_TOKEN_IN_PATH = "/inference/v1/generate"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request as it was received: `body` is the decoded JSON, or None without a body."""

    method: str
    path: str
    body: dict[str, Any] | None
    headers: Mapping[str, str]


class ScriptedServer(LoopbackServer):
    """A scripted model behind HTTP, inside its `with` block.

    Args:
        script: answers in the order of the requests, or a function from the messages (from the
            decoded prompt, for text completions) to the answer.
        faults: what goes wrong with the first completion request, the second, ...
        token_ids: `"vllm"` returns ids and logprobs if they are requested, `"ignore"` ignores
            the request for them, and `"reject"` answers it with status 400, as OpenAI does.
        token_in: also serve vLLM's `/inference/v1/generate`.
        api_key: requests must have it as a bearer token.
        context_length: the most tokens of prompt and completion; longer requests get status 400.
        delay_s: how long each answer takes.

    Attributes:
        requests: every request, in order of arrival, except those for the version of the weights.

    Example:
        >>> with ScriptedServer(["12"]) as server:
        ...     server.base_url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self,
        script: ScriptSource,
        *,
        model: str = "scripted",
        faults: Sequence[HttpFault | None] | Callable[[int], HttpFault | None] = (),
        renderer: ChatRenderer | None = None,
        token_ids: Literal["vllm", "ignore", "reject"] = "vllm",
        token_in: bool = False,
        api_key: str | None = None,
        context_length: int | None = None,
        delay_s: float = 0.0,
        port: int = 0,
    ) -> None:
        if token_ids not in ("vllm", "ignore", "reject"):
            raise ConfigError(f"token_ids = {token_ids!r} is not 'vllm', 'ignore' or 'reject'.")
        self.model = model
        self.renderer = renderer or ChatRenderer(ByteTokenizer())
        self.faults = FaultRow(faults)
        self.requests: list[ServedRequest] = []
        self.num_answers = 0
        self.max_concurrent = 0
        self._script = Script(script)
        self._token_ids = token_ids
        self._token_in = token_in
        self._api_key = api_key
        self._context_length = context_length
        self._delay_s = delay_s
        self._num_open = 0
        self._lock = threading.Lock()
        self._ids = itertools.count()
        super().__init__(self._handle, port)

    @property
    def base_url(self) -> str:
        """The `base_url` for an OpenAI client."""
        return self.url + "/v1"

    @property
    def num_requests(self) -> int:
        """Number of requests received, of any kind."""
        return len(self.requests)

    async def _handle(self, request: Request) -> Reply:
        try:
            body = json.loads(request.body) if request.body else None
        except ValueError:
            return _error(400, "the body is not JSON")
        path = request.path.partition("?")[0]
        # Clients ask for it before evaluations; it does not belong to a script.
        if path == "/weight_info":
            return _error(404, "this server's weights have no version")
        self.requests.append(ServedRequest(request.method, path, body, request.headers))
        if self._api_key and request.headers.get("authorization") != f"Bearer {self._api_key}":
            return _error(401, "Incorrect API key provided")
        if path == "/health":
            return Reply(200, b"{}")
        if path == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": "rolltree"}
            return _json(200, {"object": "list", "data": [card]})
        is_token_in = path == _TOKEN_IN_PATH and self._token_in
        if is_token_in and isinstance(body, dict):
            path, body = "/v1/completions", _as_completion(body)
        if path not in _PATHS or request.method != "POST" or not isinstance(body, dict):
            return _error(404, f"{request.method} {path} is not served")
        self._num_open += 1
        self.max_concurrent = max(self.max_concurrent, self._num_open)
        try:
            name = request.headers.get("x-request-id") or str(next(self._ids))
            return await self._complete(body, _PATHS[path], name, is_token_in)
        finally:
            self._num_open -= 1

    async def _complete(
        self, body: dict[str, Any], message_type: MessageType, name: str, is_token_in: bool
    ) -> Reply:
        fault = self.faults.next() or HttpFault()
        await asyncio.sleep(self._delay_s + fault.delay_s)
        if fault.reset or fault.gone or fault.raw is not None:
            return Reply(200, b"", reset=fault.reset, gone=fault.gone, raw=fault.raw)
        if fault.status:
            after = {} if fault.retry_after_s is None else {"Retry-After": f"{fault.retry_after_s}"}
            return _error(fault.status, fault.message, {**after, **fault.headers})
        if body.get("model") != self.model:
            return _error(404, f"The model {body.get('model')!r} does not exist.")
        if body.get("stream"):
            return _error(400, "the scripted server does not stream")
        if self._token_ids == "reject" and "return_token_ids" in body:
            return _error(400, "Unrecognized request argument supplied: return_token_ids")
        size = getattr(self.renderer.tokenizer, "__len__", lambda: 2**31)()
        problem = _problem(body, message_type, size)
        if problem:
            return _error(400, problem)
        try:
            reply = await self._answer(body, message_type, name, is_token_in)
        except (BadResponse, ConfigError) as error:
            return _error(400, str(error))
        except Exception as error:  # noqa: BLE001 (a server whose handler fails answers 500)
            return _error(500, f"the script failed: {type(error).__name__}: {error}")
        return reply if reply.status != 200 else _spoiled(reply, fault)

    async def _answer(
        self, body: dict[str, Any], message_type: MessageType, name: str, is_token_in: bool
    ) -> Reply:
        tools = body.get("tools") or None
        if message_type == "chat":
            asked: Any = body["messages"]
            prompt_ids = self.renderer.render(asked, tools)
        else:
            asked = body["prompt"]
            if isinstance(asked, str):
                prompt_ids = self.renderer.encode_text(asked)
            else:
                prompt_ids = np.array(asked, np.int32)
                asked = self.renderer.decode(prompt_ids)
        sampling = sampling_from_args({k: v for k, v in body.items() if k not in _SERVER_ONLY})
        if self._context_length is not None:
            size = len(prompt_ids) + (sampling.max_tokens or 1)
            if size > self._context_length:
                return _error(
                    400,
                    f"This model's maximum context length is {self._context_length} tokens. "
                    f"However, you requested {size} tokens. Please reduce the length.",
                )
        reply = tokens_of(await self._script.next(asked), self.renderer, sampling)
        self.num_answers += 1
        completion = self._completion(body, message_type, name, prompt_ids, reply)
        return _json(200, _ids_only(completion) if is_token_in else completion)

    def _completion(
        self,
        body: dict[str, Any],
        message_type: MessageType,
        name: str,
        prompt_ids: IntArray,
        reply: ScriptedTokens,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason.value}
        completion: dict[str, Any] = {
            "id": f"{'chatcmpl' if message_type == 'chat' else 'cmpl'}-{name}",
            "object": "chat.completion" if message_type == "chat" else "text_completion",
            "created": 0,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(reply.ids),
                "total_tokens": len(prompt_ids) + len(reply.ids),
            },
        }
        if message_type == "chat":
            parsed = self.renderer.parse_text(
                reply.text, reply.finish_reason, body.get("tools"), reply.ids
            )
            choice["finish_reason"] = parsed.finish_reason.value
            choice["message"] = {
                name: value for name, value in parsed.message.items() if name != "parse_problems"
            }
        else:
            choice["text"] = reply.text
        if self._token_ids != "vllm":
            return completion
        if body.get("logprobs"):
            choice["logprobs"] = self._logprobs(body, message_type, reply)
        if body.get("return_token_ids"):
            (completion if message_type == "chat" else choice)["prompt_token_ids"] = (
                prompt_ids.tolist()
            )
            choice["token_ids"] = reply.ids.tolist()
        return completion

    def _logprobs(
        self, body: dict[str, Any], message_type: MessageType, reply: ScriptedTokens
    ) -> dict[str, Any]:
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        texts = [
            f"token_id:{token}" if as_ids else self.renderer.decode([token])
            for token in reply.ids.tolist()
        ]
        values = reply.logprobs.tolist()
        if message_type == "completion":
            return {"tokens": texts, "token_logprobs": values}
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
        }


def _problem(body: Mapping[str, Any], message_type: MessageType, vocab_size: int) -> str:
    """Return what is wrong with the request's prompt, or an empty string."""
    if message_type == "chat":
        asked = body.get("messages")
        fits = isinstance(asked, list) and all(isinstance(item, dict) for item in asked)
        return "" if fits else "messages must be a list of objects"
    asked = body.get("prompt")
    if isinstance(asked, list) and all(type(item) is int for item in asked):
        out = [item for item in asked if not 0 <= item < vocab_size]
        return f"token id {out[0]} is out of vocabulary" if out else ""
    return "" if isinstance(asked, str) else "prompt must be one string or one list of token ids"


def _as_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token-in request as a request for a text completion."""
    sampling = {**body.get("sampling_params", {}), "logprobs": 1, "return_token_ids": True}
    return {"model": body.get("model"), "prompt": body.get("token_ids"), **sampling}


def _ids_only(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a text completion in the form of the token-in endpoint."""
    choice = completion["choices"][0]
    content = [{"logprob": value} for value in choice["logprobs"]["token_logprobs"]]
    # Not strict, since a script may have a wrong number of logprobs.
    for entry, token in zip(content, choice["token_ids"], strict=False):
        entry["token"] = f"token_id:{token}"
    choice["logprobs"] = {"content": content}
    del choice["text"], choice["prompt_token_ids"], completion["object"]
    return {"request_id": completion.pop("id"), **completion}


def _spoiled(reply: Reply, fault: HttpFault) -> Reply:
    """Return a normal answer changed by a fault."""
    body, size = reply.body, None
    if fault.spoil is not None:
        changed = fault.spoil(json.loads(body))
        body = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    if fault.body == "broken":
        body = body[: len(body) // 2]
    if fault.body == "truncated":
        size = len(body) // 2
    return Reply(
        200,
        body,
        fault.headers,
        num_sent_bytes=size,
        drip_s=fault.drip_s,
        num_copies=fault.num_copies,
        gap_s=fault.gap_s,
    )


def _json(status: int, value: Any) -> Reply:
    return Reply(status, json.dumps(value).encode())


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Reply:
    error = {"message": message, "type": "error", "code": status}
    return Reply(status, json.dumps({"error": error}).encode(), headers or {})
