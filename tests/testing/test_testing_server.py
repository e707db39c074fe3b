from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from rolltree.testing import HttpFault, LoopbackServer, Reply, Request, ScriptedServer
from rolltree.values.errors import ConfigError

openai = pytest.importorskip("openai")

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}


def post(server: ScriptedServer, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.base_url + path, json=body, **options)


def test_chat_and_text_without_token_fields() -> None:
    with ScriptedServer(["12", "13"]) as server:
        chat = post(server, "/chat/completions", ASK).json()
        text = post(server, "/completions", {"model": "scripted", "prompt": "7+5="}).json()
    assert chat["choices"] == [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "12"},
        }
    ]
    assert chat["object"] == "chat.completion"
    assert chat["usage"]["completion_tokens"] == 3
    assert text["choices"] == [{"index": 0, "finish_reason": "stop", "text": "13"}]
    assert text["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def test_vllms_fields_are_where_vllm_puts_them() -> None:
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    with ScriptedServer(lambda _: "1") as server:
        chat = post(server, "/chat/completions", {**ASK, **asked, "logprobs": True}).json()
        prompt = {"model": "scripted", "prompt": [104, 105], "logprobs": 1}
        text = post(server, "/completions", {**prompt, **asked}).json()
    assert chat["prompt_token_ids"][:2] == [257, 117]
    assert chat["choices"][0]["token_ids"] == [49, 258]
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["token_id:49", "token_id:258"]
    assert [entry["logprob"] for entry in entries] == [-0.125, -0.1875]
    assert text["choices"][0]["prompt_token_ids"] == [104, 105]
    assert text["choices"][0]["token_ids"] == [49, 258]
    assert text["choices"][0]["logprobs"]["token_logprobs"] == [-0.125, -0.1875]


def test_models_health_and_unknown_paths() -> None:
    with ScriptedServer(["1"], model="small") as server:
        models = httpx.get(server.base_url + "/models").json()
        health = httpx.get(server.base_url.removesuffix("/v1") + "/health")
        missing = httpx.get(server.base_url + "/nothing")
        paths = [request.path for request in server.requests]
    assert [card["id"] for card in models["data"]] == ["small"]
    assert health.status_code == 200
    assert missing.status_code == 404
    assert paths == ["/v1/models", "/health", "/v1/nothing"]


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        ({**ASK, "model": "other"}, 404, "does not exist"),
        ({**ASK, "stream": True}, 400, "does not stream"),
        ({**ASK, "n": 2}, 400, "n is not 1"),
        ({**ASK, "temperature": -1}, 400, "temperature"),
        ({**ASK, "max_tokens": 100}, 400, "maximum context length is 50"),
    ],
)
def test_requests_that_vllm_would_refuse(body: Any, status: int, what: str) -> None:
    with ScriptedServer(["1"], context_length=50) as server:
        reply = post(server, "/chat/completions", body)
    assert reply.status_code == status
    assert what in reply.json()["error"]["message"]


def test_a_body_that_is_no_json() -> None:
    with ScriptedServer(["1"]) as server:
        reply = httpx.post(server.base_url + "/chat/completions", content=b"{")
    assert reply.status_code == 400


def test_a_key_is_asked_for() -> None:
    with ScriptedServer(["1"], api_key="k") as server:
        assert post(server, "/chat/completions", ASK).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert post(server, "/chat/completions", ASK, headers=headers).status_code == 200


def test_faults_in_a_row() -> None:
    faults = [
        HttpFault(status=429, retry_after_s=7, message="slow down"),
        HttpFault(reset=True),
        HttpFault(body="broken"),
        HttpFault(body="truncated"),
        HttpFault(delay_s=0.3),
    ]
    with ScriptedServer(lambda _: "1", faults=faults) as server:
        reply = post(server, "/chat/completions", ASK)
        assert (reply.status_code, reply.headers["Retry-After"]) == (429, "7")
        assert reply.json()["error"]["message"] == "slow down"
        with pytest.raises(httpx.TransportError):
            post(server, "/chat/completions", ASK)
        with pytest.raises(json.JSONDecodeError):
            post(server, "/chat/completions", ASK).json()
        with pytest.raises(httpx.RemoteProtocolError):
            post(server, "/chat/completions", ASK)
        with pytest.raises(httpx.ReadTimeout):
            post(server, "/chat/completions", ASK, timeout=0.05)
        assert post(server, "/chat/completions", ASK).status_code == 200
        assert (server.num_requests, server.faults.num_faults) == (6, 5)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="'vllm', 'ignore' or 'reject'"):
        ScriptedServer(["1"], token_ids="maybe")  # type: ignore[arg-type]


async def test_the_official_client_unmodified() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with ScriptedServer(["12", text, " 13"]) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
            chat = await client.chat.completions.create(
                **ASK,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            call = await client.chat.completions.create(**ASK, tools=tools)
            completion = await client.completions.create(model="scripted", prompt="7+5=")
            models = await client.models.list()
    assert chat.choices[0].message.content == "12"
    assert chat.choices[0].token_ids == [49, 50, 258]
    assert len(chat.choices[0].logprobs.content) == 3
    assert call.choices[0].finish_reason == "tool_calls"
    assert call.choices[0].message.tool_calls[0].function.name == "add"
    assert completion.choices[0].text == " 13"
    assert [model.id for model in models.data] == ["scripted"]


async def test_many_connections_at_once() -> None:
    with ScriptedServer(lambda messages: messages[0]["content"], delay_s=0.05) as server:
        async with httpx.AsyncClient(base_url=server.base_url) as client:
            bodies = [
                {"model": "scripted", "messages": [{"role": "user", "content": str(number)}]}
                for number in range(40)
            ]
            replies = await asyncio.gather(
                *(client.post("/chat/completions", json=body) for body in bodies)
            )
        assert server.max_concurrent > 10
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    assert texts == [str(number) for number in range(40)]


def test_nothing_is_left_running() -> None:
    before = threading.active_count()
    for _ in range(3):
        with ScriptedServer(["1"]) as server:
            url = server.base_url
            stream = httpx.Client()
            stream.get(url + "/models")  # a kept-alive connection is cut, too
        stream.close()
    assert threading.active_count() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/models")


def test_a_taken_port_is_an_error_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError), ScriptedServer(["1"], port=taken.getsockname()[1]):
            pass
    assert threading.active_count() == before


def test_the_loopback_server_with_a_handler_of_ones_own() -> None:
    async def echo(request: Request) -> Reply:
        return Reply(200, request.body[::-1], {"X-Path": request.path})

    with LoopbackServer(echo) as server:
        reply = httpx.post(server.url + "/x?y=1", content=b"abc")
    assert (reply.content, reply.headers["X-Path"]) == (b"cba", "/x?y=1")
