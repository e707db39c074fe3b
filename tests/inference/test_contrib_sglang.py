"""SGLang's native endpoint, from answers in the shape of its documentation (no server here)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from inference_templates import user

from rolltree.contrib.sglang import SGLangClient
from rolltree.errors import BadResponse, ServerError, TokenError, UnsupportedSetting
from rolltree.inference import ChatRenderer, RetryPolicy
from rolltree.testing import ByteTokenizer, DirectTransport, Reply, Request
from rolltree.types import FinishReason, GenerateRequest, SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())
TWELVE = [[-0.1, 49, None], [-0.2, 50, None], [-0.3, 258, None]]


def answer(triples: Any = TWELVE, finish: Any = None, **changes: Any) -> dict[str, Any]:
    meta = {
        "id": "abc",
        "finish_reason": finish or {"type": "stop", "matched": 258},
        "prompt_tokens": 9,
        "completion_tokens": len(triples or []),
        "output_token_logprobs": triples,
        "weight_version": "default",
        "cached_tokens": 0,
    } | changes.pop("meta", {})
    return {"text": "12", "output_ids": [t[1] for t in triples or []], "meta_info": meta} | changes


def client_of(*answers: Any) -> tuple[SGLangClient, list[dict[str, Any]]]:
    sent: list[dict[str, Any]] = []
    left = list(answers)

    async def handle(request: Request) -> Reply:
        assert request.path == "/generate"
        sent.append(json.loads(request.body))
        reply = left.pop(0)
        return reply if isinstance(reply, Reply) else Reply(200, json.dumps(reply).encode())

    made = SGLangClient(
        "http://mock",
        "m",
        RENDERER,
        transport=DirectTransport(handle),
        retry=RetryPolicy(max_retries=1, first_wait_s=0.0),
    )
    return made, sent


async def test_a_rollout_of_two_turns() -> None:
    client, sent = client_of(
        answer(), answer([[-1.0, 51, None]], {"type": "length"}, meta={"weight_version": "4"})
    )
    client.version = 2
    session = client.session()
    first = await session.chat(
        [user("7 + 5 =")], sampling=SamplingParams(temperature=0.7, max_tokens=5, seed=3)
    )
    assert first.text == "12"
    assert first.finish_reason == FinishReason.STOP
    assert first.completion_ids is not None
    assert first.completion_ids.tolist() == [49, 50, 258]
    assert first.logprobs is not None
    np.testing.assert_allclose(first.logprobs, [-0.1, -0.2, -0.3], rtol=1e-6)
    assert first.versions is not None
    assert first.versions.tolist() == [2, 2, 2]  # "default" is not a number
    second = await session.chat([user("7 + 5 ="), first.message, user("more")])
    assert second.extends == first.call_id
    assert second.finish_reason == FinishReason.LENGTH
    assert second.versions is not None
    assert second.versions.tolist() == [4]
    assert sent[0]["input_ids"] == RENDERER.render([user("7 + 5 =")]).tolist()
    assert sent[1]["input_ids"][: len(sent[0]["input_ids"]) + 3] == [
        *sent[0]["input_ids"],
        49,
        50,
        258,
    ]
    params = sent[0]["sampling_params"]
    assert (params["max_new_tokens"], params["temperature"], params["sampling_seed"]) == (5, 0.7, 3)
    assert params["top_k"] == -1
    assert 258 in params["stop_token_ids"]
    # Null means no limit; SGLang refuses a number beyond its context window.
    assert sent[1]["sampling_params"]["max_new_tokens"] is None
    await client.aclose()


async def test_ids_alone_and_a_retry() -> None:
    client, sent = client_of(Reply(503, b""), answer())
    got = await client.generate(GenerateRequest(np.array([5, 6], np.int32), SamplingParams()))
    assert got.text == "12"
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == [5, 6] == sent[0]["input_ids"]
    assert got.info["num_retries"] == 1
    await client.aclose()


async def test_stops_are_sampled_but_not_said() -> None:
    triples = [[-0.1, token, None] for token in b"one two"]
    client, sent = client_of(answer(triples), answer(triples[:4]))
    cut = await client.chat([user("a")], sampling=SamplingParams(stop=(" t",)))
    assert (cut.text, cut.num_completion_tokens) == ("one", 7)
    by_id = await client.chat([user("a")], sampling=SamplingParams(stop_token_ids=(32,)))
    assert (by_id.text, by_id.num_completion_tokens) == ("one", 4)
    assert sent[0]["sampling_params"]["stop"] == [" t"]
    assert sent[1]["sampling_params"]["stop_token_ids"][0] == 32
    await client.aclose()


async def test_logprobs_before_top_p_are_dropped() -> None:
    client, _ = client_of(answer(), answer())
    for sampling in (SamplingParams(top_p=0.9), SamplingParams(top_k=5)):
        got = await client.chat([user("a")], sampling=sampling)
        assert got.logprobs is None
        assert got.completion_ids is not None
    await client.aclose()


@pytest.mark.parametrize(
    ("reply", "error", "said"),
    [
        (answer(None), TokenError, "no output_token_logprobs"),
        (answer(output_ids=[1]), TokenError, "not the ids of its logprobs"),
        (answer([[None, 49, None]]), TokenError, "placeholder"),
        (answer([[0.5, 49, None]]), TokenError, "placeholder"),
        (answer(finish={"type": "abort", "message": "too busy"}), BadResponse, "too busy"),
        (answer(finish={"type": "tired"}), BadResponse, "'tired'"),
        (Reply(400, b"no"), ServerError, "answered 400"),
    ],
    ids=str,
)
async def test_answers_that_cannot_be_used(reply: Any, error: Any, said: str) -> None:
    client, _ = client_of(reply)
    with pytest.raises(error, match=said):
        await client.chat([user("a")])
    await client.aclose()


async def test_what_would_be_ignored_is_refused() -> None:
    client, sent = client_of()
    with pytest.raises(UnsupportedSetting, match="min_p"):
        await client.chat([user("a")], sampling=SamplingParams(extra={"min_p": 0.1}))
    with pytest.raises(UnsupportedSetting, match="'other'"):
        await client.chat([user("a")], model="other")
    with pytest.raises(BadResponse, match="without /v1"):
        await client_of(Reply(200, b"<html>"), Reply(200, b"<html>"))[0].chat([user("a")])
    assert sent == []
