"""HTTP of the server: its socket, bearer tokens, limits on bodies, and clients that disconnect."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rolltree._helpers.untrusted import read_json
from rolltree.gateway.serve.requests import RequestError, error_body
from rolltree.values.errors import ConfigError

logger = logging.getLogger("rolltree.inference")

ResultT = TypeVar("ResultT")
Handler = Callable[[Request], Awaitable[Response]]

# A million ids are 7 MB of JSON.
MAX_BODY_BYTES = 16 * 2**20
# Decoding blocks the interpreter, and `/health` with it: five million empty objects take a second.
MAX_CONTAINERS = 200_000
MAX_HEAD_BYTES = 64 * 2**10
READ_TIMEOUT_S = 30.0
# How long the rest of a refused body is read and dropped.
_LINGER_S = 2.0
# Paths that need no token: they show only whether the engine runs.
_OPEN = ("/health",)


class Unauthorized:
    """Refuses requests without a bearer token (RFC 6750) before their bodies are read.

    `admin_token` is accepted everywhere, `token` everywhere but in `admin_paths`, which replace
    weights. Without an `admin_token`, every request to these is refused.
    """

    def __init__(
        self, app: ASGIApp, token: str, admin_token: str | None, admin_paths: Collection[str]
    ) -> None:
        self._app, self._admin_paths = app, frozenset(admin_paths)
        self._bearer = f"Bearer {token}".encode()
        self._admin = None if admin_token is None else f"Bearer {admin_token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            # Before the body, so that a client without a token cannot make the server read
            # megabytes.
            given = dict(scope["headers"]).get(b"authorization", b"")
            error = self._refusal(given, scope["path"])
            if error is not None:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
                await failure(error, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, given: bytes, path: str) -> RequestError | None:
        # In constant time, since a comparison that ends early reveals how much of a guess is right.
        if self._admin is not None and hmac.compare_digest(given, self._admin):
            return None
        if not hmac.compare_digest(given, self._bearer):
            return RequestError(
                "the request has no valid bearer token. Send the token that `rolltree serve` "
                "printed, as the API key.",
                status=401,
            )
        if path not in self._admin_paths:
            return None
        how = (
            "This server has no admin token: start it with --admin-key-env."
            if self._admin is None
            else "Send the admin token: engine.admin_key_env, or OpenAIClient(admin_key=...)."
        )
        return RequestError(
            f"the token is for inference only, but {path} replaces weights, which takes the admin "
            f"token. {how}",
            status=403,
        )


def answering_errors(handler: Handler) -> Handler:
    """Wrap a handler so that its exceptions become error responses."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # `failure` sorts them
            response = failure(error)
            if response.status_code in (408, 413):
                # An unread rest of the body would be parsed as the next request.
                response.headers["Connection"] = "close"
            if response.status_code >= 500:
                logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
            return response

    return run


def json_response(value: object, status: int = 200) -> Response:
    """Return a response with `value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def failure(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """Return the error response of OpenAI's servers for an exception."""
    status, body = error_body(error)
    response = json_response(body, status)
    response.headers.update(headers or {})
    return response


async def json_body(request: Request) -> dict[str, Any]:
    """Return the request's JSON object; raises as `request_body` and `object_in` do."""
    return object_in(await request_body(request))


async def request_body(request: Request) -> bytes:
    """Return the request's body.

    Raises:
        RequestError: it is larger than `MAX_BODY_BYTES`, or did not arrive in time.
    """
    limit_s = request.app.state.read_timeout_s
    parts, size, receive, is_whole = list[bytes](), 0, request.receive, False
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 19 or int(declared) > MAX_BODY_BYTES):
        raise _too_large()
    try:
        async with asyncio.timeout(limit_s):
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                is_whole = not message.get("more_body", False)
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {limit_s:g} s.", status=408) from error
    return b"".join(parts)


def _too_large() -> RequestError:
    return RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes.", status=413)


