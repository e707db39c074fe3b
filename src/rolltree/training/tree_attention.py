"""Exact attention over a packed forest, inside any Hugging Face causal LM with plain attention.

It registers one attention function with transformers and touches no model code: inside
`tree_attention(model)` the function runs over the key blocks of `layout.py`, everywhere else it
is transformers' own SDPA, also for an engine that decodes with the same module in another thread.

Forward and backward are written out (online softmax forward, recomputation backward, as in
FlashAttention: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4) over dense rectangles:
a block of keys against the contiguous range of queries below it. Nothing is gathered or padded
and no `_T` x `_T` matrix exists. On a GPU one FlexAttention kernel can do the same: query i sees
key j iff `j <= i < subtree_end[j]`, and which blocks of 128 x 128 are empty, full or mixed follows
from the least and largest `subtree_end` of a block of keys. `tree_support.py` says which models it
is exact for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from rolltree.errors import TrainingError
from rolltree.training.layout import DEFAULT_BLOCK, Forest, key_blocks
from rolltree.training.recurrence_layout import RecurrenceLayout
from rolltree.training.tree_recurrence import tree_recurrence

NAME = "rolltree_tree"
_active: ContextVar[bool] = ContextVar("rolltree_tree_active", default=False)
_IGNORABLE = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}
    | {"return_dict", "logits_to_keep", "num_items_in_batch", "cache_position"}
)


@dataclass(frozen=True, slots=True)
class Block:
    """A `KeyBlock` on the device: `mask` is float `[keys, 1, keys]`, 0 or -inf, added to scores."""

    first: int
    stop: int
    reach: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """What the attention function needs to know about the forest it runs over.

    `flex`: the mask for FlexAttention, which then takes the place of the blocks. `recurrence`: what
    recurrent layers need.
    """

    num_tokens: int
    is_path: bool
    blocks: tuple[Block, ...]
    flex: BlockMask | None = None
    recurrence: RecurrenceLayout | None = None


def tree_layout(
    forest: Forest,
    device: torch.device | str = "cpu",
    max_block: int = DEFAULT_BLOCK,
    *,
    flex: bool = False,
) -> TreeLayout:
    """Return the blocks of a forest on `device`, or its mask for FlexAttention."""
    if forest.is_path:
        return TreeLayout(forest.num_tokens, True, ())
    recurrence = RecurrenceLayout(forest.subtree_end, device)
    if flex:
        mask = flex_mask(forest.subtree_end, device)
        return TreeLayout(forest.num_tokens, False, (), mask, recurrence)
    blocks = []
    for block in key_blocks(forest.subtree_end, max_block):
        seen = torch.from_numpy(block.mask).to(device)
        added = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
        blocks.append(Block(block.first, block.stop, block.reach, added[:, None, :]))
    return TreeLayout(forest.num_tokens, False, tuple(blocks), recurrence=recurrence)


class _TreeAttention(torch.autograd.Function):
    """Softmax attention over blocks. Query heads that share a key head are rows of one matrix."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
    ) -> Tensor:
        """`query` `[1, _H, _T, d]`, `key` and `value` `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

        What is kept for the backward pass is what the layers around it keep anyway (queries, keys,
        values and the result, in their own type), and one number per query and head.
        """
        num_heads, num_tokens = query.shape[1:3]
        num_kv = key.shape[1]
        group = num_heads // num_kv
        q, k, v = _exact(query, key, value, scale)
        out = q.new_zeros(num_kv, num_tokens * group, v.shape[-1])
        top = q.new_full((num_kv, num_tokens * group, 1), float("-inf"))
        total = torch.zeros_like(top)
        with torch.autocast(q.device.type, enabled=False):
            for block in layout.blocks:
                rows = slice(block.first * group, block.reach * group)
                scores = _scores(q, k, block, rows, group)
                old = top[:, rows]
                new = torch.maximum(scores.amax(-1, keepdim=True), old)
                weights = scores.sub_(new).exp_()
                shrink = old.sub(new).exp_()
                top[:, rows] = new
                total[:, rows].mul_(shrink).add_(weights.sum(-1, keepdim=True))
                out[:, rows].mul_(shrink).baddbmm_(weights, v[:, block.first : block.stop])
        out.div_(total)
        merged = out.view(num_kv, num_tokens, group, -1).transpose(0, 1)
        result = merged.reshape(1, num_tokens, num_heads, -1).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, top.add_(total.log_()))
        ctx.layout, ctx.scale = layout, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, log_total = ctx.saved_tensors
        q, k, v = _exact(query, key, value, ctx.scale)
        num_kv, num_tokens, width = k.shape
        group = q.shape[1] // num_tokens

        def by_kv(tensor: Tensor) -> Tensor:
            parts = tensor.reshape(num_tokens, num_kv, group, -1).transpose(0, 1)
            return parts.reshape(num_kv, num_tokens * group, -1)

        d_out = by_kv(grad[0].to(q.dtype))
        shared = by_kv((grad[0].to(q.dtype) * result[0]).sum(-1))
        d_q, d_k, d_v = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        for block in ctx.layout.blocks:
            rows = slice(block.first * group, block.reach * group)
            keys = slice(block.first, block.stop)
            weights = _scores(q, k, block, rows, group).sub_(log_total[:, rows]).exp_()
            d_rows = d_out[:, rows]
            d_v[:, keys] = torch.bmm(weights.transpose(1, 2), d_rows)
            d_scores = torch.bmm(d_rows, v[:, keys].transpose(1, 2))
            d_scores.sub_(shared[:, rows]).mul_(weights)
            d_q[:, rows].baddbmm_(d_scores, k[:, keys])
            d_k[:, keys] = torch.bmm(d_scores.transpose(1, 2), q[:, rows])
        heads = d_q.mul_(ctx.scale).view(num_kv, num_tokens, group, width).transpose(1, 2)
        d_query = heads.reshape(1, num_kv * group, num_tokens, width)
        d_key, d_value = d_k[None].to(key.dtype), d_v[None].to(value.dtype)
        return d_query.to(query.dtype), d_key, d_value, None, None


