"""The keys and values of every slot, preallocated, behind transformers' cache interface.

One tensor `[slots, layers, 2, heads, capacity, head_dim]` holds everything: attention reads a
layer's view of it in place, and moving a slot is one copy. The module knows nothing about requests
or which rows a forward pass is about (`Plan` says so). It leaves out sliding windows, compressed
and recurrent caches.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rolltree.inference.local.attention import Plan


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's keys and values look like in every layer of a model."""

    num_layers: int
    num_heads: int  # key/value heads
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Memory of one cached token over all layers."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of `num_slots` sequences of up to `capacity` tokens each.

    `plan` says which rows and positions the next forward pass writes and reads.
    """

    def __init__(self, shape: KvShape, num_slots: int, capacity: int) -> None:
        full = (num_slots, shape.num_layers, 2, shape.num_heads, capacity, shape.head_dim)
        self.data = _zeros(full, shape)
        self.capacity, self.head_dim = capacity, shape.head_dim
        self.plan: Plan | None = None
        super().__init__(layers=[_SlotLayer(self, index) for index in range(shape.num_layers)])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of one slot to another."""
        if num_tokens and source != target:
            self.data[target, :, :, :, :num_tokens] = self.data[source, :, :, :, :num_tokens]

    def swap(self, one: int, two: int, num_one: int, num_two: int) -> None:
        """Exchange two slots of which `num_one` and `num_two` positions are worth keeping."""
        both = num_one and num_two
        kept = self.data[one, :, :, :, :num_one].clone() if both else None
        if kept is None:
            self.copy(one, two, num_one)
        self.copy(two, one, num_two)
        if kept is not None:
            self.data[two, :, :, :, :num_one] = kept

    def clear(self, row: int, num_tokens: int) -> None:
        """Zero a slot's first positions: a NaN in them would pass through a later mask."""
        self.data[row, :, :, :, :num_tokens] = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a `SlotCache`, as attention modules call it."""

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.keys, self.values = owner.data[:, index, 0], owner.data[:, index, 1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, _H, _T, _D]` states to the plan's places; return all slots' tensors."""
        plan = self.owner.plan
        assert plan is not None
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), plan)
        return self.keys, self.values

    def write(self, keys: torch.Tensor, values: torch.Tensor, plan: Plan) -> None:
        """Write `[_T, heads, head_dim]` keys and values to the plan's places."""
        self.keys[plan.rows, :, plan.positions] = keys
        self.values[plan.rows, :, plan.positions] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the size and offset of a mask; no mask is made, so only the types matter."""
        return self.owner.capacity, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given, never counted from here."""
        return 0

    def get_max_length(self) -> int:
        """Return how many tokens a slot holds."""
        return self.owner.capacity


def _zeros(size: tuple[int, ...], shape: KvShape) -> torch.Tensor:
    """Return zeros; on the CPU each page of memory is taken when it is first written.

    Without huge pages, since one of them would cover several heads' shares of a slot.
    """
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    pages = mmap.mmap(-1, math.prod(size) * shape.dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=shape.dtype).view(size)
