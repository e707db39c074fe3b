"""A tiny model of every causal language model architecture of transformers.

Sizes come from one table of the usual field names; `EXCEPTIONS` has what an architecture needs
besides. Every type of layer is there, windows and chunks are shorter than the paths of `check.py`,
and weights are moved away from initialisation so that gates, sinks, caps and routers matter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 128
LOGITS = 10.0
"""Largest logit that a moved model has, before caps and scales."""

MOST_PARAMETERS = 1_000_000

# fmt: off
NOT_CAUSAL: dict[str, list[str]] = {
    "decoders that read an encoder": [
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "moshi",
        "musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ],
    "relatives of BERT, and of XLNet": [
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
        "megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
        "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
    ],
    "language models with a vision or audio encoder": [
        "dots3_note", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2",
        "mllama", "moss_transcribe_diarize", "phi4_multimodal",
    ],
    "drafters that read another model's states": ["gemma4_assistant", "gemma4_unified_assistant"],
}
# fmt: on
"""What transformers' mapping has besides causal language models of text: no row each."""

ALIASES = {
    "gpt-sw3": "gpt2",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Keys of transformers' mapping that lead to a model that is there under another name."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "sliding_window": 8,
    "attention_chunk_size": 16,
    "final_logit_softcapping": 6.0,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 16,  # with few, most scores are 0, and which of equals is taken is chance
    "index_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_d_ssm": 64,
    "state_size": 8,
    "chunk_size": 16,
    "time_step_rank": 4,
    "logits_scaling": 2.0,
    "logit_scale": 0.5,
    "router_jitter_noise": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "rotary_dim": 8,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LINEAR = "linear_attention"
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_PARTS: dict[str, Any] = {  # of BLT, which is made of four models
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 128,
    "hidden_size_global": 32,
    "max_position_embeddings": 256,
}
_PATCHER = {key: value for key, value in _PARTS.items() if key != "hidden_size_global"}

OFF_BY_DEFAULT = {
    *("sliding_window", "q_lora_rank", "n_group", "topk_group"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
}
"""Fields that stay None if that is the architecture's default."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": _DEFAULT_ROPE},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "patcher_config": {**_PATCHER, "sliding_window": 8},
        "encoder_config": _PARTS,
        "decoder_config": _PARTS,
        "global_config": _PARTS,
        "encoder_hash_byte_group_size": [3],
        "encoder_hash_byte_group_vocab": 64,
    },
    "cohere_compass_text": {"rope_parameters": {_FULL: _DEFAULT_ROPE, _SLIDING: _DEFAULT_ROPE}},
    "cpmant": {
        "dim_head": 8,
        "dim_ff": 48,
        "prompt_length": 4,
        "prompt_types": 4,
        "position_bias_num_buckets": 16,
        "segment_types": 4,
    },
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 16,
            "moe_num_experts": 8,
            "moe_top_k": 2,
        },
    },
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 8,
        "partial_rotary_factor": 0.5,
        "compress_rates": {
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": 16,
        },
    },
    "dots1": {"n_shared_experts": 1, "layer_types": [_SLIDING, _FULL]},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", _SLIDING, "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "shared_experts_intermediate_size": 16,
    },
    "emu3": {
        "text_config": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attention_dropout": 0.0,
        },
        "vocabulary_map": {"<image>": 5},
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.7,
        "attention_out_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "final_logit_softcapping": 6.0,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "window_size": 8,
    },
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", _FULL], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "nemotron": {"head_dim": 8},
    "nemotron_h": {
        "layers_block_type": [_LINEAR, "moe", _FULL, "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {
        "block_types": ("recurrent", "attention"),
        "lru_width": 32,
        "logits_soft_cap": 6.0,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "num_hidden_layers": 2,
        "sliding_window": 8,
    },
}
"""Architecture -> fields besides `SIZES`; a field that is `...` keeps the default."""

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, windowed": ("mistral", {"sliding_window": 8}),
    "mistral, full": ("mistral", {"sliding_window": None}),
    "qwen2, windowed": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "llama, dynamic NTK": (
        "llama",
        {
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "llama, dynamic NTK, beyond": (
        "llama",
        {
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "qwen3, three heads": (
        "qwen3",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "phi3, longrope": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 128,
            "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 128},
        },
    ),
    "phi3, longrope, beyond": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 48,
            "rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 48},
        },
    ),
    "gemma4_text, shared keys": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    ),
    "gemma4_text, keys are values": (
        "gemma4_text",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "mixtral, windowed": ("mixtral", {"sliding_window": 8}),
    "qwen3, windowed": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}
"""Row -> an architecture and what differs: settings that change how tokens interact."""


def _architectures() -> list[str]:
    out = {*ALIASES, *(name for names in NOT_CAUSAL.values() for name in names)}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in out]


ROWS: list[str] = sorted([*_architectures(), *VARIANTS])

FAMILIES = {
    "rotary positions": "llama",
    "tied embeddings": "llama, tied",
    "positions that depend on the length": "llama, dynamic NTK",
    "a length beyond what the positions allow": "phi3, longrope, beyond",
    "learned positions": "gpt2",
    "biases instead of positions": "bloom",
    "attention and feed-forward side by side": "gpt_neox",
    "one key for all heads": "gpt_bigcode",
    "fused projections": "phi3",
    "half a head is rotated": "stablelm",
    "heads that do not fill the width": "qwen3, three heads",
    "windows": "mistral, windowed",
    "caps": "gemma2",
    "windows between full layers": "gemma3_text",
    "embeddings per layer": "gemma3n_text",
    "keys of another layer": "gemma4_text, shared keys",
    "layers without positions": "cohere2",
    "chunks": "llama4_text",
    "sinks": "gpt_oss",
    "differences of attention": "diffllama",
    "indexed attention": "deepseek_v32",
    "latent attention, groups of experts": "deepseek_v3",
    "mixtures": "mixtral",
    "shared experts": "qwen2_moe",
    "mixtures of attention": "jetmoe",
    "delta rule": "qwen3_next",
    "delta rule with latent attention": "kimi_linear",
    "linear attention": "minimax",
    "convolutions": "lfm2",
    "state spaces": "mamba",
    "state spaces with heads": "mamba2",
    "state spaces beside attention": "falcon_h1",
    "state spaces between attention": "jamba",
    "state spaces with shared attention": "zamba2",
    "state spaces with mixtures": "nemotron_h",
    "recurrent gates": "recurrent_gemma",
    "time mixing": "rwkv",
    "matrix memory": "xlstm",
    "recurrent depth": "hrm_text",
}
"""What the code tells apart -> the row that the gate checks; nightly checks every row."""


def by_family(rows: Iterable[str]) -> list[Any]:
    """Return rows as parameters of a test, `long` but for one a family."""
    first = set(FAMILIES.values())
    return [pytest.param(row, marks=[] if row in first else pytest.mark.long) for row in rows]


@functools.cache
def _known(config_class: type) -> frozenset[str]:
    names = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    return frozenset({*names, *getattr(config_class, "attribute_map", {})})


def _is_fixed(config_class: type, key: str) -> bool:
    """Whether a field follows from others."""
    key = getattr(config_class, "attribute_map", {}).get(key, key)
    return isinstance(getattr(config_class, key, None), property)


def make_config(row: str) -> Any:
    """Return the tiny config of a row."""
    name, changes = VARIANTS.get(row, (row, {}))
    config_class = CONFIG_MAPPING[name]
    changes = {**EXCEPTIONS.get(name, {}), **changes}
    known = _known(config_class)
    fields = {key: value for key, value in SIZES.items() if key in known}
    fields |= {key: 0.0 for key in known if "drop" in key}
    if "kv_lora_rank" in known:  # every query head has a key of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    try:
        default = config_class()
    except Exception:
        default = None
    depth = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"} & known
    for key in OFF_BY_DEFAULT & known:
        if default is not None and default.to_dict().get(key, 0) is None:
            fields.pop(key, None)
    if getattr(default, "n_group", 0) == 1:
        fields.pop("n_group", None)
        fields.pop("topk_group", None)
    kinds = {
        key: list(dict.fromkeys(getattr(default, key, None) or []))
        for key in ("layer_types", "mlp_layer_types", "layers_block_type")
        if key in known and not _is_fixed(config_class, key)
    }
    has_switch = "use_sliding_window" in known  # then a variant turns it on
    if kinds.get("layer_types") == [_FULL] and "sliding_window" in fields and not has_switch:
        kinds["layer_types"] = [_SLIDING, _FULL]
    num_layers = max([2, *map(len, kinds.values())])
    if depth and not depth & changes.keys():
        fields |= dict.fromkeys(depth, num_layers)
        for key, found in kinds.items():
            if found:
                fields[key] = [found[min(i, len(found) - 1)] for i in range(num_layers)]
    fields |= changes
    fields = {key: value for key, value in fields.items() if value is not ...}
    return config_class(**fields)


def make_model(row: str, seed: int = 0) -> Any:
    """Return the tiny model of a row in float32, moved away from initialisation."""
    config = make_config(row)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{row} has {size:,} parameters: EXCEPTIONS lacks one of its sizes")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(row)).float().eval()
    return moved(model, seed)


@torch.no_grad()
def moved(model: Any, seed: int = 0) -> Any:
    """Move every weight in place; the largest logit before caps becomes `LOGITS`."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=rng)
        if parameter.ndim >= 2:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.2)
        else:
            parameter.add_(0.3 * noise)
    ids = torch.randint(
        3, min(VOCAB, model.config.get_text_config().vocab_size), (1, 60), generator=rng
    )
    head = model.get_output_embeddings()
    for _ in range(4):
        seen: list[float] = []
        handle = head.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(float(output.abs().max()))
        )
        model(input_ids=ids, use_cache=False)
        handle.remove()
        head.weight.mul_(LOGITS / seen[-1])
    return model
