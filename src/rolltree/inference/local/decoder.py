"""Steps: admit requests, compute prompts, decode one token for everybody.

`Decoder.step` does one forward pass: a chunk of prompt tokens when some request still has more than
one token without keys, else one token for every request. A request joins when a slot is free and
leaves when it is finished, between steps. The last prompt token is always part of a decode step, so
members of a group whose prompt is cached go straight to decoding. The class belongs to one thread.
It knows nothing about threads, clocks of callers, or who changes the weights.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.errors import ModelError
from rolltree.inference.local.cache import SlotCache
from rolltree.inference.local.sampling import sample
from rolltree.inference.local.slots import LocalOutput, Pending, SlotTable
from rolltree.types import FinishReason, IntArray

_WORTH_WAITING = 8
"""A request waits for another's prompt when that saves computing more tokens than this."""


class Decoder:
    """The batch: slots, their cache, and the requests that wait for one."""

    def __init__(
        self,
        model: Any,
        cache: SlotCache,
        slots: SlotTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        eos_token_ids: tuple[int, ...],
        decode_text: Callable[[list[int]], str] | None,
    ) -> None:
        self.model, self.cache, self.slots = model, cache, slots
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.decode_text = decode_text
        self.is_end = np.zeros(model.config.vocab_size, bool)
        self.is_end[list(eos_token_ids)] = True
        self.waiting: deque[Pending] = deque()
        self.any_cancelled = False  # set by whoever cancels a request
        self.paused_s = 0.0
        self.num_steps = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_prefilled_tokens = self.num_sampled_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a request waits or decodes."""
        return bool(self.waiting) or any(request is not None for request in self.slots.request)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Run one forward pass; `version` is that of the weights it runs with."""
        self._drop_cancelled()
        self._admit()
        slots = self.slots
        active = slots.active()
        if not active:
            return
        self.num_steps += 1
        missing = slots.length[active] - slots.cached[active] - 1
        if missing.any():
            self._prefill([row for row, count in zip(active, missing, strict=True) if count])
        else:
            self._decode(active, version)

    def fail_all(self, error: Exception) -> None:
        """Answer every request with `error` and forget all keys, which may be half written."""
        requests = [*self.waiting, *(r for r in self.slots.request if r is not None)]
        self.waiting.clear()
        self.slots.request = [None] * len(self.slots.request)
        self.slots.forget()
        for request in requests:
            _settle(request, error)

    def _drop_cancelled(self) -> None:
        if not self.any_cancelled:
            return
        self.any_cancelled = False
        self.waiting = deque(r for r in self.waiting if not r.future.cancelled())
        for row, request in enumerate(self.slots.request):
            if request is not None and request.future.cancelled():
                self.slots.request[row] = None

    def _admit(self) -> None:
        slots = self.slots
        num_free = min(self.max_batch, len(slots.request)) - len(slots.active())
        for request in list(self.waiting):
            if num_free <= 0:
                return
            common = np.minimum(slots.common(request.prompt), len(request.prompt) - 1)
            ready = np.minimum(common, slots.cached)
            source = int(ready.argmax())
            computing = [row for row in slots.active() if slots.cached[row] < slots.length[row] - 1]
            if computing and common[computing].max() > ready[source] + _WORTH_WAITING:
                continue
            self.waiting.remove(request)
            self._place(request, source, int(ready[source]))
            num_free -= 1

    def _place(self, request: Pending, source: int, shared: int) -> None:
        """Give `request` a slot holding the first `shared` ids of its prompt, as `source` does."""
        slots, cache = self.slots, self.cache
        free = slots.request[source] is None
        take_over = free and shared > 0 and slots.cached[source] <= 2 * shared
        row = source if take_over else slots.victim()
        lowest = slots.request.index(None)
        if row > lowest and row > max(slots.active(), default=-1):
            cache.swap(row, lowest, shared if row == source else 0, int(slots.cached[lowest]))
            slots.swap(row, lowest)
            source = {row: lowest, lowest: row}.get(source, source)
            row = lowest
        cache.copy(source, row, shared)
        slots.start(row, request, shared)
        request.num_cached = shared
        request.wait_s = time.monotonic() - request.submitted_s
        request.paused_s_before = self.paused_s
        self.num_prompt_tokens += len(request.prompt)
        self.num_cached_tokens += shared

    def _prefill(self, rows: list[int]) -> None:
        """Compute keys for one chunk of the longest prompts, all but each row's last token."""
        slots = self.slots
        missing = {row: int(slots.length[row] - slots.cached[row] - 1) for row in rows}
        rows = sorted(rows, key=lambda row: -missing[row])
        width = min(missing[rows[0]], self.prefill_chunk)
        rows = rows[: max(1, self.prefill_chunk // width)]
        rows = sorted(row for row in rows if 2 * missing[row] >= width)
        counts = np.array([min(missing[row], width) for row in rows])
        tokens = np.zeros((len(rows), width), np.int64)
        for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = slots.cached[row]
            tokens[at, :count] = slots.ids[row, start : start + count]
        self._forward(rows, tokens, counts)
        slots.cached[rows] += counts
        self.num_prefilled_tokens += int(counts.sum())

    def _decode(self, active: list[int], version: int) -> None:
        slots = self.slots
        if active[-1] + 1 - len(active) > len(active) // 8:
            active = self._compact(active)
        rows = range(active[-1] + 1)
        counts = np.zeros(len(rows), np.int64)
        counts[active] = 1
        tokens = slots.ids[rows, np.maximum(slots.length[: len(rows)] - 1, 0)]
        logits = self._forward(rows, tokens[:, None].astype(np.int64), counts).float()
        requests = [slots.request[row] for row in active]
        uniforms = torch.tensor([r.uniform() for r in requests if r is not None])
        settings = torch.from_numpy(slots.settings[active]).to(logits.device)
        temperature, top_k, top_p = settings.unbind(1)
        drawn = sample(
            logits if len(active) == len(rows) else logits[active],
            uniforms.to(logits.device),
            temperature,
            top_k.long(),
            top_p,
        )
        ids = drawn.ids.to("cpu", torch.int32).numpy()
        logprobs = drawn.logprobs.cpu().numpy()
        slots.append(active, ids, logprobs, drawn.raw_logprobs.cpu().numpy(), version)
        self.num_sampled_tokens += len(active)
        finite = np.isfinite(logprobs)
        ended = self.is_end[ids]
        for at, (row, request) in enumerate(zip(active, requests, strict=True)):
            if request is None:
                continue
            if not finite[at]:
                self._reject(row, request)
                continue
            stop = self._matched_stop(row, request, int(ids[at]))
            if ended[at] or stop is not None:
                self._finish(row, request, FinishReason.STOP, stop)
            elif slots.length[row] >= request.limit:
                self._finish(row, request, FinishReason.LENGTH, None)

    def _compact(self, active: list[int]) -> list[int]:
        """Move the highest requests into the lowest free rows until there is no hole."""
        slots, count = self.slots, len(active)
        holes = [row for row in range(count) if slots.request[row] is None]
        for hole, row in zip(holes, reversed(active), strict=False):
            self.cache.swap(hole, row, int(slots.cached[hole]), int(slots.cached[row]))
            slots.swap(hole, row)
        return list(range(count))

    def _forward(
        self, rows: range | list[int], tokens: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Feed `tokens [_B, _T]`, of which the first `counts[b]` are real, after what is cached.

        Returns the logits `[_B, _V]` of the last column.
        """
        start = self.slots.cached[rows]
        position = start[:, None] + np.arange(tokens.shape[1])
        real = np.arange(tokens.shape[1]) < counts[:, None]
        length = max(int((start + counts).max()), 1)
        hidden = np.arange(length) > position[:, :, None]
        device, dtype = self.cache.data.device, self.cache.data.dtype

        def to_device(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        mask = torch.zeros((len(rows), 1, tokens.shape[1], length), dtype=dtype, device=device)
        mask.masked_fill_(to_device(hidden)[:, None], torch.finfo(dtype).min)
        self.cache.aim(rows, to_device(np.where(real, position, self.cache.capacity)), length)
        output = self.model(
            input_ids=to_device(tokens),
            attention_mask=mask,
            position_ids=to_device(np.where(real, position, 0)),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _matched_stop(self, row: int, request: Pending, token: int) -> str | int | None:
        if token in request.sampling.stop_token_ids:
            return token
        if not request.sampling.stop or self.decode_text is None:
            return None
        # Every token is at least one byte of text, so the newest bytes are in the newest tokens.
        window = max(len(stop.encode()) for stop in request.sampling.stop) + 4
        length = int(self.slots.length[row])
        first = max(len(request.prompt), length - window)
        text = self.decode_text(self.slots.ids[row, first:length].tolist())
        found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        return min(found)[1] if found else None

    def _finish(
        self, row: int, request: Pending, reason: FinishReason, stop: str | int | None
    ) -> None:
        slots = self.slots
        span = slice(len(request.prompt), int(slots.length[row]))
        output = LocalOutput(
            completion_ids=slots.ids[row, span].copy(),
            logprobs=slots.logprobs[row, span].copy(),
            raw_logprobs=slots.raw_logprobs[row, span].copy(),
            versions=slots.versions[row, span].copy(),
            finish_reason=reason,
            stop=stop,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=request.num_cached,
            wait_s=request.wait_s + self.paused_s - request.paused_s_before,
        )
        slots.request[row] = None
        slots.touch(row)
        _settle(request, output)

    def _reject(self, row: int, request: Pending) -> None:
        self.slots.request[row] = None
        self.slots.length[row] = self.slots.cached[row] = 0
        self.cache.clear(row)
        _settle(
            request,
            ModelError(
                "the model's logits are not finite, so no token can be sampled from them. The "
                "weights have most likely diverged: look at the last training steps' gradient "
                "norm and loss, and go back to an earlier checkpoint."
            ),
        )


def _settle(request: Pending, outcome: LocalOutput | Exception) -> None:
    """Answer a request; one that was cancelled meanwhile needs no answer."""
    try:
        if isinstance(outcome, Exception):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
    except InvalidStateError:
        pass


def as_prompt(ids: IntArray) -> IntArray:
    """Return prompt ids as a contiguous int32 array that nobody else changes."""
    return np.array(ids, dtype=np.int32)
