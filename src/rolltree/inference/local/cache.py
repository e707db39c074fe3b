"""The keys and values of every slot, preallocated, behind transformers' cache interface.

One tensor `[slots, layers, 2, heads, capacity + 1, head_dim]` holds everything: a layer's view of
it is what the model's attention reads, and moving a slot is one copy. The last position of each
slot is scratch: padding is written there and never read. The module knows nothing about requests.
It leaves out sliding windows, compressed and recurrent caches: `probe_kv` refuses models with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from rolltree.errors import UnsupportedSetting


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


def probe_kv(model: Any, max_context: int) -> KvShape:
    """Run four tokens through `model` and return the shape of the cache it fills.

    Raises:
        UnsupportedSetting: the cache is not one plain key and value per token, head and layer.
    """
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        plain = type(layer) is DynamicLayer or (
            type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= max_context
        )
        same = plain and layer.keys.shape == layer.values.shape == layers[0].keys.shape
        if not same:
            raise UnsupportedSetting(
                f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}, not "
                "plain keys and values of one shape, so the embedded engine cannot batch it. Serve "
                "this model with vLLM, or lower max_context to its sliding window if it has one."
            )
    if not layers:
        raise UnsupportedSetting(
            f"{type(model).__name__} returned no key/value cache, which the embedded engine needs "
            "to decode token by token. Use a causal language model with attention layers."
        )
    keys = layers[0].keys
    return KvShape(len(layers), keys.shape[1], keys.shape[3], keys.dtype, keys.device)


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of `num_slots` sequences of up to `capacity` tokens each."""

    def __init__(self, shape: KvShape, num_slots: int, capacity: int) -> None:
        self.capacity = capacity
        full = (num_slots, shape.num_layers, 2, shape.num_heads, capacity + 1, shape.head_dim)
        self.data = _zeros(full, shape)
        self.rows: slice | torch.Tensor = slice(0, 0)
        self.row_index = self.write_at = torch.empty(0, dtype=torch.long)
        self.length = 0
        super().__init__(layers=[SlotLayer(self, index) for index in range(shape.num_layers)])

    def aim(self, rows: range | list[int], write_at: torch.Tensor, length: int) -> None:
        """Point the next forward pass at some rows.

        Its input is `[_B, _T]`; token `[b, t]` goes to position `write_at[b, t]` of `rows[b]`, and
        attention sees the first `length` positions of those rows. A `range` is read in place; a
        list is gathered.
        """
        index = torch.tensor(rows, device=self.data.device)
        self.rows = slice(rows.start, rows.stop) if isinstance(rows, range) else index
        self.row_index = index[:, None]
        self.write_at, self.length = write_at, length

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of one slot to another."""
        if num_tokens and source != target:
            self.data[target, :, :, :, :num_tokens] = self.data[source, :, :, :, :num_tokens]

    def swap(self, one: int, two: int, num_one: int, num_two: int) -> None:
        """Exchange two slots of which `num_one` and `num_two` positions are worth keeping."""
        kept = self.data[one, :, :, :, :num_one].clone() if num_one and num_two else None
        if kept is None:
            self.copy(one, two, num_one)
            self.copy(two, one, num_two)
        else:
            self.copy(two, one, num_two)
            self.data[two, :, :, :, :num_one] = kept

    def clear(self, row: int) -> None:
        """Zero one slot, so that a NaN in it cannot reach a later request through a mask."""
        self.data[row] = 0


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
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
        """Write `[_B, _H, _T, _D]` states and return the rows' first `length` positions."""
        to = self.owner
        self.keys[to.row_index, :, to.write_at] = key_states.transpose(1, 2)
        self.values[to.row_index, :, to.write_at] = value_states.transpose(1, 2)
        return self.keys[:, :, : to.length][to.rows], self.values[:, :, : to.length][to.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of visible positions and the first one's index."""
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        """Return the number of visible positions."""
        return self.owner.length

    def get_max_length(self) -> int:
        """Return how many tokens a slot holds."""
        return self.owner.capacity


def _zeros(size: tuple[int, ...], shape: KvShape) -> torch.Tensor:
    """Return zeros; on the CPU their memory is only taken when it is first written."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    flat = np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(shape.dtype).view(size)
