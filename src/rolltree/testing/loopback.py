"""A minimal HTTP/1.1 server on loopback in its own thread, for tests over real sockets.

The server keeps connections alive and can misbehave: answer late, cut a body short, send it byte by
byte, send bytes that are not an answer, reset the connection, or disappear. Requests need a
Content-Length; TLS and chunked requests are not supported. `DirectTransport` serves the same
handlers without a socket.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Self
from urllib.parse import urlsplit

from rolltree.inference.transport import HttpAnswer, is_event_stream

_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Request:
    """A request; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, or a failure instead of it."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    # Bytes of the body that are sent before the connection is closed; None: all, and it stays open.
    num_sent_bytes: int | None = None
    # Delay after every byte of the body.
    drip_s: float = 0.0
    # Bytes that are sent instead of head and body.
    raw: bytes | None = None
    # Number of answers to one request, and the seconds between them.
    num_copies: int = 1
    gap_s: float = 0.0
    # Whether the connection is dropped instead.
    reset: bool = False
    # Whether the server stops: all connections are dropped, and later ones refused.
    gone: bool = False


Handler = Callable[[Request], Awaitable[Reply]]


class DirectTransport:
    """Serves `handler` on the caller's event loop without a socket: a client's `transport`.

    Example:
        >>> from rolltree import OpenAIClient
        >>> async def busy(request: Request) -> Reply:
        ...     return Reply(503, b"")
        >>> client = OpenAIClient("http://test/v1", "m", transport=DirectTransport(busy))
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def send(
        self,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        on_part: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """Return the handler's reply; a `reset` or a body cut short raises ConnectionResetError."""
        where = urlsplit(url)
        reply = await self._handler(
            Request(
                "GET" if content is None else "POST",
                where.path + (f"?{where.query}" if where.query else ""),
                {name.lower(): value for name, value in headers.items()},
                content or b"",
            )
        )
        # Without a socket nothing can be cut or sent raw, so the client sees a lost connection.
        broken = reply.reset or reply.gone or reply.raw is not None
        if broken or reply.num_sent_bytes is not None:
            raise ConnectionResetError("the reply was cut short")
        if on_part is not None and is_event_stream(reply.status, reply.headers.get("Content-Type")):
            on_part(reply.body)
            return HttpAnswer(reply.status, b"", is_stream=True)
        return HttpAnswer(reply.status, reply.body, reply.headers.get("Retry-After"))

    async def aclose(self) -> None:
        """Do nothing, since nothing is open."""


class LoopbackServer:
    """Serves `handler` on 127.0.0.1 while the `with` block lasts.

    The handler runs in the server's thread and event loop.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rolltree-loopback", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def __enter__(self) -> Self:
        # In its own thread, so that the server answers while the test's loop is busy or blocked.
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:  # Ctrl-C, too
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._end()

    @property
    def url(self) -> str:
        """The address, such as `http://127.0.0.1:40123`."""
        return f"http://127.0.0.1:{self._port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        # Port 0 takes a free port, so that concurrent tests do not collide.
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        # Kept connections would wait for their next request forever.
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while (request := await _read_request(reader)) is not None:
                reply = await self._handler(request)
                if reply.gone:
                    self._be_gone()
                    break
                if request.method == "HEAD":
                    reply = replace(reply, num_sent_bytes=0)
                is_open = await _write_reply(writer, reply)
                is_last = request.headers.get("connection", "").lower() == "close"
                if is_last or not (is_open or request.method == "HEAD"):
                    break
        except (ConnectionError, asyncio.CancelledError):
            # The client left, or the server is stopping.
            pass
        finally:
            self._connections.pop(task, None)
            writer.close()

    def _be_gone(self) -> None:
        """Refuse connections from now on, and drop the open ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request, or None if the connection ends or sends something else."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        size = int(headers.get("content-length", 0))
        if not 0 <= size <= _MAX_BODY_BYTES:
            return None
        return Request(method, path, headers, await reader.readexactly(size))
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


async def _write_reply(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Send the reply; return whether the connection can serve another request."""
    if reply.reset:
        writer.transport.abort()
        return False
    if reply.raw is not None:
        writer.write(reply.raw)
        await writer.drain()
        return True
    phrase = HTTPStatus(reply.status).phrase
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(reply.body)),
        **reply.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    start = f"HTTP/1.1 {reply.status} {phrase}\r\n{head}\r\n".encode("latin-1")
    body = reply.body[: reply.num_sent_bytes]
    if reply.drip_s:
        writer.write(start)
        for index in range(len(body)):
            writer.write(body[index : index + 1])
            await writer.drain()
            await asyncio.sleep(reply.drip_s)
        return reply.num_sent_bytes is None
    writer.write(start + body)
    await writer.drain()
    for _ in range(reply.num_copies - 1):
        await asyncio.sleep(reply.gap_s)
        writer.write(start + body)
        await writer.drain()
    return reply.num_sent_bytes is None