def _exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return scaled queries `[_K, _T * group, d]`, keys and values `[_K, _T, d]`, in float32."""
    num_heads, num_tokens, width = query.shape[1:]
    num_kv = key.shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    by_kv = query[0].reshape(num_kv, num_heads // num_kv, num_tokens, width).transpose(1, 2)
    q = (by_kv.to(exact) * scale).reshape(num_kv, num_tokens * (num_heads // num_kv), width)
    return q, key[0].to(exact).contiguous(), value[0].to(exact).contiguous()


def _scores(q: Tensor, k: Tensor, block: Block, rows: slice, group: int) -> Tensor:
    """Return the masked scores of one block, `[_K, rows, keys]`; rows are (token, head) pairs."""
    scores = torch.bmm(q[:, rows], k[:, block.first : block.stop].transpose(1, 2))
    size = block.stop - block.first
    scores[:, : size * group].view(-1, size, group, size).add_(block.mask)
    return scores


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> Tensor:
    """Attend over a forest: `[1, _H, _T, d]`, keys and values `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

    `_K` divides `_H` (grouped-query attention). A path runs through torch's causal kernel.
    """
    if layout.is_path:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
        )
        return out.transpose(1, 2)
    if layout.flex is not None:
        return flex_forest_attention(query, key, value, layout.flex, scale)
    result: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, layout, scale
    )
    return result


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if tree_layout is None:
        if _active.get():
            raise TrainingError(
                f"{type(module).__name__} did not pass the tree layout on to its attention, so its "
                "tokens would see other samples. This model cannot be trained on trees: train it "
                "with train.forward = 'rows' and scope 'interleave'."
            )
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    foreign = {k for k, v in kwargs.items() if v is not None and v is not False} - _IGNORABLE
    if foreign or dropout:
        what = f"uses {', '.join(sorted(foreign))}" if foreign else "has attention dropout"
        raise TrainingError(
            f"{type(module).__name__} {what}, which attention over trees does not compute, so its "
            "gradients would be wrong. Train it with train.forward = 'rows' and scope 'interleave'."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return forest_attention(query, key, value, tree_layout, scale), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make no mask for a forest (the blocks carry theirs), SDPA's mask for other calls."""
    if _active.get():
        return None
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Let `model` take the keyword `tree_layout` while the context is open.

    Backward passes with gradient checkpointing belong inside it too. The attention that the model
    had before is put back.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    token = _active.set(True)
    try:
        with tree_recurrence(model, _active.get):
            yield
    finally:
        _active.reset(token)
        model.config._attn_implementation = before


FLEX_BLOCK = 128
"""Queries and keys per block: FlexAttention's own default, and the least its kernels take."""


def flex_mask(
    subtree_end: NDArray[np.int32], device: torch.device | str = "cpu", block: int = FLEX_BLOCK
) -> BlockMask:
    """Return the block mask of a forest in depth-first order, `[_T]`."""
    num_tokens = len(subtree_end)
    first = np.arange(0, num_tokens, block)
    reach = np.maximum.reduceat(subtree_end, first)  # the last query that sees any key of a block
    common = np.minimum.reduceat(subtree_end, first)  # the last that sees all of them
    stop = first + block
    below = first[:, None] > first[None, :]
    full = below & (common[None, :] >= stop[:, None]) & (stop[:, None] <= num_tokens)
    mixed = (below & (reach[None, :] > first[:, None])) | np.eye(len(first), dtype=np.bool_)
    mixed &= ~full
    end = torch.from_numpy(np.ascontiguousarray(subtree_end)).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *_listed(mixed, device),
        *_listed(full, device),
        BLOCK_SIZE=block,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(blocks: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, these first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    count = blocks.sum(1, dtype=np.int32)
    return (
        torch.from_numpy(count)[None, None].to(device),
        torch.from_numpy(order)[None, None].to(device),
    )


def flex_forest_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float
) -> Tensor:
    """Attend over a forest: `[1, _H, _T, d]`, keys and values `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

    Compiled on a GPU; on a CPU torch's plain implementation, without a gradient.
    """
    attend: Any = _compiled() if query.is_cuda else flex_attention
    grouped = key.shape[1] < query.shape[1]
    out = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    result: Tensor = out.transpose(1, 2)
    return result


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
