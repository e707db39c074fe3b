"""What the server says when its engine's thread is dead."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rolltree.gateway.serve import ServedModel, create_app
from rolltree.inference.local import local_client
from rolltree.inference.models import load_model

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def dying(*args: Any) -> Any:
    raise SystemExit("killed")


async def test_a_stream_that_breaks_off_is_reported_to_the_client_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, tokenizer = load_model("tiny")
    client = local_client(model, tokenizer, max_context=64, max_batch=2)
    served = ServedModel(client.engine, client.renderer, "tiny")
    app = httpx.ASGITransport(create_app(served, "token"))
    headers = {"Authorization": "Bearer token"}
    runner = client.engine._decoder.runner
    forward, num_left = runner.forward, 3

    def dying_later(*args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        return forward(*args) if num_left else dying()

    runner.forward = dying_later  # type: ignore[method-assign]
    async with httpx.AsyncClient(transport=app, base_url="http://app", headers=headers) as http:
        body = {"prompt": "1", "max_tokens": 9, "stream": True, "logit_bias": {"256": -100}}
        streamed = await asyncio.wait_for(http.post("/v1/completions", json=body), 5)
        assert streamed.status_code == 200
        assert streamed.text.count('"text"') >= 1
        assert "thread has died (SystemExit: killed)" in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        # Before the first token, a status tells it.
        again = await asyncio.wait_for(http.post("/v1/completions", json=body), 5)
        assert again.status_code == 500
    await client.aclose()
    assert "/v1/completions failed" in caplog.text


async def test_a_dead_engine_fails_health_and_requests_at_once() -> None:
    """The real engine in the real application; its thread dies in the middle of a request."""
    model, tokenizer = load_model("tiny")
    client = local_client(model, tokenizer, max_context=64, max_batch=2)
    served = ServedModel(client.engine, client.renderer, "tiny")
    app = httpx.ASGITransport(create_app(served, "token"))
    headers = {"Authorization": "Bearer token"}

    async with httpx.AsyncClient(transport=app, base_url="http://app", headers=headers) as http:
        assert (await http.get("/health")).status_code == 200
        client.engine._decoder.runner.forward = dying  # type: ignore[method-assign]
        body = {"prompt": "1", "max_tokens": 4}
        for _ in range(2):  # in flight, and after the death
            answer = await asyncio.wait_for(http.post("/v1/completions", json=body), 5)
            assert answer.status_code == 500
            assert "thread has died (SystemExit: killed)" in answer.json()["error"]["message"]
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
        assert "thread has died" in streamed.text
        health = await http.get("/health")
        assert health.status_code == 503
        assert "has stopped" in health.json()["error"]["message"]
    await client.aclose()
