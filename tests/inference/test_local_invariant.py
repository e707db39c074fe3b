"""The batch-invariant mode: the same request has the same bits in any company."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_models import VOCAB, ask, new_model, random_prompt, shared_model, teacher_forced
from transformers import AutoModelForCausalLM, Gemma3Config

from rolltree.inference.engine import EngineOutput
from rolltree.inference.local import LocalEngine
from rolltree.inference.local import probe as probe_module
from rolltree.inference.local.plan import BLOCK, invariant_plans
from rolltree.values.errors import UnsupportedSetting


@given(
    work=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 70)), min_size=1, max_size=5),
)
def test_every_token_is_in_one_block_behind_what_it_attends_to(work: list[tuple[int, int]]) -> None:
    start, counts = (np.array(column) for column in zip(*work, strict=True))
    rows = list(range(len(work)))
    ids = np.random.default_rng(0).integers(0, 99, (len(work), 80), dtype=np.int32)
    computed = [set(range(first)) for first in start]
    ended: list[int] = []
    for plan, ending in invariant_plans(rows, counts, start, ids, torch.device("cpu")):
        assert len(plan.tokens) == len(plan.rows) == len(plan.positions) == BLOCK
        assert len(plan.newest) == (BLOCK if ending else 0)
        for index, (row, length, _) in enumerate(plan.alone):
            assert int(plan.positions[index]) == length - 1
            assert int(plan.tokens[index]) == ids[row, length - 1]
            assert length - 1 not in computed[row]
            computed[row].add(length - 1)
            assert computed[row] == set(range(length))
        for index, row in zip(plan.newest.tolist(), ending, strict=False):
            assert plan.alone[index] == (row, start[row] + counts[row], 0)
        ended += ending
    assert ended == rows
    assert [len(seen) for seen in computed] == (start + counts).tolist()


def gathered(model: Any, requests: list[Any], order: list[int], **options: Any) -> list[Any]:
    """Answer requests that come one after the other in `order`, several at a time."""

    async def answer() -> list[EngineOutput]:
        engine = LocalEngine(model, max_context=128, batch_invariant=True, **options)
        tasks: dict[int, Any] = {}
        for index in order:
            tasks[index] = asyncio.create_task(engine.generate(requests[index]))
            await asyncio.sleep(0.002 * (index % 3))
        found = [await tasks[index] for index in range(len(requests))]
        await engine.aclose()
        return found

    return asyncio.run(answer())


@given(order=st.permutations(range(6)), batch=st.integers(1, 6), chunk=st.sampled_from([5, 1000]))
@settings(max_examples=8, deadline=None)
def test_ids_and_logprobs_are_bit_equal_in_any_batch(
    order: list[int], batch: int, chunk: int
) -> None:
    """Other prompts, prefixes from the cache, chunks of prompts, more or fewer at a time."""
    shared = random_prompt(7, 40)
    prompts = [shared[:30], shared, shared[:33], random_prompt(1, 50), random_prompt(2, 3), shared]
    settings_of = [{}, {"top_p": 0.7}, {"temperature": 0.6}, {"extra": {"min_p": 0.1}}, {}, {}]
    requests = [
        ask(prompt, **{"temperature": 1.0, "seed": n, "max_tokens": 12, **sampling})  # type: ignore[arg-type]
        for n, (prompt, sampling) in enumerate(zip(prompts, settings_of, strict=True))
    ]
    together = gathered(shared_model(), requests, order, max_batch=batch, prefill_chunk=chunk)
    if not ALONE:
        ALONE.extend(gathered(shared_model(), [each], [0])[0] for each in requests)
    for one, other in zip(ALONE, together, strict=True):
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.raw_logprobs.tobytes() == other.raw_logprobs.tobytes()


ALONE: list[EngineOutput] = []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_lean_forward_and_in_bf16_too(dtype: torch.dtype) -> None:
    model = new_model().to(dtype)
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU())  # unknown to it
    requests = [ask(random_prompt(n, 5 + 9 * n), temperature=1.0, seed=n) for n in range(3)]
    alone = [gathered(model, [each], [0])[0] for each in requests]
    for one, other in zip(alone, gathered(model, requests, [0, 1, 2]), strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.completion_ids.tolist() == other.completion_ids.tolist()


def test_logprobs_are_those_of_teacher_forcing() -> None:
    prompt = random_prompt(3, 45)
    (found,) = gathered(shared_model(), [ask(prompt, temperature=1.0, seed=1)], [0])
    forced = teacher_forced(shared_model(), prompt, found.completion_ids)
    assert np.abs(found.logprobs - forced).max() < 1e-4


@pytest.mark.model
async def test_the_real_model() -> None:
    from rolltree.inference.models import load_model

    model, tokenizer = load_model("smollm2-135m")
    texts = ["7 + 5 =", "One, two,"]
    requests = [
        ask(tokenizer.encode(text), temperature=1.0, seed=n, max_tokens=2)
        for n, text in enumerate(texts)
    ]
    engine = LocalEngine(model, max_context=64, max_batch=4, batch_invariant=True)
    alone = await engine.generate(requests[0])
    async with engine.paused():
        engine.publish(0)
    together, *_ = await asyncio.gather(*map(engine.generate, requests))
    await engine.aclose()
    assert together.num_cached_tokens == 0
    assert alone.completion_ids.tolist() == together.completion_ids.tolist()
    assert alone.logprobs.tobytes() == together.logprobs.tobytes()


def test_a_device_whose_products_depend_on_the_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Careless(probe_module.ModelRunner):
        def forward(self, rows: list[int], *args: Any) -> torch.Tensor:
            return super().forward(rows, *args) + len(rows) * 1e-6

    monkeypatch.setattr(probe_module, "ModelRunner", Careless)
    with pytest.raises(UnsupportedSetting, match="change with the batch"):
        LocalEngine(shared_model(), max_context=64, batch_invariant=True)


async def test_a_model_whose_config_is_in_parts_can_be_batch_invariant() -> None:
    text = {"head_dim": 8, "sliding_window": 8, "max_position_embeddings": 128, "vocab_size": VOCAB}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**sizes, **text, "num_key_value_heads": 1, "intermediate_size": 16},
        vision_config=vision,
        mm_tokens_per_image=4,
    )
    assert not hasattr(config, "vocab_size")
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = LocalEngine(model, max_context=64, max_batch=2, batch_invariant=True)
    assert len((await engine.generate(ask([5, 6], max_tokens=2))).completion_ids) == 2
    await engine.aclose()
