"""The forward pass of Llama-like decoders, without transformers' modules.

transformers' forward spends a third of a small model's decode step in Python. For the architecture
that most models share (RMS norm, rotary positions, grouped attention, gated SiLU: Llama, Mistral,
Qwen 2 and 3, SmolLM, with biases and query/key norms), this module does the same arithmetic
directly on the model's own parameters. `probe` accepts it only if it gives the model's own logits;
every other model runs through transformers.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rolltree.inference.local.attention import attend
from rolltree.inference.local.plan import AttentionPlan
from rolltree.inference.local.shell import reset_angles
from rolltree.inference.local.slots import SlotCache

_PARTS = {
    "": ({"model", "lm_head"}, set()),
    "model": ({"embed_tokens", "layers", "norm", "rotary_emb"}, set()),
    "layer": ({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}, set()),
    "self_attn": ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}),
    "mlp": ({"gate_proj", "up_proj", "down_proj", "act_fn"}, set()),
}
"""The child modules that each part must have, and those that it may have."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square normalisation (Zhang and Sennrich 2019)."""

    weight: Tensor
    epsilon: float

    def __call__(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class _HeadNorms:
    """The norms of query and key heads, applied to both at once: `[_T, _H + keys, head_dim]`."""

    query: _Norm
    key: _Norm

    def __call__(self, heads: Tensor, num_query_heads: int) -> Tensor:
        weight = self.query.weight
        # Applied at once, since a small model's step is many small operations (design/0002).
        num_keys = heads.shape[1] - num_query_heads
        weights = torch.cat(
            [weight.expand(num_query_heads, -1), self.key.weight.expand(num_keys, -1)]
        )
        return functional.rms_norm(heads, weight.shape, None, self.query.epsilon).mul_(weights)


class _Linear:
    """One or several linear maps of the same input, side by side: `[_T, in]` to `[_T, out]`.

    With `packed` they are copied into one transposed matrix, which makes products on a CPU 1.3
    times as fast (design/0002). Otherwise, or if they have biases, the model's own tensors are
    used.
    """

    def __init__(self, *modules: Any, packed: bool) -> None:
        for module in modules:
            # Subclasses, such as adapters and quantised layers, do more than the product.
            if type(module) is not nn.Linear:
                raise TypeError(f"it has a {type(module).__name__} where a Linear was expected")
        self.own = [(module.weight, module.bias) for module in modules]
        weight = modules[0].weight
        self._packed: Tensor | None = None
        # torch multiplies by a contiguous matrix faster than by a transposed view: 107 to 135
        # instead of 80 to 90 GFLOP/s at 64 rows (design/0002).
        if packed and not any(bias is not None for _, bias in self.own):
            width = sum(own.shape[0] for own, _ in self.own)
            self._packed = weight.new_empty((weight.shape[1], width), requires_grad=False)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the model's current weights."""
        if self._packed is None:
            return
        parts = torch.split(self._packed, [own.shape[0] for own, _ in self.own], dim=1)
        for part, (own, _) in zip(parts, self.own, strict=True):
            part.copy_(own.t())

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._packed is not None:
            return inputs @ self._packed
        outputs = [functional.linear(inputs, weight, bias) for weight, bias in self.own]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def add_to(self, states: Tensor, inputs: Tensor) -> None:
        """Add the map of `inputs` to `states`, in place."""
        weight, bias = self.own[0]
        states.addmm_(inputs, weight.t() if self._packed is None else self._packed)
        if bias is not None:
            states += bias


@dataclass(frozen=True, slots=True)
class _Layer:
    before: _Norm
    attention: _Linear  # query, key and value heads
    num_heads: int  # of the query
    head_dim: int
    norms: _HeadNorms | None
    output: _Linear
    scaling: float
    between: _Norm
    gate_up: _Linear
    down: _Linear


class LeanForward:
    """Computes the logits of a Llama-like `model` from a flat batch of tokens.

    With `packed` it keeps a transposed copy of the layers' matrices, which `pack` renews.

    Raises:
        TypeError: the model has parts that this forward pass does not know.
    """

    def __init__(self, model: Any, *, packed: bool = False) -> None:
        _check_parts(model, "")
        inner = model.model
        _check_parts(inner, "model")
        self._embedding = inner.embed_tokens.weight
        self._rotary = copy.deepcopy(inner.rotary_emb)
        reset_angles(self._rotary)
        self._angles: tuple[Tensor, Tensor] | None = None
        self._layers = [_read_layer(layer, packed) for layer in inner.layers]
        self._norm = _read_norm(inner.norm)
        if type(model.lm_head) is not nn.Linear:
            raise TypeError(f"its head is a {type(model.lm_head).__name__}")
        self._head = model.lm_head.weight, model.lm_head.bias
        self.pack()

    def pack(self) -> None:
        """Renew the packed copies after the weights were changed in place."""
        for layer in self._layers:
            for linear in (layer.attention, layer.output, layer.gate_up, layer.down):
                linear.pack()

    def tensors(self) -> list[Tensor]:
        """Return the parameters that a call reads, or copies that `pack` renews."""
        found: list[Tensor | None] = [self._embedding, self._norm.weight, *self._head]
        for layer in self._layers:
            for name in _Layer.__slots__:
                part = getattr(layer, name)
                if isinstance(part, _Norm):
                    found.append(part.weight)
                elif isinstance(part, _HeadNorms):
                    found.extend((part.query.weight, part.key.weight))
                elif isinstance(part, _Linear):
                    found.extend(itertools.chain(*part.own))
        return [tensor for tensor in found if tensor is not None]

    def __call__(self, plan: AttentionPlan, cache: SlotCache) -> Tensor:
        """Return logits `[_B, _V]` after the plan's newest tokens."""
        states = functional.embedding(plan.tokens, self._embedding)  # [_T, _D]
        # Computed once for all positions, since every layer and step needs the same angles.
        if self._angles is None or len(self._angles[0]) < cache.capacity:
            self._angles = self._read_angles(states, cache.capacity)
        cosine, sine = (table[plan.positions] for table in self._angles)
        # `roll` by half a head, with the sign in the sine, equals transformers' `rotate_half`
        # without two slices and a concatenation.
        half = sine.shape[-1] // 2
        for layer, slot in zip(self._layers, cache.layers, strict=True):
            heads = layer.attention(layer.before(states)).view(len(states), -1, layer.head_dim)
            num_keys = (heads.shape[1] - layer.num_heads) // 2
            turned, value = heads[:, :-num_keys], heads[:, -num_keys:]
            if layer.norms is not None:
                turned = layer.norms(turned, layer.num_heads)
            turned = torch.addcmul(turned * cosine, turned.roll(half, -1), sine)
            slot.write(turned[:, -num_keys:], value, plan)
            found = attend(turned[:, :-num_keys], slot.keys, slot.values, plan, layer.scaling)
            layer.output.add_to(states, found.flatten(1))
            gate, up = layer.gate_up(layer.between(states)).chunk(2, dim=-1)
            layer.down.add_to(states, functional.silu(gate).mul_(up))
        # The head runs only for the last token of each row.
        return functional.linear(self._norm(states[plan.newest]), *self._head)

    def _read_angles(self, states: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions; the first half of the sines is negated."""
        positions = torch.arange(num_positions, device=states.device)
        cosine, sine = self._rotary(states, positions[None])
        sine = sine[0].clone()
        sine[:, : sine.shape[-1] // 2].neg_()
        return cosine[0][:, None].clone(), sine[:, None]


def _read_layer(layer: Any, packed: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    _check_parts(layer, "layer")
    _check_parts(attention, "self_attn")
    _check_parts(mlp, "mlp")
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise TypeError(f"its activation is {type(mlp.act_fn).__name__}")
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _HeadNorms(_read_norm(attention.q_norm), _read_norm(attention.k_norm))
        if norms.query.epsilon != norms.key.epsilon:
            raise TypeError("its query and key norms differ in their epsilon")
    return _Layer(
        before=_read_norm(layer.input_layernorm),
        attention=_Linear(attention.q_proj, attention.k_proj, attention.v_proj, packed=packed),
        num_heads=attention.q_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        norms=norms,
        output=_Linear(attention.o_proj, packed=packed),
        scaling=float(attention.scaling),
        between=_read_norm(layer.post_attention_layernorm),
        gate_up=_Linear(mlp.gate_proj, mlp.up_proj, packed=packed),
        down=_Linear(mlp.down_proj, packed=packed),
    )


def _read_norm(module: Any) -> _Norm:
    if not type(module).__name__.endswith("RMSNorm") or module.weight.ndim != 1:
        raise TypeError(f"it normalises with {type(module).__name__}")
    return _Norm(module.weight, float(module.variance_epsilon))


def _check_parts(module: Any, part: str) -> None:
    """Raise `TypeError` unless `module` has exactly the children that `part` must or may have."""
    needed, allowed = _PARTS[part]
    children = {name for name, _ in module.named_children()}
    # An unknown child could change the result; transformers runs such a model.
    if not needed <= children <= needed | allowed:
        raise TypeError(f"{type(module).__name__} has the parts {sorted(children)}")
