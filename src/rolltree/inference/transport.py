"""The part of HTTP that `HttpClient` needs: bytes to a server and back, implemented with aiohttp.

It leaves out redirects, cookies and `.netrc`: an API with keys does not use them.
"""

from __future__ import annotations

import functools
import io
import os
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from rolltree.values.errors import AnswerTooLarge, BadResponse, ConfigError

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 4.0
"""How long an idle connection is kept: uvicorn, and so vLLM, closes it after 5 seconds."""
_LARGE_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_PART_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's response: a status, the decompressed body, and its `Retry-After`.

    `is_stream`: the body was passed on as it came, and is empty here.
    """

    status: int
    body: bytes
    retry_after: str | None = None
    is_stream: bool = False


class Transport(Protocol):
    """Sends one request and returns the whole answer; used on one event loop."""

    async def send(
        self,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        on_part: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """POST `content`, or GET if it is None.

        If the answer is a stream of events, `on_part` gets each part of it as it comes; what
        `on_part` raises ends the request.

        Raises:
            OSError: there is no connection, or it broke.
            BadResponse: the answer cannot be decompressed.
            AnswerTooLarge: the answer has more bytes than are allowed.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class SocketTransport:
    """Connections to one origin over real sockets, kept alive between requests.

    They belong to the running event loop, and end with it. Proxies are those of the
    environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY), certificate authorities those of the
    system or of SSL_CERT_FILE and SSL_CERT_DIR.

    Args:
        url: any URL of the origin.
        max_answer_bytes: the largest answer that is read, both compressed and decompressed.

    Raises:
        ConfigError: the environment names a proxy that cannot be used, or missing certificates.
    """

    def __init__(self, url: str, max_answer_bytes: int) -> None:
        origin = URL(url)
        self._max_bytes = max_answer_bytes
        self._urls: dict[str, URL] = {}
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                # `HttpClient` limits connections itself, fairly and outside of the deadline.
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_S,
                ssl=_certificates() if origin.scheme == "https" else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # aiohttp does not limit the size
            # `with_retries` limits an attempt as a whole.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            proxy=proxy_of(url),
        )
        self._life = _life(self._session)

    async def send(
        self,
        url: str,
        headers: Mapping[str, str],
        content: bytes | None,
        on_part: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """POST `content`, or GET if it is None; see `Transport.send`.

        Raises:
            OSError: there is no connection, or it broke.
            aiohttp.ClientError: the same, as an error of aiohttp.
            BadResponse: the answer cannot be decompressed.
            AnswerTooLarge: the answer has more than `max_answer_bytes`.
        """
        where = self._urls.get(url)
        if where is None:
            # Starts the generator in this loop: asyncio closes only those that have started.
            await anext(self._life, None)
            # Parsed only once, since every call of every rollout needs it.
            where = self._urls[url] = URL(url)
        response = await self._session.request(
            "GET" if content is None else "POST",
            where,
            # aiohttp warns about larger bodies of bytes, since it would write them in one piece.
            data=io.BytesIO(content) if content and len(content) > _LARGE_BYTES else content,
            headers=headers,
            allow_redirects=False,
        )
        packing = response.headers.get("Content-Encoding")
        is_stream = on_part is not None and is_event_stream(
            response.status, response.headers.get("Content-Type")
        )
        try:
            if is_stream and not packing:
                assert on_part is not None
                await self._pass_on(response.content, on_part)
                body = b""
            else:
                body = await self._read(response)
        except BaseException:
            # The rest of the answer is unread, so the connection cannot be used again.
            response.close()
            raise
        response.release()
        if packing:
            body = unpacked(body, packing.strip().lower(), self._max_bytes)
            if is_stream:  # from a proxy that compresses it against the request
                assert on_part is not None
                on_part(body)
        return HttpAnswer(
            response.status,
            b"" if is_stream else body,
            response.headers.get("Retry-After"),
            is_stream,
        )

    async def _pass_on(
        self, content: aiohttp.StreamReader, on_part: Callable[[bytes], None]
    ) -> None:
        left = self._max_bytes
        while part := await content.readany():
            left -= len(part)
            if left < 0:
                raise too_large(self._max_bytes)
            on_part(part)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > self._max_bytes:
            raise too_large(self._max_bytes)
        content = response.content
        chunk = await content.readany()
        # Most answers come in one piece.
        if content.at_eof():
            return chunk
        chunks, size = [chunk], len(chunk)
        while size <= self._max_bytes:
            chunk = await content.readany()
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            size += len(chunk)
        raise too_large(self._max_bytes)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._life.aclose()
        await self._session.close()


class _Connector(aiohttp.TCPConnector):
    """Drops connections on which the server sent data without a request.

    aiohttp would take such bytes for the answer to the next request: if a server or a proxy answers
    twice, every later request would get the answer to the one before.
    """

    async def _get(self, key: Any, traces: Any) -> Any:
        while True:
            found = await super()._get(key, traces)
            if found is None or found.protocol is None or not found.protocol.should_close:
                return found
            found.close()


async def _life(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """Close the session when this generator ends.

    asyncio closes started generators before their loop closes, and when they are unreferenced, so a
    client that was never closed leaves no connection behind.
    """
    try:
        while True:
            yield
    finally:
        await session.close()


def unpacked(body: bytes, packing: str, max_bytes: int) -> bytes:
    """Return a body without its `Content-Encoding`.

    Raises:
        BadResponse: the body is damaged, or has an encoding that was not requested.
        AnswerTooLarge: the body is larger than `max_bytes`.
    """
    if packing == "identity":
        return body
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise BadResponse(
            f"the server compressed its answer as {packing!r}, which was not requested, so it "
            "cannot be read. Is there a proxy in front of it?"
        )
    # Some servers leave the zlib header out; the lower half of its first byte is 8.
    raw_deflate = packing == "deflate" and body[:1] and body[0] & 0x0F != 8
    wbits = -zlib.MAX_WBITS if raw_deflate else 32 + zlib.MAX_WBITS
    unpacker, packed, at, content = zlib.decompressobj(wbits), memoryview(body), 0, bytearray()
    try:
        while at < len(body) and len(content) <= max_bytes:
            # A gzip body may have several members, one after another (RFC 1952).
            if unpacker.eof:
                if not body.startswith(_GZIP_MAGIC, at):
                    break
                unpacker = zlib.decompressobj(wbits)
            # In parts: at the end of each member, zlib copies all that follows it in the part.
            part = packed[at : at + _PART_BYTES]
            # Limited while decompressing, since a small body may expand to gigabytes. One byte more
            # shows that the body is larger than the limit.
            content += unpacker.decompress(part, max_bytes + 1 - len(content))
            at += len(part) - len(unpacker.unused_data)
        if len(content) <= max_bytes and not unpacker.eof:
            raise zlib.error("it ends too early")
    except zlib.error as error:
        raise BadResponse(
            f"the server's answer says that it is {packing} but cannot be decompressed ({error}). "
            "The call is lost. Is there a proxy in front of the server that changes answers?"
        ) from error
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return bytes(content)


def is_event_stream(status: int, content_type: str | None) -> bool:
    """Whether an answer of this status and `Content-Type` is a stream of events."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return status == 200 and kind == "text/event-stream"


def too_large(max_bytes: int) -> AnswerTooLarge:
    """Return the error for an answer above the limit."""
    return AnswerTooLarge(
        f"the server's answer has more than max_answer_bytes = {max_bytes:,} bytes, so the rest of "
        "it was not read. The call is lost. If you expect such answers, raise "
        "max_answer_bytes; top_logprobs makes them large."
    )


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment (HTTP_PROXY, NO_PROXY, ...) names for a URL.

    Raises:
        ConfigError: it is not an HTTP proxy.
    """
    where = URL(url)
    if proxy_bypass(where.host or ""):
        return None
    proxies = getproxies()
    found = proxies.get(where.scheme) or proxies.get("all")
    if not found:
        return None
    if "://" not in found:
        found = f"http://{found}"
    scheme = found.partition("://")[0]
    if scheme not in ("http", "https"):
        raise ConfigError(
            f"the environment names a {scheme} proxy for {where.host}, but only http and https "
            "proxies can be used, so no request was sent. Name one in HTTPS_PROXY, or the host in "
            "NO_PROXY."
        )
    return found


def _certificates() -> ssl.SSLContext:
    """Return a TLS context that trusts SSL_CERT_FILE, or else what the system trusts.

    Raises:
        ConfigError: the certificates cannot be read.
    """
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    try:
        return _context(file, folder)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"SSL_CERT_FILE = {file!r} and SSL_CERT_DIR = {folder!r} hold no certificates that can "
            f"be read ({error}), so no server could be trusted. Correct or unset them."
        ) from error


# Cached, since reading the certificates takes longer than a call.
@functools.cache
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    if file or folder:
        return ssl.create_default_context(cafile=file or None, capath=folder or None)
    context = ssl.create_default_context()
    if find_spec("certifi") is not None:  # some systems have no certificates of their own
        context.load_verify_locations(import_module("certifi").where())
    return context
