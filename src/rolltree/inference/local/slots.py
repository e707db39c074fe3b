"""What each cache slot holds: token ids, how many of them have keys and values, for whom.

Plain numpy bookkeeping, one row per slot. A slot keeps its ids when its request is done, so later
prompts find their longest known prefix here. Requests that decode occupy the lowest rows, so that
attention reads the cache in place. The module knows nothing about models and tensors. It leaves
out the keys and values, which `SlotCache` moves alongside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rolltree.inference.local.requests import Pending
from rolltree.types import FloatArray, IntArray


class SlotTable:
    """Rows of token ids. `length[row]` ids are known, the first `cached[row]` have keys.

    Arrays of shape `[slots, capacity]` hold ids and, for sampled tokens, logprobs and versions;
    Of the row's request, `settings` `[slots, 3]` holds temperature, top_k and top_p, `limit` the
    greatest length, and `has_stops` whether it has stop strings or ids of its own.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.ids: IntArray = np.zeros((num_slots, capacity), np.int32)
        self.logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.raw_logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.versions: IntArray = np.zeros((num_slots, capacity), np.int32)
        self.settings: FloatArray = np.zeros((num_slots, 3), np.float32)
        self.length: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.cached: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.limit: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.has_stops: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.last_used: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.taken: NDArray[np.bool_] = np.zeros(num_slots, bool)
        self.request: list[Pending | None] = [None] * num_slots
        self._clock = 0

    def active(self) -> list[int]:
        """Return the rows that have a request, ascending."""
        rows: list[int] = self.taken.nonzero()[0].tolist()
        return rows

    def common(self, prompt: IntArray) -> NDArray[np.int64]:
        """Return, per row, how many leading ids `prompt` shares with it."""
        differs = self.ids[:, : len(prompt)] != prompt
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
        return np.minimum(first, self.length)

    def victim(self) -> int:
        """Return the free row to overwrite: an empty one, else the one unused for longest."""
        age = np.where(self.length > 0, self.last_used, -1)
        return int(np.where(self.taken, np.iinfo(np.int64).max, age).argmin())

    def start(self, row: int, request: Pending, cached: int) -> None:
        """Give a free row to `request`, of whose prompt `cached` ids have keys there."""
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
        """Take the request off a row; its ids stay for reuse unless `keep` is False."""
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
        """Declare all keys and values outdated; rows without a request become empty."""
        self.cached[:] = 0
        self.length[~self.taken] = 0

    def _touch(self, row: int) -> None:
        self._clock += 1
        self.last_used[row] = self._clock
