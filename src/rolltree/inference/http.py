"""One HTTP server that answers JSON: connection limit, retries, and errors by what they mean.

The API key is kept out of `repr`, logs and error messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec

from rolltree.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    PromptTooLong,
    ServerError,
)
from rolltree.inference.retry import Outcome, Retry, RetryPolicy, parse_retry_after, with_retries
from rolltree.redact import redact_text

ResultT = TypeVar("ResultT")

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
_RETRYABLE = frozenset((408, 409, 425, 429))


class HttpServer:
    """Requests to one base URL, at most `max_connections` at a time.

    Raises:
        ConfigError: the base URL is not an http(s) URL, or holds a password.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float = 600.0,
        max_connections: int = 256,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"base_url = {base_url!r} is not an http or https URL. Pass one such as "
                "'http://127.0.0.1:8000/v1'."
            )
        if url.userinfo:
            raise ConfigError(
                "base_url holds a user name or password, which would end up in logs. Pass the "
                "secret as api_key, or as a header."
            )
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                "api_key has a space, a line break or a character that is not allowed in an HTTP "
                "header. Was it read from a file, with the trailing line break?"
            )
        self.base_url = str(url).rstrip("/")
        self.retry = retry or RetryPolicy()
        self._api_key = api_key
        self._headers = httpx.Headers(
            {"Host": url.netloc.decode("ascii"), "Accept": "*/*", "User-Agent": "rolltree"}
        )
        self._headers["Accept-Encoding"] = "gzip, deflate"
        self._headers["Connection"] = "keep-alive"
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._headers.update(headers)
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0), pool=None)
        self._max_connections = max_connections
        self._urls: dict[str, httpx.URL] = {}
        self._given_transport = transport
        self._transport: httpx.AsyncBaseTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_connections)

    def __repr__(self) -> str:
        return f"HttpServer({self.base_url!r})"

    @property
    def root_url(self) -> str:
        """The base URL without the `/v1` at its end: where servers have what is not OpenAI's."""
        return self.base_url.removesuffix("/v1")

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        decode: Callable[[bytes], ResultT],
        *,
        at_root: bool = False,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> Outcome[ResultT]:
        """Send `body` as JSON (GET when it is None) and return the decoded answer.

        `path` continues the base URL, or the root URL with `at_root`. `retry` and `timeout_s` take
        the place of the server's own.

        Raises:
            PromptTooLong: the server says that the prompt does not fit.
            ServerError: an error status that stayed, or that no retry can mend.
            ConnectionFailed: no connection, or none that lasted until the answer was complete.
            BadResponse: the answer could not be decoded, time after time.
        """
        content = None if body is None else msgspec.json.encode(body)
        url = (self.root_url if at_root else self.base_url) + path
        transport, slots = self._connect()
        start = monotonic()
        async with slots:
            queued_s = monotonic() - start

            async def attempt() -> ResultT:
                answer = await self._send(transport, url, content, timeout_s)
                try:
                    return decode(answer)
                except BadResponse as error:
                    raise Retry(error) from error

            outcome = await with_retries(retry or self.retry, attempt)
        return Outcome(outcome.value, outcome.num_retries, outcome.wait_s + queued_s)

    async def check_health(self) -> None:
        """Ask `/health` once; a server that has no such path is well.

        Raises:
            ConnectionFailed: no answer within 5 seconds.
            ServerError: the server says that it is not well.
        """
        transport, _ = self._connect()
        try:
            await self._send(transport, f"{self.root_url}/health", None, timeout_s=5.0)
        except Retry as failure:
            raise failure.error from failure
        except ServerError as error:
            if error.status not in (404, 405):
                raise

    async def aclose(self) -> None:
        """Close the connections."""
        transport, self._transport = self._transport, None
        if transport is not None and self._loop is asyncio.get_running_loop():
            await transport.aclose()

    def _connect(self) -> tuple[httpx.AsyncBaseTransport, asyncio.Semaphore]:
        """Return the connections of the running loop: they cannot move to another one.

        httpx's transport is used without its client, whose redirects, cookies and event hooks an
        API with keys has no use for; they cost as much as the rest of a request.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None or self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self._max_connections)
            self._transport = self._given_transport or httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                proxy=_proxy(httpx.URL(self.base_url)),
            )
        return self._transport, self._slots

    async def _send(
        self,
        transport: httpx.AsyncBaseTransport,
        url: str,
        content: bytes | None,
        timeout_s: float | None = None,
    ) -> bytes:
        timeout = self._timeout if timeout_s is None else httpx.Timeout(timeout_s)
        try:
            response = await transport.handle_async_request(self._request(url, content, timeout))
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            raise Retry(
                ConnectionFailed(
                    f"{url} gave no answer in time ({type(error).__name__}). The "
                    "call is lost. Is the server overloaded? Raise timeout_s or send fewer "
                    "requests."
                )
            ) from error
        except httpx.RequestError as error:
            raise Retry(
                ConnectionFailed(
                    f"{url} could not be reached or hung up "
                    f"({type(error).__name__}: {self._redacted(str(error))}). The call is lost. "
                    "Is the server running?"
                )
            ) from error
        if response.is_success:
            return response.content
        error_of_status = self._status_error(response, url)
        if isinstance(error_of_status, ServerError) and error_of_status.retryable:
            raise Retry(error_of_status, parse_retry_after(response.headers.get("Retry-After")))
        raise error_of_status

    def _request(self, url: str, content: bytes | None, timeout: httpx.Timeout) -> httpx.Request:
        """Return a POST of JSON, or a GET when there is no content."""
        where = self._urls.get(url)
        if where is None:
            where = self._urls[url] = httpx.URL(url)
        request = httpx.Request(
            "GET" if content is None else "POST",
            where,
            headers=self._headers,
            stream=httpx.ByteStream(content or b""),
            extensions={"timeout": timeout.as_dict()},
        )
        if content is not None:
            request.headers["Content-Type"] = "application/json"
            request.headers["Content-Length"] = str(len(content))
        request.read()
        return request

    def _status_error(self, response: httpx.Response, url: str) -> ModelError:
        text = self._redacted(response.text)[:500]
        return status_error(response.status_code, text, url)

    def _redacted(self, text: str) -> str:
        return redact_text(text, (self._api_key,) if self._api_key else ())


def _proxy(url: httpx.URL) -> str | None:
    """Return the proxy that the environment (HTTP_PROXY, NO_PROXY, ...) names for a URL."""
    if proxy_bypass(url.host):
        return None
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    return found if found is None or "://" in found else f"http://{found}"


def status_error(status: int, text: str, where: str) -> ModelError:
    """Return the exception for an error status with the answer `text`."""
    if status in (400, 413, 422) and any(sign in text.lower() for sign in _TOO_LONG):
        return PromptTooLong(
            f"{where} says that the prompt does not fit: {text}. The call has no answer; shorten "
            "the history or serve the model with a longer context."
        )
    retryable = status in _RETRYABLE or status >= 500
    advice = "Retries are exhausted." if retryable else "Change the request."
    return ServerError(
        f"{where} answered {status}: {text or '(no text)'}. The call has no answer. {advice}",
        status=status,
        retryable=retryable,
    )
