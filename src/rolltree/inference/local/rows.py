"""Runs rows one by one, each with transformers' own cache: slow, but right for any causal model.

For models that cannot share one flat batch: recurrent and hybrid layers, compressed caches,
positions that come from the cache. A state cannot be shortened, so a row can be reused only from
the states that are kept: after its last computed token, and before the last token of its prompt.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.inference.local.shell import cache_argument, cache_of, shell_of
from rolltree.inference.local.slots import SlotTable
from rolltree.values.types import IntArray


class RowMode(StrEnum):
    """How far a model's own cache can be reused, from the fastest to the slowest way."""

    # Any number of tokens can follow a cached prefix.
    PIECES = "pieces"
    # One token at a time can follow: transformers' Mamba is wrong for more (design/0002).
    TOKENS = "tokens"
    # Without a cache: every token computes its whole row again.
    WHOLE = "whole"


@dataclass(slots=True)
class _State:
    """A cache that holds the first `position` tokens of a row."""

    position: int = 0
    cache: Any = None

    def copy(self) -> _State:
        return _State(self.position, copy.deepcopy(self.cache))


class RowCaches:
    """The states of `num_slots` rows: the newest, and one kept from before."""

    def __init__(self, num_slots: int) -> None:
        self.newest: list[_State] = [_State() for _ in range(num_slots)]
        self.kept: list[_State] = [_State() for _ in range(num_slots)]

    def ready(self, slots: SlotTable, common: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, per row, how many of its first `common` ids a new request could take over."""
        usable = np.minimum(common, slots.cached)
        found = np.zeros_like(usable)
        # Only whole states can be taken over, since a recurrent state cannot be shortened.
        for states in (self.kept, self.newest):
            at = np.array([state.position for state in states])
            found = np.where((at <= usable) & (at > found), at, found)
        return found

    def promised(self, slots: SlotTable, common: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, per row, how many ids will be ready when the row's prompt is computed."""
        found = np.zeros_like(common)
        for row in slots.active():
            request = slots.request[row]
            kept = len(request.prompt) - 1 if request is not None else 0
            if slots.cached[row] < kept <= common[row]:
                found[row] = kept
        return found

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the state after the first `num_tokens` tokens of `source`, if any, to `target`."""
        states = self.newest[source], self.kept[source]
        chosen = next((s for s in states if num_tokens and s.position == num_tokens), _State())
        if source == target:
            if chosen is not self.newest[source]:
                self.newest[target] = chosen.copy()
            if self.kept[target].position > num_tokens:
                self.kept[target] = _State()
        else:
            self.newest[target] = chosen.copy()
            # Rows can share a kept state, because only the newest state is ever changed.
            self.kept[target] = chosen if chosen is self.kept[source] else _State()

    def swap(self, one: int, two: int, num_one: int, num_two: int) -> None:
        """Exchange two rows; the numbers of tokens worth keeping do not matter here."""
        for states in (self.newest, self.kept):
            states[one], states[two] = states[two], states[one]

    def clear(self, row: int, num_tokens: int) -> None:
        """Forget a row."""
        self.newest[row] = self.kept[row] = _State()


class RowRunner:
    """Forward passes of `model` over `num_slots` rows, one after the other."""

    lean = False

    def __init__(self, model: Any, mode: RowMode, num_slots: int) -> None:
        self._source, self._mode = model, mode
        self.cache = RowCaches(num_slots)
        self._read_model()

    def refresh(self) -> None:
        """Use the model's current parameters if tensors were replaced (not changed in place)."""
        now = [id(parameter) for parameter in self._source.parameters()]
        if now != self._parameters:
            self._read_model()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters that `forward` reads."""
        return list(self._model.parameters())

    def pack(self) -> None:
        """Do nothing: `forward` reads the model's own parameters."""

    def forward(
        self,
        rows: list[int],
        ids: IntArray,
        start: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> torch.Tensor:
        """Compute new tokens of some rows; see `ModelRunner.forward`."""
        logits = [
            self._run(row, ids[row], int(first), int(first + count))
            for row, first, count in zip(rows, start, counts, strict=True)
        ]
        return torch.stack(logits).float()

    def _run(self, row: int, ids: IntArray, start: int, stop: int) -> torch.Tensor:
        if self._mode is RowMode.WHOLE:
            self.cache.newest[row] = _State(stop)
            return self._logits(ids[:stop], use_cache=False)[0]
        if start == 0:
            self.cache.clear(row, 0)
            self.cache.newest[row] = _State()
        state = self.cache.newest[row]
        assert state.position == start, f"row {row} has a state at {state.position}, not {start}"
        # All but the last token first, to keep a state: the next turn begins with this prompt, and
        # a template may strip what is sampled after it (design/0002).
        if stop - start > 1:
            self._extend(state, ids[start : stop - 1])
            self.cache.kept[row] = state.copy()
        return self._extend(state, ids[stop - 1 : stop])

    def _extend(self, state: _State, ids: IntArray) -> torch.Tensor:
        step = len(ids)
        if self._mode is RowMode.TOKENS and state.position:
            step = 1
        for begin in range(0, len(ids), step):
            known = {} if state.cache is None else {cache_argument(self._model): state.cache}
            logits, output = self._logits(ids[begin : begin + step], use_cache=True, **known)
            state.cache = cache_of(output)
            state.position += len(ids[begin : begin + step])
        return logits

    def _logits(self, ids: IntArray, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """Return float `[_V]` after the last of `ids`, and the model's whole output."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self._model.device)[None]
        output = self._model(input_ids=tokens, **self._last, **arguments)
        return output.logits[0, -1], output

    def _read_model(self) -> None:
        self._parameters = [id(parameter) for parameter in self._source.parameters()]
        self._model = shell_of(self._source)
        takes = inspect.signature(self._model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}


def state_bytes(cache: Any) -> int:
    """Return the memory of a cache's tensors."""
    return sum(tensor.nbytes for tensor in _tensors(cache, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)
