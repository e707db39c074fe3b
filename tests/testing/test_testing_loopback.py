from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from contextlib import closing

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.testing import LoopbackServer, Reply, Request


async def echo(request: Request) -> Reply:
    return Reply(200, request.body, {"X-Method": request.method, "X-Path": request.path})


def test_requests_arrive_whole() -> None:
    seen: list[Request] = []

    async def keep(request: Request) -> Reply:
        seen.append(request)
        return Reply(204, b"")

    with LoopbackServer(keep) as server:
        body = bytes(range(256)) * 4096
        reply = httpx.put(server.url + "/a/b?c=d", content=body, headers={"X-Y": "z"})
    assert reply.status_code == 204
    assert (seen[0].method, seen[0].path, seen[0].body) == ("PUT", "/a/b?c=d", body)
    assert seen[0].headers["x-y"] == "z"


def test_one_connection_serves_many_requests() -> None:
    with LoopbackServer(echo) as server:
        host = server.url.removeprefix("http://")
        with closing(http.client.HTTPConnection(host)) as connection:
            connection.connect()
            local = connection.sock.getsockname()
            for number in range(5):
                connection.request("POST", f"/{number}", body=str(number))
                reply = connection.getresponse()
                assert reply.read() == str(number).encode()
                assert reply.headers["X-Path"] == f"/{number}"
                assert connection.sock.getsockname() == local


def test_two_servers_have_two_ports() -> None:
    with LoopbackServer(echo) as one, LoopbackServer(echo) as two:
        assert one.url != two.url
        assert httpx.get(one.url).status_code == httpx.get(two.url).status_code == 200


def test_only_loopback_is_served() -> None:
    with LoopbackServer(echo) as server:
        assert server._server is not None
        assert {each.getsockname()[0] for each in server._server.sockets} == {"127.0.0.1"}


@pytest.mark.parametrize("num_sent_bytes", [0, 1, 5])
def test_a_body_is_cut_where_asked(num_sent_bytes: int) -> None:
    async def cut(request: Request) -> Reply:
        return Reply(200, b"123456", num_sent_bytes=num_sent_bytes)

    with LoopbackServer(cut) as server, pytest.raises(httpx.RemoteProtocolError):
        httpx.get(server.url)


def test_a_reset_is_a_reset() -> None:
    async def reset(request: Request) -> Reply:
        return Reply(200, b"", reset=True)

    with LoopbackServer(reset) as server, pytest.raises(httpx.TransportError):
        httpx.get(server.url)


def test_clients_that_leave_do_no_harm() -> None:
    async def slow(request: Request) -> Reply:
        await asyncio.sleep(0.05)
        return Reply(200, b"x" * 100_000)

    with LoopbackServer(slow) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for start in (b"", b"GET / HT", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(start)
        assert httpx.get(server.url).status_code == 200


NO_REQUESTS = [
    b"GET\r\n\r\n",
    b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET /" + b"x" * 100_000,
]


@pytest.mark.parametrize("start", NO_REQUESTS, ids=range(len(NO_REQUESTS)))
def test_what_is_no_request_ends_the_connection_quietly(
    start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = SERVER.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(start)
        client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""
    assert httpx.get(SERVER.url).status_code == 200
    assert caplog.records == [] or all(each.name != "asyncio" for each in caplog.records)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_request_do_no_harm(start: bytes) -> None:
    host, port = SERVER.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(start + b"\r\n\r\n")
    assert httpx.post(SERVER.url, content=b"fine").content == b"fine"


@pytest.fixture(scope="module", autouse=True)
def _server() -> object:
    global SERVER
    with LoopbackServer(echo) as SERVER:
        yield


SERVER: LoopbackServer
