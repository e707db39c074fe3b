"""Adapter for the OpenAI SDK: `openai.AsyncOpenAI`, or anything shaped like it, as a `ModelClient`.

Requests go through `client.chat.completions.create` and `client.completions.create`. The response
object is kept in `ModelResponse.raw` without its token data, which the record has: a server repeats
the ids of the whole prompt in every turn. The openai package is not imported. Token-in needs
`OpenAIClient`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from rolltree._helpers.untrusted import well_formed
from rolltree.inference.call import ModelCall
from rolltree.inference.client_base import RootClient
from rolltree.inference.http import MAX_ANSWER_BYTES, status_error
from rolltree.inference.message_session import MessageSession, send_with_token_fields
from rolltree.inference.parse import extract_finish_reason
from rolltree.inference.request_fields import extension_fields, extra_fields, sampling_fields
from rolltree.inference.request_ids import HEADER, RequestIds
from rolltree.inference.retry import (
    ONCE,
    Outcome,
    Retry,
    RetryPolicy,
    parse_retry_after,
    with_retries,
)
from rolltree.inference.token_fields import LogprobsMode, TokenFields, TokenIds
from rolltree.inference.transport import too_large
from rolltree.inference.wire import read
from rolltree.values.errors import (
    AnswerTooLarge,
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    ServerError,
)
from rolltree.values.types import (
    MessageType,
    ModelResponse,
    SamplingParams,
)


class OpenAISDKClient(RootClient[MessageSession]):
    """An AsyncOpenAI-like object as a `ModelClient`.

    The openai client's own retries are switched off, and as many are made here instead, so that
    they are counted. A call with all its attempts takes at most `deadline_s` (by default twice the
    openai client's timeout); its decompressed answer has at most `max_answer_bytes`. `token_ids`,
    `logprobs_mode` and `vocab_size` are those of `OpenAIClient`; with `"auto"`, OpenAI's own
    servers are not asked for ids, which they do not have. The openai client is used as it is, but
    each event loop has connections of its own, configured as those of its `http_client`, to which
    an event hook is added that reads the answers to these calls.

    Raises:
        ConfigError: the object is a blocking client.
    """

    version: int = 0

    def __init__(
        self,
        client: Any,
        model: str | None = None,
        *,
        token_ids: TokenIds = "auto",
        logprobs_mode: LogprobsMode = "raw",
        vocab_size: int | None = None,
        deadline_s: float | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        where = str(getattr(client, "base_url", type(client).__name__))
        self._retry = ONCE
        self._ids: RequestIds | None = None
        # Checked by name, since the package may not be installed.
        if type(client).__module__.partition(".")[0] == "openai":
            # Only the asynchronous client is a context for `async with`.
            if not hasattr(client, "__aenter__"):
                raise ConfigError(
                    f"{type(client).__name__} blocks the event loop in every call, so rollouts "
                    "would run one after the other. Pass openai.AsyncOpenAI(...)."
                )
            self._retry = RetryPolicy(max_retries=client.max_retries)
            limit_s = getattr(client.timeout, "read", client.timeout)
            if deadline_s is None and isinstance(limit_s, int | float):
                deadline_s = 2.0 * limit_s
            self._ids = RequestIds()
            # A copy, so the user's own object keeps its retries. Its hooks are shared, which is why
            # ours looks for `_MAX_BYTES`.
            client = client.with_options(max_retries=0)
            hooks = getattr(getattr(client, "_client", None), "event_hooks", {"response": []})
            if _read_answer not in hooks["response"]:
                hooks["response"].append(_read_answer)
            if token_ids == "auto" and "api.openai.com" in where:
                token_ids = "off"
        self._client = client
        self._bound: tuple[Any, asyncio.AbstractEventLoop | None] = client, None
        self.deadline_s, self._max_answer_bytes = deadline_s, max_answer_bytes
        self._model = model
        self.tokens = TokenFields(token_ids, logprobs_mode, where, vocab_size)

    def __repr__(self) -> str:
        return f"OpenAISDKClient({type(self._client).__name__}, {self._model!r})"

    @property
    def model(self) -> str:
        """The model of calls that name none; empty if there is none."""
        return self._model or ""

    def new_memory(self) -> MessageSession:
        """Return the empty memory of a new session."""
        return MessageSession(self.tokens)

    async def respond(self, call: ModelCall, memory: MessageSession) -> ModelResponse:
        """Send messages, a string or ids."""
        response = await memory.respond(call, self.ask, self.version, keeps_raw=True)
        _drop_tokens(response.raw, response, call.sampling)
        return response

    async def aclose(self) -> None:
        """Close the wrapped client if it can be closed."""
        if self._ids is not None:
            await _close_connections(self._client)
            self._bound = self._client, None
        close = getattr(self._client, "close", None)
        result = close() if callable(close) else None
        if inspect.isawaitable(result):
            await result

    async def ask(
        self,
        content: Mapping[str, Any],
        message_type: MessageType,
        call: ModelCall,
        memory: MessageSession,
    ) -> Outcome[Any]:
        """Send one request: `content` is its messages or prompt.

        Raises:
            ConfigError: neither the call nor the client names a model.
            ModelError: the request failed.
        """
        sampling, name = call.sampling, call.model or self._model
        if not name:
            raise ConfigError(
                "neither the call nor as_client(client, model) names a model. Pass model=..."
            )
        client = self._client if self._ids is None else await self._in_loop()
        endpoint = client.chat.completions if message_type == "chat" else client.completions

        async def send(with_tokens: bool) -> Outcome[Any]:
            fields = {"model": name, **content, **sampling_fields(sampling, message_type)}
            body = extension_fields(sampling)
            if with_tokens:
                fields |= self.tokens.standard(message_type)
                body = self.tokens.extension() | body
            fields |= extra_fields(sampling)
            if body:
                fields["extra_body"] = body

            async def attempt() -> Any:
                request_id = None
                if self._ids is not None:
                    # A new id for each attempt.
                    request_id = self._ids.new()
                    given = fields.get("extra_headers") or {}
                    fields["extra_headers"] = {**given, HEADER: request_id}
                limited = _MAX_BYTES.set(self._max_answer_bytes)
                try:
                    try:
                        result = endpoint.create(**fields)
                        result = await result if inspect.isawaitable(result) else result
                    except UnicodeEncodeError:  # a lone surrogate, for example in a world's text
                        result = endpoint.create(**well_formed(fields))
                        result = await result if inspect.isawaitable(result) else result
                    if self._ids is not None and request_id is not None:
                        self._ids.check(request_id, str(read(result, "id")))
                    # Checked here, so that an answer which was broken off is requested again.
                    extract_finish_reason(result)
                    return result
                except _openai_errors() as error:
                    raise self._failure(error) from error
                except AnswerTooLarge:
                    raise
                except BadResponse as error:
                    raise Retry(error) from error
                except (ValueError, RecursionError) as error:
                    if self._ids is None and type(error) is ValueError:  # raised by a mock
                        raise
                    # Python's JSON decoder rejects numbers of 4,300 digits with a ValueError.
                    raise Retry(self._unreadable(error)) from error
                finally:
                    _MAX_BYTES.reset(limited)

            return await with_retries(
                self._retry, attempt, deadline_s=self.deadline_s, where=repr(self)
            )

        return await send_with_token_fields(self.tokens, send)

    async def _in_loop(self) -> Any:
        """Return the openai client for the running event loop."""
        loop = asyncio.get_running_loop()
        bound, owner = self._bound
        if owner is not loop:
            bound = await _with_connections(self._client)
            self._bound = bound, loop
        return bound

    def _failure(self, error: BaseException) -> Exception:
        """Return the exception to raise for one of the openai package."""
        status = getattr(error, "status_code", None)
        where = str(getattr(self._client, "base_url", "the server"))
        if isinstance(status, int):
            found: ModelError = status_error(status, str(error)[:500], where)
            headers = getattr(getattr(error, "response", None), "headers", {})
            if isinstance(found, ServerError) and found.retryable:
                return Retry(found, parse_retry_after(headers.get("Retry-After")))
            return found
        # By name, again without importing the package.
        if "Connection" in type(error).__name__ or "Timeout" in type(error).__name__:
            return Retry(
                ConnectionFailed(
                    f"{where} could not be reached or gave no answer in time ({error}). The call "
                    "is lost. Is the server running?"
                )
            )
        return BadResponse(f"{where} gave no usable answer ({error}). The call is lost.")

    def _unreadable(self, error: Exception) -> BadResponse:
        where = str(getattr(self._client, "base_url", "the server"))
        return BadResponse(
            f"{where} answered with something that is not JSON ({error}). The call is lost. Did "
            "the server, or a proxy in front of it, break off the answer?"
        )


_OF_LOOPS: WeakKeyDictionary[Any, dict[asyncio.AbstractEventLoop, tuple[Any, Any]]] = (
    WeakKeyDictionary()
)
"""The copies of an httpx client and their lives, by event loop."""


async def _with_connections(client: Any) -> Any:
    """Return an openai client whose connections belong to the running loop.

    An idle connection of another loop cannot be used, and often is of a loop that has been closed.
    """
    http = getattr(client, "_client", None)
    if not hasattr(http, "_transport"):
        return client
    loop = asyncio.get_running_loop()
    # Shared by all adapters of a client: each rollout may make one.
    copies = _OF_LOOPS.setdefault(http, {})
    if loop not in copies:
        for ended in [other for other in copies if other.is_closed()]:
            del copies[ended]
        made = _unconnected(http)
        copies[loop] = made, _life(made)
        await anext(copies[loop][1])
    return client.with_options(http_client=copies[loop][0])


async def _close_connections(client: Any) -> None:
    """Close the connections of the running loop."""
    http = getattr(client, "_client", None)
    copies = _OF_LOOPS.get(http) if http is not None else None
    if copies and asyncio.get_running_loop() in copies:
        _, life = copies.pop(asyncio.get_running_loop())
        await life.aclose()


async def _life(http: Any) -> AsyncGenerator[None, None]:
    """Close an httpx client when this generator ends, at the latest with its loop."""
    try:
        yield
    finally:
        await http.aclose()


def _unconnected(part: Any) -> Any:
    """Return a copy of an httpx client, transport or pool with the same settings, not connected."""
    made = copy(part)
    for name, value in getattr(part, "__dict__", {}).items():
        if name == "_mounts" and isinstance(value, dict):
            setattr(made, name, {at: value[at] and _unconnected(value[at]) for at in value})
        elif hasattr(value, "handle_async_request"):
            setattr(made, name, _unconnected(value))
        elif name in ("_connections", "_requests"):  # of httpcore's pools
            setattr(made, name, [])
    return made


_MAX_BYTES: ContextVar[int | None] = ContextVar("rolltree_max_answer_bytes", default=None)
"""The largest answer to the call that this task makes; None for the user's own calls."""


async def _read_answer(response: Any) -> None:
    """Read an httpx response as httpx itself would, but no further than the limit."""
    max_bytes = _MAX_BYTES.get()
    if max_bytes is None:
        return
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
    response._content = b"".join(parts)  # where httpx's own `aread` stores it


def _drop_tokens(response: Any, made: ModelResponse, sampling: SamplingParams) -> None:
    """Set token data of an openai response to None if `made` has it as arrays.

    Logprobs that the record does not have, and alternatives that the caller requested, stay.
    """
    if made.prompt_ids is None or type(response).__module__.partition(".")[0] != "openai":
        return
    choice = response.choices[0]
    # vLLM puts the prompt's ids into the response for chat and into the choice for text.
    dropped = [(response, "prompt_token_ids"), (choice, "prompt_token_ids"), (choice, "token_ids")]
    if made.logprobs is not None and "top_logprobs" not in sampling.extra:
        dropped.append((choice, "logprobs"))
    for holder, name in dropped:
        if getattr(holder, name, None) is not None:
            setattr(holder, name, None)


def _openai_errors() -> tuple[type[BaseException], ...]:
    """Return the openai package's root exception, if the package has been imported."""
    package = sys.modules.get("openai")
    return (package.OpenAIError,) if package is not None else ()
