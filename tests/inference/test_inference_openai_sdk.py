"""Wrapped clients: the official openai package over real HTTP, and mocks as tests write them."""

from __future__ import annotations

import asyncio
import gzip
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from inference_templates import TOOLS, user

from rolltree.inference import OpenAISDKClient, as_client
from rolltree.testing import HttpFault, ScriptedServer
from rolltree.values.errors import (
    AnswerTooLarge,
    BadResponse,
    CallTimeout,
    ConfigError,
    ConnectionFailed,
    PromptTooLong,
    ServerError,
)
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams

openai = pytest.importorskip("openai")
# Newer releases of openai use httpx2.
httpx = pytest.importorskip(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])


def mock_openai(content: str = "12", **choice: Any) -> Any:
    """Return an AsyncOpenAI as people mock it."""
    response = MagicMock()
    response.choices = [MagicMock()]
    response.choices[0].message.content = content
    response.choices[0].message.tool_calls = None
    response.choices[0].finish_reason = "stop"
    for name, value in choice.items():
        setattr(response.choices[0], name, value)
    client = MagicMock()
    client.chat.completions.create = AsyncMock(return_value=response)
    return client


async def test_a_mock_is_asked_as_the_openai_client_would_be() -> None:
    mock = mock_openai()
    client = as_client(mock, "small")
    sampling = SamplingParams(temperature=0.5, max_tokens=4, top_k=3, extra={"user": "me"})
    got = await client.chat([user("7 + 5 =")], tools=TOOLS, sampling=sampling)
    assert got.message == {"role": "assistant", "content": "12"}
    assert got.finish_reason == FinishReason.STOP
    assert got.prompt_ids is None
    assert got.raw is mock.chat.completions.create.return_value
    sent = mock.chat.completions.create.call_args.kwargs
    assert sent["model"] == "small"
    assert sent["messages"] == [user("7 + 5 =")]
    assert sent["tools"] == TOOLS
    assert (sent["temperature"], sent["max_tokens"], sent["user"]) == (0.5, 4, "me")
    assert "seed" not in sent
    assert "stop" not in sent
    assert sent["extra_body"]["top_k"] == 3
    assert sent["extra_body"]["return_token_ids"] is True
    assert mock.chat.completions.create.await_count == 1
    # It gave no ids; the next answer may have them.
    await client.chat([user("a")])
    assert mock.chat.completions.create.call_args.kwargs["logprobs"] is True


async def test_a_mock_with_vllms_fields_gives_tokens() -> None:
    content = [SimpleNamespace(token="1", logprob=-0.1), SimpleNamespace(token="2", logprob=-0.2)]
    mock = mock_openai(token_ids=[49, 50], logprobs=SimpleNamespace(content=content))
    mock.chat.completions.create.return_value.prompt_token_ids = [7, 8]
    got = await as_client(mock, "m").chat([user("a")])
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == [49, 50]
    assert got.logprobs is not None
    np.testing.assert_allclose(got.logprobs, [-0.1, -0.2], rtol=1e-6)


async def test_a_function_that_is_not_async_will_do() -> None:
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "length"}]}
    completions = SimpleNamespace(create=lambda **_: answer)
    client = as_client(SimpleNamespace(chat=SimpleNamespace(completions=completions)), "m")
    got = await client.chat([user("a")])
    assert (got.text, got.finish_reason) == ("hi", FinishReason.LENGTH)
    await client.aclose()


async def test_a_model_must_be_named_somewhere() -> None:
    mock = mock_openai()
    with pytest.raises(ConfigError, match="names a model"):
        await as_client(mock).chat([user("a")])
    await as_client(mock).chat([user("a")], model="named")
    assert mock.chat.completions.create.call_args.kwargs["model"] == "named"


async def test_errors_that_are_not_the_servers_are_not_hidden() -> None:
    mock = mock_openai()
    mock.chat.completions.create.side_effect = KeyError("bug in the mock")
    with pytest.raises(KeyError):
        await as_client(mock, "m").chat([user("a")])


def official(server: ScriptedServer, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="key", **options)


