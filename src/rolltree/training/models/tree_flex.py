"""Attention over a packed forest as one FlexAttention kernel, for GPUs.

Query i sees key j if `j <= i < subtree_end[j]` and i is not too deep for the layer's pattern.
Which blocks of 128 x 128 are empty, full or mixed follows from the smallest and largest
`subtree_end`, depth and limit of a block, so no pair of tokens is examined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rolltree.training.layout import FULL, Pattern

FLEX_BLOCK = 128
"""Queries and keys per block: FlexAttention's own default, and the minimum of its kernels."""

_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_mask(
    subtree_end: NDArray[np.int32],
    device: torch.device | str = "cpu",
    block: int = FLEX_BLOCK,
    *,
    depth: NDArray[np.int32] | None = None,
    pattern: Pattern = FULL,
) -> BlockMask:
    """Return the block mask of a forest in depth-first order, `[_T]`.

    Args:
        subtree_end: int32 `[_T]`.
        device: where the kernel runs.
        block: queries and keys per block.
        depth: int32 `[_T]`, which `pattern` limits.
        pattern: how far back a token sees.
    """
    num_tokens = len(subtree_end)
    first = np.arange(0, num_tokens, block)
    reach = np.maximum.reduceat(subtree_end, first)  # end of the queries that see any of its keys
    common = np.minimum.reduceat(subtree_end, first)  # end of those that see all of them
    stop = first + block
    below = first[:, None] > first[None, :]
    full = below & (common[None, :] >= stop[:, None]) & (stop[:, None] <= num_tokens)
    mixed = below & (reach[None, :] > first[:, None])
    limit = None if depth is None else pattern.limit(depth)
    if depth is not None and limit is not None:
        shallow, deep = (by.reduceat(depth, first) for by in (np.minimum, np.maximum))
        full &= deep[:, None] < np.minimum.reduceat(limit, first)[None, :]
        mixed &= shallow[:, None] < np.maximum.reduceat(limit, first)[None, :]
    # The kernel adds up both lists, so no block may be in both. A diagonal block is always mixed,
    # because causality hides half of it.
    mixed = (mixed & ~full) | np.eye(len(first), dtype=np.bool_)
    return BlockMask.from_kv_blocks(
        *_listed(mixed, device),
        *_listed(full, device),
        BLOCK_SIZE=block,
        mask_mod=_rule(subtree_end, depth, limit, device),
        seq_lengths=(num_tokens, num_tokens),
    )


def _rule(
    subtree_end: NDArray[np.int32],
    depth: NDArray[np.int32] | None,
    limit: NDArray[np.int64] | None,
    device: torch.device | str,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    # The kernel reads the tensors that `sees` closes over, so they have to be on the device.
    end = torch.from_numpy(np.ascontiguousarray(subtree_end)).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    if depth is None or limit is None:
        return sees
    deep = torch.from_numpy(np.ascontiguousarray(depth)).to(device)
    last = torch.from_numpy(limit.astype(np.int32)).to(device)

    def sees_near(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key]) & (deep[query] < last[key])

    return sees_near


def _listed(blocks: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks of each query block, and all key blocks, those first."""
    # `[query blocks, key blocks]`: only the first `count` of each row are read.
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    count = blocks.sum(1, dtype=np.int32)
    return (
        torch.from_numpy(count)[None, None].to(device),
        torch.from_numpy(order)[None, None].to(device),
    )


def flex_forest_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over a forest: `[1, _H, _T, d]`, keys and values `[1, _K, _T, d]` -> `[1, _T, _H, d]`.

    On a GPU it is compiled; on a CPU it is torch's plain code, without a gradient. `softcap` and
    `sinks` are those of `forest_attention`.
    """
    # Without compilation, torch materializes all scores.
    attend: Any = _compiled() if query.is_cuda else flex_attention
    settings: dict[str, Any] = {
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": key.shape[1] < query.shape[1],
        "score_mod": None if softcap is None else _capped(softcap),
    }
    if sinks is None:
        out = attend(query, key, value, **settings)
    else:
        # The sink adds exp(sink) to the denominator, so sigmoid(log-sum - sink) of the result is
        # left.
        out, aux = attend(query, key, value, return_aux=AuxRequest(lse=True), **settings)
        left = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
        out = out * left[..., None].to(out.dtype)
    result: Tensor = out.transpose(1, 2)
    return result


@functools.cache
def _capped(softcap: float) -> _ScoreMod:
    def cap(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
