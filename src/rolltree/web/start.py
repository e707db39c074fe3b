"""The start of the servers that run on uvicorn: their socket, its settings, limits of heads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from rolltree.values.errors import ConfigError
from rolltree.web.limits import MAX_HEAD_BYTES, READ_TIMEOUT_S

# How long the rest of a refused body is read and dropped.
_LINGER_S = 2.0
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


class AnnouncingServer(uvicorn.Server):
    """A server that calls `on_ready` when it accepts requests."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call `on_ready`."""
        await super().startup(sockets)
        self._on_ready()


def server_config(
    app: ASGIApp, read_timeout_s: float = READ_TIMEOUT_S, **settings: Any
) -> uvicorn.Config:
    """Return uvicorn's settings; a server's own `settings` replace the shared ones."""
    shared: dict[str, Any] = {
        "http": protocol_with_head_timeout(read_timeout_s),
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": 1,
        "ws": "none",
    }
    return uvicorn.Config(app, **(shared | settings))


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
