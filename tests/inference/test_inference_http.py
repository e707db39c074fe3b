"""`HttpClient` against servers that answer anything at all."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.inference import RetryPolicy
from rolltree.inference.http import HttpClient, status_error
from rolltree.inference.transport import proxy_of
from rolltree.inference.wire import decode_response
from rolltree.testing import DirectTransport, LoopbackServer, Reply, Request
from rolltree.values.errors import (
    BadResponse,
    ConnectionFailed,
    ModelError,
    PromptTooLong,
    ServerError,
)

NEVER = RetryPolicy(max_retries=0)
FAST = RetryPolicy(max_retries=2, first_wait_s=0.001)
GOOD = b'{"choices": [{"text": "hi"}]}'


def server_of(handle: Any, **options: Any) -> HttpClient:
    options.setdefault("retry", NEVER)
    return HttpClient("http://mock/v1", transport=DirectTransport(handle), **options)


@pytest.mark.parametrize(
    ("status", "text", "error", "retryable"),
    [
        (400, "bad field", ServerError, False),
        (401, "", ServerError, False),
        (404, "no model", ServerError, False),
        (408, "", ServerError, True),
        (409, "", ServerError, True),
        (422, "bad", ServerError, False),
        (425, "", ServerError, True),
        (429, "slow down", ServerError, True),
        (500, "oops", ServerError, True),
        (503, "", ServerError, True),
        (400, '{"code": "context_length_exceeded"}', PromptTooLong, False),
        (400, "This model's maximum context length is 8 tokens.", PromptTooLong, False),
        (400, "The decoder prompt is longer than the maximum model length", PromptTooLong, False),
        (413, "Input is too long", PromptTooLong, False),
        (500, "maximum context length", ServerError, True),
    ],
)
def test_what_a_status_means(status: int, text: str, error: Any, retryable: bool) -> None:
    found = status_error(status, text, "http://x")
    assert type(found) is error
    assert text in str(found)
    assert "http://x" in str(found)
    if isinstance(found, ServerError):
        assert (found.status, found.retryable) == (status, retryable)


async def test_body_path_and_headers_are_sent() -> None:
    seen: list[Request] = []

    async def handle(request: Request) -> Reply:
        seen.append(request)
        return Reply(200, GOOD)

    server = server_of(handle, api_key="sk-1", headers={"X-Team": "blue"})
    outcome = await server.post("/completions", {"prompt": "é"}, decode_response)
    await server.aclose()
    assert outcome.value.choices[0].text == "hi"
    assert (seen[0].method, seen[0].path) == ("POST", "/v1/completions")
    assert json.loads(seen[0].body) == {"prompt": "é"}
    assert seen[0].headers["authorization"] == "Bearer sk-1"
    assert seen[0].headers["x-team"] == "blue"
    assert seen[0].headers["content-type"] == "application/json"


def test_nothing_secret_is_shown() -> None:
    assert repr(server_of(None, api_key="sk-1")) == "HttpClient('http://mock/v1')"


def test_a_closing_slash_makes_no_difference() -> None:
    assert HttpClient("http://x/v1/").base_url == HttpClient("http://x/v1").base_url


async def test_the_server_decides_how_long_to_wait() -> None:
    answers = [Reply(429, b"", {"Retry-After": "0.1"}), Reply(200, GOOD)]

    async def handle(request: Request) -> Reply:
        return answers.pop(0)

    server = server_of(handle, retry=FAST)
    start = monotonic()
    outcome = await server.post("/x", {}, decode_response)
    await server.aclose()
    assert monotonic() - start >= 0.1
    assert outcome.wait_s >= 0.1
    assert outcome.num_retries == 1


async def test_one_request_may_have_retries_and_a_time_limit_of_its_own() -> None:
    seen: list[Request] = []
    release = asyncio.Event()

    async def handle(request: Request) -> Reply:
        seen.append(request)
        if len(seen) == 1:
            await release.wait()  # never: only a time limit ends it
        return Reply(500, b"")

    server = server_of(handle, retry=FAST)
    with pytest.raises(ConnectionFailed, match=r"0\.02 s"):
        await server.post("/x", {}, decode_response, retry=NEVER, timeout_s=0.02)
    with pytest.raises(ServerError):
        await server.post("/x", {}, decode_response)
    await server.aclose()
    assert len(seen) == 4


async def test_long_error_texts_are_shortened() -> None:
    async def handle(request: Request) -> Reply:
        return Reply(400, b"x" * 100_000)

    server = server_of(handle)
    with pytest.raises(ServerError) as caught:
        await server.post("/x", {}, decode_response)
    await server.aclose()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ConnectionRefusedError("refused"), ConnectionFailed),
        (aiohttp.ClientOSError("reset"), ConnectionFailed),
        (aiohttp.ServerDisconnectedError("gone"), ConnectionFailed),
        (aiohttp.ClientPayloadError("cut"), ConnectionFailed),
        (aiohttp.ConnectionTimeoutError("slow"), ConnectionFailed),
        (TimeoutError("slow"), ConnectionFailed),
        (BadResponse("bad gzip"), BadResponse),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_every_failure_of_the_transport_is_ours(failure: Any, error: Any) -> None:
    attempts = []

    async def handle(request: Request) -> Reply:
        attempts.append(request)
        raise failure

    server = server_of(handle, retry=FAST)
    with pytest.raises(error) as caught:
        await server.post("/x", {}, decode_response)
    await server.aclose()
    assert len(attempts) == 3
    assert failure in (caught.value, caught.value.__cause__)


async def test_cancelling_frees_the_connection_slot() -> None:
    release = asyncio.Event()

    async def handle(request: Request) -> Reply:
        await release.wait()
        return Reply(200, GOOD)

    server = server_of(handle, max_connections=1)
    stuck = asyncio.create_task(server.post("/x", {}, decode_response))
    await asyncio.sleep(0.01)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    release.set()
    outcome = await asyncio.wait_for(server.post("/x", {}, decode_response), 60)
    await server.aclose()
    assert outcome.value.choices[0].text == "hi"


@settings(max_examples=60, deadline=None)
@given(status=st.integers(200, 599), body=st.binary(max_size=80))
def test_any_answer_is_a_completion_or_a_model_error(status: int, body: bytes) -> None:
    async def handle(request: Request) -> Reply:
        return Reply(status, body)

    async def ask() -> None:
        server = server_of(handle)
        try:
            await server.post("/x", {}, decode_response)
        except ModelError as error:
            expected = BadResponse if status < 300 else (ServerError, PromptTooLong)
            assert isinstance(error, expected)  # noqa: PT017
        else:
            assert status < 300
        await server.aclose()

    asyncio.run(ask())


RAW = [
    b"",
    b"garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
]


@pytest.mark.parametrize("raw", RAW)
async def test_bytes_that_are_hardly_http(raw: bytes) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server = HttpClient(f"http://127.0.0.1:{port}/v1", retry=NEVER)
    with pytest.raises(ModelError):
        await asyncio.wait_for(server.post("/x", {}, decode_response), 5)
    await server.aclose()
    listener.close()


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "http://far.example/v1", None),
        ({"http_proxy": "http://p:1"}, "http://far.example/v1", "http://p:1"),
        ({"https_proxy": "p:1"}, "https://far.example/v1", "http://p:1"),
        ({"all_proxy": "http://p:1"}, "https://far.example/v1", "http://p:1"),
        ({"http_proxy": "http://p:1", "no_proxy": ".example"}, "http://far.example/v1", None),
        ({"http_proxy": "http://p:1", "no_proxy": "127.0.0.1"}, "http://127.0.0.1:8/v1", None),
        ({"https_proxy": "http://p:1"}, "http://far.example/v1", None),
    ],
)
def test_the_proxy_is_the_environments(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


async def test_a_request_carries_what_servers_expect() -> None:
    seen: list[Request] = []

    async def handle(request: Request) -> Reply:
        seen.append(request)
        return Reply(200, GOOD)

    with LoopbackServer(handle) as loopback:
        server = HttpClient(
            f"{loopback.url}/v1",
            api_key="k",
            headers={"X-Mine": "1", "user-agent": "mine"},
        )
        await server.post("/x", {"a": "ü"}, decode_response)
        await server.check_health()
        await server.aclose()
        host = loopback.url.removeprefix("http://")
    post, get = seen
    assert (post.method, post.path, post.body) == ("POST", "/v1/x", '{"a":"ü"}'.encode())
    assert (get.method, get.path, get.body) == ("GET", "/health", b"")
    assert dict(post.headers) == {
        "x-request-id": post.headers["x-request-id"],
        "host": host,
        "accept": "*/*",
        "accept-encoding": "gzip, deflate",
        "authorization": "Bearer k",
        "x-mine": "1",
        "user-agent": "mine",
        "content-type": "application/json",
        "content-length": "10",
    }
    assert "content-type" not in get.headers