async def test_the_official_client_over_http() -> None:
    with ScriptedServer(["12", "13"]) as server:
        client = as_client(official(server), "scripted")
        session = client.session()
        first = await session.chat([user("7 + 5 =")])
        second = await session.chat([user("7 + 5 ="), first.message, user("more")])
        await client.aclose()
    assert (first.text, second.text) == ("12", "13")
    assert first.completion_ids is not None
    assert first.completion_ids.tolist() == [49, 50, 258]
    assert first.logprobs is not None
    assert second.extends == first.call_id
    assert first.raw.choices[0].message.content == "12"
    assert first.raw.usage.completion_tokens == 3


async def test_a_kept_response_does_not_restate_the_tokens() -> None:
    """What the record has as arrays would be O(turns) objects in every turn."""
    with ScriptedServer(["12"] * 4) as server:
        client = as_client(official(server), "scripted")
        plain = await client.chat([user("q")])
        other = await client.chat([user("q")], sampling=SamplingParams(temperature=0.5))
        asked = SamplingParams(extra={"top_logprobs": 1})
        wider = await client.chat([user("q")], sampling=asked)
        text = await client.chat("q", message_type="completion")
        await client.aclose()
    for got in (plain, other, wider, text):
        assert got.prompt_ids is not None
        assert getattr(got.raw, "prompt_token_ids", None) is None
        (choice,) = got.raw.choices
        assert getattr(choice, "token_ids", None) is None
        assert getattr(choice, "prompt_token_ids", None) is None
    assert plain.raw.choices[0].logprobs is None
    assert text.raw.choices[0].logprobs is None
    assert other.logprobs is None  # the server's are raw: the record has no use for them
    assert len(other.raw.choices[0].logprobs.content) == 3
    assert len(wider.raw.choices[0].logprobs.content) == 3


async def test_the_official_client_with_text_and_ids() -> None:
    with ScriptedServer([" 12", " 13"]) as server:
        client = as_client(official(server), "scripted")
        got = await client.chat("7 + 5 =", message_type="completion")
        prompt = np.array(list(b"6 + 7 ="), np.int32)
        by_ids = await client.generate(GenerateRequest(prompt, SamplingParams(max_tokens=2)))
        await client.aclose()
    assert got.text == " 12"
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == list(b"7 + 5 =")
    assert by_ids.text == " 1"
    assert by_ids.finish_reason == FinishReason.LENGTH
    assert by_ids.prompt_ids is not None
    assert by_ids.prompt_ids.tolist() == prompt.tolist()


async def test_tool_calls_through_the_official_client() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    with ScriptedServer([text, "5"]) as server:
        client = as_client(official(server), "scripted")
        session = client.session()
        first = await session.chat([user("2 + 3?")], tools=TOOLS)
        call = first.message["tool_calls"][0]
        result = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
        second = await session.chat([user("2 + 3?"), first.message, result], tools=TOOLS)
        await client.aclose()
    assert first.finish_reason == FinishReason.TOOL_CALLS
    assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert second.text == "5"
    # The server re-rendered the call with other spaces: an honest "no" instead of a wrong claim.
    same = second.extends == first.call_id
    assert same or "rerendered" in second.info


async def test_the_official_clients_calls_end_at_their_deadline() -> None:
    with ScriptedServer(["12"], faults=lambda _: HttpFault(delay_s=60.0)) as server:
        client = OpenAISDKClient(official(server, max_retries=9), "scripted", deadline_s=0.3)
        with pytest.raises(CallTimeout, match=r"deadline_s = 0\.3 s"):
            await asyncio.wait_for(client.chat([user("a")]), 30)
        assert as_client(official(server)).deadline_s == 1200
        assert as_client(official(server, timeout=5)).deadline_s == 10
        await client.aclose()


@pytest.mark.parametrize("is_packed", [False, True])
async def test_the_official_clients_answers_have_a_largest_size(is_packed: bool) -> None:
    def large(answer: dict[str, Any]) -> object:
        text = json.dumps(answer | {"padding": "x" * 3_000_000}).encode()
        return gzip.compress(text) if is_packed else text

    headers = {"Content-Encoding": "gzip"} if is_packed else {}
    fault = HttpFault(spoil=large, headers=headers)
    with ScriptedServer(lambda messages: "12", faults=lambda _: fault) as server:
        ours = official(server, max_retries=3)
        client = OpenAISDKClient(ours, "scripted", max_answer_bytes=2_000_000)
        with pytest.raises(AnswerTooLarge, match="2,000,000 bytes"):
            await client.chat([user("a")])
        assert server.num_requests == 1
        wide = OpenAISDKClient(ours, "scripted")
        assert (await wide.chat([user("a")])).text == "12"
        messages = [{"role": "user", "content": "a"}]  # the user's own call has no limit
        await ours.chat.completions.create(model="scripted", messages=messages)
        await client.aclose()


