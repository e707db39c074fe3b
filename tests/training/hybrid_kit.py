"""Tiny models with recurrent layers, and their recurrences token by token in float64."""

from __future__ import annotations

import sys

import numpy as np
import torch
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
HYBRIDS = {
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 16},
}
"""Model type -> its configuration beside `SIZES`."""


def tiny_hybrid(kind):
    """A model of random weights, all of them moved away from what initialisation gives them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **HYBRIDS[kind]})
    config._experts_implementation = "eager"  # the others have no float64
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def bushy(seed=0):
    """Two prompts; below them branches of one token and more, one of them longer than a chunk.

    Branches follow each other within the reach of a convolution and on several levels.
    """
    rng = np.random.default_rng(seed)

    def words(count):
        return rng.integers(0, SIZES["vocab_size"], count).tolist()

    calls = []
    for prompt, length in ((words(6), 66), (words(1), 3)):
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


PLAIN = {"torch_chunk_gated_delta_rule": gated_delta_rule}


def without_casts(monkeypatch, model):
    """Make the kernels of `model`'s own code exact in float64, for the reference."""
    code = sys.modules[type(model).__module__]
    for name, kernel in PLAIN.items():
        if hasattr(code, name):
            monkeypatch.setattr(code, name, kernel)
