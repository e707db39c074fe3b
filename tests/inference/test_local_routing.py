"""Routed experts that the embedded engine records are those of a plain pass over the same ids."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import pytest
import torch
from local_models import VOCAB, ask, new_model, random_prompt, tokenizer
from test_local_engine import engine_of
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltree.errors import UnsupportedSetting
from rolltree.inference.local import local_client
from rolltree.inference.local.recording import ExpertTable
from rolltree.inference.local.rows import RowMode, RowRunner
from rolltree.tokens import ROUTED_EXPERTS, recorded_routing
from rolltree.types import SamplingParams

NUM_LAYERS, TOP_K = 3, 2


@functools.cache
def mixture() -> Any:
    """Return a mixture of three layers, of which the second has no experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config).eval()


@torch.no_grad()
def plain_routing(model: Any, path: Any) -> Any:
    """Return the experts `[_T, layers, top_k]` of a pass over a whole path, by torch's hooks."""
    found = np.zeros((len(path), NUM_LAYERS, TOP_K), np.uint8)
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def note(_module: Any, _args: Any, output: Any, index: int = index) -> None:
                found[:, index] = output[2].numpy()

            hooks.append(layer.mlp.gate.register_forward_hook(note))
    model(torch.from_numpy(np.asarray(path, np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def check(output: Any, prompt: Any) -> None:
    path = np.concatenate([prompt, output.completion_ids])[:-1]
    assert output.routed_experts.dtype == np.uint8
    assert np.array_equal(output.routed_experts, plain_routing(mixture(), path))


async def test_prompts_and_answers_in_a_batch_and_from_the_prefix_cache() -> None:
    prompts = [random_prompt(n, 3 + 5 * n) for n in range(7)]
    options = {"max_batch": 4, "prefill_chunk": 16}
    async with engine_of(mixture(), record_experts=True, **options) as engine:
        requests = [ask(p, max_tokens=3 + n, seed=n) for n, p in enumerate(prompts)]
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        for prompt, output in zip(prompts, found, strict=True):
            check(output, prompt)
        longer = [
            np.concatenate([prompt, output.completion_ids, random_prompt(n, 4)])
            for n, (prompt, output) in enumerate(zip(prompts, found, strict=True))
        ]
        longer += [np.concatenate([prompts[6][:20], random_prompt(9, 5)])]
        again = await asyncio.gather(*(engine.generate(ask(p)) for p in longer))
        assert sum(output.num_cached_tokens for output in again) > 0
        for prompt, output in zip(longer, again, strict=True):
            check(output, prompt)
        async with engine.paused():
            engine.publish(1)
        check(await engine.generate(ask(longer[-1])), longer[-1])


@pytest.mark.parametrize("mode", list(RowMode))
def test_rows_that_run_one_by_one(mode: RowMode) -> None:
    runner = RowRunner(mixture(), mode, num_slots=2)
    table = ExpertTable(mixture(), runner, num_slots=2, capacity=16)
    ids = random_prompt(1, 32).reshape(2, 16)
    with torch.inference_mode():
        for start, count in ((0, 9), (9, 1), (10, 1)):
            two = np.array([start, start]), np.array([count, count])
            runner.forward([0, 1], ids, *two)
    for row in (0, 1):
        assert np.array_equal(table.read(row, 11), plain_routing(mixture(), ids[row, :11]))


async def test_a_session_stores_what_each_call_adds() -> None:
    client = local_client(mixture(), tokenizer(), record_experts=True, max_context=256)
    messages = [{"role": "user", "content": "a b c"}]
    session = client.session()
    trajectory: Any = None
    for turn in range(3):
        sampling = SamplingParams(max_tokens=5, seed=turn)
        answer = await session.chat(messages, sampling=sampling)
        assert answer.routed_experts is None  # it is in the tree
        trajectory = answer.tree
        messages += [answer.message, {"role": "user", "content": "again"}]
    await client.aclose()
    for call in range(3):
        stream = trajectory.stream(ROUTED_EXPERTS, call)
        path = trajectory.path_view(call)
        parent = trajectory.parent(call)
        assert stream.start == (0 if parent is None else trajectory.path_len(parent) - 1)
        assert stream.start + len(stream.values) == len(path) - 1
        expected = plain_routing(mixture(), path[:-1])
        assert np.array_equal(recorded_routing(trajectory, call), expected)
    assert trajectory.parent(2) is not None


async def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedSetting, match="no router was found in Qwen3ForCausalLM"):
        async with engine_of(new_model(), record_experts=True):
            pass
