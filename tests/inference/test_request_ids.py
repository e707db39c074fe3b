"""Answers that are another request's: by their name, and on connections that said too much."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rolltree.inference import OpenAIClient, RetryPolicy
from rolltree.inference.http import HttpClient
from rolltree.inference.request_ids import RequestIds
from rolltree.testing import LoopbackServer, Reply, Request, ScriptedServer
from rolltree.values.errors import BadResponse

ONCE = RetryPolicy(max_retries=0)


def test_an_answer_may_name_its_own_request_or_none() -> None:
    ids = RequestIds()
    first, second = ids.new(), ids.new()
    assert first != second
    for answer in (f"chatcmpl-{first}", "chatcmpl-1", "", f"cmpl-{first}-0"):
        ids.check(first, answer)
        ids.check(first, f'{{"id": "{answer}"}}'.encode())
    for answer in (f"chatcmpl-{second}", f"chatcmpl-{first[:-1]}"):
        with pytest.raises(BadResponse, match=f"sent request {first}"):
            ids.check(first, answer)
        with pytest.raises(BadResponse, match="not its answer"):
            ids.check(first, answer.encode())
    RequestIds().check(first, f"chatcmpl-{second}")  # another client's


async def test_every_request_has_a_name_of_its_own() -> None:
    with ScriptedServer(["1", "2"]) as server:
        client = OpenAIClient(server.base_url, "scripted")
        answers = [await client.chat([{"role": "user", "content": "a"}]) for _ in range(2)]
        await client.aclose()
    names = [request.headers["x-request-id"] for request in server.requests]
    assert [answer.id for answer in answers] == [f"chatcmpl-{name}" for name in names]
    assert len({*names}) == 2


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
async def test_a_connection_that_said_too_much_is_not_used_again(gap_s: float) -> None:
    """The answers name no request, as most servers' do not."""
    answered, said_twice = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    async def handle(request: Request) -> Reply:
        answered.append(request)
        loop.call_soon_threadsafe(loop.call_later, gap_s + 0.1, said_twice.set)
        return Reply(200, json.dumps(len(answered)).encode(), num_copies=2, gap_s=gap_s)

    with LoopbackServer(handle) as loopback:
        server = HttpClient(loopback.url, retry=ONCE)
        got: list[Any] = []
        for _ in range(3):
            said_twice.clear()
            got.append((await server.post("/x", {}, json.loads)).value)
            async with asyncio.timeout(30):  # a stale answer comes before the request is sent
                await said_twice.wait()
        await server.aclose()
    assert got == [1, 2, 3]
