"""`HttpClient` over real sockets: servers that are silent, drip, flood, hang up; TLS, proxies."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
import ssl
import subprocess
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rolltree.inference import RetryPolicy
from rolltree.inference.http import HttpClient
from rolltree.inference.transport import _KEEP_ALIVE_S, proxy_of, unpacked
from rolltree.values.errors import (
    AnswerTooLarge,
    BadResponse,
    CallTimeout,
    ConfigError,
    ConnectionFailed,
    ServerError,
)

NEVER = RetryPolicy(max_retries=0)
OFTEN = RetryPolicy(max_retries=1000, first_wait_s=0.001, max_wait_s=0.01)
GOOD = b'{"ok":true}'
Writer = asyncio.StreamWriter
Answer = Callable[[bytes, Writer], Awaitable[None]]


def reply(body: bytes, *headers: str, status: str = "200 OK", size: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if size is None else size}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


class Server:
    """A server on a real socket: `answer` gets each request's head and writes what it likes."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.url = ""

    async def accept(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
                self.heads.append(head)
                await self.answer(head, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def serving(
    answer: Answer | bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    async def same(head: bytes, writer: Writer) -> None:
        assert isinstance(answer, bytes)
        writer.write(answer)

    server = Server(same if isinstance(answer, bytes) else answer)
    tasks = set()

    async def accept(reader: asyncio.StreamReader, writer: Writer) -> None:
        tasks.add(asyncio.current_task())
        with suppress(asyncio.CancelledError):
            await server.accept(reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def post(client: HttpClient, **options: Any) -> bytes:
    return (await client.post("/v1/x", {"a": 1}, bytes, **options)).value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (what is asked for is not an event)
            await asyncio.sleep(0.01)


# Time


async def silent(head: bytes, writer: Writer) -> None:
    await asyncio.Event().wait()


async def drip_head(head: bytes, writer: Writer) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 10**6:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_body(head: bytes, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    await drip_head(head, writer)


@pytest.mark.parametrize("answer", [silent, drip_head, drip_body])
async def test_a_call_ends_at_its_deadline_retries_included(answer: Answer) -> None:
    async with serving(answer) as server:
        client = HttpClient(server.url, retry=OFTEN, timeout_s=0.2, deadline_s=0.7)
        with pytest.raises(CallTimeout, match=r"deadline_s = 0\.7 s.*asked \d times") as caught:
            await asyncio.wait_for(post(client), 60)
        assert "gave no answer in time" in str(caught.value)
        assert isinstance(caught.value, ConnectionFailed)
        assert 2 <= len(server.heads) <= 4
        assert server.num_connections >= len(server.heads)  # none is used again
        await client.aclose()


@pytest.mark.parametrize("answer", [silent, drip_body])
async def test_an_attempt_has_a_time_limit_of_its_own(answer: Answer) -> None:
    async def second_time_right(head: bytes, writer: Writer) -> None:
        if len(server.heads) == 1:
            await answer(head, writer)
        writer.write(reply(GOOD))

    async with serving(second_time_right) as server:
        client = HttpClient(server.url, retry=OFTEN, timeout_s=0.5, deadline_s=300.0)
        outcome = await asyncio.wait_for(client.post("/x", {}, bytes), 60)
        assert (outcome.value, outcome.num_retries) == (GOOD, 1)
        assert outcome.wait_s >= 0.5
        await client.aclose()


async def test_a_wait_beyond_the_deadline_is_not_begun() -> None:
    async with serving(reply(b"busy", "Retry-After: 60", status="503 Busy")) as server:
        client = HttpClient(server.url, retry=OFTEN, deadline_s=30.0)
        with pytest.raises(CallTimeout, match="answered 503: busy") as caught:
            await asyncio.wait_for(post(client), 20)
        assert isinstance(caught.value.__cause__, ServerError)
        assert len(server.heads) == 1
        await client.aclose()


async def test_waiting_for_a_connection_is_not_the_calls_time() -> None:
    async def slow(head: bytes, writer: Writer) -> None:
        await asyncio.sleep(0.2)
        writer.write(reply(GOOD))

    async with serving(slow) as server:
        client = HttpClient(server.url, retry=NEVER, deadline_s=30.0, max_connections=1)
        client.deadline_s = 1.5  # eight calls in a row take longer
        assert await asyncio.gather(*(post(client) for _ in range(8))) == [GOOD] * 8
        await client.aclose()


def test_the_deadline_is_twice_the_time_limit_unless_given() -> None:
    assert HttpClient("http://x").deadline_s == 1200
    assert HttpClient("http://x", timeout_s=5).deadline_s == 10
    assert HttpClient("http://x", timeout_s=5, deadline_s=7).deadline_s == 7


@pytest.mark.parametrize(
    "limit", ["timeout_s", "deadline_s", "max_connections", "max_answer_bytes"]
)
def test_limits_are_above_zero(limit: str) -> None:
    with pytest.raises(ConfigError, match=rf"{limit} = 0\b"):
        HttpClient("http://x", **{limit: 0})


# Size


async def test_a_gzip_bomb_is_not_unpacked() -> None:
    packer = zlib.compressobj(wbits=31)
    block = bytes(2**20)
    bomb = b"".join(packer.compress(block) for _ in range(64)) + packer.flush()
    assert len(bomb) < 2**17  # 64 MiB in 64 KiB
    async with serving(reply(bomb, "Content-Encoding: gzip")) as server:
        client = HttpClient(server.url, retry=OFTEN, max_answer_bytes=2**20)
        tracemalloc.start()
        with pytest.raises(AnswerTooLarge, match=r"max_answer_bytes = 1,048,576"):
            await asyncio.wait_for(post(client), 60)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * 2**20
        assert len(server.heads) == 1  # a second answer would hardly be smaller
        await client.aclose()


async def test_an_answer_that_states_its_size_is_refused_unread() -> None:
    async with serving(reply(b"", size=10**12)) as server:
        client = HttpClient(server.url, retry=OFTEN)
        with pytest.raises(AnswerTooLarge, match="67,108,864"):
            await asyncio.wait_for(post(client), 60)
        await until(lambda: server.num_closed == 1)
        await client.aclose()


@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", "Connection: close"])
async def test_an_answer_without_end_is_read_up_to_the_limit(head: str) -> None:
    sent = 0

    async def flood(_: bytes, writer: Writer) -> None:
        nonlocal sent
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        while True:
            writer.write(
                b"10000\r\n" + b"0" * 2**16 + b"\r\n" if "chunked" in head else b"0" * 2**16
            )
            sent += 2**16
            await writer.drain()

    async with serving(flood) as server:
        client = HttpClient(server.url, retry=OFTEN, max_answer_bytes=2**20)
        with pytest.raises(AnswerTooLarge):
            await asyncio.wait_for(post(client), 60)
        await until(lambda: server.num_closed == 1)
        assert sent < 64 * 2**20  # the limit, and what sockets hold
        await client.aclose()


@pytest.mark.parametrize("packing", ["gzip", "deflate", "raw deflate", "x-gzip", "identity"])
@pytest.mark.parametrize("size", [10, 10**6])
async def test_packed_answers_up_to_the_limit_are_unpacked(packing: str, size: int) -> None:
    body = bytes(at % 251 for at in range(size))
    wbits = {"deflate": 15, "raw deflate": -15}.get(packing, 31)
    packer = zlib.compressobj(wbits=wbits)
    packed = body if packing == "identity" else packer.compress(body) + packer.flush()
    async with serving(reply(packed, f"Content-Encoding: {packing.split()[-1]}")) as server:
        client = HttpClient(server.url, retry=NEVER, max_answer_bytes=max(size, len(packed)))
        assert await post(client) == body
        await client.aclose()


@pytest.mark.parametrize(
    ("body", "packing"),
    [
        (gzip.compress(GOOD, mtime=0)[:-9], "gzip"),
        (GOOD, "gzip"),
        (b"", "gzip"),
        (b"", "deflate"),
        (GOOD, "br"),
    ],
)
def test_a_damaged_packing_is_a_bad_response(body: bytes, packing: str) -> None:
    with pytest.raises(BadResponse):
        unpacked(body, packing, 100)


def test_a_gzip_answer_of_several_members_is_whole() -> None:
    members = [gzip.compress(part, mtime=0) for part in (b"one", b"", b"x" * 10**5, b"two")]
    whole = b"one" + b"x" * 10**5 + b"two"
    assert unpacked(b"".join(members), "gzip", len(whole)) == whole
    with pytest.raises(AnswerTooLarge):
        unpacked(b"".join(members), "gzip", len(whole) - 1)
    with pytest.raises(BadResponse, match="ends too early"):
        unpacked(b"".join(members)[:-1], "gzip", len(whole))
    assert unpacked(members[0] + bytes(9), "gzip", 3) == b"one"  # padding


def test_very_many_members_take_no_longer_than_their_bytes() -> None:
    body = gzip.compress(b"", mtime=0) * 100_000
    began = time.process_time()
    assert unpacked(body, "gzip", 0) == b""
    assert time.process_time() - began < 2.0


async def test_large_requests_arrive_whole() -> None:
    async with serving(reply(GOOD)) as server:
        client = HttpClient(server.url, retry=NEVER)
        body = {"prompt": "0" * (3 * 2**20)}
        assert (await client.post("/x", body, bytes)).value == GOOD
        assert b"content-length: 3145741" in server.heads[0].lower()
        await client.aclose()


# Connections


async def test_an_answer_cut_short_is_asked_for_again() -> None:
    async def cut_twice(head: bytes, writer: Writer) -> None:
        if len(server.heads) < 3:
            writer.write(reply(GOOD[:5], size=len(GOOD)))
            await writer.drain()
            writer.close()
        else:
            writer.write(reply(GOOD))

    async with serving(cut_twice) as server:
        client = HttpClient(server.url, retry=OFTEN)
        outcome = await asyncio.wait_for(client.post("/x", {}, bytes), 60)
        assert (outcome.value, outcome.num_retries) == (GOOD, 2)
        assert server.num_connections == 3
        await client.aclose()


async def test_connections_are_kept_and_used_again() -> None:
    async with serving(reply(GOOD)) as server:
        client = HttpClient(server.url, retry=NEVER, max_connections=5)
        for _ in range(10):
            await post(client)
        assert server.num_connections == 1
        for _ in range(3):
            await asyncio.gather(*(post(client) for _ in range(20)))
        assert server.num_connections <= 5
        await client.aclose()
        await until(lambda: server.num_closed == server.num_connections)
        assert await post(client) == GOOD  # open again
        await client.aclose()


def test_idle_connections_end_before_the_servers_end_them() -> None:
    assert _KEEP_ALIVE_S < 5  # uvicorn's, and so vLLM's


async def test_a_cancelled_call_closes_its_connection() -> None:
    async def first_silent(head: bytes, writer: Writer) -> None:
        if len(server.heads) == 1:
            await silent(head, writer)
        writer.write(reply(GOOD))

    async with serving(first_silent) as server:
        client = HttpClient(server.url, retry=NEVER, max_connections=1)
        call = asyncio.create_task(post(client))
        await until(lambda: len(server.heads) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(post(client), 60) == GOOD
        assert server.num_connections == 2
        await client.aclose()


async def test_redirects_are_not_followed() -> None:
    async with serving(reply(GOOD)) as other:
        moved = reply(b"", f"Location: {other.url}/x", status="307 Moved")
        async with serving(moved) as server:
            client = HttpClient(server.url, retry=OFTEN, api_key="sk-1")
            with pytest.raises(ServerError, match=r"307.*Check the URL"):
                await post(client)
            assert other.num_connections == 0
            await client.aclose()


def test_a_client_that_is_never_closed_leaves_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(client: HttpClient, counts: list[int]) -> bytes:
        async with serving(reply(GOOD)) as server:
            client.base_url = server.url
            found = await post(client)
            counts.append(server.num_connections)
            return found

    client = HttpClient("http://127.0.0.1:1", retry=NEVER)
    counts: list[int] = []
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):  # in three event loops
            assert asyncio.run(ask(client, counts)) == GOOD
        del client
        gc.collect()
    assert counts == [1, 1, 1]
    assert "nclosed" not in caplog.text


async def test_a_client_that_nobody_holds_closes_its_connections() -> None:
    async with serving(reply(GOOD)) as server:
        client = HttpClient(server.url, retry=NEVER)
        await post(client)
        del client
        gc.collect()
        await until(lambda: server.num_closed == 1)


# TLS and proxies


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority: `cert.pem` and `key.pem`."""
    folder = tmp_path_factory.mktemp("authority")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=rolltree-test -out cert.pem"
    command = ["openssl", *words.split(), "-keyout", "key.pem"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


@pytest.fixture
def tls(authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "cert.pem", authority / "key.pem")
    return context


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)


async def test_tls_with_an_authority_of_ones_own(
    authority: Path, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(reply(GOOD), tls) as server:
        unknown = HttpClient(server.url, retry=OFTEN)
        with pytest.raises(ConnectionFailed, match="SSL_CERT_FILE"):  # and is not tried again
            await asyncio.wait_for(post(unknown), 60)
        assert not server.heads
        await unknown.aclose()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "cert.pem"))
        client = HttpClient(server.url, retry=NEVER)
        for _ in range(3):
            assert await post(client) == GOOD
        assert server.num_connections == 1
        await client.aclose()


async def test_certificates_that_are_missing_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"none\.pem"):
        await post(HttpClient("https://127.0.0.1:1", retry=NEVER))


async def test_a_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(reply(GOOD)) as proxy:
        address = proxy.url.removeprefix("http://")
        monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{address}")
        client = HttpClient("http://far.example:81", retry=NEVER, api_key="k")
        assert await post(client) == GOOD
        await client.aclose()
        head = proxy.heads[0].decode().split("\r\n")
        assert head[0] == "POST http://far.example:81/v1/x HTTP/1.1"
        assert "Host: far.example:81" in head
        assert "Authorization: Bearer k" in head
        assert "Proxy-Authorization: Basic bWU6c2VjcmV0" in head
        monkeypatch.setenv("NO_PROXY", "far.example")
        assert proxy_of("http://far.example:81") is None


async def test_a_proxy_sees_nothing_of_tls_but_the_host(
    authority: Path, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
        finally:
            writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: Writer) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        host, _, port = asked[-1].split()[1].decode().partition(":")
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))

    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "cert.pem"))
    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    async with serving(reply(GOOD), tls) as server:
        client = HttpClient(server.url, retry=NEVER, api_key="k")
        for _ in range(2):
            assert await post(client) == GOOD
        await client.aclose()
        assert [words.split()[0] for words in asked] == [b"CONNECT"]
        assert b"Bearer" not in asked[0]
        assert len(server.heads) == 2
    proxy.close()


def test_a_proxy_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(ConfigError, match="socks5 proxy"):
        proxy_of("https://far.example/v1")
