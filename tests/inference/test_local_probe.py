from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from local_models import ask, check, greedy, new_model, random_prompt, shared_model
from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

from rolltree.inference.local import LocalEngine
from rolltree.inference.local.probe import choose_route, max_stable_positions
from rolltree.inference.local.shell import trial_copy
from rolltree.inference.local.slots import LayerShape
from rolltree.values.errors import UnsupportedSetting

torch.set_num_threads(1)
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    if kind == "t5":
        return T5ForConditionalGeneration(config).eval()
    return AutoModelForCausalLM.from_config(config).eval()


def moved(kind: str, **changes: Any) -> Any:
    """Return a model whose weights do not look like fresh ones."""
    return trial_copy(make(kind, **changes), max_context=0)


LEAN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}
THROUGH_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma": {"head_dim": 8},
    "phi3": {},
    "olmo2": {},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "cohere": {"logit_scale": 0.5},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", [*LEAN, *THROUGH_TRANSFORMERS])
async def test_any_plain_model_decodes_as_without_a_cache(kind: str) -> None:
    model = make(kind, **{**LEAN, **THROUGH_TRANSFORMERS}[kind])
    route = choose_route(model, 64)
    assert route.lean == (kind in LEAN)
    assert route.shape is not None
    assert len(route.shape.layers) == model.config.num_hidden_layers
    engine = LocalEngine(model, max_context=64, max_batch=2)
    rng = np.random.default_rng(0)
    for length in (1, 4, 9):
        prompt = rng.integers(3, 100, length)
        found = await engine.generate(ask(prompt, max_tokens=5))
        assert found.completion_ids.tolist() == greedy(model, prompt, 5)
    await engine.aclose()


async def test_biases_are_added() -> None:
    model = make("llama", attention_bias=True, mlp_bias=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert choose_route(model, 64).lean
    engine = LocalEngine(model, max_context=64, max_batch=1)
    found = await engine.generate(ask([5, 6, 7]))
    assert found.completion_ids.tolist() == greedy(model, [5, 6, 7], 6)
    await engine.aclose()


def test_the_shape_of_the_cache_is_read_off_the_model() -> None:
    route = choose_route(make("qwen3", head_dim=16).to(torch.bfloat16), 64)
    shape = route.shape
    assert shape is not None
    assert shape.layers == (LayerShape(2, 16, 16),) * 2
    assert shape.dtype is torch.bfloat16
    assert route.lean


def test_a_hook_that_changes_something_is_not_bypassed() -> None:
    model = new_model()
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    assert choose_route(model, 64).lean is False


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two inputs": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}, "token ids"),
    "moving rope": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        "change when a sequence passes 32 tokens.*use max_context=32",
    ),
    "too short": ("llama", {"max_position_embeddings": 16}, "has 16 positions, and"),
    "both directions": ("bert", {"is_decoder": False}, "gives different logits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_reproduced_is_refused(case: str) -> None:
    kind, changes, reason = REFUSED[case]
    with pytest.raises(UnsupportedSetting, match=reason):
        choose_route(make(kind, **changes), 64)


def test_position_embeddings_that_move_later_are_served() -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 48,
        "rope_theta": 1e4,
    }
    model = make("phi3", rope_parameters=rope, original_max_position_embeddings=48)
    assert choose_route(model, 48).row_mode is None
    with pytest.raises(UnsupportedSetting, match="passes 48 tokens"):
        LocalEngine(model, max_context=49)
    assert LocalEngine(model, max_batch=1).max_context == 48


LIMIT = 48
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": LIMIT,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "rope"), [("llama", DYNAMIC), ("olmo2", DYNAMIC), ("llama", LONGROPE)]
)
async def test_angles_of_a_longer_sequence_do_not_reach_the_engine(
    kind: str, rope: dict[str, Any], when: str
) -> None:
    """`before` or `after` the engine is made; up to the very last position that is served."""
    own = {"max_position_embeddings": LIMIT} if rope is DYNAMIC else {}
    model = moved(kind, rope_parameters=rope, **own)
    fresh = copy.deepcopy(model)

    def pass_the_limit() -> None:
        with torch.no_grad():
            model(torch.arange(LIMIT + 12)[None] % 97 + 2, use_cache=False)

    if when == "before":
        pass_the_limit()
    engine = LocalEngine(model, max_batch=2, max_context=LIMIT)
    if when == "after":
        pass_the_limit()
    prompts = [random_prompt(length, length) % 98 for length in (5, LIMIT - 6)]
    outputs = [await engine.generate(ask(p, temperature=1.0, max_tokens=6)) for p in prompts]
    await engine.aclose()
    check(fresh, outputs, prompts)


def test_the_trainers_mode_does_not_disturb() -> None:
    model = make("llama", attention_dropout=0.5)
    model.train()
    model.activation_checkpointing_enable()
    assert choose_route(model, 64).lean
    assert model.training
    assert model.is_activation_checkpointing


def test_a_runner_uses_the_models_own_tensors() -> None:
    for model in (shared_model(), make("gemma", head_dim=8)):
        runner = choose_route(model, 32).runner(model, 2, 32)
        if not runner.lean:
            pairs = zip(model.parameters(), runner._model.parameters(), strict=True)
            assert all(mine is theirs for mine, theirs in pairs)
        ids = np.arange(64, dtype=np.int32).reshape(2, 32)
        with torch.inference_mode():
            before = runner.forward([0], ids, np.array([0]), np.array([5]))
        weight = model.model.norm.weight
        with torch.no_grad():
            weight += 1
        with torch.inference_mode():
            after = runner.forward([0], ids, np.array([0]), np.array([5]))
        with torch.no_grad():
            weight -= 1
        assert not torch.allclose(before, after)


def test_a_configuration_without_a_length_is_no_crash() -> None:
    model = make("bloom", n_layer=2, n_head=4)
    del model.config.max_position_embeddings
    assert max_stable_positions(model) is None
