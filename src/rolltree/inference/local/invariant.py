"""Plans under which a token's logits do not depend on what else is computed with it.

A matrix product may add up in another order when it has another number of rows, so a token's
logits differ in their last bits between a batch of 3 and one of 64, between a prompt computed whole
and one continued from the prefix cache. Here every pass has exactly `BLOCK` tokens (the last one
repeated to fill it), and attention runs token by token, in shapes that depend on the token's
position alone. What remains is that a product must treat all of its rows alike;
`rolltree.inference.local.probe` tries that out. See He et al. 2025, "Defeating nondeterminism in
LLM inference". The module knows nothing about models and requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.inference.local.attention import Plan
from rolltree.types import IntArray

BLOCK = 32
"""Tokens of one pass: fewer cost more passes for a full batch, more cost more for a small one."""


def invariant_plans(
    rows: list[int],
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    ids: IntArray,
    device: torch.device,
) -> Iterator[tuple[Plan, list[int]]]:
    """Lay out new tokens as `make_plan` does, in passes to be run one after the other.

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
        plan = Plan(
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
