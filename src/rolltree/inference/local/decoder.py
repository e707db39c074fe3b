"""Decodes in steps: admit requests, run one forward pass, sample, release finished requests.

Every request in the batch has at least one token without keys: the newest sampled token, or the
part of its prompt that was not in the prefix cache. One pass computes the former for all rows and
the latter up to a limit; a request whose tokens all have keys samples its next token. A `Decoder`
is used by one thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rolltree.inference.engine import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    SampledToken,
    TopLogprobs,
)
from rolltree.inference.local.runner import ModelRunner
from rolltree.inference.local.sampling import Adjusted, Processors, sample
from rolltree.inference.local.slots import SlotTable
from rolltree.values.errors import ModelError
from rolltree.values.types import FinishReason

if TYPE_CHECKING:
    from rolltree.inference.local.grammars import GrammarMask
    from rolltree.inference.local.routing import ExpertTable
    from rolltree.inference.local.rows import RowRunner

# A request waits for another request's prompt if that saves computing more tokens than this.
_WORTH_WAITING = 8
# Uniform numbers are drawn in blocks, since drawing one costs as much as drawing many.
_BLOCK = 64


class UniformStream:
    """Uniform numbers in [0, 1) that depend only on the seed (Philox, a counter-based stream)."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.Philox(seed))
        self._block: list[float] = []

    def __next__(self) -> float:
        if not self._block:
            self._block = self._rng.random(_BLOCK, dtype=np.float32)[::-1].tolist()
        return self._block.pop()


@dataclass(slots=True, eq=False)
class LocalRequest(EngineRequest):
    """A request with its own logits processors and random numbers."""

    processors: Processors | None = None
    mask: GrammarMask | None = None  # one of the processors
    num_top: int = 0
    # The likeliest tokens at each place: of the distribution sampled from, and of the model's.
    tops: list[list[TopLogprobs]] = field(default_factory=list)
    uniforms: UniformStream = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = UniformStream(self.seed)


