"""Softmax attention over a packed forest, block by block, with its own backward pass.

Forward and backward are written out (online softmax forward, recomputation backward, as in
FlashAttention: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4) over dense rectangles:
a block of keys against a contiguous range of queries below it. Nothing is gathered or padded
and no `_T` x `_T` matrix exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rolltree.training.layout import DEFAULT_BLOCK, FULL, Forest, Pattern, key_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from rolltree.training.models.recurrence_layout import RecurrenceLayout

T = TypeVar("T")
_UNSEEN = -1e30
"""Added to the score of a key that is not seen: finite, as a row may see nothing of a block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A `KeyBlock` on the device. Its masks are float `[queries, 1, keys]`, added to scores."""

    first: int
    stop: int
    start: int
    reach: int
    masks: tuple[tuple[int, Tensor], ...]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The layout of a forest, as the layers of a model need it.

    `subtree_end` and `depth` are int32 `[_T]`. Layers that look equally far back share the blocks,
    or, with `flex`, the mask for FlexAttention, which then takes their place.
    """

    subtree_end: NDArray[np.int32]
    depth: NDArray[np.int32]
    device: torch.device | str = "cpu"
    max_block: int = DEFAULT_BLOCK
    flex: bool = False
    _made: dict[tuple[str, Pattern], Any] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the forest."""
        return len(self.subtree_end)

    @property
    def is_path(self) -> bool:
        """Whether the forest is one unbranched sequence."""
        return self._once(
            "is_path", FULL, lambda: bool((self.subtree_end == self.num_tokens).all())
        )

    def is_full(self, pattern: Pattern) -> bool:
        """Whether no path is long enough for the pattern to hide a token."""
        return self._once("is_full", pattern, lambda: pattern.limit(self.depth) is None)

    def blocks(self, pattern: Pattern = FULL) -> tuple[Block, ...]:
        """Return the rectangles that layers with this pattern compute."""
        return self._once("blocks", pattern, lambda: self._cut(pattern))

    def flex_mask(self, pattern: Pattern = FULL) -> BlockMask:
        """Return the mask of layers with this pattern."""
        from rolltree.training.models.tree_flex import flex_mask

        return self._once(
            "flex_mask",
            pattern,
            lambda: flex_mask(self.subtree_end, self.device, depth=self.depth, pattern=pattern),
        )

    @property
    def recurrence(self) -> RecurrenceLayout:
        """The layout for recurrent layers."""
        from rolltree.training.models.recurrence_layout import RecurrenceLayout

        return self._once(
            "recurrence", FULL, lambda: RecurrenceLayout(self.subtree_end, self.device)
        )

    def _once(self, what: str, pattern: Pattern, make: Callable[[], T]) -> T:
        # Made when the first layer asks for it; layers that look equally far back share it.
        if (what, pattern) not in self._made:
            self._made[what, pattern] = make()
        made: T = self._made[what, pattern]
        return made

    def _cut(self, pattern: Pattern) -> tuple[Block, ...]:
        limit = pattern.limit(self.depth)
        return tuple(
            Block(
                b.first, b.stop, b.start, b.reach, tuple((at, self._added(m)) for at, m in b.masks)
            )
            for b in key_blocks(self.subtree_end, self.max_block, self.depth, limit)
        )

    def _added(self, seen: NDArray[np.bool_]) -> Tensor:
        hidden = ~torch.from_numpy(seen).to(self.device)
        # `[queries, 1, keys]`: the heads of a group share the mask of their token.
        return torch.zeros(seen.shape, device=self.device).masked_fill_(hidden, _UNSEEN)[:, None, :]


def tree_layout(
    forest: Forest,
    device: torch.device | str = "cpu",
    *,
    flex: bool = False,
) -> TreeLayout:
    """Return the layout of a forest for layers on `device`."""
    return TreeLayout(forest.subtree_end, forest.positions, device, flex=flex)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one pass: (token, query head) pairs; `group` heads share a key head."""

    blocks: tuple[Block, ...]
    group: int
    scale: float
    softcap: float | None

    def scores(self, q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
        """Return the masked scores of one block, `[_K, rows, keys]`, and the cap's tanh."""
        raw = torch.bmm(q[:, self.of(block)], k[:, block.first : block.stop].transpose(1, 2))
        bent = None
        if self.softcap is not None:
            bent = raw.div_(self.softcap).tanh_()
            # A new tensor: callers write into the scores, and the backward pass needs the tanh.
            raw = bent * self.softcap
        size = block.stop - block.first
        for first, mask in block.masks:
            top = (first - block.start) * self.group
            # Rows are ordered by token, then by head within the group.
            part = raw[:, top : top + len(mask) * self.group]
            part.view(-1, len(mask), self.group, size).add_(mask)
        return raw, bent

    def of(self, block: Block) -> slice:
        return slice(block.start * self.group, block.reach * self.group)


class _TreeAttention(torch.autograd.Function):
    """Softmax attention over blocks. Query heads that share a key head are rows of one matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """`query` `[1, _H, _T, d]`, `key` and `value` `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

        It keeps for the backward pass only what the layers around it keep anyway (queries, keys,
        values and the result, in their own type), and one number per query and head.
        """
        num_heads, num_tokens = query.shape[1:3]
        num_kv = key.shape[1]
        rows = _Rows(blocks, num_heads // num_kv, scale, softcap)
        q, k, v = _exact(query, key, value, scale)
        out = q.new_zeros(num_kv, num_tokens * rows.group, v.shape[-1])
        if sinks is None:
            top = q.new_full((num_kv, num_tokens * rows.group, 1), float("-inf"))
            total = torch.zeros_like(top)
        else:
            # A sink is a key that every query sees and whose value is zero.
            top = _per_row(sinks, num_kv, num_tokens).to(q.dtype).clone()
            total = torch.ones_like(top)
        # Autocast would run these products in 16 bits (design/0003).
        with torch.autocast(q.device.type, enabled=False):
            for block in blocks:
                at = rows.of(block)
                scores, _ = rows.scores(q, k, block)
                # Online softmax: rescale what earlier blocks added to the new maximum.
                old = top[:, at]
                new = torch.maximum(scores.amax(-1, keepdim=True), old)
                weights = scores.sub_(new).exp_()
                shrink = old.sub(new).exp_()
                top[:, at] = new
                total[:, at].mul_(shrink).add_(weights.sum(-1, keepdim=True))
                out[:, at].mul_(shrink).baddbmm_(weights, v[:, block.first : block.stop])
        # Normalize once, not per block.
        out.div_(total)
        merged = out.view(num_kv, num_tokens, rows.group, -1).transpose(0, 1)
        result = merged.reshape(1, num_tokens, num_heads, -1).to(query.dtype)
        # With the log-sum, the backward pass can turn scores into weights again.
        ctx.save_for_backward(query, key, value, sinks, result, top.add_(total.log_()))
        ctx.rows = rows
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, log_total = ctx.saved_tensors
        rows: _Rows = ctx.rows
        q, k, v = _exact(query, key, value, rows.scale)
        num_kv, num_tokens, width = k.shape

        def by_kv(tensor: Tensor) -> Tensor:
            parts = tensor.reshape(num_tokens, num_kv, rows.group, -1).transpose(0, 1)
            return parts.reshape(num_kv, num_tokens * rows.group, -1)

        d_out = by_kv(grad[0].to(q.dtype))
        # Equals the sum over a row's keys of weight times its gradient, and needs no weights.
        shared = by_kv((grad[0].to(q.dtype) * result[0]).sum(-1))
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in rows.blocks:
            at, keys = rows.of(block), slice(block.first, block.stop)
            scores, bent = rows.scores(q, k, block)
            weights = scores.sub_(log_total[:, at]).exp_()
            d_rows = d_out[:, at]
            d_v[:, keys].baddbmm_(weights.transpose(1, 2), d_rows)
            d_scores = torch.bmm(d_rows, v[:, keys].transpose(1, 2))
            d_scores.sub_(shared[:, at]).mul_(weights)
            if bent is not None:
                # The cap's derivative is `1 - tanh^2`: the two factors `softcap` cancel.
                d_scores.mul_(bent.square_().neg_().add_(1))
            d_q[:, at].baddbmm_(d_scores, k[:, keys])
            d_k[:, keys].baddbmm_(d_scores.transpose(1, 2), q[:, at])
        # Queries were scaled before the products, so only `d_q` still lacks the factor.
        heads = d_q.mul_(rows.scale).view(num_kv, num_tokens, rows.group, width).transpose(1, 2)
        d_query = heads.reshape(1, num_kv * rows.group, num_tokens, width)
        d_key, d_value = d_k[None].to(key.dtype), d_v[None].to(value.dtype)
        d_sinks = None
        if sinks is not None:
            # A sink's value is zero, so its gradient is minus its softmax share times `shared`.
            share = (_per_row(sinks, num_kv, num_tokens).to(q.dtype) - log_total).exp_()
            lost = share.mul_(shared).view(num_kv, num_tokens, rows.group).sum(1)
            d_sinks = lost.neg_().reshape(-1).to(sinks.dtype)
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None, None, None


def _exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Return scaled queries `[_K, _T * group, d]`, keys and values `[_K, _T, d]`, in float32."""
    num_heads, num_tokens, width = query.shape[1:]
    num_kv = key.shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    by_kv = query[0].reshape(num_kv, num_heads // num_kv, num_tokens, width).transpose(1, 2)
    q = (by_kv.to(exact) * scale).reshape(num_kv, num_tokens * (num_heads // num_kv), width)
    return q, key[0].to(exact).contiguous(), value[0].to(exact).contiguous()


def _per_row(sinks: Tensor, num_kv: int, num_tokens: int) -> Tensor:
    """Expand one number per head, `[_H]`, to all rows: `[_K, _T * group, 1]`."""
    by_kv = sinks.detach().view(num_kv, 1, -1).expand(-1, num_tokens, -1)
    return by_kv.reshape(num_kv, -1, 1)


def forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    pattern: Pattern = FULL,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over a forest: `[1, _H, _T, d]`, keys and values `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

    `_K` divides `_H` (grouped-query attention). A path that is seen whole runs through torch's
    causal kernel.

    Args:
        query: `[1, _H, _T, d]`.
        key: `[1, _K, _T, d]`.
        value: `[1, _K, _T, e]`.
        layout: the forest.
        scale: the factor of products of queries and keys.
        pattern: how far back a token sees.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: `[_H]`, one more score per head in the softmax's denominator (GPT-OSS).
    """
    full = layout.is_full(pattern)
    # The fast kernel on a GPU; on a CPU it is as fast as the blocks (design/0003).
    if layout.is_path and full and softcap is None and sinks is None:
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
        )
        return out.transpose(1, 2)
    # These layers can share the blocks of layers without a pattern.
    if full:
        pattern = FULL
    if layout.flex:
        from rolltree.training.models.tree_flex import flex_forest_attention

        mask = layout.flex_mask(pattern)
        return flex_forest_attention(query, key, value, mask, scale, softcap=softcap, sinks=sinks)
    result: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, layout.blocks(pattern), scale, softcap
    )
    return result
