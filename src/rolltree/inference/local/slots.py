"""The slots of the embedded engine: the ids in each slot, and their keys and values.

`SlotTable` is numpy bookkeeping, one row per slot. A slot keeps its ids when its request is done,
so that later prompts find their longest known prefix. Requests that decode occupy the lowest rows,
so that attention reads the cache in place. `SlotCache` holds the keys and values, in tensors
`[slots, keys or values of layers, heads, capacity, width]`, behind transformers' cache interface.
Layers with sliding windows keep all tokens, too. Recurrent states are not supported.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from rolltree.inference.local.plan import AttentionPlan
from rolltree.values.types import FloatArray, IntArray

if TYPE_CHECKING:
    from rolltree.inference.local.decoder import LocalRequest

try:
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:
    # transformers before 5.20, as in vLLM's environment, lacks the class and never uses it.

    class DummyLayer:  # type: ignore[no-redef]
        """A layer without keys and values."""

        supports_early_init, is_initialized, is_compileable, is_croppable = False, True, True, True
        keys = values = None


class SlotTable:
    """Rows of token ids, `[slots, capacity]`, and the state of each row's request."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        # Arrays instead of objects, so that a step reads and writes all rows in a few numpy calls.
        self.ids: IntArray = np.zeros((num_slots, capacity), np.int32)
        # Only for sampled tokens.
        self.logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.raw_logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.versions: IntArray = np.zeros((num_slots, capacity), np.int32)
        # Temperature, top_k and top_p.
        self.settings: FloatArray = np.zeros((num_slots, 3), np.float32)
        # The number of known ids; the first `cached` of them have keys and values.
        self.length: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.cached: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        # The greatest length that the request may reach.
        self.limit: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        # Whether the request has stop strings or stop ids: only these rows need a check per token.
        self.has_stops: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.last_used: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.taken: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.request: list[LocalRequest | None] = [None] * num_slots
        self._clock = 0

    def active(self) -> list[int]:
        """Return the rows that have a request, ascending."""
        rows: list[int] = self.taken.nonzero()[0].tolist()
        return rows

    def common(self, prompt: IntArray) -> NDArray[np.int64]:
        """Return, per row, how many leading ids `prompt` shares with it."""
        # Rows in use are compared, too: a request can copy a prompt that another request is still
        # decoding from.
        differs = self.ids[:, : len(prompt)] != prompt
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
        return np.minimum(first, self.length)

    def victim(self) -> int:
        """Return the free row to overwrite: an empty row, else the least recently used."""
        # The next turn of a conversation comes soon or never.
        age = np.where(self.length > 0, self.last_used, -1)
        return int(np.where(self.taken, np.iinfo(np.int64).max, age).argmin())

    def start(self, row: int, request: LocalRequest, cached: int) -> None:
        """Give a free row to `request`; the row has keys of its first `cached` prompt ids."""
        self.ids[row, : len(request.prompt)] = request.prompt
        self.length[row], self.cached[row] = len(request.prompt), cached
        asked = request.sampling
        self.settings[row] = asked.temperature, asked.top_k, asked.top_p
        self.limit[row] = request.limit
        self.has_stops[row] = bool(asked.stop or asked.stop_token_ids)
        self.request[row], self.taken[row] = request, True
        self._touch(row)

    def append(
        self, rows: list[int], ids: IntArray, logprobs: FloatArray, raw: FloatArray, version: int
    ) -> None:
        """Add one sampled token to each of `rows`."""
        at = (rows, self.length[rows])
        self.ids[at], self.logprobs[at], self.raw_logprobs[at] = ids, logprobs, raw
        self.versions[at] = version
        self.length[rows] += 1

    def release(self, row: int, *, keep: bool = True) -> None:
        """Remove the request from a row; its ids are kept for reuse unless `keep` is False."""
        self.request[row], self.taken[row] = None, False
        self._touch(row)
        if not keep:
            self.length[row] = self.cached[row] = 0

    def swap(self, one: int, two: int) -> None:
        """Exchange two rows."""
        pair, reverse = [one, two], [two, one]
        for array in (self.ids, self.logprobs, self.raw_logprobs, self.versions, self.settings):
            array[pair] = array[reverse]
        for values in (self.length, self.cached, self.limit, self.last_used):
            values[pair] = values[reverse]
        for flags in (self.has_stops, self.taken):
            flags[pair] = flags[reverse]
        self.request[one], self.request[two] = self.request[two], self.request[one]

    def forget(self) -> None:
        """Mark all keys and values as outdated; rows without a request become empty."""
        # For new weights. Requests in flight keep their ids, whose keys are computed again.
        self.cached[:] = 0
        self.length[~self.taken] = 0

    def _touch(self, row: int) -> None:
        self._clock += 1
        self.last_used[row] = self._clock


