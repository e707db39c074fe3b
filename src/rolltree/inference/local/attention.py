"""Attention of one flat batch of tokens over the slots they belong to.

A forward pass is one sequence of tokens, `[1, _T]`: the next token of every decoding row, then the
new tokens of rows whose prompts are being computed. Nothing is padded. A `Plan` says which token
belongs to which slot and position; `attend` computes attention from it, the decoding rows together
and the others by equal shape. transformers calls it under the name `NAME`. The module knows nothing
about models and requests. It leaves out sliding windows, soft caps and sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rolltree.errors import UnsupportedSetting
from rolltree.inference.local.shape import KvShape
from rolltree.types import IntArray

NAME = "rolltree_slots"


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows of which the same number of tokens, from the same position, is computed."""

    rows: list[int]
    tokens: slice  # of the flat batch
    length: int  # visible positions
    hidden: Tensor | None  # additive mask [count, length]; None: plainly causal from 0


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows of which one token is computed: the first `num_tokens` of the flat batch."""

    num_tokens: int
    num_rows: int  # highest row + 1
    rows: Tensor | None  # int64 [num_tokens]; None: all the rows, without a gap
    length: int  # visible positions of the longest row
    hidden: Tensor  # additive mask [num_rows * key heads, 1, length]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each token of a flat batch belongs. Tensors are int64."""

    tokens: Tensor  # [_T] ids
    rows: Tensor  # [_T]
    positions: Tensor  # [_T]
    newest: Tensor  # [_B], the flat index of each row's last token
    in_order: Tensor | None  # [_B], puts what belongs to `newest` in the caller's order of rows
    decode: Decode | None
    prefills: tuple[Prefill, ...]


def make_plan(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    shape: KvShape,
) -> Plan:
    """Lay out `counts[i]` new tokens of `rows[i]` from position `start[i]`; `rows` ascend.

    `ids` is int32 `[slots, capacity]`. The flat order is: rows with one token, ascending; then the
    others, equal shapes together.
    """
    device = shape.device
    index = np.array(rows)
    single = counts == 1
    prefills: tuple[Prefill, ...] = ()
    if single.all():
        flat_rows, flat_positions = index, start
        newest, in_order = np.arange(len(index)), None
    else:
        shapes: dict[tuple[int, int], list[int]] = {}
        for at in (~single).nonzero()[0]:
            shapes.setdefault((int(start[at]), int(counts[at])), []).append(int(at))
        order = [*single.nonzero()[0], *(at for group in shapes.values() for at in group)]
        flat_rows = np.repeat(index[order], counts[order])
        flat_positions = np.concatenate([start[at] + np.arange(counts[at]) for at in order])
        newest, in_order = np.cumsum(counts[order]) - 1, np.argsort(order)
        prefills = _make_prefills(shapes, rows, int(single.sum()), shape)
    tokens = ids[flat_rows, flat_positions].astype(np.int64)
    return Plan(
        tokens=torch.from_numpy(tokens).to(device),
        rows=torch.from_numpy(flat_rows).to(device),
        positions=torch.from_numpy(flat_positions).to(device),
        newest=torch.from_numpy(newest).to(device),
        in_order=None if in_order is None else torch.from_numpy(in_order).to(device),
        decode=_make_decode(index[single], start[single], shape) if single.any() else None,
        prefills=prefills,
    )


def _make_decode(rows: NDArray[np.int64], start: NDArray[np.int64], shape: KvShape) -> Decode:
    num_rows, length = int(rows[-1]) + 1, int(start.max()) + 1
    visible = np.ones(num_rows, np.int64)
    visible[rows] = start + 1
    hidden = _additive(np.arange(length) >= visible[:, None, None], shape)
    gaps = None if len(rows) == num_rows else torch.from_numpy(rows).to(shape.device)
    hidden = hidden.repeat_interleave(shape.num_heads, dim=0)
    return Decode(len(rows), num_rows, gaps, length, hidden)


def _make_prefills(
    shapes: dict[tuple[int, int], list[int]],
    rows: list[int],
    offset: int,
    shape: KvShape,
) -> tuple[Prefill, ...]:
    prefills = []
    for (start, count), group in shapes.items():
        stop = offset + count * len(group)
        hidden = None
        if start:
            seen = start + np.arange(count)
            hidden = _additive(np.arange(start + count) > seen[:, None], shape)
        chosen = [rows[at] for at in group]
        prefills.append(Prefill(chosen, slice(offset, stop), start + count, hidden))
        offset = stop
    return tuple(prefills)


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scaling: float) -> Tensor:
    """Attend from `query` to slots: `softmax(query keys scaling + mask) values`, per head.

    Args:
        query: `[_T, _H, head_dim]`, in the plan's order; returned in the same shape.
        keys: `[slots, heads, head_dim, capacity]`; `_H / heads` query heads share a key head.
        values: `[slots, heads, capacity, head_dim]`.
        plan: which token sees which slot, and how far.
        scaling: of the products.
    """
    group = query.shape[1] // keys.shape[1]
    parts = []
    if plan.decode is not None:
        decode = plan.decode
        asked = query[: decode.num_tokens]
        if decode.rows is not None:
            spread = query.new_zeros((decode.num_rows, *query.shape[1:]))
            asked = spread.index_copy_(0, decode.rows, asked)
        seen_keys = keys[: decode.num_rows].flatten(0, 1)[:, :, : decode.length]
        seen_values = values[: decode.num_rows].flatten(0, 1)[:, : decode.length]
        shaped = asked.reshape(len(seen_keys), group, -1)
        scores = torch.baddbmm(decode.hidden, shaped, seen_keys, alpha=scaling)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        found = torch.bmm(weights, seen_values).view(asked.shape)
        parts.append(found if decode.rows is None else found[decode.rows])
    for prefill in plan.prefills:
        num_rows = len(prefill.rows)
        asked = query[prefill.tokens].view(num_rows, -1, *query.shape[1:]).transpose(1, 2)
        found = scaled_dot_product_attention(
            asked,
            _gathered(keys[..., : prefill.length].transpose(2, 3), prefill.rows, group),
            _gathered(values[:, :, : prefill.length], prefill.rows, group),
            attn_mask=prefill.hidden,
            is_causal=prefill.hidden is None,
            scale=scaling,
        )
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gathered(states: Tensor, rows: list[int], group: int) -> Tensor:
    """Copy the states of some rows, each head as often as queries share it."""
    chosen = states[rows[0]][None] if len(rows) == 1 else states[rows]
    return chosen.repeat_interleave(group, dim=1) if group > 1 else chosen.contiguous()


def _additive(hidden: NDArray[np.bool_], shape: KvShape) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=shape.device)
    lowest = torch.finfo(shape.dtype).min
    return mask.masked_fill_(torch.from_numpy(hidden).to(shape.device), lowest)


def slot_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: Plan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Do `attend` for transformers' attention modules, whose query is `[1, _H, _T, head_dim]`.

    Raises:
        UnsupportedSetting: the model's attention is not plain.
    """
    special = [name for name in _SPECIAL if others.get(name) is not None]
    if plan is None or special:
        raise UnsupportedSetting(f"its attention is not plain: {special or 'it gets no plan'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = query[0].transpose(0, 1).contiguous()
    return attend(flat, keys, values, plan, scale)[None], None


_SPECIAL = ("softcap", "s_aux", "position_bias")

AttentionInterface.register(NAME, slot_attention)
