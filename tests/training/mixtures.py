"""Tiny mixtures with moved weights, and rollouts whose routed experts are recorded."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from training_kit import SIZES, engine_logprobs, states
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig

from rolltree.tokens import ROUTED_EXPERTS, TokenStream

NUM_EXPERTS, TOP_K = 8, 3
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_CONFIGS = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": NUM_EXPERTS, "head_dim": 8}),
    "deepseek_v2": (DeepseekV2Config, {**_MLA, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (DeepseekV3Config, _MLA),
}


def mixture(kind="qwen3_moe", seed=0, **changes):
    """Three layers with `TOP_K` of `NUM_EXPERTS` experts, away from the first weights."""
    torch.manual_seed(seed)
    made, own = _CONFIGS[kind]
    sizes = {**SIZES, "num_hidden_layers": 3, "moe_intermediate_size": 24}
    sizes |= {"num_experts_per_tok": TOP_K, "norm_topk_prob": True, **own, **changes}
    model = AutoModelForCausalLM.from_config(made(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def choices(rng, num_tokens, num_layers=3, num_groups=4):
    """Distinct experts of at most two groups for every token, as a grouped router chooses them."""
    size = NUM_EXPERTS // num_groups
    found = np.zeros((num_tokens, num_layers, TOP_K), np.uint8)
    for token in range(num_tokens):
        for layer in range(num_layers):
            groups = rng.choice(num_groups, 2, replace=False)
            allowed = (groups[:, None] * size + np.arange(size)).ravel()
            found[token, layer] = rng.choice(allowed, TOP_K, replace=False)
    return found


def routed_states(model=None, seed=0, skip=()):
    """`states()` with random experts, one choice per distinct prefix, `skip` calls without any."""
    rollouts = states(model=model, seed=seed)
    known: dict[bytes, np.ndarray] = {}
    rng = np.random.default_rng(seed + 100)
    number = 0
    for state in rollouts:
        tree = state["trajectory"].tree
        for call in range(tree.num_calls):
            path = np.concatenate([tree.prompt_ids(call), tree.completion_ids(call)])
            rows = []
            for end in range(1, len(path)):
                key = path[:end].tobytes()
                if key not in known:
                    known[key] = choices(rng, 1)[0]
                rows.append(known[key])
            if number not in skip:
                tree.label(
                    call,
                    agent=tree.agent(call),
                    turn=tree.turn(call),
                    streams={ROUTED_EXPERTS: TokenStream(np.stack(rows), 0)},
                )
            number += 1
    return rollouts, known


class _Given(nn.Module):
    """A router written out by hand: the experts are given, the scores are those of the weights."""

    def __init__(self, router, kind):
        super().__init__()
        self.router, self.kind = router, kind
        self.ids = None

    def forward(self, hidden_states):
        router, ids = self.router, self.ids
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = flat @ router.weight.T.to(flat.dtype)
        own = {"deepseek_v3": torch.sigmoid(logits)}.get(self.kind, logits.softmax(-1))
        scores = own.gather(1, ids)
        if self.kind == "qwen3_moe":
            scores = scores / scores.sum(-1, keepdim=True)
        elif self.kind == "deepseek_v3":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
        else:
            scores = scores * router.routed_scaling_factor
        return logits, scores, ids


@contextmanager
def given_experts(model, kind, ids):
    """Let every router of `model` take `ids`, `[_T, layers, top_k]`, without rolltree's replay."""
    layers = model.base_model.layers
    gates = {i: layer.mlp.gate for i, layer in enumerate(layers) if hasattr(layer.mlp, "gate")}
    for index, gate in gates.items():
        layers[index].mlp.gate = _Given(gate, kind)
        layers[index].mlp.gate.ids = torch.from_numpy(ids[:, index].astype(np.int64))
    try:
        yield
    finally:
        for index, gate in gates.items():
            layers[index].mlp.gate = gate


__all__ = ["choices", "engine_logprobs", "given_experts", "mixture", "routed_states"]
