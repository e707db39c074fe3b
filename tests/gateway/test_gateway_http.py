"""Who may ask, sessions over HTTP, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
import time
from contextlib import aclosing
from unittest.mock import Mock

import aiohttp
import httpx
import openai
import pytest
from gateway_kit import Lingering, calling, is_one_path, openai_agent

import rolltree as rt
from rolltree.gateway.app import GatewayApp
from rolltree.gateway.journal import JournalFile
from rolltree.gateway.session import SessionLimits
from rolltree.rollouts.decode import decode_results
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.values.errors import ConfigError, ConnectionFailed, ServerError, StoreError

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


CHUNK = b"200000\r\n" + b"x" * 2**21 + b"\r\n"


def echo(messages):
    return messages[-1]["content"].upper()


async def post(url, body, key, **headers):
    """Return status and JSON of a request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **headers}
    if key is not None:
        given.setdefault("Authorization", f"Bearer {key}")
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=io.BytesIO(content), headers=given) as r,
    ):
        return r.status, await r.json(content_type=None)


# -- who may ask -----------------------------------------------------------------------------------


async def test_only_the_sessions_own_key_opens_it():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s, g.session() as other:
        url = f"{s.base_url}/chat/completions"
        answers = [
            await post(url, ASKED, key)
            for key in ("wrong", "", None, other.api_key, g.admin_key, s.api_key + "x", "é")
        ]
        unknown = await post(url.replace(s.id, "nobody"), ASKED, s.api_key)
        # One answer for all: nobody learns which sessions there are.
        assert {(status, body["error"]["message"]) for status, body in [*answers, unknown]} == {
            (401, unknown[1]["error"]["message"])
        }
        assert (await post(url, ASKED, s.api_key))[0] == 200
        header = {"x-api-key": s.api_key}
        assert (await post(url, ASKED, None, **header))[0] == 200
        assert (len(s.trajectory), len(other.trajectory)) == (2, 0)


async def test_a_closed_session_answers_nobody():
    async with rt.gateway(ScriptedClient(echo)) as g:
        async with g.session() as s:
            url, key = f"{s.base_url}/chat/completions", s.api_key
        assert (await post(url, ASKED, key))[0] == 401


async def test_no_session_sees_another_ones_answers():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s, g.session() as other:
        _, answer = await post(f"{s.base_url}/chat/completions", ASKED, s.api_key)
        name = answer["id"].partition("-")[2]
        assert s.conversation(name)[-1]["content"] == "HELLO THERE"
        with pytest.raises(Exception, match="gave no answer"):
            other.conversation(name)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_pages_of_the_web_are_refused(headers, status):
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        url = f"{s.base_url}/chat/completions"
        assert (await post(url, ASKED, s.api_key, **headers))[0] == status
        assert len(s.trajectory) == 0


async def test_another_name_of_the_gateway_must_be_allowed():
    client = ScriptedClient(echo)
    async with rt.gateway(client, allowed_hosts=["box.internal:1"]) as g, g.session() as s:
        url = f"{s.base_url}/chat/completions"
        assert (await post(url, ASKED, s.api_key, Host="box.internal:1"))[0] == 200


def test_other_machines_are_let_in_on_purpose_only():
    with pytest.raises(ConfigError, match="allow-remote"):
        rt.gateway(ScriptedClient(echo), host="0.0.0.0")


async def test_a_unix_socket_serves_programs_without_a_network(tmp_path):
    path = tmp_path / "gateway.sock"
    async with rt.gateway(ScriptedClient(echo), unix_socket=path) as g, g.session() as s:
        assert path.stat().st_mode & 0o777 == 0o600
        connector = aiohttp.UnixConnector(str(path))
        headers = {"Authorization": f"Bearer {s.api_key}"}
        async with aiohttp.ClientSession(connector=connector) as http:
            url = f"http://gateway/s/{s.id}/v1/chat/completions"
            async with http.post(url, json=ASKED, headers=headers) as response:
                answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == "HELLO THERE"
    assert not path.exists()


# -- bodies ----------------------------------------------------------------------------------------


