"""The forward pass of Llama-like decoders, without the modules around it.

transformers' forward spends a third of a small model's decode step in Python: module calls,
keyword plumbing, one kernel per addition. For the one architecture that most models share (RMS
norm, rotary positions, grouped attention, gated SiLU: Llama, Mistral, Qwen 2 and 3, SmolLM) the
same arithmetic is written out here on the model's own parameters. `probe` accepts it only after it
gave the model's own logits; every other model runs through transformers. The module knows nothing
about requests, and it leaves out every variation but biases and query/key norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolltree.inference.local.attention import Plan, attend
from rolltree.inference.local.cache import SlotCache

_PARTS = {
    "": ({"model", "lm_head"}, set()),
    "model": ({"embed_tokens", "layers", "norm", "rotary_emb"}, set()),
    "layer": ({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set()),
    "self_attn": ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}),
    "mlp": ({"gate_proj", "up_proj", "down_proj", "act_fn"}, set()),
}
"""The child modules that each part has, and those it may have."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]
    value: tuple[Tensor, Tensor | None]
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: tuple[Tensor, Tensor | None]
    scaling: float
    between: _Norm
    gate: tuple[Tensor, Tensor | None]
    up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class LeanForward:
    """Logits of a Llama-like `model` from a flat batch of tokens.

    Raises:
        TypeError: the model has other parts than this forward pass knows.
    """

    def __init__(self, model: Any) -> None:
        _check_parts(model, "")
        inner = model.model
        _check_parts(inner, "model")
        self._embedding = inner.embed_tokens.weight
        self._rotary = inner.rotary_emb
        self._layers = [_read_layer(layer) for layer in inner.layers]
        self._norm = _read_norm(inner.norm)
        self._head = _read_linear(model.lm_head)

    def tensors(self) -> list[Tensor]:
        """Return the parameters that a call reads."""
        found: list[Tensor | None] = [self._embedding, self._norm.weight, *self._head]
        for layer in self._layers:
            for name in _Layer.__slots__:
                part = getattr(layer, name)
                if isinstance(part, _Norm):
                    found.append(part.weight)
                elif isinstance(part, tuple):
                    found.extend(part)
        return [tensor for tensor in found if tensor is not None]

    def __call__(self, plan: Plan, cache: SlotCache) -> Tensor:
        """Return logits `[_B, _V]` after the plan's newest tokens."""
        states = functional.embedding(plan.tokens, self._embedding)  # [_T, _D]
        cosine, sine = self._rotary(states, plan.positions[None])
        cosine, sine = cosine[0][:, None], sine[0][:, None].clone()
        half = sine.shape[-1] // 2
        sine[..., :half].neg_()
        for layer, slot in zip(self._layers, cache.layers, strict=True):
            normed = layer.before(states)
            shape = (len(states), -1, cache.head_dim)
            query = functional.linear(normed, *layer.query).view(shape)  # [_T, _H, head_dim]
            key = functional.linear(normed, *layer.key).view(shape)
            value = functional.linear(normed, *layer.value).view(shape)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = layer.query_norm(query), layer.key_norm(key)
            query = torch.addcmul(query * cosine, query.roll(half, -1), sine)
            key = torch.addcmul(key * cosine, key.roll(half, -1), sine)
            slot.write(key, value, plan)
            found = attend(query, slot.keys, slot.values, plan, layer.scaling)
            _add_linear(states, found.flatten(1), layer.output)
            normed = layer.between(states)
            gate = functional.silu(functional.linear(normed, *layer.gate), inplace=True)
            _add_linear(states, gate.mul_(functional.linear(normed, *layer.up)), layer.down)
        return functional.linear(self._norm(states[plan.newest]), *self._head)


def _add_linear(states: Tensor, inputs: Tensor, linear: tuple[Tensor, Tensor | None]) -> None:
    """Add a linear map of `inputs` to `states`, in place."""
    weight, bias = linear
    states.addmm_(inputs, weight.t())
    if bias is not None:
        states += bias


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    _check_parts(layer, "layer")
    _check_parts(attention, "self_attn")
    _check_parts(mlp, "mlp")
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise TypeError(f"its activation is {type(mlp.act_fn).__name__}")
    normed = hasattr(attention, "q_norm")
    return _Layer(
        before=_read_norm(layer.input_layernorm),
        query=_read_linear(attention.q_proj),
        key=_read_linear(attention.k_proj),
        value=_read_linear(attention.v_proj),
        query_norm=_read_norm(attention.q_norm) if normed else None,
        key_norm=_read_norm(attention.k_norm) if normed else None,
        output=_read_linear(attention.o_proj),
        scaling=float(attention.scaling),
        between=_read_norm(layer.post_attention_layernorm),
        gate=_read_linear(mlp.gate_proj),
        up=_read_linear(mlp.up_proj),
        down=_read_linear(mlp.down_proj),
    )


def _read_linear(module: Any) -> tuple[Tensor, Tensor | None]:
    if type(module) is not nn.Linear:
        raise TypeError(f"it has a {type(module).__name__} where a Linear was expected")
    return module.weight, module.bias


def _read_norm(module: Any) -> _Norm:
    if not type(module).__name__.endswith("RMSNorm") or module.weight.ndim != 1:
        raise TypeError(f"it normalises with {type(module).__name__}")
    return _Norm(module.weight, float(module.variance_epsilon))


def _check_parts(module: Any, part: str) -> None:
    """Raise `TypeError` unless `module` has just the children that its part is known to have."""
    needed, allowed = _PARTS[part]
    children = {name for name, _ in module.named_children()}
    if not needed <= children <= needed | allowed:
        raise TypeError(f"{type(module).__name__} has the parts {sorted(children)}")
