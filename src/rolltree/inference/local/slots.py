"""What each cache slot holds: token ids, how many of them have keys and values, for whom.

Plain numpy bookkeeping, one row per slot. A slot keeps its ids when its request is done, so later
prompts find their longest known prefix here. Requests that decode occupy the lowest rows, so that
attention reads the cache in place. The module knows nothing about models and tensors. It leaves
out the keys and values, which `SlotCache` moves alongside.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rolltree.types import FinishReason, FloatArray, IntArray, SamplingParams

_UNIFORM_BLOCK = 64


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """One completion of the embedded engine. Arrays of shape `[_C]`, one entry per sampled token.

    `logprobs` are those of the distribution sampled from, `raw_logprobs` those of the model's own
    softmax. `stop` is the stop string, or the id in `stop_token_ids`, that ended it; None when an
    end token or the length did.
    """

    completion_ids: IntArray
    logprobs: FloatArray
    raw_logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    stop: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    wait_s: float  # before it was admitted, and while the engine was paused


@dataclass(slots=True, eq=False)
class Pending:
    """A request inside the engine. Owned by the engine's thread once it is in the inbox."""

    prompt: IntArray
    sampling: SamplingParams
    seed: int
    limit: int  # longest prompt + completion, in tokens
    submitted_s: float
    future: Future[LocalOutput] = field(default_factory=Future)
    num_cached: int = 0
    wait_s: float = 0.0
    paused_s_before: float = 0.0
    _rng: np.random.Generator | None = None
    _uniforms: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    _next_uniform: int = 0

    def uniform(self) -> float:
        """Return the next number in [0, 1) of this request's own stream."""
        if self._next_uniform == len(self._uniforms):
            if self._rng is None:
                self._rng = np.random.Generator(np.random.Philox(self.seed))
            self._uniforms = self._rng.random(_UNIFORM_BLOCK, dtype=np.float32)
            self._next_uniform = 0
        self._next_uniform += 1
        return float(self._uniforms[self._next_uniform - 1])


class SlotTable:
    """Rows of token ids. `length[row]` ids are known, the first `cached[row]` have keys."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.ids: IntArray = np.zeros((num_slots, capacity), np.int32)
        self.logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.raw_logprobs: FloatArray = np.zeros((num_slots, capacity), np.float32)
        self.versions: IntArray = np.zeros((num_slots, capacity), np.int32)
        self.length: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.cached: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.last_used: NDArray[np.int64] = np.zeros(num_slots, np.int64)
        self.settings: FloatArray = np.zeros((num_slots, 3), np.float32)  # of the request's
        self.request: list[Pending | None] = [None] * num_slots
        self.clock = 0

    def active(self) -> list[int]:
        """Return the rows that have a request, ascending."""
        return [row for row, request in enumerate(self.request) if request is not None]

    def common(self, prompt: IntArray) -> NDArray[np.int64]:
        """Return, per row, how many leading ids `prompt` shares with it."""
        differs = self.ids[:, : len(prompt)] != prompt
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
        return np.minimum(first, self.length)

    def victim(self) -> int:
        """Return the free row to overwrite: an empty one, else the one unused for longest."""
        free = [row for row, request in enumerate(self.request) if request is None]
        return min(free, key=lambda row: (self.length[row] > 0, self.last_used[row], row))

    def start(self, row: int, request: Pending, cached: int) -> None:
        """Give a free row to `request`, of whose prompt `cached` ids have keys there."""
        self.ids[row, : len(request.prompt)] = request.prompt
        self.length[row], self.cached[row] = len(request.prompt), cached
        self.request[row] = request
        asked = request.sampling
        self.settings[row] = asked.temperature, asked.top_k, asked.top_p
        self.touch(row)

    def touch(self, row: int) -> None:
        """Mark a row as just used."""
        self.clock += 1
        self.last_used[row] = self.clock

    def append(
        self, rows: list[int], ids: IntArray, logprobs: FloatArray, raw: FloatArray, version: int
    ) -> None:
        """Add one sampled token to each of `rows`, whose keys are known up to the one before."""
        at = (rows, self.length[rows])
        self.ids[at], self.logprobs[at], self.raw_logprobs[at] = ids, logprobs, raw
        self.versions[at] = version
        self.cached[rows] = self.length[rows]
        self.length[rows] += 1

    def swap(self, one: int, two: int) -> None:
        """Exchange two rows."""
        pair, reverse = [one, two], [two, one]
        for array in (self.ids, self.logprobs, self.raw_logprobs, self.versions, self.settings):
            array[pair] = array[reverse]
        for counts in (self.length, self.cached, self.last_used):
            counts[pair] = counts[reverse]
        self.request[one], self.request[two] = self.request[two], self.request[one]

    def forget(self) -> None:
        """Declare all keys and values outdated; rows without a request become empty."""
        self.cached[:] = 0
        for row, request in enumerate(self.request):
            if request is None:
                self.length[row] = 0