class LayerShape(NamedTuple):
    """The shape of one token's keys and values in a layer."""

    num_heads: int  # key/value heads
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one token's keys and values in every layer of a model.

    None stands for a layer without keys and values of its own. `counts`: the cache's length is a
    tensor, for models that derive positions from it instead of using the given positions.
    """

    layers: tuple[LayerShape | None, ...]
    dtype: torch.dtype
    device: torch.device
    counts: bool = False

    @property
    def token_bytes(self) -> int:
        """The memory of one cached token over all layers."""
        sizes = (heads * (key + value) for heads, key, value in filter(None, self.layers))
        return sum(sizes) * self.dtype.itemsize


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of `num_slots` sequences of up to `capacity` tokens each.

    `data` has one tensor for all keys and values of the same shape. `plan` defines the rows and
    positions that the next forward pass writes and reads.
    """

    def __init__(self, shape: KvShape, num_slots: int, capacity: int) -> None:
        own = [layer for layer in shape.layers if layer is not None]
        # Layers of the same shape share a tensor, so moving a slot takes one copy for all of them.
        kinds = Counter((heads, dim) for heads, *dims in own for dim in dims)
        tensors = {
            kind: _zeros((num_slots, count, kind[0], capacity, kind[1]), shape)
            for kind, count in kinds.items()
        }
        self.data = list(tensors.values())
        self.counts = shape.counts
        self.capacity, self.device, self.dtype = capacity, shape.device, shape.dtype
        self.plan: AttentionPlan | None = None
        parts = {kind: iter(tensor.unbind(1)) for kind, tensor in tensors.items()}
        layers: list[CacheLayerMixin | DummyLayer] = []
        for layer in shape.layers:
            if layer is None:
                layers.append(DummyLayer())
            else:
                heads, *dims = layer
                layers.append(_SlotLayer(self, *(next(parts[heads, dim]) for dim in dims)))
        super().__init__(layers=layers)

    def ready(self, slots: SlotTable, common: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, per row, how many of its first `common` ids a new request could take over."""
        return np.minimum(common, slots.cached)

    def promised(self, slots: SlotTable, common: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, per row, how many will be ready when its own request's prompt is computed."""
        return common * slots.taken

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of one slot to another."""
        if num_tokens and source != target:
            for data in self.data:
                data[target, :, :, :num_tokens] = data[source, :, :, :num_tokens]

    def swap(self, one: int, two: int, num_one: int, num_two: int) -> None:
        """Exchange two slots, keeping `num_one` and `num_two` of their positions."""
        both = num_one and num_two
        # If both rows have tokens to keep, the first is cloned before the second overwrites it.
        kept = [data[one, :, :, :num_one].clone() for data in self.data] if both else []
        if not both:
            self.copy(one, two, num_one)
        self.copy(two, one, num_two)
        for data, states in zip(self.data, kept, strict=False):
            data[two, :, :, :num_one] = states

    def clear(self, row: int, num_tokens: int) -> None:
        """Zero a slot's first positions."""
        # A mask gives hidden positions the weight 0, but 0 times NaN is NaN.
        for data in self.data:
            data[row, :, :, :num_tokens] = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a `SlotCache`, with the interface that attention modules call."""

    def __init__(self, owner: SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.owner, self.keys, self.values = owner, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, _H, _T, _D]` states where the plan says; return the states that it reads."""
        plan = self.owner.plan
        assert plan is not None
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), plan)
        num_rows, length = plan.extent
        return self.keys[:num_rows, :, :length], self.values[:num_rows, :, :length]

    def write(self, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> None:
        """Write `[_T, heads, head_dim]` keys and values to the plan's rows and positions."""
        self.keys[plan.rows, :, plan.positions] = keys
        self.values[plan.rows, :, plan.positions] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the size and offset of a mask; no mask is made, so only the types matter."""
        return self.owner.capacity, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Return 0, or `[_T]`: offsets that turn 0, 1, 2, ... into the flat batch's positions."""
        plan = self.owner.plan
        if plan is None or not self.owner.counts:
            return 0
        # These models add the length to 0, 1, 2, ..., but the flat batch has many sequences.
        return plan.positions - torch.arange(len(plan.positions), device=plan.positions.device)

    def get_max_length(self) -> int:
        """Return the capacity of a slot in tokens."""
        return self.owner.capacity


def _zeros(size: tuple[int, ...], shape: KvShape) -> torch.Tensor:
    """Return zeros; on the CPU each memory page is allocated when it is first written."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # torch.zeros would touch all pages now. A huge page would span several heads of a slot, and so
    # allocate memory for unused slots.
    pages = mmap.mmap(-1, math.prod(size) * shape.dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=shape.dtype).view(size)
