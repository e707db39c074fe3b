"""FlexAttention over a forest: one fused kernel on a GPU instead of a call per block.

The same `subtree_end` says everything: query i sees key j iff `j <= i < subtree_end[j]`. Which
blocks of 128 x 128 are empty, full or mixed follows from the least and the largest `subtree_end` of
a block of keys, so nothing of size `_T` x `_T` is made. It knows nothing about models. It leaves
out the backward pass on a CPU, which torch does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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
