"""The scripted client and the scripted server are one model: the same script, the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.inference.retry import RetryPolicy
from rolltree.testing import (
    ByteTokenizer,
    FaultyClient,
    HttpFault,
    ScriptedAnswer,
    ScriptedClient,
    ScriptedServer,
    scripted_logprobs,
)
from rolltree.values.errors import ConnectionFailed, ServerError
from rolltree.values.types import FinishReason, GenerateRequest, ModelResponse, SamplingParams

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
RENDERER = ChatRenderer(ByteTokenizer())
NEVER = RetryPolicy(max_retries=0)


@asynccontextmanager
async def served(script: Any, **options: Any) -> AsyncIterator[tuple[ScriptedServer, OpenAIClient]]:
    with ScriptedServer(script, **options) as server:
        client = OpenAIClient(
            server.base_url, "scripted", renderer=RENDERER, retry=NEVER, timeout_s=10
        )
        try:
            yield server, client
        finally:
            await client.aclose()


def facts(made: ModelResponse) -> dict[str, Any]:
    """Return what must not depend on how the model was reached."""
    arrays = {
        name: None if (value := getattr(made, name)) is None else value.tolist()
        for name in ("prompt_ids", "completion_ids", "logprobs")
    }
    message = {key: made.message.get(key) or None for key in ("role", "content")}
    calls = [call["function"] for call in made.message.get("tool_calls") or ()]
    return {
        **arrays,
        **message,
        "calls": calls,
        "reason": made.finish_reason,
        "temperature": made.temperature,
        "counts": (made.num_prompt_tokens, made.num_completion_tokens),
    }


async def talk(client: Any, turns: list[str], **options: Any) -> list[dict[str, Any]]:
    session, messages, found = client.session(), [], []
    for text in turns:
        messages.append({"role": "user", "content": text})
        made = await session.chat(messages, **options)
        found.append(facts(made))
        messages.append(made.message)
        for call in made.message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
    return found


words = st.text("abé 🙂\n", min_size=1, max_size=6)
call = {"function": {"name": "add", "arguments": {"a": 7, "b": 5}}}
answers = words | st.just({"role": "assistant", "content": "so", "tool_calls": [call]})


@settings(max_examples=15, deadline=None)
@given(
    st.lists(answers, min_size=1, max_size=4),
    st.sampled_from([SamplingParams(), SamplingParams(max_tokens=3), SamplingParams(stop=("b",))]),
    st.booleans(),
)
def test_a_conversation_is_the_same_over_http(
    script: list[Any], sampling: SamplingParams, has_tools: bool
) -> None:
    turns = [f"turn {number}" for number in range(len(script))]
    options = {"sampling": sampling, "tools": TOOLS if has_tools else None}

    async def both() -> tuple[Any, Any]:
        here = await talk(ScriptedClient(script, renderer=RENDERER), turns, **options)
        async with served(script) as (_, client):
            return here, await talk(client, turns, **options)

    here, there = asyncio.run(both())
    assert here == there
    for made in here:
        assert made["logprobs"] == scripted_logprobs(made["completion_ids"]).tolist()


@pytest.mark.parametrize("size", [1, 20])
async def test_ids_in_are_ids_out_over_http(size: int) -> None:
    prompt = np.arange(97, 97 + size, dtype=np.int32)
    request = GenerateRequest(prompt, SamplingParams())
    echo = lambda text: text[::-1]  # noqa: E731
    here = await ScriptedClient(echo, renderer=RENDERER).generate(request)
    async with served(echo) as (server, client):
        there = await client.generate(request)
        assert server.requests[-1].path == "/v1/completions"
    assert facts(here) == facts(there)
    assert there.completion_ids is not None
    assert there.completion_ids.tolist() == [*prompt.tolist()[::-1], 258]


async def test_what_an_engine_cannot_say_in_text_arrives_as_ids() -> None:
    """A lone surrogate, an end token in the middle: only ids carry these."""
    odd = ScriptedAnswer("", ids=[0xC3, 258, 0xF0, 65], logprobs=[-0.25, -0.5, -0.75, -1.0])
    async with served([odd]) as (_, client):
        made = await client.chat([{"role": "user", "content": "a"}])
    assert made.completion_ids is not None
    assert made.logprobs is not None
    assert made.completion_ids.tolist() == [0xC3, 258, 0xF0, 65]
    assert made.logprobs.tolist() == [-0.25, -0.5, -0.75, -1.0]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_the_reason_to_stop_travels(reason: FinishReason) -> None:
    async with served([ScriptedAnswer("12", reason)]) as (_, client):
        made = await client.chat([{"role": "user", "content": "a"}])
    assert made.finish_reason == reason
    assert made.completion_ids is not None
    assert (made.completion_ids[-1] == 258) == (reason == FinishReason.STOP)


@pytest.mark.parametrize(
    ("mode", "has_ids"), [("vllm", True), ("ignore", False), ("reject", False)]
)
async def test_servers_without_ids_give_text_only(mode: Any, has_ids: bool) -> None:
    with ScriptedServer(lambda _: "12", token_ids=mode) as server:
        client = OpenAIClient(server.base_url, "scripted", retry=NEVER)
        made = await client.chat([{"role": "user", "content": "a"}])
        await client.aclose()
    assert made.text == "12"
    assert (made.completion_ids is not None) is has_ids
    assert made.num_completion_tokens == 3


async def test_a_failed_turn_can_be_asked_again_with_the_same_tokens() -> None:
    """A fault between two turns changes neither the ids nor what extends what."""
    turns = ["one", "two", "three"]
    smooth = await talk(ScriptedClient(lambda _: "ok", renderer=RENDERER), turns)
    inner = ScriptedClient(lambda _: "ok", renderer=RENDERER)
    session = FaultyClient(
        inner, lambda number: ConnectionFailed("gone") if number % 2 == 0 else None
    ).session()
    messages: list[Any] = []
    found: list[ModelResponse] = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        with pytest.raises(ConnectionFailed):
            await session.chat(messages)
        found.append(await session.chat(messages))
        messages.append(found[-1].message)
    assert [facts(made) for made in found] == smooth
    assert [made.extends for made in found] == [None, found[0].call_id, found[1].call_id]
    assert len(inner.calls) == 3


async def test_a_fault_over_http_costs_one_turn_and_no_answer() -> None:
    faults = [None, HttpFault(status=503), None, HttpFault(reset=True)]
    async with served(["1", "2", "3"], faults=faults) as (server, client):
        session, messages, texts, errors = client.session(), [], [], []
        while len(texts) < 3:
            messages = [*messages, {"role": "user", "content": "next"}]
            try:
                made = await session.chat(messages)
            except (ServerError, ConnectionFailed) as error:
                errors.append(type(error))
                messages = messages[:-1]
                continue
            texts.append(made.text)
            messages.append(made.message)
        assert texts == ["1", "2", "3"]
        assert errors == [ServerError, ConnectionFailed]
        assert (server.num_answers, server.faults.num_faults) == (3, 2)
