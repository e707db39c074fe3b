"""`OpenAIClient` and a gateway that stream from `rolltree serve` with a real tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
import uvicorn
from serve_kit import ADD, TOKEN, Served

import rolltree as rt
from conftest import ASKED
from rolltree.gateway.serve import ServedModel, create_app
from rolltree.gateway.server import _QuietServer
from rolltree.inference import ChatRenderer, EndpointPool, OpenAIClient
from rolltree.inference.call import ModelCall
from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.values.types import ModelResponse, SamplingParams
from rolltree.web.start import listen

LONG = [{"role": "user", "content": "count"}]
BRIEF: dict[str, Any] = {"model": "taught", "max_tokens": 5, "messages": LONG}


@pytest.fixture(scope="module")
def renderer(reference: Any) -> ChatRenderer:
    return ChatRenderer(reference[1])


def client_of(served: Served, way: str, renderer: ChatRenderer) -> Any:
    options: dict[str, Any] = {"api_key": TOKEN, "logprobs_mode": "processed"}
    if way in ("generate", "completions"):
        options |= {"renderer": renderer, "token_endpoint": way}
    if way == "pool":
        return EndpointPool.of([served.url], "taught", **options)
    return OpenAIClient(served.url, "taught", **options)


def arrays(response: ModelResponse) -> list[Any]:
    assert response.prompt_ids is not None
    assert response.completion_ids is not None
    assert response.versions is not None
    found = (response.prompt_ids, response.completion_ids, response.versions)
    return [array.tolist() for array in found]


WAYS = pytest.mark.parametrize("way", ["chat", "generate", "completions", "pool"])


@WAYS
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, max_tokens=60),
        SamplingParams(temperature=1.5, max_tokens=40, seed=4),
        SamplingParams(temperature=0.0, max_tokens=60, stop=("ee",)),
    ],
    ids=["greedy", "sampled", "stop string"],
)
async def test_streamed_ids_are_those_of_an_answer_that_is_not(
    served: Served, renderer: ChatRenderer, way: str, sampling: SamplingParams
) -> None:
    client, heard = client_of(served, way, renderer), list[dict[str, Any]]()
    whole = await client.session().chat(LONG, sampling=sampling)
    call = ModelCall(LONG, sampling, on_delta=heard.append)
    streamed = await call.to(client.session())
    await client.aclose()
    assert arrays(streamed) == arrays(whole)
    assert streamed.logprobs is not None
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert len(heard) > 2
    assert streamed.text.startswith("".join(delta.get("content", "") for delta in heard))


@WAYS
async def test_a_streamed_tool_call_is_the_whole_one(
    served: Served, renderer: ChatRenderer, way: str
) -> None:
    client, heard = client_of(served, way, renderer), list[dict[str, Any]]()
    sampling = SamplingParams(temperature=0.0, max_tokens=90)
    whole = await client.session().chat(ASKED, tools=[ADD], sampling=sampling)
    call = ModelCall(ASKED, sampling, tools=[ADD], on_delta=heard.append)
    streamed = await call.to(client.session())
    await client.aclose()
    assert arrays(streamed) == arrays(whole)
    assert streamed.message == whole.message
    assert streamed.message["tool_calls"][0]["function"]["name"] == "add"


@WAYS
async def test_a_gateway_streams_and_every_turn_continues(
    served: Served, renderer: ChatRenderer, way: str
) -> None:
    client = client_of(served, way, renderer)
    async with rt.gateway(client) as g, g.session() as s:
        agent = openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=0)
        messages: list[Any] = []
        for question in ("7 + 5 =", "capital?", "count"):
            messages.append({"role": "user", "content": question})
            events = await agent.chat.completions.create(
                model="any", messages=messages, stream=True, temperature=0, max_tokens=40
            )
            parts = [e.choices[0].delta.content or "" async for e in events]
            assert len([part for part in parts if part]) > 1
            messages.append({"role": "assistant", "content": "".join(parts)})
        await agent.close()
        tree = s.trajectory.tree
        if way != "chat":
            assert s.breaks == ()
            assert tree.num_tokens == tree.path_len(tree.num_calls - 1)
        assert tree.num_calls == 3
    await client.aclose()


@pytest.mark.parametrize("way", ["generate", "completions"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_gateway_passes_on_logprobs_and_the_size_of_the_prompt(
    served: Served, renderer: ChatRenderer, way: str, n: int
) -> None:
    client = client_of(served, way, renderer)
    async with rt.gateway(client) as g, g.session(seed=1) as s:
        agent = openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=0)
        events = await agent.chat.completions.create(
            model="any", messages=LONG, stream=True, max_tokens=20, logprobs=True, n=n
        )
        values: list[list[float]] = [[] for _ in range(n)]
        async for event in events:
            (choice,) = event.choices
            new = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
            assert len(new) == 1 or choice.finish_reason, "a chunk has the tokens of others"
            values[choice.index] += new
        recorded = [step["tokens"]["completion_logprobs"] for step in s.trajectory]
        for streamed, kept in zip(sorted(values), sorted(map(list, recorded)), strict=True):
            assert streamed == pytest.approx(kept)
        await agent.close()
        other = anthropic.AsyncAnthropic(base_url=s.root_url, api_key=s.api_key, max_retries=0)
        said = [e async for e in await other.messages.create(**BRIEF, stream=True)]
        assert said[0].type == "message_start"
        assert said[0].message.usage.input_tokens == len(s.trajectory[n]["tokens"]["prompt_ids"])
        await other.close()
    await client.aclose()


async def test_a_message_of_the_server_starts_with_the_size_of_its_prompt(served: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=served.root, api_key=TOKEN) as agent:
        events = [e async for e in await agent.messages.create(**BRIEF, stream=True)]
        counted = await agent.messages.count_tokens(model="taught", messages=BRIEF["messages"])
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens == counted.input_tokens > 0


@asynccontextmanager
async def in_this_process() -> AsyncIterator[tuple[Any, str]]:
    """Serve the tiny model from here; yield its engine's client and the URL."""
    local = local_client(*load_model("tiny"), max_context=4096)
    app = create_app(ServedModel(local.engine, local.renderer, "tiny"), TOKEN)
    listener, ready = listen("127.0.0.1", 0), asyncio.Event()
    server = _QuietServer(uvicorn.Config(app, log_level="warning", ws="none"), ready.set)
    serving = asyncio.ensure_future(server.serve([listener]))
    await ready.wait()
    try:
        yield local, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await serving
        await local.aclose()


@pytest.mark.parametrize("way", ["chat", "generate", "completions"])
async def test_hanging_up_takes_the_request_out_of_the_servers_engine(way: str) -> None:
    async with in_this_process() as (local, url):
        options: dict[str, Any] = {"api_key": TOKEN}
        if way != "chat":
            options |= {"renderer": local.renderer, "token_endpoint": way}
        client = OpenAIClient(url, "tiny", **options)
        async with rt.gateway(client) as g, g.session() as s:
            agent = openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=0)
            asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            stream = await agent.chat.completions.create(**asked, stream=True, temperature=0)
            await anext(aiter(stream))
            async with local.engine.paused(), asyncio.timeout(60):
                # Nothing is sampled meanwhile: the request can only end by being taken out.
                assert local.engine._in_flight
                await stream.close()
                while local.engine._in_flight:  # noqa: ASYNC110  (a connection's end)
                    await asyncio.sleep(0.005)
            assert (s.num_cancelled, len(s.trajectory)) == (1, 0)
            answer = await agent.chat.completions.create(**asked, max_tokens=3)
            assert answer.usage.completion_tokens == 3
            await agent.close()
        await client.aclose()
