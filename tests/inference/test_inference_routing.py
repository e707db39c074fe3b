"""Routed experts over HTTP: the server's endpoints, the client's two ways, and bad answers."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
from test_local_routing import mixture, plain_routing

from rolltree.gateway.serve import ServedModel, create_app
from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.inference.local import local_client
from rolltree.inference.models.made import byte_tokenizer
from rolltree.inference.routed_experts import decode_routing, encode_routing
from rolltree.testing import DirectTransport, Reply, Request
from rolltree.tokens import recorded_routing
from rolltree.values.errors import TokenError
from rolltree.values.types import SamplingParams


@pytest.mark.parametrize("way", ["generate", "completions", "messages"])
async def test_a_client_reads_what_the_server_recorded(way: str) -> None:
    tokenizer = byte_tokenizer()
    local = local_client(mixture(), tokenizer, record_experts=True, max_context=256)
    app = httpx.ASGITransport(create_app(ServedModel(local.engine, local.renderer, "m"), "t"))
    asked: list[str] = []

    async def handle(request: Request) -> Reply:
        asked.append(request.path)
        async with httpx.AsyncClient(transport=app, base_url="http://app") as http:
            headers = {"Authorization": "Bearer t", "Content-Type": "application/json"}
            method = "POST" if request.body else "GET"
            answer = await http.request(method, request.path, content=request.body, headers=headers)
        return Reply(answer.status_code, answer.content)

    own: dict[str, Any] = {}
    if way != "messages":
        own = {"renderer": ChatRenderer(tokenizer), "token_endpoint": way}
    client = OpenAIClient(
        "http://app/v1", "m", transport=DirectTransport(handle), token_ids="vllm", **own
    )
    session, messages = client.session(), [{"role": "user", "content": "a b c"}]
    for turn in range(2):
        sampling = SamplingParams(max_tokens=6, seed=turn)
        answer = await session.chat(messages, sampling=sampling)
        path = answer.tree.path_view(answer.call)
        routing = recorded_routing(answer.tree, answer.call)
        assert np.array_equal(routing, plain_routing(mixture(), path[:-1]))
        messages += [answer.message, {"role": "user", "content": "again"}]
    await client.aclose()
    await local.aclose()
    named = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}
    assert named.get(way, "/v1/chat/completions") in asked


def npy(array: Any, **options: Any) -> str:
    with io.BytesIO() as file:
        np.save(file, array, **options)
        return base64.b64encode(file.getvalue()).decode()


GOOD = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


def test_what_vllm_sends_is_read() -> None:
    """Its `numpy2base64` is `np.save` and base64."""
    for dtype in (np.uint8, np.uint16, np.int32):
        found = decode_routing(npy(GOOD.astype(dtype)), 5)
        assert found is not None
        assert found.dtype == dtype
        assert np.array_equal(found, GOOD)
    assert np.array_equal(decode_routing(encode_routing(GOOD), 9), GOOD)
    assert decode_routing(None, 5) is None


def forged(shape: str) -> str:
    """Return a file whose header promises more than there is."""
    data = base64.b64decode(npy(GOOD))
    return base64.b64encode(data.replace(b"(4, 3, 2)", shape.encode())).decode()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[1, 2]]], "is a list"),
        ("&&", "is not base64"),
        ("AAAA", r"is not a \.npy file"),
        (npy(GOOD)[:40], r"is not a \.npy file"),
        (npy(GOOD)[:-8], "has 19 bytes for an array of uint8 and shape"),
        (npy(GOOD.astype(np.float32)), "array of float32"),
        (npy(GOOD[0]), r"shape \(3, 2\)"),
        (npy(np.asfortranarray(GOOD)), "array of uint8"),
        (npy(np.empty((4, 0, 2), np.uint8)), r"shape \(4, 0, 2\)"),
        (npy(np.full((1, 1, 1), None), allow_pickle=True), "array of object"),
        (forged("(9, 9, 9)"), r"has 24 bytes for an array of uint8 and shape \(9, 9, 9\)"),
        (forged("(-4,-3,2)"), r"shape \(-4, -3, 2\)"),
        (npy(np.ones((5, 3, 2), np.uint8)), "experts of 5 tokens, and the model was given 4"),
    ],
)
def test_what_is_not_routing_is_a_typed_error(value: Any, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        decode_routing(value, 5)