class Decoder:
    """The batch: slots, their cache, and the requests that wait for a slot."""

    def __init__(
        self,
        runner: ModelRunner | RowRunner,
        slots: SlotTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        is_end: NDArray[np.bool_],
        decode_text: Callable[[list[int]], str] | None,
        counts: EngineStats | None = None,
        experts: ExpertTable | None = None,
    ) -> None:
        self.runner, self.slots = runner, slots
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.decode_text = decode_text
        self.is_end, self.experts = is_end, experts
        self.waiting: deque[LocalRequest] = deque()
        self.counts = counts or EngineStats()

    @property
    def busy(self) -> bool:
        """Whether a request waits or decodes."""
        return bool(self.waiting) or bool(self.slots.taken.any())

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Run one forward pass; `version` is the version of the current weights."""
        self._admit()
        slots = self.slots
        active = slots.active()
        if not active:
            return
        # Attention reads all rows up to the highest, holes included. Closing a hole copies a whole
        # slot, so a few holes are tolerated.
        if active[-1] + 1 - len(active) > len(active) // 8:
            active = self._compact(active)
        counts = self._share(slots.length[active] - slots.cached[active])
        rows = [row for row, count in zip(active, counts, strict=True) if count]
        counts = counts[counts > 0]
        logits = self.runner.forward(rows, slots.ids, slots.cached[rows], counts)
        # Only after the pass, so that the keys are computed again if it fails.
        slots.cached[rows] += counts
        self.counts.num_steps += 1
        self.counts.num_computed_tokens += int(counts.sum())
        ready = slots.cached[rows] == slots.length[rows]
        if ready.any():
            chosen = [row for row, done in zip(rows, ready, strict=True) if done]
            self._sample(chosen, logits if ready.all() else logits[ready.nonzero()[0]], version)

    def forget_requests(self) -> None:
        """Empty the batch and forget all keys, which may be half written."""
        self.waiting.clear()
        for row in self.slots.active():
            self.slots.release(row)
        self.slots.forget()

    def drop_cancelled(self) -> None:
        """Take requests whose futures are cancelled out of the queue and the batch."""
        self.waiting = deque(r for r in self.waiting if not r.future.cancelled())
        for row, request in enumerate(self.slots.request):
            if request is not None and request.future.cancelled():
                self.slots.release(row)

    def _admit(self) -> None:
        slots, cache = self.slots, self.runner.cache
        num_free = min(self.max_batch, len(slots.taken)) - int(slots.taken.sum())
        # A copy, since requests are removed on the way. A request that waits for another's prompt
        # does not hold up later requests.
        for request in list(self.waiting) if num_free > 0 else ():
            if num_free == 0:
                return
            # The last id is always computed, since the first token is sampled from its logits.
            common = np.minimum(slots.common(request.prompt), len(request.prompt) - 1)
            ready = cache.ready(slots, common)
            source = int(ready.argmax())
            if cache.promised(slots, common).max() > ready[source] + _WORTH_WAITING:
                # A row is computing the same prompt: the other members of a group wait and copy
                # it, so that it is computed once.
                continue
            self.waiting.remove(request)
            self._place(request, source, int(ready[source]))
            num_free -= 1

    def _place(self, request: LocalRequest, source: int, shared: int) -> None:
        """Give `request` a slot with the first `shared` ids of its prompt, from row `source`."""
        slots = self.slots
        # A free row is continued in place if at least half of it is shared. Otherwise the prefix
        # is copied, because the row's own conversation may continue.
        take_over = not slots.taken[source] and 0 < slots.cached[source] <= 2 * shared
        row = source if take_over else slots.victim()
        lowest = int(slots.taken.argmin())
        # Otherwise it would be the highest row of the batch, and attention reads all rows up to it.
        if row > lowest and not slots.taken[row:].any():
            self._swap(row, lowest, shared if row == source else 0, int(slots.cached[lowest]))
            # The swap may have moved the source row.
            source = {row: lowest, lowest: row}.get(source, source)
            row = lowest
        self.runner.cache.copy(source, row, shared)
        if self.experts is not None:
            self.experts.copy(source, row, shared)
        slots.start(row, request, shared)
        request.num_cached = shared
        request.admit()
        self.counts.num_prompt_tokens += len(request.prompt)
        self.counts.num_cached_tokens += shared

    def _share(self, missing: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many tokens to compute per row: one, or a share of `prefill_chunk`."""
        # One token for every row first, so that a long prompt does not delay rows that decode.
        counts = np.minimum(missing, 1)
        left = self.prefill_chunk
        for at in (missing > 1).nonzero()[0]:
            counts[at] = min(int(missing[at]), left)
            left -= int(counts[at])
        return counts

    def _sample(self, rows: list[int], logits: torch.Tensor, version: int) -> None:
        slots, device = self.slots, logits.device
        requests = [request for row in rows if (request := slots.request[row]) is not None]
        # Drawn per request, so that a row's tokens do not depend on the other rows.
        uniforms = torch.tensor([next(request.uniforms) for request in requests], device=device)
        adjusted = []
        for at, request in enumerate(requests):
            if request.processors is not None:
                known = slots.ids[rows[at], None, : slots.length[rows[at]]].astype(np.int64)
                so_far = torch.from_numpy(known).to(device)
                adjusted.append(Adjusted(at, so_far, request.processors))
        temperature, top_k, top_p = torch.from_numpy(slots.settings[rows]).to(device).unbind(1)
        asking = [at for at, request in enumerate(requests) if request.num_top]
        most = max((requests[at].num_top for at in asking), default=0)
        drawn = sample(logits, uniforms, temperature, top_k.long(), top_p, adjusted, asking, most)
        for at, *tops in zip(asking, drawn.top or (), drawn.raw_top or (), strict=True):
            requests[at].tops.append([tuple(top[: requests[at].num_top]) for top in tops])
        ids = drawn.ids.to("cpu", torch.int32).numpy()
        logprobs, raw = drawn.logprobs.cpu().numpy(), drawn.raw_logprobs.cpu().numpy()
        slots.append(rows, ids, logprobs, raw, version)
        self.counts.num_sampled_tokens += len(rows)
        broken, ended = ~np.isfinite(logprobs), self.is_end[ids]
        full = slots.length[rows] >= slots.limit[rows]
        # The Python loop covers only rows that may be done.
        for at in (broken | ended | full | slots.has_stops[rows]).nonzero()[0]:
            row, request = rows[at], requests[at]
            stop = self._matched_stop(row, request, int(ids[at]))
            if broken[at]:
                self._reject(row, request)
            elif ended[at] or stop is not None:
                is_cut = request.mask is not None and request.mask.is_broken
                self._finish(
                    row, request, FinishReason.LENGTH if is_cut else FinishReason.STOP, stop
                )
            elif full[at]:
                self._finish(row, request, FinishReason.LENGTH, None)
        for at, request in enumerate(requests):
            # The last token comes with the finished answer and its finish reason.
            if request.on_token is not None and slots.request[rows[at]] is request:
                token = int(ids[at]), float(logprobs[at]), float(raw[at]), version
                request.on_token(SampledToken(*token, *(request.tops[-1] if request.tops else ())))

    def _compact(self, active: list[int]) -> list[int]:
        """Move the highest requests into the lowest free rows until no hole is left."""
        slots, count = self.slots, len(active)
        holes = [row for row in range(count) if slots.request[row] is None]
        for hole, row in zip(holes, reversed(active), strict=False):
            self._swap(hole, row, int(slots.cached[hole]), int(slots.cached[row]))
        return list(range(count))

    def _swap(self, one: int, two: int, num_one: int, num_two: int) -> None:
        """Exchange two rows, keeping `num_one` and `num_two` of their computed tokens."""
        self.runner.cache.swap(one, two, num_one, num_two)
        if self.experts is not None:
            self.experts.swap(one, two, max(num_one, num_two))
        self.slots.swap(one, two)

    def _matched_stop(self, row: int, request: LocalRequest, token: int) -> str | int | None:
        if token in request.sampling.stop_token_ids:
            return token
        if not request.sampling.stop or self.decode_text is None:
            return None
        # Every token has at least one byte of text, so the newest bytes are in the newest tokens.
        # Four more, because a character that the window cuts in two takes up to four bytes.
        window = max(len(stop.encode()) for stop in request.sampling.stop) + 4
        length = int(self.slots.length[row])
        first = max(len(request.prompt), length - window)
        text = self.decode_text(self.slots.ids[row, first:length].tolist())
        # The earliest match in the text counts, whatever the order in the request.
        found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        return min(found)[1] if found else None

    def _finish(
        self, row: int, request: LocalRequest, reason: FinishReason, stop: str | int | None
    ) -> None:
        slots = self.slots
        length = int(slots.length[row])
        span = slice(len(request.prompt), length)
        output = EngineOutput(
            completion_ids=slots.ids[row, span].copy(),
            logprobs=slots.logprobs[row, span].copy(),
            raw_logprobs=slots.raw_logprobs[row, span].copy(),
            versions=slots.versions[row, span].copy(),
            finish_reason=reason,
            stop=stop,
            num_prompt_tokens=len(request.prompt),
            num_cached_tokens=request.num_cached,
            wait_s=request.wait_s,
            # The last sampled token was never run through the model.
            routed_experts=None if self.experts is None else self.experts.read(row, length - 1),
            top=tuple(top for top, _ in request.tops),
            raw_top=tuple(raw_top for _, raw_top in request.tops),
        )
        slots.release(row)
        request.settle(output)

    def _reject(self, row: int, request: LocalRequest) -> None:
        # A NaN left in the slot would reach its next request (see `clear`).
        self.runner.cache.clear(row, int(self.slots.length[row]))
        self.slots.release(row, keep=False)
        request.settle(
            ModelError(
                "the model's logits are not finite, so no token can be sampled from them. The "
                "weights have most likely diverged: look at the last training steps' gradient "
                "norm and loss, and go back to an earlier checkpoint."
            )
        )
