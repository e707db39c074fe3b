"""What a scripted server says to requests that are wrong, odd, or go wrong on its side."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.inference import OpenAIClient
from rolltree.inference.retry import RetryPolicy
from rolltree.testing import HttpFault, LoopbackServer, Reply, Request, ScriptedServer
from rolltree.values.errors import BadResponse, ConnectionFailed, PromptTooLong, ServerError

ASK = [{"role": "user", "content": "a"}]


def chat(server: ScriptedServer, **body: Any) -> httpx.Response:
    return httpx.post(server.base_url + "/chat/completions", json={"model": "scripted", **body})


def complete(server: ScriptedServer, **body: Any) -> httpx.Response:
    return httpx.post(server.base_url + "/completions", json={"model": "scripted", **body})


@asynccontextmanager
async def client_of(server: ScriptedServer, max_retries: int = 0) -> AsyncIterator[OpenAIClient]:
    retry = RetryPolicy(max_retries=max_retries, first_wait_s=0.001)
    client = OpenAIClient(server.base_url, "scripted", retry=retry)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture(scope="module")
def server() -> Any:
    with ScriptedServer(lambda _: "ok") as made:
        yield made


@pytest.mark.parametrize(
    "body", [{}, {"messages": None}, {"messages": "a"}, {"messages": [1]}, {"messages": ["a"]}]
)
def test_messages_that_are_none_get_400(server: ScriptedServer, body: Any) -> None:
    reply = chat(server, **body)
    assert reply.status_code == 400
    assert reply.json()["error"] == {
        "message": "messages must be a list of objects",
        "type": "error",
        "code": 400,
    }


@pytest.mark.parametrize("prompt", [None, 7, ["a", "b"], [[1]], [1, "a"], [True], [1.0]])
def test_prompts_that_are_none_get_400(server: ScriptedServer, prompt: Any) -> None:
    reply = complete(server, prompt=prompt)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
    assert "one string or one list of token ids" in reply.json()["error"]["message"]


@pytest.mark.parametrize("token", [-1, 259, 2**31, 2**70])
def test_ids_out_of_vocabulary_get_400(server: ScriptedServer, token: int) -> None:
    reply = complete(server, prompt=[1, token])
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"token id {token} is out of vocabulary"


def test_the_last_id_of_the_vocabulary_is_in_it(server: ScriptedServer) -> None:
    assert complete(server, prompt=[0, 258]).status_code == 200


@pytest.mark.parametrize("size", [0, 1, 300])
def test_usage_counts_every_token(server: ScriptedServer, size: int) -> None:
    usage = complete(server, prompt="x" * size).json()["usage"]
    assert usage == {"prompt_tokens": size, "completion_tokens": 3, "total_tokens": size + 3}


def test_other_methods_and_bodies_are_not_served(server: ScriptedServer) -> None:
    url = server.base_url + "/chat/completions"
    assert httpx.get(url).status_code == 404
    assert httpx.put(url, json={}).status_code == 404
    assert httpx.post(url, json=[1]).status_code == 404
    assert httpx.post(url).status_code == 404
    assert httpx.post(url + "?api-version=1", json={"model": "x"}).status_code == 404


def test_a_key_guards_everything_that_is_served() -> None:
    with ScriptedServer(["1"], api_key="k") as server:
        for path in ("/models", "/chat/completions", "/nothing"):
            assert httpx.get(server.base_url + path).status_code == 401
        wrong = {"Authorization": "Bearer kk"}
        assert httpx.get(server.base_url + "/models", headers=wrong).status_code == 401
        assert server.num_answers == 0
        assert server.num_requests == 4  # what was refused came in all the same


def test_a_script_that_fails_is_500_and_the_server_lives() -> None:
    def script(messages: Any) -> str:
        return {"a": "fine"}[messages[0]["content"]]

    with ScriptedServer(script) as server:
        reply = chat(server, messages=[{"role": "user", "content": "b"}])
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the script failed: KeyError: 'b'"
        assert chat(server, messages=ASK).json()["choices"][0]["message"]["content"] == "fine"
        assert server.num_answers == 1


def test_a_script_at_its_end_is_400() -> None:
    with ScriptedServer(["1"]) as server:
        assert chat(server, messages=ASK).status_code == 200
        for _ in range(2):
            reply = chat(server, messages=ASK)
            assert reply.status_code == 400
            assert "1 answers and was asked for one more" in reply.json()["error"]["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
fields = st.sampled_from(
    ["messages", "prompt", "tools", "max_tokens", "temperature", "stop", "logprobs", "n", "seed"]
)


@settings(max_examples=60, deadline=None)
@given(
    body=st.dictionaries(fields, json_values, max_size=4), path=st.sampled_from([chat, complete])
)
def test_no_json_makes_the_server_hang_up(server: ScriptedServer, body: Any, path: Any) -> None:
    reply = path(server, **body)
    assert reply.status_code in (200, 400, 500)
    assert ("error" in reply.json()) == (reply.status_code != 200)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_make_the_server_hang_up(server: ScriptedServer, body: bytes) -> None:
    reply = httpx.post(server.base_url + "/chat/completions", content=body)
    assert reply.status_code in (400, 404)


async def test_context_length_counts_prompt_and_completion() -> None:
    with ScriptedServer(lambda _: "12345678", context_length=30) as server:
        url = server.base_url + "/completions"
        async with httpx.AsyncClient() as client:
            for size, limit, status in (
                (27, 3, 200),
                (28, 3, 400),
                (29, None, 200),
                (30, None, 400),
            ):
                body = {"model": "scripted", "prompt": "x" * size}
                body |= {} if limit is None else {"max_tokens": limit}
                reply = await client.post(url, json=body)
                assert reply.status_code == status, (size, limit)
        async with client_of(server) as model:
            with pytest.raises(PromptTooLong):
                await model.chat([{"role": "user", "content": "x" * 50}])


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (HttpFault(status=403, message="no"), ServerError),
        (HttpFault(status=503), ServerError),
        (HttpFault(reset=True), ConnectionFailed),
        (HttpFault(body="broken"), BadResponse),
        (HttpFault(body="truncated"), ConnectionFailed),
    ],
)
async def test_each_fault_is_an_error_of_its_own_kind(
    fault: HttpFault, error: type[Exception]
) -> None:
    with ScriptedServer(lambda _: "1", faults=[fault]) as server:
        async with client_of(server) as client:
            with pytest.raises(error):
                await client.chat(ASK)
            assert (await client.chat(ASK)).text == "1"
        assert server.faults.num_faults == 1


async def test_faults_by_request_number_and_a_client_that_tries_again() -> None:
    with ScriptedServer(
        lambda _: "1", faults=lambda number: HttpFault(status=500) if number % 2 == 0 else None
    ) as server:
        async with client_of(server, max_retries=1) as client:
            for _ in range(2):
                assert (await client.chat(ASK)).info["num_retries"] == 1
        assert (server.num_requests, server.num_answers) == (4, 2)


class TestConnections:
    def test_a_connection_survives_errors(self, server: ScriptedServer) -> None:
        host = server.base_url.removeprefix("http://").removesuffix("/v1")
        with closing(http.client.HTTPConnection(host)) as connection:
            connection.connect()
            local = connection.sock.getsockname()
            for body, status in (("{", 400), ('{"model": "x"}', 404), ("{}", 404)):
                connection.request("POST", "/v1/chat/completions", body=body)
                reply = connection.getresponse()
                assert (reply.status, json.loads(reply.read())["error"]["code"]) == (status, status)
                assert connection.sock.getsockname() == local

    def test_an_answer_to_head_has_no_body_that_would_be_read_as_the_next(self) -> None:
        async def answer(request: Request) -> Reply:
            return Reply(200, request.path.encode() * 3)

        with LoopbackServer(answer) as server:
            host = server.url.removeprefix("http://")
            with closing(http.client.HTTPConnection(host)) as connection:
                connection.request("HEAD", "/a")
                head = connection.getresponse()
                assert (head.read(), head.headers["Content-Length"]) == (b"", "6")
                local = connection.sock.getsockname()
                connection.request("GET", "/b")
                assert connection.getresponse().read() == b"/b/b/b"
                assert connection.sock.getsockname() == local

    def test_close_means_close(self) -> None:
        async def answer(request: Request) -> Reply:
            return Reply(200, b"x")

        with LoopbackServer(answer) as server:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=5) as client:
                client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                said = b""
                while part := client.recv(1000):
                    said += part
            assert said.endswith(b"\r\n\r\nx")  # and then the end of the stream, not a time-out
