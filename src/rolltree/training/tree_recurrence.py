"""Recurrent layers over a packed forest: short convolutions, gated delta rule, state spaces.

A token's state follows from the state of its parent, so a branch starts from the state (and the
last tokens of the convolution) where it leaves its path, and gradients of all branches add up
there. Everything in such a layer that is per token runs once over the flat forest in the model's
own code: inside `tree_recurrence(model)` its kernels are replaced by those of this file, by name,
on the instances of the model alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d
from transformers.activations import ACT2FN

from rolltree.errors import TrainingError
from rolltree.training.recurrence_layout import Chunks, RecurrenceLayout

CHUNK = 64
"""Tokens per chunk, as in the model's own kernels (design/0021)."""


class _Gather(torch.autograd.Function):
    """Rows of a `[_T, ...]` tensor at the places of the chunks, `[_N, _C, ...]`; pads are zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return padded[chunks.token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.flatten(0, 1).index_select(0, ctx.chunks.place), None


def _gather(rows: Tensor, chunks: Chunks) -> Tensor:
    """Return float rows by chunk and head: `[_T, _H, ...]` -> `[_N, _H, _C, ...]`."""
    found: Tensor = _Gather.apply(rows, chunks)  # type: ignore[no-untyped-call]
    return found.transpose(1, 2)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    layout: RecurrenceLayout,
    size: int = CHUNK,
) -> Tensor:
    """Read the states of a gated linear recurrence over a forest, chunk by chunk.

    The state after token t with parent p is `S = exp(log_decay) * S_p + k v'` (outer product), the
    result `q S`. With `beta` this is the gated delta rule, `v' = beta * (v - k (exp(log_decay) *
    S_p))` (Yang et al. 2024, arXiv:2412.06464); without it `v' = v` (Mamba-2: Dao and Gu 2024,
    arXiv:2405.21060). Inside a chunk all `v'` come from one triangular system; between chunks only
    states pass.

    Args:
        query, key: `[_T, _G, d]`; `_G` divides `_H`, each head serves consecutive value heads.
        value: `[_T, _H, w]`.
        log_decay: `[_T, _H]`, at most 0.
        beta: `[_T, _H]`, or None.
        layout: the forest.
        size: tokens per chunk; it changes the time, not the result.

    Returns:
        `[_T, _H, w]`.
    """
    chunks = layout.chunks(size)
    q, k, v = (_gather(rows, chunks) for rows in (query, key, value))
    num_heads = v.shape[1]
    heads = partial(_repeat, count=num_heads // q.shape[1])
    seen = chunks.seen[:, None]
    decay = _gather(log_decay[..., None], chunks)
    total = seen.to(decay.dtype) @ decay  # [_N, _H, _C, 1], from the chunk's start
    between = (total - total.transpose(2, 3)).masked_fill(~seen, float("-inf")).exp()
    grown = total.exp()
    scores = heads(q @ k.transpose(2, 3)) * between
    k_heads = heads(k)
    reads = None
    if beta is not None:
        rate = _gather(beta[..., None], chunks)
        system = heads(k @ k.transpose(2, 3)) * between * rate
        right = torch.cat([v * rate, k_heads * (rate * grown)], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    exits = chunks.exit_place
    chunk, offset = exits // chunks.token.shape[1], exits % chunks.token.shape[1]
    writes = (k_heads[chunk] * between[chunk, :, offset][..., None]).transpose(2, 3)
    kept = grown[chunk, :, offset][..., None]
    state, v = _scan(v, reads, writes, kept, chunks)
    out = scores @ v
    if state is not None:
        later = chunks.levels[0].stop
        further = (heads(q[later:]) * grown[later:]) @ state
        out = torch.cat([out[:later], out[later:] + further])
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.place)


def _repeat(heads: Tensor, count: int) -> Tensor:
    return heads.repeat_interleave(count, 1) if count > 1 else heads


def _scan(
    v: Tensor, reads: Tensor | None, writes: Tensor, kept: Tensor, chunks: Chunks
) -> tuple[Tensor | None, Tensor]:
    """Pass states from level to level.

    Returns the states that the chunks of all levels but the first start from, and the values that
    are written.
    """
    states: list[Tensor] = []
    values: list[Tensor] = []
    ends = v.new_empty(0)
    for level in chunks.levels:
        new = v[level.first : level.stop]
        start = None
        if level.entry is not None:
            start = ends.index_select(0, level.entry)
            states.append(start)
            if reads is not None:
                new = new - reads[level.first : level.stop] @ start
        values.append(new)
        if level.exit_first < level.exit_stop:
            part = slice(level.exit_first, level.exit_stop)
            ends = writes[part] @ new.index_select(0, level.exit_chunk)
            if start is not None:
                ends = ends + kept[part] * start.index_select(0, level.exit_chunk)
    return (torch.cat(states) if states else None), torch.cat(values)


def _exact(*tensors: Tensor) -> list[Tensor]:
    """Return one row's tensors, `[1, _T, ...]` -> `[_T, ...]`, in float32 or wider."""
    return [tensor[0].to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _gated_delta_rule(
    layout: RecurrenceLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v, decay, rate = _exact(query, key, value, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    out = linear_attention(q * q.shape[-1] ** -0.5, k, v, decay, rate, layout)
    return out[None].to(query.dtype), None


def _convolution(
    layout: RecurrenceLayout,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve the last tokens of each path, `[1, channels, _T]`, with `weight` `[channels, K]`.

    The whole row at once, then anew where a token's last K are not those before it in the row.
    """
    channels, width = weight.shape
    count = hidden_states.shape[-1]
    rows = hidden_states.to(weight.dtype)
    out = conv1d(rows, weight[:, None], bias, padding=width - 1, groups=channels)[..., :count]
    moved, ancestors = layout.taps(width)
    if len(moved):
        padded = torch.cat([rows, rows.new_zeros(1, channels, 1)], -1)
        last = padded[0].index_select(1, ancestors.flatten()).view(channels, -1, width)
        anew = (last * weight[:, None]).sum(-1)
        out = out.index_copy(2, moved, (anew if bias is None else anew + bias[:, None])[None])
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
}
"""The name a layer's forward calls -> what takes its place over a forest, layout first."""

_ONE_TOKEN = frozenset({"causal_conv1d_update", "torch_recurrent_gated_delta_rule"})
"""What the same layers call only for one token with a cache, so never here."""

_MIXES = re.compile(r"conv1d|scan|delta|recurren|mamba|kda")
"""Functions of a layer that look as if they mixed tokens."""

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
"""`config.layer_types` of layers that carry a state from token to token."""


def unknown_recurrence(model: Any, config: Any) -> str | None:
    """Return why the states of `model` cannot follow a tree, or None if they can."""
    layers = recurrent_layers(model)
    if unknown := sorted(
        set().union(*(_mixing(layer.__class__) - KERNELS.keys() for layer in layers))
    ):
        return f"its layers call {', '.join(unknown)}, which rolltree has no tree form of"
    types = [kind for kind in getattr(config, "layer_types", None) or () if kind in RECURRENT_TYPES]
    expected = len(types) or getattr(model, "_is_stateful", False)
    if len(layers) >= expected:
        return None
    what = f"layers of type {', '.join(sorted({*types}))}" if types else "layers"
    return (
        f"its {what} carry a state from token to token in a way that rolltree has no tree form of"
    )


def recurrent_layers(model: Any) -> list[Any]:
    """Return the modules of `model` that call one of `KERNELS`."""
    return [module for module in model.modules() if KERNELS.keys() & _mixing(module.__class__)]


@functools.cache
def _mixing(kind: Any) -> frozenset[str]:
    """Return the names of functions by which the forward of a module class mixes tokens."""
    forward: Any = inspect.unwrap(kind.forward)
    if not inspect.isfunction(forward):
        return frozenset()
    names = frozenset(name for name in forward.__code__.co_names if _MIXES.search(name))
    return (names & forward.__globals__.keys()) - _ONE_TOKEN


def _over_forest(kind: Any, layout: RecurrenceLayout) -> Any:
    """Return the forward of a module class with its kernels replaced by those for `layout`."""
    forward: Any = inspect.unwrap(kind.forward)
    swapped = {name: partial(KERNELS[name], layout) for name in KERNELS.keys() & _mixing(kind)}
    found = FunctionType(
        forward.__code__,
        {**forward.__globals__, **swapped},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


@contextmanager
def tree_recurrence(model: Any, active: Callable[[], bool]) -> Iterator[None]:
    """Let the recurrent layers of `model` follow the keyword `tree_layout` while it is open.

    `active` says whether the calling thread is inside a pass over a forest, where a layer that
    does not get the layout must not run.
    """
    layers = recurrent_layers(model)
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _patched(layer, layer.forward, active)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _patched(module: Any, original: Any, active: Callable[[], bool]) -> Any:
    def forward(*args: Any, tree_layout: Any = None, **kwargs: Any) -> Any:
        if tree_layout is None:
            if active():
                raise TrainingError(
                    f"{type(module).__name__} did not get the tree layout, so its state would run "
                    "from one branch into the next. This model cannot be trained on trees: train "
                    "it with train.forward = 'rows' and scope 'interleave'."
                )
            return original(*args, **kwargs)
        if tree_layout.is_path:
            return original(*args, **kwargs)
        return _over_forest(module.__class__, tree_layout.recurrence)(module, *args, **kwargs)

    return forward
