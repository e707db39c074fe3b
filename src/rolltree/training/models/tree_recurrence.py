"""Recurrent layers over a packed forest: short convolutions, gated delta rule, state spaces.

A token's state follows from the state of its parent, so a branch starts from the state (and the
last tokens of the convolution) where it leaves its path, and gradients of all branches add up
there. Everything in such a layer that is per token runs once over the flat forest in the model's
own code: inside `tree_recurrence(model)` its kernels are replaced by those of this file, by name,
for the layers of this model only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers.activations import ACT2FN

from rolltree.inference.local.routing import replace_forward
from rolltree.training.models.recurrence_layout import Chunks, RecurrenceLayout
from rolltree.training.models.recurrent_layers import KERNELS, mixing_functions, recurrent_layers
from rolltree.values.errors import TrainingError

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens per chunk, with one decay per head and with one per channel (design/0021)."""


class _Gather(torch.autograd.Function):
    """From rows `[_T, ...]` to the places of the chunks, `[_N, _C, ...]`; pads are zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, chunks: Chunks) -> Tensor:
        ctx.chunks = chunks
        # A pad reads row `_T`, which is zero and so adds nothing to products and decays.
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return padded[chunks.token]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each token has exactly one place, so a lookup replaces autograd's scatter-add.
        return grad.flatten(0, 1).index_select(0, ctx.chunks.place), None


class _Between(torch.autograd.Function):
    """From sums of log decays to decays from place j to place i: `[_N, _H, _C, _C, 1 or d]`."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
        # Mask before the exponential: between places that do not see each other, the difference may
        # be positive and overflow.
        between = total[..., None, :] - total[..., None, :, :]
        between = between.masked_fill_(~seen, float("-inf")).to(dtype).exp_()
        # Keep only the exponentials; the sums may be float64 (design/0021).
        ctx.save_for_backward(between)
        ctx.dtype = total.dtype
        return between

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (between,) = ctx.saved_tensors
        change = grad * between
        return (change.sum(-2) - change.sum(-3)).to(ctx.dtype), None, None


def _gather(rows: Tensor, chunks: Chunks) -> Tensor:
    """Return float rows by chunk and head: `[_T, _H, ...]` -> `[_N, _H, _C, ...]`."""
    gathered: Tensor = _Gather.apply(rows, chunks)  # type: ignore[no-untyped-call]
    return gathered.transpose(1, 2)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    layout: RecurrenceLayout,
    size: int = CHUNK,
) -> Tensor:
    """Compute a gated linear recurrence over a forest, chunk by chunk.

    The state after token t with parent p is `S = exp(log_decay) * S_p + k v'` (outer product), the
    result `q S`. With `beta` this is the gated delta rule, `v' = beta * (v - k (exp(log_decay) *
    S_p))` (Yang et al. 2024, arXiv:2412.06464); without it `v' = v` (Mamba-2: Dao and Gu 2024,
    arXiv:2405.21060). Inside a chunk all `v'` come from one triangular system; between chunks only
    states pass.

    Args:
        query, key: `[_T, _G, d]`; `_G` divides `_H`, each head serves consecutive value heads.
        value: `[_T, _H, w]`.
        log_decay: `[_T, _H]`, at most 0; `[_T, _H, d]` decays each channel of the keys by itself
            (Kimi Delta Attention: arXiv:2510.26692), at `size` times the memory.
        beta: `[_T, _H]`, or None.
        layout: the forest.
        size: tokens per chunk; it changes the time, not the result.

    Returns:
        `[_T, _H, w]`.
    """
    chunks = layout.chunks(size)
    q, k, v = (_gather(rows, chunks) for rows in (query, key, value))
    per_group = v.shape[1] // q.shape[1]
    per_head = log_decay.ndim == 2
    decay = _gather(log_decay[..., None] if per_head else log_decay, chunks)
    # Sums over a chunk reach hundreds while the difference that counts is near 0 (design/0021).
    if per_head:
        decay = decay.double()
    # `[_N, _H, _C, 1 or d]`, summed along each token's own path: siblings do not decay each other.
    total = chunks.seen[:, None].to(decay.dtype) @ decay
    grown = total.to(v.dtype).exp()
    between: Tensor = _Between.apply(  # type: ignore[no-untyped-call]
        total, chunks.seen[:, None, :, :, None], v.dtype
    )

    def heads(rows: Tensor) -> Tensor:
        return rows.repeat_interleave(per_group, 1) if per_group > 1 else rows

    def products(left: Tensor, right: Tensor) -> Tensor:
        # The heads of a group share queries and keys, so multiply them once per group.
        if per_head:
            groups = between.view(len(between), left.shape[1], -1, *between.shape[2:4])
            each: Tensor = (left @ right.transpose(2, 3))[:, :, None] * groups
            return each.flatten(1, 2)
        # Decays per channel rule out a matrix product: this is `[_N, _H, _C, _C, d]` (design/0021).
        return (heads(left)[..., None, :] * heads(right)[..., None, :, :] * between).sum(-1)

    scores = products(q, k)
    k_heads = heads(k)
    reads = None
    if beta is not None:
        rate = _gather(beta[..., None], chunks)
        # `v'` is linear in the start state, which is not known yet, so one solve gives both the
        # part without it and the factor of it. Ancestors come first, so the system is lower
        # triangular; the solver assumes ones on its diagonal.
        right = torch.cat([v * rate, k_heads * (rate * grown)], -1)
        system = products(k, k) * rate
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    exits = chunks.exit_place
    # With a slice between two index tensors, torch puts the exits first: `[_E, _H, _C, 1 or d]`.
    chunk, offset = exits // chunks.token.shape[1], exits % chunks.token.shape[1]
    writes = (k_heads[chunk] * between[chunk, :, offset]).transpose(2, 3)
    kept = grown[chunk, :, offset][..., None]
    state, v = _scan(v, reads, writes, kept, chunks)
    out = scores @ v
    if state is not None:
        # Chunks of the first level begin at roots and have no start state.
        later = chunks.levels[0].stop
        further = (heads(q[later:]) * grown[later:]) @ state
        out = torch.cat([out[:later], out[later:] + further])
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.place)


