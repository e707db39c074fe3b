"""Penalties, biases and min_p, checked against their definitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from local_models import ask, greedy, next_logits, random_prompt, shared_model, teacher_forced

from rolltree.inference.local import LocalEngine
from rolltree.inference.local.sampling import make_processors
from rolltree.values.types import FinishReason


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    made = LocalEngine(shared_model(), max_context=64, max_batch=4)
    yield made
    await made.aclose()


def test_values_that_change_nothing_make_no_processor() -> None:
    extra = {"min_p": 0, "repetition_penalty": 1.0, "logit_bias": {}, "other": 5}
    options = {"num_prompt": 1, "end_ids": [2], "vocab_size": 9, "device": torch.device("cpu")}
    assert make_processors(extra, **options) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.3},
        {"min_p": 0.2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"logit_bias": {"7": 3.0, "9": -100}},
        {"extra_body": {"min_p": 0.05, "repetition_penalty": 0.9}},
    ],
)
async def test_logits_processors_reshape_what_is_sampled_from(
    engine: LocalEngine, extra: dict[str, Any]
) -> None:
    """Logprobs are those of the distribution worked out here; the raw ones are the model's own."""
    model, prompt = shared_model(), random_prompt(0, 8)
    request = ask(prompt, temperature=0.8, top_k=50, seed=1, max_tokens=15, extra=extra)
    found, _ = await asyncio.gather(
        engine.generate(request), engine.generate(ask(prompt, temperature=1.0))
    )
    raw = teacher_forced(model, prompt, found.completion_ids)
    assert np.abs(found.raw_logprobs - raw).max() < 1e-4
    asked = {**extra, **extra.get("extra_body", {})}
    for at, (token, logprob) in enumerate(zip(found.completion_ids, found.logprobs, strict=True)):
        sampled = found.completion_ids[:at].tolist()
        logits = next_logits(model, [*prompt, *sampled]).clone()
        for bias, value in asked.get("logit_bias", {}).items():
            logits[int(bias)] += value
        for seen in {*prompt.tolist(), *sampled}:
            factor = asked.get("repetition_penalty", 1.0)
            logits[seen] = logits[seen] * factor if logits[seen] < 0 else logits[seen] / factor
        for seen in set(sampled):
            logits[seen] -= asked.get("frequency_penalty", 0.0) * sampled.count(seen)
            logits[seen] -= asked.get("presence_penalty", 0.0)
        logits = logits / 0.8
        logits[logits < logits.topk(50).values[-1]] = -torch.inf
        probs = logits.softmax(-1)
        probs[probs < asked.get("min_p", 0.0) * probs.max()] = 0
        assert logprob == pytest.approx(float((probs[token] / probs.sum()).log()), abs=1e-4)


async def test_min_tokens_keeps_the_end_away() -> None:
    prompt = [1, 2, 3]
    ends = greedy(shared_model(), prompt, 1)
    engine = LocalEngine(shared_model(), max_context=64, max_batch=4, eos_token_ids=ends)
    short = await engine.generate(ask(prompt))
    longer = await engine.generate(ask(prompt, extra={"min_tokens": 3}))
    await engine.aclose()
    assert len(short.completion_ids) == 1
    assert len(longer.completion_ids) >= 4 or longer.finish_reason == FinishReason.LENGTH
    assert ends[0] not in longer.completion_ids[:3]