def object_in(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; lone surrogates in it become U+FFFD.

    Raises:
        RequestError: it has more than `MAX_CONTAINERS`, or is not a JSON object.
    """
    # Counted in the raw bytes, before decoding; exactly only if a prompt may have many brackets.
    brackets = content.count(b"{") + content.count(b"[")
    if brackets > MAX_CONTAINERS and _num_containers(content) > MAX_CONTAINERS:
        raise RequestError(
            f"the body has more than {MAX_CONTAINERS:,} objects and lists.", status=413
        )
    try:
        try:
            body = msgspec.json.decode(content)
        except (ValueError, msgspec.MsgspecError):
            # An agent sends back what a model wrote, which may be half of a surrogate pair.
            if b"\\u" not in content:
                raise
            body = read_json(content.decode())
    # MsgspecError: older releases of msgspec do not make it a ValueError. RecursionError: objects
    # nested deeper than msgspec or the interpreter allows.
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"the body is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise RequestError("the body is JSON, but not an object.")
    return body


def _num_containers(content: bytes) -> int:
    """Return how many objects and lists a JSON text has; brackets in its strings do not count."""
    # Without escaped quotes, every quote begins or ends a string.
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(plain, np.uint8)
    in_string = np.cumsum(text == ord('"'), dtype=np.uint8) % 2  # wraps at 256, which is even
    brackets = (text == ord("{")) | (text == ord("["))
    return int(np.count_nonzero(brackets & (in_string == 0)))


def foreign_request(
    headers: Headers, hosts: Collection[str], origins: Collection[str]
) -> tuple[int, str] | None:
    """Return the status and reason to refuse a request that a web page may have sent, or None."""
    # A web page can resolve its own name to 127.0.0.1 (DNS rebinding), which makes it same-origin,
    # so only requests to known host names are answered.
    found = headers.getlist("host")
    if len(found) != 1 or found[0] not in hosts:
        return 421, "this server answers only under the address that it printed."
    # Browsers send the origin of the page; other programs send none, and need the token anyway.
    pages = headers.getlist("origin")
    if pages and (len(pages) > 1 or pages[0] not in origins):
        return 403, "the request comes from another page."
    return None


async def unknown_path(request: Request, error: Exception) -> Response:
    """Answer a request for a path that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served here"
    return failure(RequestError(what, status=status))


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work`, and cancel it if the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None

    def leave(_: object) -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    # The requests of a client that disconnected would keep their slots in the batch for nothing.
    leaving = asyncio.ensure_future(_left(request.receive))
    leaving.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # 0: only the disconnect cancelled this task.
        if has_left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def has_left(receive: Receive) -> bool:
    """Whether the server knows that the client has left. The body must have been read."""
    coming = _left(receive)
    try:
        coming.send(None)
    except StopIteration:
        return True
    coming.close()
    return False


_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


def protocol_with_head_timeout(limit_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with limits of time and size for request heads; then it closes."""
    # uvicorn waits forever for the rest of a head, however long. `request_body` limits the body.
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class HeadTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _late: asyncio.TimerHandle | None = None
        _num_head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_GatheredWrites(transport, self.loop, self._is_body_unread))
            self._watch()

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)
                self._watch()
                # Still in the head, for otherwise nothing is watched.
                self._num_head_bytes = 0 if self._late is None else self._num_head_bytes + len(data)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self.transport.write(_HEAD_TOO_LARGE)
                    self.transport.close()

        def _is_body_unread(self) -> bool:
            return self.cycle is not None and bool(self.cycle.more_body)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._late is None:
                self._late = self.loop.call_later(limit_s, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return HeadTimeoutProtocol


class _GatheredWrites:
    """A transport that sends everything written in one turn of the event loop at once.

    uvicorn writes the head and the body of an answer separately, and each system call may take
    longer than the Python code does. If the client still sends a body that nobody reads, `close`
    drops it for a while: closing at once would reset the connection, and the answer with it.
    """

    _MOST_BYTES = 2**16

    def __init__(
        self, transport: Any, loop: asyncio.AbstractEventLoop, is_body_unread: Callable[[], bool]
    ) -> None:
        self._transport, self._loop, self._is_body_unread = transport, loop, is_body_unread
        self._parts: list[bytes] = []
        self._is_lingering = False

    def write(self, data: bytes) -> None:
        """Send `data` at the end of this turn."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)
        if len(data) > self._MOST_BYTES:
            self._send()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        """Send what has been written, and close."""
        self._send()
        if self._is_lingering or not self._is_body_unread() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(_LINGER_S, self._transport.close)

    def is_closing(self) -> bool:
        """Whether `close` was called, or the connection is lost."""
        return self._is_lingering or bool(self._transport.is_closing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AnnouncingServer(uvicorn.Server):
    """A server that calls `on_ready` when it accepts requests."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call `on_ready`."""
        await super().startup(sockets)
        self._on_ready()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0 takes a free port.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that was just stopped leaves its port in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error}). Another server may "
            "be running there: choose a different --port, or 0 for a free one."
        ) from error
    return listener