async def test_the_official_clients_calls_that_drip_end_at_their_deadline() -> None:
    with ScriptedServer(["12"], faults=lambda _: HttpFault(drip_s=0.05)) as server:
        client = OpenAISDKClient(official(server), "scripted", deadline_s=0.4)
        with pytest.raises(CallTimeout):
            await asyncio.wait_for(client.chat([user("a")]), 30)
        await client.aclose()


async def test_the_official_clients_retries_are_counted() -> None:
    with ScriptedServer(["12"], faults=[HttpFault(status=500)]) as server:
        client = as_client(official(server, max_retries=2), "scripted")
        got = await client.chat([user("a")])
        await client.aclose()
    assert got.info["num_retries"] == 1
    assert got.wait_s > 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (HttpFault(status=500), ServerError),
        (HttpFault(status=404), ServerError),
        (HttpFault(status=400, message="This model's maximum context length is 8"), PromptTooLong),
        (HttpFault(reset=True), ConnectionFailed),
    ],
    ids=str,
)
async def test_its_errors_become_ours(fault: HttpFault, error: Any) -> None:
    with ScriptedServer(["12"], faults=lambda _: fault) as server:
        client = as_client(official(server, max_retries=0), "scripted")
        with pytest.raises(error) as caught:
            await client.chat([user("a")])
        await client.aclose()
    assert "key" not in str(caught.value)


async def test_broken_json_is_tried_again_and_then_a_bad_response() -> None:
    broken = HttpFault(body="broken")
    with ScriptedServer(["11", "12"], faults=[broken]) as server:
        ours = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=1)
        client = as_client(ours, "scripted")
        got = await client.chat([user("7 + 5 =")])
        assert (got.text, got.info["num_retries"]) == ("12", 1)
        await client.aclose()
    with ScriptedServer(["12"], faults=lambda _: broken) as server:
        ours = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0)
        client = as_client(ours, "scripted")
        with pytest.raises(BadResponse, match="not JSON"):
            await client.chat([user("7 + 5 =")])
        await client.aclose()


async def test_other_errors_of_the_package_are_bad_responses() -> None:
    mock = mock_openai()
    mock.chat.completions.create.side_effect = openai.OpenAIError("odd")
    with pytest.raises(BadResponse, match="odd"):
        await as_client(mock, "m").chat([user("a")])


@pytest.mark.parametrize("own", ["default", "http_client", "wrapped"])
def test_each_event_loop_has_its_own_connections(own: str) -> None:
    class Wrapper(httpx.AsyncBaseTransport):
        def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
            self.inner = inner

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            request.headers["X-Seen"] = "yes"
            return await self.inner.handle_async_request(request)

        async def aclose(self) -> None:
            await self.inner.aclose()

    http = None
    if own != "default":
        inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=2))
        http = httpx.AsyncClient(transport=Wrapper(inner) if own == "wrapped" else inner)
    with ScriptedServer(lambda _: "12") as server:
        given = openai.AsyncOpenAI(base_url=server.base_url, api_key="x", http_client=http)

        async def ask() -> list[str]:
            # Every rollout wraps the user's client anew; their connections are the same.
            asked = [as_client(given, "scripted").chat([user("7 + 5 =")]) for _ in range(3)]
            return [answer.text for answer in await asyncio.gather(*asked)]

        async def inside() -> list[str]:
            await ask()
            # As in a notebook: its loop still runs and has idle connections.
            return await asyncio.to_thread(asyncio.run, ask())

        for work in (ask, ask, inside):
            assert asyncio.run(work()) == ["12"] * 3
        if own == "wrapped":
            assert all(r.headers.get("x-seen") == "yes" for r in server.requests)


async def test_openais_own_server_is_not_asked_for_ids() -> None:
    client = OpenAISDKClient(openai.AsyncOpenAI(api_key="key"), "m")
    assert not client.tokens.wanted
    await client.aclose()
