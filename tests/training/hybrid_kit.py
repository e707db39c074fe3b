"""Tiny models with recurrent layers, and their recurrences token by token in float64."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch.nn.functional import silu, softplus
from training_kit import SIZES, Call
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 2}
LAYERS = {"num_hidden_layers": 3, "layer_types": DELTA_NET["layer_types"]}
HYBRIDS = {
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**DELTA_NET, "pad_token_id": 0},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "granitemoehybrid": {**MAMBA, **LAYERS, "num_local_experts": 0, "shared_intermediate_size": 24},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": ...,
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "use_mem_rope": True,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": DELTA_NET["layer_types"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "pad_token_id": 0,
    },
    "jamba": {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
}
"""Model type -> its configuration beside `SIZES`."""

ONE_PER_KERNEL = ("qwen3_next", "lfm2", "nemotron_h", "kimi_linear", "jamba")


def tiny_hybrid(kind):
    """A model of random weights, all of them moved away from what initialisation gives them."""
    torch.manual_seed(0)
    fields = {**SIZES, **HYBRIDS[kind]}
    config = AutoConfig.for_model(kind, **{k: v for k, v in fields.items() if v is not ...})
    config._experts_implementation = "eager"  # the others have no float64
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bushy(longest=66, seed=0):
    """Two prompts; below them branches of one token and more, one of them `longest` tokens long.

    Chunks have at most 64 tokens. Branches follow each other within the reach of a convolution and
    on several levels.
    """
    rng = np.random.default_rng(seed)

    def words(count):
        return rng.integers(0, SIZES["vocab_size"], count).tolist()

    calls = []
    for prompt, length in ((words(6), longest), (words(1), 3)):
        answers = [words(1), words(2), words(length), words(1)]
        calls += [Call(prompt, answer) for answer in answers]
        deeper = prompt + answers[2] + words(1)
        calls += [Call(deeper, words(count)) for count in (1, 2)]
        calls.append(Call(prompt + answers[2][:3], words(2)))
    for rollout, call in enumerate(calls):
        call.rollout, call.advantage = rollout, float(np.float32(rng.normal()))
    return calls


def token_by_token(query, key, value, log_decay, beta, parent=None):
    """The recurrence as it is written: one token after the other, each from its parent's state."""
    parent = range(-1, len(value) - 1) if parent is None else parent
    group = value.shape[1] // query.shape[1]
    query, key = query.repeat_interleave(group, 1), key.repeat_interleave(group, 1)
    nothing = value.new_zeros(value.shape[1], key.shape[-1], value.shape[-1])
    states, out = [], []
    for token, above in enumerate(parent):
        state = states[above] if above >= 0 else nothing
        decay = log_decay[token].exp()
        state = state * (decay[..., None] if decay.ndim == 2 else decay[:, None, None])
        written = value[token]
        if beta is not None:
            read = (state * key[token][..., None]).sum(-2)
            written = (written - read) * beta[token][:, None]
        states.append(state + key[token][..., None] * written[:, None])
        out.append((states[-1] * query[token][..., None]).sum(-2))
    return torch.stack(out)


def gated_delta_rule(query, key, value, g, beta, **_):
    """Qwen's recurrence in float64: as the model computes it, without its casts to float32."""

    def unit(rows):
        return rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    query, key, value, g, beta = (tensor[0].double() for tensor in (query, key, value, g, beta))
    query = unit(query) / query.shape[-1] ** 0.5
    return token_by_token(query, unit(key), value, g, beta)[None], None


def mamba2(x, dt, a, b, c, D, dt_bias, dt_limit, **_):
    """Mamba-2's recurrence in float64."""
    x, b, c = (tensor[0].double() for tensor in (x, b, c))
    step = softplus(dt[0].double() + dt_bias).clamp(*dt_limit)
    out = token_by_token(c, b, x * step[..., None], step * a, None)
    return (out + x * D[:, None])[None]


def mamba(x, dt, a, b, c, D, z, delta_bias, **_):
    """Mamba-1's recurrence in float64: one state per channel, which is a head of one value here."""
    step = softplus(dt[0].double() + delta_bias[:, None]).T
    decay = step[..., None] * a
    count, channels, _ = decay.shape
    keys, queries = (rows[0].T.double()[:, None].expand(count, channels, -1) for rows in (b, c))
    value = (step * x[0].T.double())[..., None]
    out = token_by_token(queries, keys, value, decay, None)[..., 0].T
    return ((out + x[0] * D[:, None]) * silu(z[0]))[None]


PLAIN = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}


def without_casts(monkeypatch, model):
    """Make the kernels of `model`'s own code exact in float64, for the reference."""
    code = sys.modules[type(model).__module__]
    for name, kernel in PLAIN.items():
        if hasattr(code, name):
            monkeypatch.setattr(code, name, kernel)