def _scan(
    v: Tensor, reads: Tensor | None, writes: Tensor, kept: Tensor, chunks: Chunks
) -> tuple[Tensor | None, Tensor]:
    """Pass states from level to level.

    Returns the states that the chunks of all levels but the first start from, and the values that
    are written.
    """
    widths = [level.stop - level.first for level in chunks.levels]
    exits = [level.exit_stop - level.exit_first for level in chunks.levels]
    # Slicing per level would allocate a full-size gradient for each of them (design/0021).
    parts = zip(
        chunks.levels,
        torch.split(v, widths),
        torch.split(v if reads is None else reads, widths),
        torch.split(writes, exits),
        torch.split(kept, exits),
        strict=True,
    )
    states: list[Tensor] = []
    values: list[Tensor] = []
    ends = start = None
    for level, new, read, write, keep in parts:
        if level.entry is not None and ends is not None:
            start = ends.index_select(0, level.entry)
            states.append(start)
            if reads is not None:
                new = new - read @ start
        values.append(new)
        if len(level.exit_chunk):
            ends = write @ new.index_select(0, level.exit_chunk)
            if start is not None:
                ends = ends + keep * start.index_select(0, level.exit_chunk)
    return (torch.cat(states) if states else None), torch.cat(values)


def _exact(*tensors: Tensor) -> list[Tensor]:
    """Return one row's tensors, `[1, _T, ...]` -> `[_T, ...]`, in float32 or wider."""
    return [tensor[0].to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _float32(rows: Tensor) -> torch.autocast:
    """Keep products of states in float32, also when the layers around them compute in bf16."""
    return torch.autocast(rows.device.type, enabled=False)


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
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
    """Return what the kernels of Qwen3-Next's layers and of Kimi's return.

    The first have one decay per head, the others one per channel.
    """
    q, k, v, decay, rate = _exact(query, key, value, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    size = CHUNK if decay.ndim == 2 else CHANNEL_CHUNK
    with _float32(query):
        out = linear_attention(q * q.shape[-1] ** -0.5, k, v, decay, rate, layout, size)
    return out[None].to(query.dtype), None


def convolution(
    layout: RecurrenceLayout,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve the last tokens of each path, `[1, channels, _T]`, with `weight` `[channels, K]`.

    The whole row is done at once; tokens whose last K are not those before them in the row are
    then recomputed.
    """
    channels, width = weight.shape
    count = hidden_states.shape[-1]
    rows = hidden_states.to(weight.dtype)
    # Padding both sides and cutting off the end makes the convolution causal.
    out = conv1d(rows, weight[:, None], bias, padding=width - 1, groups=channels)[..., :count]
    moved, ancestors = layout.taps(width)
    if len(moved):
        padded = torch.cat([rows, rows.new_zeros(1, channels, 1)], -1)
        last = padded[0].index_select(1, ancestors.flatten()).view(channels, -1, width)
        anew = (last * weight[:, None]).sum(-1)
        anew = anew if bias is None else anew + bias[:, None]
        out = out.index_copy(2, moved, anew[None].to(out.dtype))
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def state_space(
    layout: RecurrenceLayout,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor | None = None,  # noqa: N803  (as it is called)
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Mamba-2: keys `b`, queries `c`, values `dt * x`, decay `dt * a`."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    x, step, keys, queries = _exact(hidden_states, dt.clamp(*dt_limit), b, c)
    with _float32(dt):
        out = linear_attention(queries, keys, x * step[..., None], step * a, None, layout)
    if D is not None:
        out = out + x * D[:, None]
    return out[None]


def selective_scan(
    layout: RecurrenceLayout,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor | None = None,  # noqa: N803  (as it is called)
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Mamba-1: each of `channels x states` numbers decays by itself, token by token.

    `hidden_states`, `dt` and `z` are `[1, channels, _T]`, `a` `[channels, states]`, `b` and `c`
    `[1, states, _T]`. Tokens of one depth are one step.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = softplus(dt)
    rows = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, b, c))
    steps = layout.steps
    x, step, keys, queries = (rows.index_select(0, steps.tokens) for rows in _exact(*rows))
    sizes = [stop - start for start, stop in pairwise(steps.start)]
    kept = torch.split((step[..., None] * a).exp(), sizes)
    added = torch.split((step * x)[..., None] * keys[:, None], sizes)
    states = [added[0]]
    for keep, new, entry in zip(kept[1:], added[1:], steps.entry, strict=True):
        states.append(keep * states[-1].index_select(0, entry) + new)
    with _float32(dt):
        out = (torch.cat(states) @ queries[..., None])[..., 0]
    if D is not None:
        out = out + x * D
    out = out.index_select(0, steps.place).T[None].to(hidden_states.dtype)
    return out if z is None else out * silu(z)


def not_fused(*_: Any, **__: Any) -> None:
    """Replace the kernels of whole layers: return None, as transformers' own stand-in does."""


def _over_forest(kind: Any, layout: RecurrenceLayout) -> Any:
    """Return the forward of a module class with its kernels replaced by those for `layout`."""
    forward: Any = inspect.unwrap(kind.forward)
    called = KERNELS.keys() & mixing_functions(kind)
    swapped = {name: partial(globals()[KERNELS[name]], layout) for name in called}
    # Copy the function with different globals, because all models of this class share those of
    # its file.
    function = FunctionType(
        forward.__code__,
        {**forward.__globals__, **swapped},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


@contextmanager
def tree_recurrence(model: Any, active: Callable[[], bool]) -> Iterator[None]:
    """Let the recurrent layers of `model` follow the keyword `tree_layout` while it is open.

    `active` returns whether the calling thread is inside a pass over a forest; there, a layer that
    does not get the layout must not run.
    """
    layers = recurrent_layers(model)
    last = _LastLayout()
    # Mamba's and Jamba's blocks do not pass the keyword on to their mixer, so hooks on the modules
    # around it record the layout (design/0021).
    inside = {id(layer) for layer in layers}
    paths = [name.split(".") for name, layer in model.named_modules() if id(layer) in inside]
    around = {".".join(path[:count]) for path in paths for count in range(len(path))}
    with ExitStack() as held:
        for name in around:
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(last.read, with_kwargs=True)
            held.callback(hook.remove)
        for layer in layers:
            held.callback(replace_forward(layer, _patched(layer, layer.forward, last, active)))
        yield


class _LastLayout:
    """The layout that a module around a recurrent layer got last, and may not pass on."""

    def __init__(self) -> None:
        self.layout: Any = None

    def read(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Take the layout from the arguments of `module`; ids without a layout clear it."""
        if "tree_layout" in kwargs or "input_ids" in kwargs:
            self.layout = kwargs.get("tree_layout")


def _patched(module: Any, original: Any, last: _LastLayout, active: Callable[[], bool]) -> Any:
    def forward(*args: Any, tree_layout: Any = None, **kwargs: Any) -> Any:
        layout = tree_layout or last.layout
        if layout is None and active():
            raise TrainingError(
                f"{type(module).__name__} did not get the tree layout, so its state would run "
                "from one branch into the next. This model cannot be trained on trees: train "
                "it with train.forward = 'rows' and scope 'interleave'."
            )
        # On a single path the model's own kernels are exact, and they do not take `tree_layout`.
        if layout is None or layout.is_path:
            return original(*args, **kwargs)
        return _over_forest(module.__class__, layout.recurrence)(module, *args, **kwargs)

    return forward
