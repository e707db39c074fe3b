"""Windows, chunks, sinks, caps, compressed keys and layers of different shapes, over slots."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from local_models import ask, check, random_prompt
from test_local_probe import moved

from rolltree.inference.local import LocalEngine
from rolltree.inference.local.probe import choose_route

torch.set_num_threads(1)
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
GEMMA = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8}
SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
    "num_kv_shared_layers": 2,
}
SLOTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 8},
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
    "cohere2": {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": GEMMA,
    "gemma3n_text": GEMMA | SHARED | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": GEMMA | SHARED | {"global_head_dim": 16},
    "gpt_oss": {"head_dim": 8, "sliding_window": 8, **EXPERTS},
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "attention_chunk_size": 8,
        "floor_scale": 8,  # attention that sharpens with the position, counted from the cache
        "intermediate_size_mlp": 48,
        **EXPERTS,
    },
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "minicpm3": LATENT,
    "jetmoe": {"kv_channels": 8, **EXPERTS},
    "granitemoe": EXPERTS | {"logits_scaling": 4.0},
    "stablelm": {},
}


@pytest.mark.parametrize("kind", SLOTS)
async def test_far_beyond_the_window_logprobs_are_the_models_own(kind: str) -> None:
    model = moved(kind, **SLOTS[kind])
    route = choose_route(model, 96)
    assert (route.lean, route.row_mode) == (False, None)
    engine = LocalEngine(model, max_context=96, max_batch=3, prefill_chunk=23)
    prompts = [random_prompt(seed, length) % 98 + 2 for seed, length in enumerate((1, 9, 40))]
    requests = [ask(prompt, temperature=1.0, max_tokens=12) for prompt in prompts]
    outputs = await asyncio.gather(*map(engine.generate, requests))
    longer = [
        np.concatenate([prompt, out.completion_ids, [5, 6]])
        for prompt, out in zip(prompts, outputs, strict=True)
    ]
    longer.append(np.concatenate([prompts[2][:25], [7, 8, 9]]))  # cut inside what is cached
    again = [ask(prompt, temperature=1.0, max_tokens=6) for prompt in longer]
    outputs += await asyncio.gather(*map(engine.generate, again))
    await engine.aclose()
    assert sum(out.num_cached_tokens for out in outputs) > 60
    check(model, outputs, prompts + longer)


@pytest.mark.parametrize("kind", ["mistral", "cohere2", "llama4_text", "gemma2"])
async def test_a_batch_changes_no_bit_of_it(kind: str) -> None:
    model = moved(kind, **SLOTS[kind])
    prompts = [random_prompt(seed, length) % 98 + 2 for seed, length in enumerate((30, 9, 40))]
    requests = [ask(prompt, temperature=1.0, seed=1, max_tokens=5) for prompt in prompts]
    engine = LocalEngine(model, max_context=96, max_batch=3, batch_invariant=True)
    together = await asyncio.gather(*map(engine.generate, requests))
    async with engine.paused():
        engine.publish(1)
    alone = await engine.generate(requests[2])
    await engine.aclose()
    assert alone.num_cached_tokens == 0
    assert alone.completion_ids.tolist() == together[2].completion_ids.tolist()
    assert alone.logprobs.tobytes() == together[2].logprobs.tobytes()


def test_a_window_is_not_mistaken_for_a_plain_llama() -> None:
    model = moved("mistral", sliding_window=64)
    assert choose_route(model, 64).lean  # wider than the context
    assert not choose_route(model, 65).lean


def test_scales_that_grow_with_the_position_are_not_missed() -> None:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 64,
    }
    model = moved("ministral3", head_dim=8, rope_parameters=rope)
    assert choose_route(model, 64).lean
    assert not choose_route(model, 96).lean
