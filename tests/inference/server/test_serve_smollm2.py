"""The real 135M model behind `rolltree serve`: the openai client, exact ids, exact logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import serve_kit
from serve_kit import ADD, TOKEN, Served

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.values.types import SamplingParams

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from rolltree.inference.models import load_model

    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def server(smollm2: Any) -> Iterator[Served]:
    started = serve_kit.start("smollm2-135m")
    yield started
    serve_kit.stop(started)


def test_the_openai_client(server: Served) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0) as client:
        options: dict[str, Any] = {"model": server.model, "temperature": 0, "max_tokens": 24}
        first = client.chat.completions.create(messages=asked, **options)
        assert "Paris" in first.choices[0].message.content
        asked = [{"role": "user", "content": "Count from one to ten."}]
        whole = client.chat.completions.create(messages=asked, **options)
        chunks = list(client.chat.completions.create(messages=asked, **options, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        assert len(chunks) > 1
        with pytest.raises(openai.BadRequestError, match="ignores tools"):  # its template does
            client.chat.completions.create(messages=asked, tools=[ADD], **options)
        text = client.completions.create(
            model=server.model, prompt="The capital of France is", temperature=0, max_tokens=5
        )
        assert "Paris" in text.choices[0].text


def tokenized(server: Served, messages: list[dict[str, Any]]) -> list[int]:
    """Return the prompt that the server itself makes of a conversation."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{server.root}/tokenize", json={"messages": messages}, headers=headers)
    ids: list[int] = answer.raise_for_status().json()["tokens"]
    return ids


async def test_a_rollouts_ids_and_logprobs(server: Served, smollm2: Any) -> None:
    import torch

    model, tokenizer = smollm2
    client = OpenAIClient(
        server.url,
        server.model,
        api_key=TOKEN,
        renderer=ChatRenderer(tokenizer),
        logprobs_mode="processed",
    )
    session, messages, last, off = client.session(), [], None, []
    for turn, question in enumerate(["Say a colour.", "Another one.", "Count to five."]):
        messages.append({"role": "user", "content": question})
        sampling = SamplingParams(temperature=0.8, max_tokens=24, seed=turn)
        got = await session.chat(messages, sampling=sampling)
        assert got.prompt_ids is not None
        assert got.completion_ids is not None
        assert got.logprobs is not None
        assert got.extends == (last.call_id if last else None)
        if last is None or last.finish_reason == "stop":
            assert got.prompt_ids.tolist() == tokenized(server, messages)
        ids = torch.tensor([[*got.prompt_ids.tolist(), *got.completion_ids.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(got.prompt_ids) - 1 : -1].float() / 0.8
        chosen = logits.log_softmax(-1).gather(
            -1, torch.from_numpy(got.completion_ids).long()[:, None]
        )
        off.append(np.abs(chosen[:, 0].numpy() - got.logprobs))
        messages.append(got.message)
        last = got
    await client.aclose()
    assert float(np.concatenate(off).mean()) < 1e-4