async def test_a_unix_socket_whose_server_names_no_address_is_served():
    # As releases of uvicorn before 0.44 describe it.
    scope = {"type": "http", "server": None, "path": "/health", "method": "GET", "headers": []}
    sent = []

    async def send(message):
        sent.append(message)

    async with rt.gateway(ScriptedClient(echo)) as g:
        await GatewayApp(g, ())({**scope, "query_string": b""}, Mock(), send)
    assert sent[0]["status"] == 200


async def test_a_unix_socket_replaces_a_stale_socket_and_no_other_file(tmp_path):
    path, notes = tmp_path / "gateway.sock", tmp_path / "notes.txt"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with rt.gateway(ScriptedClient(echo), unix_socket=path):
        pass
    notes.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt: a file that is not a socket"):
        await rt.gateway(ScriptedClient(echo), unix_socket=notes).start()
    assert notes.read_text() == "mine"


async def test_a_body_of_50_mb_is_refused_and_the_gateway_goes_on():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        url = f"{s.base_url}/chat/completions"
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 50_000_000}]}
        status, body = await post(url, long, s.api_key)
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert (await post(url, ASKED, s.api_key))[0] == 200


LENGTHS = {
    "ten gigabytes that do not come": (b"Content-Length: 10000000000\r\n\r\n", 413),
    "more than a number holds": (b"Content-Length: 18446744073709551615\r\n\r\n", 413),
    "chunks without an end": (b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK * 9, 413),
    "half of a body": (b"Content-Length: 100\r\n\r\n{", 408),
    "half of a chunk": (b"Transfer-Encoding: chunked\r\n\r\n64\r\n{", 408),
}


@pytest.mark.parametrize("body", LENGTHS)
async def test_a_body_that_is_too_large_or_does_not_come_is_answered(body):
    content, status = LENGTHS[body]
    read_timeout_s = 0.3 if status == 408 else 60.0
    gateway = rt.gateway(ScriptedClient(echo), read_timeout_s=read_timeout_s)
    async with gateway as g, g.session() as s:
        host, _, port = g.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /s/{s.id}/v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        writer.write(f"{head}Authorization: Bearer {s.api_key}\r\n".encode() + content)
        answer = await asyncio.wait_for(reader.read(), 20)  # to the end of the connection
        assert f" {status} ".encode() in answer.splitlines()[0]
        writer.close()


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nX: ", b"GET /"])
async def test_a_head_without_an_end_is_refused_at_once(start):
    async with rt.gateway(ScriptedClient(echo), read_timeout_s=60.0) as g:
        host, _, port = g.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):  # heads that have an end do not add up
            large = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nX: {'a' * 50_000}\r\n\r\n"
            writer.write(large.encode())
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        with contextlib.suppress(ConnectionError):
            writer.write(start + b"a" * 80_000)
            await asyncio.wait_for(reader.read(), 20)  # to the end of the connection
        writer.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5000, b"null"])
async def test_a_body_that_is_not_an_object_is_refused(content):
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        status, body = await post(f"{s.base_url}/chat/completions", content, s.api_key)
        assert status == 400
        assert body["error"]["type"] == "invalid_request_error"


LONE = "half \ud800"


HALF = {"role": "user", "content": LONE}
SAID = {
    "chat/completions": {
        "messages": [HALF, {"role": "assistant", **calling("f", LONE)}, HALF],
    },
    "responses": {
        "input": [
            HALF,
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": LONE},
            HALF,
        ],
    },
    "messages": {
        "messages": [
            HALF,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"text": LONE}}],
            },
            HALF,
        ],
        "max_tokens": 5,
    },
}


@pytest.mark.parametrize("path", SAID)
async def test_half_of_a_surrogate_pair_becomes_a_replacement_character(path):
    """An agent sends back what a model wrote; refused, the model could end its rollout."""
    seen = []
    client = ScriptedClient(lambda messages: seen.append(messages) or "ok")
    body = json.dumps({"model": "m", **SAID[path]}).encode()
    assert rb"\ud800" in body
    async with rt.gateway(client) as g, g.session() as s:
        status, answer = await post(f"{s.base_url}/{path}", body, s.api_key)
    assert status == 200, answer
    first, second, _ = seen[0]
    assert first["content"] == "half \ufffd"
    (call,) = second["tool_calls"]
    assert "half \ufffd" in call["function"]["arguments"]


