"""rolltree's own clients against `rolltree serve`: exact ids, exact logprobs, typed errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import serve_kit
from serve_kit import ADD, TOKEN, Served

from conftest import ASKED
from rolltree.inference import ChatRenderer, EndpointPool, OpenAIClient, RetryPolicy
from rolltree.values.errors import ConnectionFailed, PromptTooLong, ServerError
from rolltree.values.types import FinishReason, GenerateRequest, ModelResponse, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=90)
FAST = RetryPolicy(max_retries=1, first_wait_s=0.01)


@pytest.fixture(scope="module")
def renderer(reference: Any) -> ChatRenderer:
    return ChatRenderer(reference[1])


def client_of(served: Served, **options: Any) -> OpenAIClient:
    options.setdefault("retry", FAST)
    return OpenAIClient(served.url, "taught", api_key=TOKEN, **options)


def tokenized(served: Served, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """Return the prompt that the server itself makes of a conversation."""
    body = {"messages": messages, "tools": tools}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{served.root}/tokenize", json=body, headers=headers).raise_for_status()
    ids: list[int] = answer.json()["tokens"]
    return ids


def ids(response: ModelResponse) -> list[int]:
    assert response.prompt_ids is not None
    assert response.completion_ids is not None
    return [*response.prompt_ids.tolist(), *response.completion_ids.tolist()]


ENDPOINTS = pytest.mark.parametrize("endpoint", ["auto", "completions"])


@ENDPOINTS
async def test_a_multi_turn_rollouts_prompts_are_the_servers_own(
    served: Served, renderer: ChatRenderer, endpoint: Any
) -> None:
    client = client_of(served, renderer=renderer, token_endpoint=endpoint)
    session, messages, last = client.session(), [], None
    for question, answer in [("7 + 5 =", "12"), ("capital?", None), ("count", None)]:
        messages.append({"role": "user", "content": question})
        got = await session.chat(messages, sampling=GREEDY)
        assert got.text == (answer or got.text)
        assert got.finish_reason == FinishReason.STOP
        assert got.prompt_ids is not None
        assert got.prompt_ids.tolist() == tokenized(served, messages)
        assert got.extends == (last.call_id if last else None)
        if last is not None:
            assert ids(got)[: len(ids(last))] == ids(last)
        messages.append(got.message)
        last = got
    await client.aclose()
    assert (client.token_endpoint == "completions") is (endpoint == "completions")


@ENDPOINTS
async def test_a_tool_rollouts_prompts_are_the_servers_own(
    served: Served, renderer: ChatRenderer, endpoint: Any
) -> None:
    client = client_of(served, renderer=renderer, token_endpoint=endpoint)
    session = client.session()
    call = await session.chat(ASKED, tools=[ADD], sampling=GREEDY)
    assert call.finish_reason == FinishReason.TOOL_CALLS
    (asked,) = call.message["tool_calls"]
    messages = [*ASKED, call.message]
    messages.append({"role": "tool", "content": "5", "tool_call_id": asked["id"]})
    last = await session.chat(messages, tools=[ADD], sampling=GREEDY)
    await client.aclose()
    assert last.text == "It is 5."
    assert last.extends == call.call_id
    assert ids(last)[: len(ids(call))] == ids(call)
    assert last.prompt_ids is not None
    assert last.prompt_ids.tolist() == tokenized(served, messages, [ADD])


async def test_messages_and_ids_give_the_same_answer(
    served: Served, renderer: ChatRenderer
) -> None:
    by_message, by_id = client_of(served), client_of(served, renderer=renderer)
    answers = [await client.chat(ASKED, sampling=GREEDY) for client in (by_message, by_id)]
    assert ids(answers[0]) == ids(answers[1])
    assert answers[0].message == answers[1].message
    for client in (by_message, by_id):
        await client.aclose()


@ENDPOINTS
async def test_logprobs_are_those_of_teacher_forcing(
    served: Served, renderer: ChatRenderer, reference: Any, endpoint: Any
) -> None:
    import torch

    client = client_of(
        served, renderer=renderer, logprobs_mode="processed", token_endpoint=endpoint
    )
    differences = []
    for temperature in (1.0, 2.5):
        for seed in range(4):
            sampling = SamplingParams(temperature=temperature, max_tokens=40, seed=seed)
            got = await client.chat([{"role": "user", "content": f"say {seed}"}], sampling=sampling)
            assert got.prompt_ids is not None
            assert got.completion_ids is not None
            assert got.logprobs is not None
            with torch.no_grad():
                logits = reference[0](input_ids=torch.tensor([ids(got)])).logits[0].float()
            start = len(got.prompt_ids)
            expected = (logits[start - 1 : -1] / temperature).log_softmax(-1)
            chosen = expected.gather(-1, torch.tensor(got.completion_ids).long()[:, None])[:, 0]
            differences.append(np.abs(got.logprobs - chosen.numpy()))
    await client.aclose()
    assert sum(map(len, differences)) > 60
    assert float(np.concatenate(differences).mean()) < 1e-4


async def test_raw_logprobs_at_another_temperature_are_not_used(
    served: Served, renderer: ChatRenderer
) -> None:
    client = client_of(served, renderer=renderer)  # it believes that the server's are raw
    got = await client.chat(ASKED, sampling=SamplingParams(temperature=0.7, max_tokens=2))
    await client.aclose()
    assert got.logprobs is None
    assert got.completion_ids is not None


async def test_ids_alone(served: Served) -> None:
    client = client_of(served)
    prompt = np.array([257, *b"user\n7 + 5 =", 258, 10, 257, *b"assistant\n"], np.int32)
    got = await client.generate(GenerateRequest(prompt, GREEDY))
    with pytest.raises(PromptTooLong):
        await client.generate(GenerateRequest(np.full(4000, 5, np.int32), GREEDY))
    await client.aclose()
    assert got.text == "12"
    assert ids(got) == [*prompt.tolist(), 49, 50, 258]
    assert got.versions is not None
    assert got.versions.tolist() == [0, 0, 0]


async def test_a_wrong_token_is_a_typed_error(served: Served) -> None:
    client = OpenAIClient(served.url, "taught", api_key="wrong", retry=FAST)
    with pytest.raises(ServerError) as caught:
        await client.chat(ASKED)
    assert (caught.value.status, caught.value.retryable) == (401, False)
    assert "wrong" not in str(caught.value)
    await client.aclose()


async def test_a_killed_server_and_what_becomes_of_its_rollouts(
    taught: Any, served: Served, renderer: ChatRenderer
) -> None:
    doomed = serve_kit.start(str(taught), "--batch-invariant", name="taught")
    alone = client_of(doomed, logprobs_mode="processed")
    seeded = SamplingParams(temperature=1.5, seed=3, max_tokens=12)
    one = await alone.chat(ASKED, sampling=seeded)
    crowd = [alone.chat([{"role": "user", "content": f"7 + {i} ="}]) for i in range(5)]
    same, *_ = await asyncio.gather(alone.chat(ASKED, sampling=seeded), *crowd)
    assert one.logprobs is not None
    assert same.logprobs is not None
    assert (ids(one), one.logprobs.tobytes()) == (ids(same), same.logprobs.tobytes())
    pool = EndpointPool.of(
        [doomed.url, served.url],
        "taught",
        api_key=TOKEN,
        renderer=renderer,
        retry=RetryPolicy(max_retries=4, first_wait_s=0.01),
        cool_down_s=30.0,
    )
    assert await pool.check() == {doomed.url: None, served.url: None}
    sessions = [pool.session() for _ in range(6)]
    histories = [[{"role": "user", "content": f"7 + {i} ="}] for i in range(6)]
    first = [
        await session.chat(history, sampling=GREEDY)
        for session, history in zip(sessions, histories, strict=True)
    ]
    homes = {each.info["endpoint"] for each in first}
    assert homes == {doomed.url, served.url}
    doomed.kill()
    with pytest.raises(ConnectionFailed):
        await alone.chat(ASKED)
    for session, history, before in zip(sessions, histories, first, strict=True):
        messages = [*history, before.message, {"role": "user", "content": "count"}]
        after = await session.chat(messages, sampling=GREEDY)
        assert after.extends == before.call_id  # what it remembers moved with it
        assert ids(after)[: len(ids(before))] == ids(before)
        assert after.info["endpoint"] == served.url
        moved = before.info["endpoint"] == doomed.url
        assert ("failed_endpoints" in after.info) <= moved
    health = await pool.check()
    assert health[served.url] is None
    assert "could not be reached" in str(health[doomed.url])
    serve_kit.stop(doomed)
    await alone.aclose()
    await pool.aclose()
