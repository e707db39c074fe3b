"""A client of one HTTP server that answers with JSON: limits, retries and typed errors.

The API key is kept out of `repr`, logs and error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

import aiohttp
from yarl import URL

from rolltree._helpers.redact import redact_text
from rolltree._helpers.tasks import yield_fairly
from rolltree._helpers.untrusted import encode_json
from rolltree.inference.request_ids import HEADER, RequestIds
from rolltree.inference.retry import (
    ONCE,
    Outcome,
    Retry,
    RetryPolicy,
    parse_retry_after,
    with_retries,
)
from rolltree.inference.transport import HttpAnswer, SocketTransport, Transport, proxy_of
from rolltree.values.errors import (
    AnswerTooLarge,
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    PromptTooLong,
    ServerError,
)

if TYPE_CHECKING:
    from rolltree.inference.stream import CompletionStream, StreamedCompletion

ResultT = TypeVar("ResultT")

MAX_ANSWER_BYTES = 64 * 2**20
"""A prompt of 128,000 ids and an answer of 32,000 tokens with logprobs take about 5 MB."""

_TOO_LONG = (
    "context_length_exceeded",
    "maximum context length",
    "context length",
    "context window",
    "maximum model length",
    "max_model_len",
    "prompt is too long",
    "input is too long",
    "too many tokens",
)
_ADVICE = {
    401: "Check the API key.",
    403: "Check what the API key may do.",
    404: "Check the model's name, and the URL (it often ends in /v1).",
    **dict.fromkeys(range(300, 400), "Check the URL: redirections are not followed."),
}
_RETRYABLE = frozenset((408, 409, 425, 429))


class HttpClient:
    """Makes requests to one base URL, at most `max_connections` at a time.

    Args:
        base_url: where the API is, usually ending in `/v1`.

    The other arguments are described at `OpenAIClient`; `deadline_s` counts from when a call gets
    its connection slot.

    Raises:
        ConfigError: the base URL is not an http(s) URL or holds a password, or a limit is not
            above 0.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        deadline_s: float | None = None,
        max_connections: int = 256,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        headers: Mapping[str, str] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.base_url = checked_url(base_url)
        for name, key in (("api_key", api_key), ("admin_key", admin_key)):
            if key and not (key.isascii() and key.isprintable() and " " not in key):
                raise ConfigError(
                    f"{name} has a space, a line break or a character that is not allowed in an "
                    "HTTP header. Was it read from a file, with the trailing line break?"
                )
        deadline_s = 2.0 * timeout_s if deadline_s is None else deadline_s
        if not min(timeout_s, deadline_s, max_connections, max_answer_bytes) > 0:
            raise ConfigError(
                f"timeout_s = {timeout_s}, deadline_s = {deadline_s}, max_connections = "
                f"{max_connections} and max_answer_bytes = {max_answer_bytes} must be above 0, or "
                "no request could be answered."
            )
        self.retry = retry or RetryPolicy()
        self.timeout_s, self.deadline_s = timeout_s, deadline_s
        self._api_key, self._admin_key = api_key, admin_key
        self._get_headers = {
            "Accept": "*/*",
            "User-Agent": "rolltree",
            "Accept-Encoding": "gzip, deflate",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        }
        # Header names ignore case: a given header replaces ours, however it is spelled.
        for name, value in (headers or {}).items():
            self._get_headers = {
                known: text
                for known, text in self._get_headers.items()
                if known.lower() != name.lower()
            }
            self._get_headers[name] = value
        self._post_headers = {**self._get_headers, "Content-Type": "application/json"}
        self._max_connections, self._max_answer_bytes = max_connections, max_answer_bytes
        self._ids = RequestIds()
        self._given_transport = transport
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_connections)

    def __repr__(self) -> str:
        return f"HttpClient({self.base_url!r})"

    @property
    def root_url(self) -> str:
        """The base URL without a final `/v1`; paths that are not OpenAI's start here."""
        return self.base_url.removesuffix("/v1")

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        decode: Callable[[bytes], ResultT],
        *,
        at_root: bool = False,
        as_admin: bool = False,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        stream: CompletionStream | None = None,
    ) -> Outcome[ResultT]:
        """Send `body` as JSON (GET when it is None) and return the decoded answer.

        `path` continues the base URL, or the root URL with `at_root`. `as_admin` sends the
        `admin_key`, if there is one. `retry` replaces the client's policy, and `timeout_s` its
        timeout, with a deadline twice as long. `stream` reads a completion that is a stream of
        events; any other answer is decoded as a whole.

        Raises:
            PromptTooLong: the server says that the prompt does not fit.
            ServerError: an error status that retries did not fix, or cannot fix.
            CallTimeout: the deadline passed.
            ConnectionFailed: no connection, or it broke before the answer was complete.
            AnswerTooLarge: the answer has more than `max_answer_bytes`.
            BadResponse: the answer could not be decoded, even after retries.
        """
        # Encoded once for all attempts.
        content = None if body is None else encode_json(body)
        url = (self.root_url if at_root else self.base_url) + path
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = self.deadline_s if timeout_s is None else 2.0 * timeout_s
        transport, slots = self._connect()
        # The deadline excludes the wait for a slot: the caller's own queue is not the server's
        # fault (design/0015).
        start = monotonic()
        async with slots:
            queued_s = monotonic() - start

            async def attempt() -> ResultT:
                # An id per attempt, so that a late answer to an earlier attempt is not taken for
                # the answer to this one.
                name = self._ids.new()
                reader = (
                    None
                    if stream is None
                    else stream.reader(lambda data: self._ids.check(name, data))
                )
                answer = await self._send(
                    transport, url, content, name=name, as_admin=as_admin, reader=reader
                )
                await yield_fairly()  # many answers may have come at once
                try:
                    if reader is not None and answer.is_stream:
                        if reader.failure is not None:
                            raise self._error(*reader.failure, url)
                        return cast(ResultT, reader.result())
                    # Before decoding, since another request's answer could be decoded, too.
                    self._ids.check(name, answer.body)
                    return decode(answer.body)
                except BadResponse as error:
                    raise Retry(error) from error

            outcome = await with_retries(
                retry or self.retry,
                attempt,
                timeout_s=limit_s,
                deadline_s=deadline_s,
                where=url,
                may_retry=lambda: stream is None or not stream.has_begun,
            )
        return Outcome(outcome.value, outcome.num_retries, outcome.wait_s + queued_s)

    async def check_health(self) -> None:
        """Request `/health` once; a server without this path counts as healthy.

        Raises:
            ConnectionFailed: no answer within 5 seconds.
            ServerError: the server reports that it is unhealthy.
        """
        # Without a slot: calls that hang must not hide that the server is healthy.
        transport, _ = self._connect()
        url = f"{self.root_url}/health"
        try:
            await with_retries(
                ONCE, lambda: self._send(transport, url, None), timeout_s=5.0, where=url
            )
        except ServerError as error:
            if error.status not in (404, 405):
                raise

    async def check_reachable(self, limit_s: float) -> None:
        """Open a connection, to the proxy if there is one, and close it; send nothing.

        Raises:
            ConnectionFailed: no connection was made within `limit_s`.
        """
        if self._given_transport is not None:
            return
        where = URL(proxy_of(self.base_url) or self.base_url)
        try:
            async with asyncio.timeout(limit_s):
                _, writer = await asyncio.open_connection(where.host, where.port)
        except OSError as error:  # TimeoutError is one
            raise ConnectionFailed(
                f"{self.base_url} could not be reached ({type(error).__name__}: {error})."
            ) from error
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        transport, self._transport = self._transport, None
        # The connections of a different loop were closed with that loop (design/0015).
        if transport is not None and self._loop is asyncio.get_running_loop():
            await transport.aclose()

    def _connect(self) -> tuple[Transport, asyncio.Semaphore]:
        """Return the transport and slots of the running loop; they cannot move to another."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self._max_connections)
            self._transport = self._given_transport or SocketTransport(
                self.base_url, self._max_answer_bytes
            )
        return self._transport, self._slots

    async def _send(
        self,
        transport: Transport,
        url: str,
        content: bytes | None,
        *,
        name: str | None = None,
        as_admin: bool = False,
        reader: StreamedCompletion | None = None,
    ) -> HttpAnswer:
        headers = self._get_headers if content is None else self._post_headers
        if name is not None:
            headers = {HEADER: name, **headers}
        if as_admin and self._admin_key:
            headers = {**headers, "Authorization": f"Bearer {self._admin_key}"}
        try:
            if reader is None:
                answer = await transport.send(url, headers, content)
            else:  # parts of a compressed stream could not be read as they come
                headers = {**headers, "Accept-Encoding": "identity"}
                answer = await transport.send(url, headers, content, reader.feed)
        except AnswerTooLarge:
            raise  # the answer to a retry would hardly be smaller
        except BadResponse as error:
            raise Retry(error) from error
        # The next attempt would find the same certificate.
        except aiohttp.ClientSSLError as error:
            raise ConnectionFailed(
                f"{url} could not be trusted ({self._redacted(str(error))}), so nothing was sent. "
                "If its certificate is your own, name its authority's file in SSL_CERT_FILE."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Retry(
                ConnectionFailed(
                    f"{url} could not be reached or hung up "
                    f"({type(error).__name__}: {self._redacted(str(error))}). The call is lost. "
                    "Is the server running?"
                )
            ) from error
        if 200 <= answer.status < 300:
            return answer
        text = answer.body[:2000].decode("utf-8", "replace")
        raise self._error(answer.status, text, url, parse_retry_after(answer.retry_after))

    def _error(
        self, status: int, text: str, url: str, after_s: float | None = None
    ) -> Retry | ModelError:
        """Return what to raise for an error status."""
        # Cut after keys are redacted, or half of one could remain.
        error = status_error(status, self._redacted(text[:2000])[:500], url)
        if isinstance(error, ServerError) and error.retryable:
            return Retry(error, after_s)
        return error

    def _redacted(self, text: str) -> str:
        return redact_text(text, tuple(filter(None, (self._api_key, self._admin_key))))


def checked_url(base_url: str) -> str:
    """Return a base URL in its normal form.

    Raises:
        ConfigError: it is not an http(s) URL, or holds a password.
    """
    try:
        url = URL(base_url)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"base_url = {base_url!r} is not an http or https URL. Pass one such as "
            "'http://127.0.0.1:8000/v1'."
        )
    if url.user is not None or url.password is not None:
        raise ConfigError(
            "base_url holds a user name or password, which would end up in logs. Pass the "
            "secret as api_key, or as a header."
        )
    return str(url).rstrip("/")


def status_error(status: int, text: str, where: str) -> ModelError:
    """Return the exception for an error status with the answer `text`."""
    # Servers have no common error code for this, but all of them say it in words.
    if status in (400, 413, 422) and any(sign in text.lower() for sign in _TOO_LONG):
        return PromptTooLong(
            f"{where} says that the prompt does not fit: {text}. The call has no answer; shorten "
            "the history or serve the model with a longer context."
        )
    retryable = status in _RETRYABLE or status >= 500
    advice = "Retries are exhausted." if retryable else _ADVICE.get(status, "Change the request.")
    return ServerError(
        f"{where} answered {status}: {text or '(no text)'}. The call has no answer. {advice}",
        status=status,
        retryable=retryable,
    )