async def test_paths_that_are_not_served():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        assert (await post(f"{s.base_url}/embeddings", {}, s.api_key))[0] == 404
        assert (await post(f"{s.base_url}/models", {}, s.api_key))[0] == 405
        assert (await post(f"{g.url}/elsewhere", {}, g.admin_key))[0] == 404


# -- hanging up, and slow readers ------------------------------------------------------------------


async def until(condition, limit_s=20.0):
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (nothing tells of a connection's end)
            await asyncio.sleep(0.002)


class Raw:
    """A connection on which the test decides what is sent and read."""

    def __init__(self, session, body):
        self._session, self._body = session, body

    async def __aenter__(self):
        host, _, port = self._session.root_url.split("/")[2].partition(":")
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        await self.ask()
        return self

    async def ask(self):
        host, _, port = self._session.root_url.split("/")[2].partition(":")
        content = json.dumps(self._body).encode()
        head = (
            f"POST /s/{self._session.id}/v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Authorization: Bearer {self._session.api_key}\r\nContent-Length: {len(content)}\r\n"
            "\r\n"
        )
        self.writer.write(head.encode() + content)
        await self.writer.drain()

    async def __aexit__(self, *exc):
        self.writer.close()

    def reset(self):
        """End the connection at once, as a program that is killed does."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.writer.transport.abort()


NUM_EVENTS = 12  # the first chunk, ten tokens that are text, and the end


@pytest.mark.parametrize("num_read", range(NUM_EVENTS + 1))
async def test_hanging_up_after_each_event_ends_the_sampling(num_read):
    client = ScriptedClient(lambda messages: "0123456789", token_delay_s=0.01)
    async with rt.gateway(client) as g, g.session() as s:
        async with Raw(s, {**ASKED, "stream": True}) as raw:
            for _ in range(num_read):
                line = await raw.reader.readuntil(b"\n\n")
                assert b"error" not in line
            raw.reset()
            await until(lambda: s.num_in_flight == 0 and (s.num_cancelled or len(s.trajectory)))
        # Either it was cut off, and nothing of it is there, or all of it had been sampled.
        assert s.num_cancelled + len(s.trajectory) == 1
        if num_read < NUM_EVENTS // 2:
            assert s.num_cancelled == 1
        async with openai_agent(s) as agent:
            answer = await agent.chat.completions.create(**ASKED)
        assert answer.choices[0].message.content == "0123456789"


async def test_hanging_up_cancels_an_answer_that_is_not_streamed():
    client = ScriptedClient(echo, delay_s=30.0)
    async with rt.gateway(client) as g, g.session() as s:
        async with Raw(s, ASKED) as raw:
            await until(lambda: s.num_in_flight == 1)
            raw.reset()
            await until(lambda: s.num_cancelled == 1)
        assert len(s.trajectory) == 0


async def test_a_client_that_does_not_read_is_let_go():
    client = ScriptedClient(lambda messages: "x" * 3000, token_delay_s=0.0001)
    async with rt.gateway(client, write_timeout_s=0.2) as g, g.session() as s:
        # Small buffers: every connection that is accepted has those of the listener.
        g.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        async with Raw(s, {**ASKED, "stream": True}) as raw:
            sock = raw.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.writer.transport.pause_reading()
            await until(lambda: s.num_cancelled == 1)
        assert len(s.trajectory) == 0
        async with openai_agent(s) as agent:
            answer = await agent.chat.completions.create(**ASKED)
        assert len(answer.choices[0].message.content) == 3000


async def test_a_client_that_reads_no_answer_is_no_error_of_the_gateway(caplog, capsys):
    caplog.set_level("INFO")
    # More than the buffers hold, so the next answer of the connection waits.
    client = ScriptedClient(lambda messages: "x" * 150_000)
    async with rt.gateway(client, write_timeout_s=0.2) as g, g.session() as s:
        g.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        async with Raw(s, ASKED) as raw:
            sock = raw.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.writer.transport.pause_reading()
            await raw.ask()
            await until(lambda: "does not read" in caplog.text, limit_s=5.0)
            raw.reset()
    assert "Traceback" not in capsys.readouterr().err


async def test_a_client_that_gives_up_and_repeats_is_answered_once():
    num_asked = 0

    async def hanging_once(messages):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            await asyncio.Event().wait()
        return "done"

    async with rt.gateway(ScriptedClient(hanging_once)) as g, g.session() as s:
        async with openai_agent(s, max_retries=5, timeout=1.0) as agent:
            answer = await agent.chat.completions.create(**ASKED)
        assert answer.choices[0].message.content == "done"
        assert (num_asked, len(s.trajectory), s.num_cancelled) == (2, 1, 1)


BODIES = {
    "chat/completions": ASKED,
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": ASKED["messages"]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_parallel_equal_requests_without_a_retry_header_are_samples_of_their_own(
    path, stream
):
    body = BODIES[path] | ({"stream": True} if stream else {})
    async with (
        rt.gateway(ScriptedClient(lambda prompt: "yes", delay_s=0.02)) as g,
        g.session() as s,
    ):
        async with httpx.AsyncClient(headers={"x-api-key": s.api_key}, timeout=60) as http:
            sent = [http.post(f"{s.base_url}/{path}", json=body) for _ in range(5)]
            texts = [answer.text for answer in await asyncio.gather(*sent)]
        assert len(s.trajectory) == len(set(texts)) == 5  # each has an id of its own


def num_waiting(session):
    return sum(flight.num_waiting for flight in session._flights.values())


async def test_a_request_is_answered_again_when_its_connection_was_lost(tmp_path, monkeypatch):
    on_disk, append = asyncio.Event(), JournalFile.append

    async def slow(*args):
        await on_disk.wait()  # sampled, so that it is no longer cancelled
        await append(*args)

    monkeypatch.setattr(JournalFile, "append", slow)
    client = ScriptedClient(["one", "two"])
    async with rt.gateway(client, directory=tmp_path) as g, g.session() as s:
        async with Raw(s, ASKED) as raw:
            await until(lambda: len(s.trajectory) == 1)
            raw.reset()
            await until(lambda: num_waiting(s) == 0)
        async with Raw(s, ASKED) as again:
            await until(lambda: num_waiting(s) == 1)
            on_disk.set()
            assert b"one" in await asyncio.wait_for(again.reader.read(4000), 20)
        assert len(s.trajectory) == 1


async def test_an_idempotency_key_is_answered_once():
    async with rt.gateway(ScriptedClient(["one", "two"])) as g, g.session() as s:
        url, key = f"{s.base_url}/chat/completions", {"Idempotency-Key": "k"}
        answers = await asyncio.gather(*(post(url, ASKED, s.api_key, **key) for _ in range(5)))
        later = await post(url, ASKED, s.api_key, **key)
        assert [answer == later for answer in answers] == [True] * 5
        assert len(s.trajectory) == 1
        other = {"model": "m", "messages": [{"role": "user", "content": "else"}]}
        assert (await post(url, other, s.api_key, **key))[0] == 422


async def test_a_hundred_connections_of_one_session():
    async with rt.gateway(ScriptedClient(echo, delay_s=0.01)) as g, g.session() as s:
        async with openai_agent(s) as agent:
            root = [{"role": "user", "content": "the task"}]
            first = await agent.chat.completions.create(model="m", messages=root)
            root.append({"role": "assistant", "content": first.choices[0].message.content})

            async def branch(number):
                messages = [*root, {"role": "user", "content": f"part {number}"}]
                answer = await agent.chat.completions.create(model="m", messages=messages)
                return answer.choices[0].message.content

            said = await asyncio.gather(*map(branch, range(100)))
        assert said == [f"PART {number}" for number in range(100)]
        tree = s.trajectory.tree
        assert tree.num_calls == 101
        begun = tree.path_len(0)
        assert all(
            (tree.prompt_ids(call)[:begun] == tree.path_view(0)).all() for call in range(1, 101)
        )


# -- the model's server ----------------------------------------------------------------------------


async def test_an_upstream_that_dies_and_returns():
    faults = [ConnectionFailed("http://10.0.0.1 hung up"), ConnectionFailed("again"), None]
    client = FaultyClient(ScriptedClient(echo), faults)
    async with rt.gateway(client) as g, g.session() as s:
        async with openai_agent(s) as agent:
            with pytest.raises(openai.InternalServerError) as caught:
                await agent.chat.completions.create(**ASKED)
            assert caught.value.status_code == 503
        # The official client repeats what may be repeated.
        async with openai_agent(s, max_retries=2) as agent:
            answer = await agent.chat.completions.create(**ASKED)
        assert answer.choices[0].message.content == "HELLO THERE"
        assert is_one_path(s)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerError("401: bad key", status=401, retryable=False), 502),
        (ServerError("307: elsewhere", status=307, retryable=False), 502),
        (ServerError("404: no such model", status=404, retryable=False), 502),
        (ServerError("422: odd tools", status=422, retryable=False), 400),
        (ServerError("400: no such field", status=400, retryable=False), 400),
        (ServerError("500: boom", status=500, retryable=True), 502),
        (rt.PromptTooLong("9 tokens"), 400),
    ],
)
async def test_what_an_agent_hears_of_the_upstreams_errors(error, status):
    for stream in (False, True):
        client = FaultyClient(ScriptedClient(echo), [error])
        async with rt.gateway(client) as g, g.session() as s:
            got = await post(
                f"{s.base_url}/chat/completions", {**ASKED, "stream": stream}, s.api_key
            )
            assert got[0] == status


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_hears_soon_that_the_upstream_is_dead_and_not_where_it_was(stream, caplog):
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        client = rt.OpenAIClient(f"http://127.0.0.1:{port}/v1", "m")
        began = time.monotonic()
        async with aclosing(client), rt.gateway(client) as g, g.session() as s:
            status, body = await post(
                f"{s.base_url}/chat/completions", {**ASKED, "stream": stream}, s.api_key
            )
    # Seven attempts with growing waits take 15 s on average; these at most two seconds of waits.
    assert time.monotonic() - began < 10
    assert (status, body["error"]["code"]) == (503, "upstream_unavailable")
    assert str(port) not in str(body)
    assert "127.0.0.1" not in str(body)
    assert f"127.0.0.1:{port}" in caplog.text  # the operator's


async def test_what_the_upstream_refuses_is_told_without_its_address():
    said = "http://10.0.0.1:8000/v1/x answered 400: no field top_a. Change the request."
    client = FaultyClient(ScriptedClient(echo), [ServerError(said, status=400, retryable=False)])
    async with rt.gateway(client) as g, g.session() as s:
        _, body = await post(f"{s.base_url}/chat/completions", ASKED, s.api_key)
    assert "no field top_a" in body["error"]["message"]
    assert "10.0.0.1" not in str(body)


async def test_a_stream_that_fails_midway_says_so_and_is_no_call():
    class Breaking(ScriptedClient):
        async def _stream(self, reply, call, *prompt):
            await super()._stream(reply, call, *prompt)
            raise ConnectionFailed("the server died")

    async with rt.gateway(Breaking(echo, token_delay_s=0.001)) as g, g.session() as s:
        async with openai_agent(s) as agent:
            stream = await agent.chat.completions.create(**ASKED, stream=True)
            said = []

            async def read():
                async for chunk in stream:
                    said.append(chunk.choices[0].delta.content or "")

            with pytest.raises(openai.APIError, match="the server died"):
                await read()
        assert len(said) > 3
        assert "HELLO THERE".startswith("".join(said))
        assert len(s.trajectory) == 0


# -- sessions over HTTP ----------------------------------------------------------------------------


async def test_sessions_are_opened_and_closed_over_http_and_stored(tmp_path):
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            status, made = await post(
                f"{g.url}/sessions", {"id": "mine", "max_calls": 3, "info": {"a": 1}}, g.admin_key
            )
            assert (status, made["id"]) == (201, "mine")
            agent = openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["api_key"])
            async with agent:
                await agent.chat.completions.create(**ASKED)
            async with aiohttp.ClientSession() as http:
                headers = {"Authorization": f"Bearer {g.admin_key}"}
                async with http.get(f"{g.url}/sessions/mine", headers=headers) as response:
                    shown = await response.json()
                async with http.get(f"{g.url}/sessions", headers=headers) as response:
                    assert await response.json() == {"sessions": ["mine"]}
            assert (shown["num_calls"], shown["info"], shown["breaks"]) == (1, {"a": 1}, [])
            assert list((tmp_path / "run" / "gateway").iterdir())
            outcome = {"reward": 0.5, "metrics": {"steps": 1.0}}
            status, ended = await post(f"{g.url}/sessions/mine/close", outcome, g.admin_key)
            assert (status, ended["is_closed"]) == (200, True)
            assert (await post(f"{g.url}/sessions/mine/close", {}, g.admin_key))[0] == 404
            assert not list((tmp_path / "run" / "gateway").iterdir())
            # A rollout that a run has is kept, so a second session of the name would be lost.
            status, refused = await post(f"{g.url}/sessions", {"id": "mine"}, g.admin_key)
            assert (status, g.sessions) == (400, {})
            assert "session 'mine'" in refused["error"]["message"]
        (result,) = decode_results(run.rollouts())
    (state,) = result.states
    assert (state["reward"], state["metrics"]) == (0.5, {"steps": 1.0})
    assert state["completion"] == [{"role": "assistant", "content": "HELLO THERE"}]
    assert state["trajectory"][0]["tokens"]["completion_ids"] == [*b"HELLO THERE", 258]


@pytest.mark.parametrize("then", ["close", "delete"])
async def test_a_session_that_could_not_be_stored_can_be_closed_again(tmp_path, monkeypatch, then):
    """Else the second request got a 404, as after it was stored, and its name could be taken."""
    files = tmp_path / "run" / "gateway"
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            s = g.session("mine")
            async with openai_agent(s) as agent:
                await agent.chat.completions.create(**ASKED)
            close = f"{g.url}/sessions/mine/close", {"reward": 0.5}, g.admin_key
            with monkeypatch.context() as full:
                full.setattr(run, "add_rollouts", Mock(side_effect=StoreError("full")))
                assert (await post(*close))[0] == 507
            assert (await post(f"{g.url}/sessions", {"id": "mine"}, g.admin_key))[0] == 400
            assert [path.name for path in files.iterdir()] == ["mine.calls"]
            if then == "close":
                assert (await post(*close))[0] == 200
            else:
                headers = {"Authorization": f"Bearer {g.admin_key}"}
                async with aiohttp.ClientSession() as http:
                    await http.delete(f"{g.url}/sessions/mine", headers=headers)
            assert (await post(*close))[0] == 404
            assert list(files.iterdir()) == []
        found = [(row.reward, row.num_calls) for row in run.rollouts()]
        assert found == ([(0.5, 1)] if then == "close" else [])


@pytest.mark.parametrize("second", ["close", "delete"])
async def test_a_second_request_waits_for_the_first_that_closes_a_session(tmp_path, second):
    """Else it stored a state that was not finished, and deleted the journal of calls in flight."""
    client = Lingering(ScriptedClient(echo))
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        async with rt.gateway(client, run=run) as g:
            s = g.session("mine")
            async with openai_agent(s) as agent:
                asking = asyncio.ensure_future(agent.chat.completions.create(**ASKED))
                await client.has_begun.wait()
                closing = asyncio.ensure_future(
                    post(f"{g.url}/sessions/mine/close", {"reward": 0.5}, g.admin_key)
                )
                await until(lambda: s.is_closed)
                again = asyncio.ensure_future(end(g, "mine", second, {"reward": 0.25}))
                await asyncio.sleep(0.1)
                assert not again.done()
                assert run.num_rollouts() == 0
                client.may_end.set()
                # As if it had come after the first.
                assert ((await closing)[0], await again) == (200, 404)
                with pytest.raises(openai.APIError):
                    await asking
        assert [(row.reward, row.num_calls) for row in run.rollouts()] == [(0.5, 0)]


@pytest.mark.parametrize("second", ["close", "delete", "open"])
async def test_a_session_keeps_its_id_until_it_is_stored(tmp_path, monkeypatch, second):
    """Else another session took its id, and lost its own journal when the first was stored."""
    is_storing, may_store = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        add = run.add_rollouts

        def add_slowly(results):
            loop.call_soon_threadsafe(is_storing.set)
            may_store.wait(20)
            add(results)

        monkeypatch.setattr(run, "add_rollouts", add_slowly)
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            s = g.session("mine")
            closing = asyncio.ensure_future(end(g, "mine", "close", {"reward": 0.5}))
            try:
                await is_storing.wait()
                if second == "open":
                    with pytest.raises(ConfigError, match="it is taken"):
                        g.session("mine")
                else:
                    again = asyncio.ensure_future(end(g, "mine", second, {}))
                    await asyncio.sleep(0.1)
                    assert not again.done()
                assert g.sessions == {"mine": s}
            finally:
                may_store.set()
            assert await closing == 200
            if second != "open":
                assert await again == 404
            assert g.sessions == {}
        assert [row.reward for row in run.rollouts()] == [0.5]


async def test_a_session_that_is_closed_twice_leaves_the_next_of_its_name_alone(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        async with g.session("mine"):
            assert await end(g, "mine", "delete", {}) == 200
            g.session("mine")
        assert [path.name for path in tmp_path.iterdir()] == ["mine.calls"]


async def end(g, session_id, how, body):
    """Return the status of a request that closes or deletes a session."""
    url = f"{g.url}/sessions/{session_id}"
    if how == "close":
        return (await post(f"{url}/close", body, g.admin_key))[0]
    headers = {"Authorization": f"Bearer {g.admin_key}"}
    async with aiohttp.ClientSession() as http, http.delete(url, headers=headers) as response:
        return response.status


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"id": "../up"}, "../up"),
        ({"max_call": 3}, "max_call"),
        ({"max_calls": 0}, "max_calls"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"temprature": 1}}, "Did you mean 'temperature'?"),
    ],
)
async def test_settings_of_a_session_are_checked(body, named):
    async with rt.gateway(ScriptedClient(echo)) as g:
        status, answer = await post(f"{g.url}/sessions", body, g.admin_key)
        assert status == 400
        assert named in answer["error"]["message"]
        assert g.sessions == {}


async def test_sessions_are_the_admins_to_open():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        for key in ("wrong", None, s.api_key):
            assert (await post(f"{g.url}/sessions", {}, key))[0] == 401
            assert (await post(f"{g.url}/sessions/{s.id}/close", {}, key))[0] == 401
        assert not s.is_closed


async def test_open_sessions_are_bounded():
    async with rt.gateway(ScriptedClient(echo), max_sessions=1) as g:
        async with g.session():
            assert (await post(f"{g.url}/sessions", {}, g.admin_key))[0] == 400
        async with g.session():
            pass


async def test_a_limit_is_an_answer_that_is_not_repeated():
    limits = SessionLimits(max_calls=1)
    async with rt.gateway(ScriptedClient(echo), limits=limits) as g, g.session() as s:
        async with openai_agent(s, max_retries=5) as agent:
            await agent.chat.completions.create(**ASKED)
            with pytest.raises(openai.PermissionDeniedError, match="max_steps"):
                await agent.chat.completions.create(model="m", messages=[*ASKED["messages"]] * 2)
        assert s.state["truncation_reason"] == "max_steps"


async def test_sub_agents_have_a_url_or_a_header():
    async with rt.gateway(ScriptedClient(echo)) as g, g.session() as s:
        url = f"{s.root_url}/agents/scout/v1/chat/completions"
        await post(url, ASKED, s.api_key)
        header = {"X-Rolltree-Agent": "writer"}
        await post(f"{s.base_url}/chat/completions", ASKED, s.api_key, **header)
        agents = [step["extras"]["agent"] for step in s.trajectory]
        assert agents == ["scout", "writer"]
