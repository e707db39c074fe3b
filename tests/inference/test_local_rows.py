"""Models that the slots cannot serve run row by row, and exactly."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from local_models import ask, check, random_prompt
from test_local_probe import moved

from rolltree.inference.local import LocalEngine
from rolltree.inference.local.probe import choose_route
from rolltree.inference.local.rows import RowMode
from rolltree.inference.local.shell import cache_argument, cache_of
from rolltree.values.errors import ConfigError, UnsupportedSetting

torch.set_num_threads(1)
QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
ROWS: dict[str, tuple[RowMode, dict[str, Any]]] = {
    "qwen3_next": (RowMode.PIECES, QWEN3_NEXT),
    "mamba": (RowMode.TOKENS, {"state_size": 4, "use_mambapy": False}),
    "mamba2": (
        RowMode.PIECES,
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "lfm2": (RowMode.PIECES, {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]}),
    "recurrent_gemma": (
        RowMode.WHOLE,
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16, "head_dim": 8},
    ),
    "minimax": (
        RowMode.PIECES,
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bloom": (RowMode.PIECES, {"n_layer": 2, "n_head": 4}),
    "mpt": (RowMode.PIECES, {"d_model": 32, "n_heads": 4, "n_layers": 2}),
}


@pytest.mark.parametrize("kind", ROWS)
async def test_rows_of_different_lengths_are_the_models_own(kind: str) -> None:
    mode, changes = ROWS[kind]
    model = moved(kind, **changes)
    route = choose_route(model, 64)
    assert route.row_mode is mode
    assert ("every token computes its whole row again" in route.reason) == (mode is RowMode.WHOLE)
    engine = LocalEngine(model, max_context=64, max_batch=3, prefill_chunk=23)
    prompts = [random_prompt(seed, length) % 98 + 2 for seed, length in enumerate((1, 9, 30))]
    requests = [ask(prompt, temperature=1.0, max_tokens=7) for prompt in prompts]
    outputs = await asyncio.gather(*map(engine.generate, requests))
    longer = [
        np.concatenate([prompt, out.completion_ids, [5, 6]])
        for prompt, out in zip(prompts, outputs, strict=True)
    ]
    again = [ask(prompt, temperature=1.0, max_tokens=3) for prompt in longer]
    outputs += await asyncio.gather(*map(engine.generate, again))
    await engine.aclose()
    cached = [out.num_cached_tokens for out in outputs[3:]]
    assert cached == [len(prompt) - 3 for prompt in longer]  # all but the last sampled and the new
    check(model, outputs, prompts + longer)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "state", "mems"])
def test_a_cache_is_found_by_the_name_that_the_model_gives_it(name: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def forward(input_ids, {name}=None, use_cache=None): pass", made)
    assert cache_argument(SimpleNamespace(**made)) == name
    assert cache_of(SimpleNamespace(logits=1, **{name: "found"})) == "found"


def test_names_that_transformers_warns_of_are_not_asked_for_where_there_is_another() -> None:
    class Output:
        cache = "found"

        @property
        def past_key_values(self) -> Any:
            raise AssertionError("deprecated")

    assert cache_of(Output()) == "found"
    with pytest.raises(ValueError, match="returned no cache"):
        cache_of(SimpleNamespace(logits=1, cache=None))
    with pytest.raises(ValueError, match="takes no cache"):
        cache_argument(SimpleNamespace(forward=lambda input_ids: None))


def test_transformers_warns_of_nothing_that_the_engine_calls(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for kind in ("llama", "mamba"):
        route = choose_route(moved(kind, **ROWS.get(kind, (None, {}))[1]), 64)
        assert route.row_mode in (None, RowMode.TOKENS)
    assert "deprecated" not in caplog.text


async def test_a_group_computes_its_prompt_once(caplog: pytest.LogCaptureFixture) -> None:
    model = moved("qwen3_next", **QWEN3_NEXT)
    engine = LocalEngine(model, max_context=64, max_batch=4)
    assert "row by row in the embedded engine, which is slow: it keeps a Linear" in caplog.text
    prompt = random_prompt(0, 24) % 98 + 2
    group = [ask(prompt, temperature=1.0, seed=seed, max_tokens=5) for seed in range(4)]
    outputs = await asyncio.gather(*map(engine.generate, group))
    cut = ask(prompt[:12], temperature=1.0, max_tokens=5)  # no state was kept there
    other = await engine.generate(cut)
    stats = engine.stats
    await engine.aclose()
    assert sorted(out.num_cached_tokens for out in outputs) == [0, 23, 23, 23]
    assert other.num_cached_tokens == 0
    assert stats["num_cached_tokens"] == 3 * 23
    check(model, [*outputs, other], [prompt] * 4 + [prompt[:12]])


async def test_new_weights_reach_rows_in_flight() -> None:
    model = moved("lfm2", **ROWS["lfm2"][1])
    engine = LocalEngine(model, max_context=64, max_batch=2)
    prompt = random_prompt(0, 10) % 98 + 2
    await engine.generate(ask(prompt, max_tokens=4))
    async with engine.paused():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.1
        engine.publish(1)
    found = await engine.generate(ask(prompt, temperature=1.0, max_tokens=4))
    await engine.aclose()
    assert found.num_cached_tokens == 0
    check(model, [found], [prompt])


async def test_memory_of_rows_is_counted() -> None:
    model = moved("qwen3_next", **QWEN3_NEXT)
    route = choose_route(model, 64)
    assert route.row_bytes > 2 * 64 * 2 * 2 * 8 * 4  # two states of one layer's keys and values
    with pytest.raises(ConfigError, match="kv_budget_bytes"):
        LocalEngine(model, max_context=64, max_batch=2, kv_budget_bytes=route.row_bytes)


def test_what_needs_a_flat_batch_is_refused() -> None:
    model = moved("qwen3_next", **QWEN3_NEXT)
    with pytest.raises(UnsupportedSetting, match=r"batch_invariant.*row by row because"):
        LocalEngine(model, max_context=64, batch_invariant=True)
