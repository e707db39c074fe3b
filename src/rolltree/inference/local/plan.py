"""Maps the tokens of a flat batch to slots and positions.

A forward pass is one sequence of tokens, `[1, _T]`: the next token of every decoding row, then the
new tokens of rows whose prompts are being computed. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltree.values.types import IntArray

# Tokens of one batch-invariant pass: fewer mean more passes for a full batch, more mean waste for
# a small batch.
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows that compute the same number of tokens from the same position."""

    rows: list[int]
    tokens: slice  # of the flat batch
    length: int  # visible positions
    hidden: Tensor | None  # additive mask [count, length - first]; None: plainly causal from 0
    first: int = 0  # no token sees a position before this one


@dataclass(frozen=True, slots=True)
class Decode:
    """Rows that compute one token: the first `num_tokens` of the flat batch."""

    num_tokens: int
    num_rows: int  # highest row + 1
    rows: Tensor | None  # int64 [num_tokens]; None: all rows, without a gap
    length: int  # visible positions of the longest row
    hidden: Tensor  # additive mask [num_rows, 1, 1, length - first]
    start: NDArray[np.int64]  # [num_rows], the position of each row's token, 0 for idle rows
    oldest: int  # the lowest position of a token
    first: int = 0  # no token sees a position before this one


class Alone(NamedTuple):
    """A token that attends on its own, to the positions from `first` up to `length`."""

    row: int
    length: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The slot and position of each token of a flat batch. Tensors are int64."""

    tokens: Tensor  # [_T] ids
    rows: Tensor  # [_T]
    positions: Tensor  # [_T]
    newest: Tensor  # [_B], the flat index of each row's last token
    in_order: Tensor | None  # [_B], index that puts `newest` into the caller's order of rows
    decode: Decode | None
    prefills: tuple[Prefill, ...]
    extent: tuple[int, int]  # the highest row + 1, and the highest position + 1
    dtype: torch.dtype  # of masks
    alone: tuple[Alone, ...] = ()  # every token, if `invariant`


def make_plan(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Lay out `counts[i]` new tokens of `rows[i]` from position `start[i]`; `rows` ascend.

    `ids` is int32 `[slots, capacity]`. In the flat batch, rows with one token come first, in
    ascending order; then the other rows, grouped by shape.
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
            # Prompts of a group have the same start and length, so they attend in one call.
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
        extent=(int(flat_rows.max()) + 1, int(flat_positions.max()) + 1),
        dtype=dtype,
    )


def _make_decode(
    rows: NDArray[np.int64], start: NDArray[np.int64], dtype: torch.dtype, device: torch.device
) -> Decode:
    num_rows, length = int(rows[-1]) + 1, int(start.max()) + 1
    visible = np.ones(num_rows, np.int64)
    # An idle row between busy rows attends to its first position, since an empty softmax would be
    # NaN. Its result is dropped.
    visible[rows] = start + 1
    hidden = additive(np.arange(length) >= visible[:, None], dtype, device)[:, None, None]
    gaps = None if len(rows) == num_rows else torch.from_numpy(rows).to(device)
    return Decode(len(rows), num_rows, gaps, length, hidden, visible - 1, int(start.min()))


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
            hidden = additive(np.arange(start + count) > seen[:, None], dtype, device)
        chosen = [rows[at] for at in group]
        prefills.append(Prefill(chosen, slice(offset, stop), start + count, hidden))
        offset = stop
    return tuple(prefills)


def additive(
    hidden: NDArray[np.bool_] | Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a mask to add to scores: very low where `hidden`, else 0."""
    mask = torch.as_tensor(hidden, device=device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(
        # Not -inf, because the softmax of a row of -inf is NaN.
        mask,
        torch.finfo(dtype).min,
    )


def invariant_plans(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    device: torch.device,
) -> Iterator[tuple[AttentionPlan, list[int]]]:
    """Lay out new tokens in passes whose logits do not depend on what else is computed.

    Each plan comes with the indices of those `rows` whose last token is in it; these are the first
    of the plan's `newest`. See He et al. 2025, "Defeating nondeterminism in LLM inference".
    """
    # A matrix product may sum in a different order for a different number of rows, so logits differ
    # in their last bits between a batch of 3 and a batch of 64. Here every pass has exactly `BLOCK`
    # tokens (the last token is repeated to fill it), and attention runs token by token. This still
    # relies on products that treat all rows alike, which `check_invariance` tests.
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
        # A full block even for one row, since the head's product must have a fixed shape, too.
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
            extent=(int(flat_rows[chosen].max()) + 1, max(lengths)),
            # The dtype of masks, which are not used here.
            dtype=torch.float32,
            alone=tuple(map(Alone, flat_rows[chosen].tolist(), lengths)),
        )
        yield plan, ending.tolist()


def _tensor(values: NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
