"""Attention of one flat batch of tokens over the slots they belong to.

A forward pass is one sequence of tokens, `[1, _T]`: the next token of every decoding row, then the
new tokens of rows whose prompts are being computed. Nothing is padded. An `AttentionPlan` says
which token belongs to which slot and position; `attend` computes attention from it, the decoding
rows together and the others by equal shape. transformers calls it under the name `NAME`. Sliding
windows, soft caps and sinks are not supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rolltree.errors import UnsupportedSetting
from rolltree.types import IntArray

NAME = "rolltree_slots"
BLOCK = 32
"""Tokens of one batch-invariant pass: fewer cost more passes for a full batch, more cost more for a
small one."""


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
    hidden: Tensor  # additive mask [num_rows, 1, 1, length]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where each token of a flat batch belongs. Tensors are int64."""

    tokens: Tensor  # [_T] ids
    rows: Tensor  # [_T]
    positions: Tensor  # [_T]
    newest: Tensor  # [_B], the flat index of each row's last token
    in_order: Tensor | None  # [_B], puts what belongs to `newest` in the caller's order of rows
    decode: Decode | None
    prefills: tuple[Prefill, ...]
    alone: tuple[tuple[int, int], ...] = ()  # row and visible positions of each token (`invariant`)


def make_plan(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Lay out `counts[i]` new tokens of `rows[i]` from position `start[i]`; `rows` ascend.

    `ids` is int32 `[slots, capacity]`. The flat order is: rows with one token, ascending; then the
    others, equal shapes together.
    """
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
        prefills = _make_prefills(shapes, rows, int(single.sum()), dtype, device)
    tokens = ids[flat_rows, flat_positions].astype(np.int64)
    return AttentionPlan(
        tokens=torch.from_numpy(tokens).to(device),
        rows=torch.from_numpy(flat_rows).to(device),
        positions=torch.from_numpy(flat_positions).to(device),
        newest=torch.from_numpy(newest).to(device),
        in_order=None if in_order is None else torch.from_numpy(in_order).to(device),
        decode=_make_decode(index[single], start[single], dtype, device) if single.any() else None,
        prefills=prefills,
    )


def _make_decode(
    rows: NDArray[np.int64], start: NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Decode:
    num_rows, length = int(rows[-1]) + 1, int(start.max()) + 1
    visible = np.ones(num_rows, np.int64)
    visible[rows] = start + 1
    hidden = _additive(np.arange(length) >= visible[:, None], dtype, device)[:, None, None]
    gaps = None if len(rows) == num_rows else torch.from_numpy(rows).to(device)
    return Decode(len(rows), num_rows, gaps, length, hidden)


def _make_prefills(
    shapes: dict[tuple[int, int], list[int]],
    rows: list[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Prefill, ...]:
    prefills = []
    for (start, count), group in shapes.items():
        stop = offset + count * len(group)
        hidden = None
        if start:
            seen = start + np.arange(count)
            hidden = _additive(np.arange(start + count) > seen[:, None], dtype, device)
        chosen = [rows[at] for at in group]
        prefills.append(Prefill(chosen, slice(offset, stop), start + count, hidden))
        offset = stop
    return tuple(prefills)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scaling: float
) -> Tensor:
    """Attend from `query` `[_T, _H, head_dim]` to slots `[slots, heads, capacity, head_dim]`.

    Returns `[_T, _H, head_dim]`. Each query head shares the keys of `heads / _H` others.
    """
    group = query.shape[1] // keys.shape[1]
    if plan.alone:
        return _attend_alone(query, keys, values, plan, scaling)
    parts = []
    if plan.decode is not None:
        decode = plan.decode
        asked = query[: decode.num_tokens]
        if decode.rows is not None:
            spread = query.new_zeros((decode.num_rows, *query.shape[1:]))
            asked = spread.index_copy_(0, decode.rows, asked)
        found = scaled_dot_product_attention(
            asked.view(decode.num_rows, -1, group, query.shape[2]),
            keys[: decode.num_rows, :, : decode.length],
            values[: decode.num_rows, :, : decode.length],
            attn_mask=decode.hidden,
            scale=scaling,
        ).view(asked.shape)
        parts.append(found if decode.rows is None else found[decode.rows])
    for prefill in plan.prefills:
        num_rows = len(prefill.rows)
        asked = query[prefill.tokens].view(num_rows, -1, *query.shape[1:]).transpose(1, 2)
        found = scaled_dot_product_attention(
            asked,
            _repeated(keys[:, :, : prefill.length], prefill.rows, group),
            _repeated(values[:, :, : prefill.length], prefill.rows, group),
            attn_mask=prefill.hidden,
            is_causal=prefill.hidden is None,
            scale=scaling,
        )
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_alone(
    query: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scaling: float
) -> Tensor:
    """Attend token by token, in shapes that depend on each token's position only.

    Tokens behind those in `plan.alone` repeat the last one, and so does what they find.
    """
    found = torch.empty_like(query, memory_format=torch.contiguous_format)
    for index, (row, length) in enumerate(plan.alone):
        found[index] = scaled_dot_product_attention(
            query[index].view(1, keys.shape[1], -1, query.shape[2]),
            keys[row, None, :, :length],
            values[row, None, :, :length],
            scale=scaling,
        ).flatten(0, 2)
    found[len(plan.alone) :] = found[len(plan.alone) - 1]
    return found


def _repeated(states: Tensor, rows: list[int], group: int) -> Tensor:
    """Return the states of some rows, each head repeated for the queries that share it."""
    first, behind = rows[0], rows[-1] + 1
    chosen = states[first:behind] if behind - first == len(rows) else states[rows]
    return chosen if group == 1 else chosen.repeat_interleave(group, dim=1)


def _additive(hidden: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.from_numpy(hidden).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
        mask, torch.finfo(dtype).min
    )


def slot_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Do `attend` for transformers' attention modules: query `[1, _H, _T, head_dim]`.

    Raises:
        UnsupportedSetting: the model's attention is not plain.
    """
    special = [name for name in _SPECIAL if others.get(name) is not None]
    if plan is None or special:
        raise UnsupportedSetting(f"its attention is not plain: {special or 'it gets no plan'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = query[0].transpose(0, 1).contiguous()
    return attend(flat, keys, values, plan, scale)[None], None


def invariant_plans(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    device: torch.device,
) -> Iterator[tuple[AttentionPlan, list[int]]]:
    """Lay out new tokens in passes whose logits do not depend on what else is computed.

    A matrix product may add up in another order when it has another number of rows, so logits
    differ in their last bits between a batch of 3 and one of 64. Here every pass has exactly
    `BLOCK` tokens (the last one repeated to fill it), and attention runs token by token. What
    remains is that a product must treat its rows alike, which `check_invariance` tries out. See He
    et al. 2025, "Defeating nondeterminism in LLM inference".

    With each plan comes which of `rows` (by index) have their last token in it; these are the first
    of the plan's `newest`.
    """
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.concatenate(
        [first + np.arange(count) for first, count in zip(start, counts, strict=True)]
    )
    flat_rows = np.array(rows)[owners]
    last = np.cumsum(counts) - 1
    for begin in range(0, len(owners), BLOCK):
        chosen = np.arange(begin, min(begin + BLOCK, len(owners)))
        filled = np.pad(chosen, (0, BLOCK - len(chosen)), mode="edge")
        ending = ((last >= begin) & (last < begin + BLOCK)).nonzero()[0]
        newest = np.zeros(BLOCK if len(ending) else 0, np.int64)
        newest[: len(ending)] = last[ending] - begin
        lengths = (positions[chosen] + 1).tolist()
        plan = AttentionPlan(
            tokens=_tensor(ids[flat_rows[filled], positions[filled]], device),
            rows=_tensor(flat_rows[filled], device),
            positions=_tensor(positions[filled], device),
            newest=_tensor(newest, device),
            in_order=None,
            decode=None,
            prefills=(),
            alone=tuple(zip(flat_rows[chosen].tolist(), lengths, strict=True)),
        )
        yield plan, ending.tolist()


def _tensor(values: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


_SPECIAL = ("softcap", "s_aux", "position_bias")

AttentionInterface.register(NAME, slot_attention)
