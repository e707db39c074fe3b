"""The embedded engine: a thread that decodes with the trainer's own weights.

`await engine.generate(request)` from any event loop. The weights are shared, not copied: between
`async with engine.paused()` and its end no step runs, so a trainer may change them in place, and
`publish` tells the engine that it did. The module knows nothing about chat templates, rollouts or
losses. It leaves out other processes and other machines: that is what a vLLM server is for.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rolltree.errors import (
    ConfigError,
    ModelError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
    did_you_mean,
)
from rolltree.inference.local.decoder import Decoder
from rolltree.inference.local.probe import check_invariance, probe
from rolltree.inference.local.processors import PROCESSED, make_processors
from rolltree.inference.local.requests import LocalOutput, LocalToken, Pending, UniformStream
from rolltree.inference.local.runner import ModelRunner
from rolltree.inference.local.slots import SlotTable
from rolltree.types import GenerateRequest, SamplingParams

_DEFAULT_CONTEXT = 2048
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed")
_CHUNKS = {"cpu": 1024}
"""Prompt tokens of one pass where not told; on a CPU, activations that stay in its cache."""
_DEFAULT_CHUNK = 8192
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "logprobs": (True, False, 0, 1),
    "top_logprobs": (0,),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "stream": (False,),
    "echo": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
}
"""Values of servers' request fields that ask for what this engine does anyway."""


class LocalEngine:
    """Batched decoding for one Hugging Face causal language model.

    Args:
        model: the module whose weights are used, in place, also after they change.
        eos_token_ids: ids that end an answer; they count as sampled and are its last id.
        decode_text: ids to text (special tokens kept); needed for `stop` strings only.
        max_batch: how many requests decode together.
        max_context: prompt and completion of one request, in tokens; None is 2,048, or the model's
            own limit if that is less.
        kv_budget_bytes: memory for keys and values. None takes `max_batch` slots of `max_context`
            tokens; more memory keeps more finished conversations for reuse. On the CPU memory
            is taken when it is used.
        prefill_chunk: most prompt tokens in one forward pass; None is what suits the device.
        pack_weights: keep the layers' matrices a second time, transposed, where that makes
            products faster: Llama-like models on a CPU. The copy is renewed after `publish`; for a
            model that is not trained meanwhile. Without it nothing is copied.
        batch_invariant: the same request gives the same ids and bit-equal logprobs whatever else
            is in the batch or in the prefix cache (and pays for it, see docs/engine.md).
        seed: for requests that bring none.

    Raises:
        ConfigError: the budget does not hold `max_batch` slots, or a number is out of range.
        UnsupportedSetting: the model's cache is not plain keys and values, or the device's products
            depend on the batch and it must not matter.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Iterable[int] = (),
        decode_text: Callable[[list[int]], str] | None = None,
        max_batch: int = 64,
        max_context: int | None = None,
        kv_budget_bytes: int | None = None,
        prefill_chunk: int | None = None,
        pack_weights: bool = False,
        batch_invariant: bool = False,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        own_limit = getattr(model.config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
        self.max_context = max_context or min(own_limit, _DEFAULT_CONTEXT)
        if prefill_chunk is None:
            prefill_chunk = _CHUNKS.get(model.device.type, _DEFAULT_CHUNK)
        for name, value in (
            ("max_batch", max_batch),
            ("max_context", self.max_context - 1),
            ("prefill_chunk", prefill_chunk),
        ):
            if value < 1:
                raise ConfigError(f"{name} is too small for a single request; raise it.")
        if self.max_context > own_limit:
            raise ConfigError(
                f"max_context {self.max_context} exceeds the {own_limit} positions the model was "
                "made for; answers beyond them would be noise. Lower max_context."
            )
        packed = pack_weights and model.device.type == "cpu"
        shape, lean = probe(model, self.max_context, packed)
        if batch_invariant:
            check_invariance(model, shape, lean, packed)
        slot_bytes = shape.token_bytes * self.max_context
        num_slots = max_batch
        if kv_budget_bytes is not None:
            num_slots = min(kv_budget_bytes // slot_bytes, 8 * max_batch)
        if num_slots < max_batch:
            raise ConfigError(
                f"kv_budget_bytes = {kv_budget_bytes:,} holds {num_slots} slots of "
                f"{self.max_context} tokens ({slot_bytes:,} bytes each), not max_batch = "
                f"{max_batch}. Lower max_batch or max_context, or raise the budget."
            )
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.vocab_size = int(model.config.vocab_size)
        if any(not 0 <= token < self.vocab_size for token in self.eos_token_ids):
            raise ConfigError(
                f"eos_token_ids {self.eos_token_ids} has an id outside the model's vocabulary of "
                f"{self.vocab_size}, which it can never sample. Take them from its own tokenizer."
            )
        self.kv_bytes = num_slots * slot_bytes
        is_end = np.zeros(self.vocab_size, bool)
        is_end[list(self.eos_token_ids)] = True
        self._device = shape.device
        capacity = self.max_context
        runner = ModelRunner(
            model, shape, num_slots, capacity, lean=lean, packed=packed, invariant=batch_invariant
        )
        self._decoder = Decoder(
            runner,
            SlotTable(num_slots, capacity),
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            is_end=is_end,
            decode_text=decode_text,
        )
        self._version = version
        self._seeds = (
            int(np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0])
            for n in itertools.count()
        )
        self._condition = threading.Condition()
        self._inbox: list[Pending] = []
        self._num_pauses, self._pause_began_s = 0, 0.0
        self._stepping = self._outdated = self._closed = False
        self._death: ModelError | None = None
        self._between_steps: list[Future[None]] = []
        self._stopped: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="rolltree-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def version(self) -> int:
        """The policy version that tokens sampled from now on carry."""
        return self._version

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, so that requests are answered."""
        return self._thread.is_alive() and not self._closed

    @property
    def stats(self) -> dict[str, int]:
        """Totals since the start: steps, and prompt, cached, computed and sampled tokens."""
        names = ("steps", "prompt_tokens", "cached_tokens", "computed_tokens", "sampled_tokens")
        return {f"num_{name}": getattr(self._decoder, f"num_{name}") for name in names}

    async def generate(self, request: GenerateRequest) -> LocalOutput:
        """Sample one completion after exactly `request.prompt_ids`.

        Cancelling the awaiting task takes the request out of the batch.

        Raises:
            PromptTooLong: no room for one more token within `max_context`.
            TokenError: the prompt is empty, or has an id outside the vocabulary.
            UnsupportedSetting: the engine cannot do what `request.sampling` asks.
            ModelError: the engine failed or was closed.
        """
        return await asyncio.wrap_future(self.submit(request))

    def submit(
        self, request: GenerateRequest, on_token: Callable[[LocalToken], None] | None = None
    ) -> Future[LocalOutput]:
        """Queue a request and return at once; raises and answers as `generate` does.

        `on_token` is called in the engine's thread after every sampled token but the last, with
        which the answer comes; it must be quick and may not raise.
        """
        sampling, prompt = request.sampling, np.array(request.prompt_ids, np.int32)
        self._check(prompt, sampling)
        extra = _extra(sampling)
        _check_extra(extra)
        processors = make_processors(
            extra,
            num_prompt=len(prompt),
            end_ids=[*self.eos_token_ids, *sampling.stop_token_ids],
            vocab_size=self.vocab_size,
            device=self._device,
        )
        limit = self.max_context
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        with self._condition:
            if self._closed or not self._thread.is_alive():
                raise ModelError(str(self._death or _CLOSED)) from self._death
            seed = sampling.seed if sampling.seed is not None else next(self._seeds)
            uniforms = UniformStream(seed % 2**64)
            now_s = time.monotonic()
            pending = Pending(prompt, sampling, uniforms, limit, now_s, processors, on_token)
            self._inbox.append(pending)
            self._condition.notify_all()
        pending.future.add_done_callback(self._note_cancelled)
        return pending.future

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No step runs inside this block; requests stay where they are and go on afterwards."""
        waiter: Future[None] | None = None
        with self._condition:
            if self._num_pauses == 0:
                self._pause_began_s = time.monotonic()
            self._num_pauses += 1
            if self._stepping:
                waiter = Future()
                self._between_steps.append(waiter)
        try:
            if waiter is not None:
                await asyncio.wrap_future(waiter)
            yield
        finally:
            with self._condition:
                self._num_pauses -= 1
                if self._num_pauses == 0:
                    self._decoder.paused_s += time.monotonic() - self._pause_began_s
                self._condition.notify_all()

    def publish(self, version: int) -> None:
        """Say that the weights have changed and are now `version`.

        All cached keys and values are dropped. Requests in flight go on: what they have so far is
        computed again with the new weights, and their next tokens carry the new version. Call it
        inside `paused()`, right after changing the weights.
        """
        with self._condition:
            self._version, self._outdated = version, True
            self._decoder.runner.refresh()

    def served_tensors(self) -> list[Any]:
        """Return the tensors that forward passes read, or copies of which `publish` renews."""
        return self._decoder.runner.tensors()

    async def aclose(self) -> None:
        """Stop the thread after its current step; requests in flight end with `ModelError`."""
        self._ask_to_stop()
        await asyncio.shield(asyncio.wrap_future(self._stopped))
        self.close()

    def close(self) -> None:
        """Do what `aclose` does, and block meanwhile; called at exit if nobody did before."""
        self._ask_to_stop()
        self._thread.join()
        atexit.unregister(self.close)

    def _ask_to_stop(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _check(self, prompt: Any, sampling: SamplingParams) -> None:
        if prompt.ndim != 1 or not len(prompt):
            raise TokenError(
                f"prompt_ids has shape {prompt.shape}; the engine continues one sequence of at "
                "least one token. Pass a one-dimensional array of ids."
            )
        if len(prompt) >= self.max_context:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and max_context is {self.max_context}, so "
                "nothing can be sampled after it. Shorten the prompt or raise max_context."
            )
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise TokenError(
                f"prompt_ids has ids from {prompt.min()} to {prompt.max()}, outside the model's "
                f"vocabulary of {self.vocab_size}. Was it made by another model's tokenizer?"
            )
        if sampling.stop and self._decoder.decode_text is None:
            raise UnsupportedSetting(
                "stop strings need text, and this engine was built without decode_text. Pass "
                "decode_text=tokenizer.decode, or use stop_token_ids."
            )
        checks = {
            "temperature": 0 <= sampling.temperature < float("inf"),
            "top_p": 0 < sampling.top_p <= 1,
            "top_k": sampling.top_k >= 0,
            "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
        }
        for name, good in checks.items():
            if not good:
                raise UnsupportedSetting(
                    f"{name} = {getattr(sampling, name)} is outside what can be sampled with "
                    "(temperature >= 0, 0 < top_p <= 1, top_k >= 0, max_tokens >= 1)."
                )

    def _note_cancelled(self, future: Future[LocalOutput]) -> None:
        if future.cancelled():
            self._decoder.any_cancelled = True

    def _run(self) -> None:
        error = ModelError(_CLOSED)
        try:
            while self._begin_step():
                try:
                    self._decoder.step(self._step_version)
                except Exception as cause:  # noqa: BLE001  (becomes every request's typed error)
                    self._decoder.fail_all(_step_failed(cause))
                self._end_step()
        except BaseException as cause:
            error = self._death = _thread_died(cause)
            raise
        finally:
            with self._condition:
                self._closed = True
                self._decoder.waiting.extend(self._inbox)
                self._inbox.clear()
            self._decoder.fail_all(error)
            self._end_step()
            self._stopped.set_result(None)

    def _begin_step(self) -> bool:
        """Wait until there is something to do and nobody has paused; False ends the thread."""
        with self._condition:
            while not self._closed and (
                self._num_pauses or not (self._inbox or self._decoder.busy)
            ):
                self._condition.wait()
            if self._closed:
                return False
            self._stepping, self._step_version = True, self._version
            outdated, self._outdated = self._outdated, False
            self._decoder.waiting.extend(self._inbox)
            self._inbox.clear()
        if outdated:
            self._decoder.slots.forget()
            self._decoder.runner.pack()
        return True

    def _end_step(self) -> None:
        with self._condition:
            self._stepping = False
            waiters, self._between_steps = self._between_steps, []
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.set_result(None)


def _extra(sampling: SamplingParams) -> dict[str, Any]:
    extra = {**sampling.extra, **sampling.extra.get("extra_body", {})}
    extra.pop("extra_body", None)
    return extra


def _check_extra(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name not in PROCESSED and value not in _NO_EFFECT.get(name, ()):
            raise UnsupportedSetting(
                f"the embedded engine cannot do {name} = {value!r} and would sample as if it were "
                f"not there.{did_you_mean(name, (*_SAMPLING, *PROCESSED))} Remove it, or use a "
                "server that has it."
            )


_CLOSED = (
    "the embedded engine is closed, so the request was not answered. Keep the engine open until "
    "the last rollout is done."
)


def _thread_died(cause: BaseException) -> ModelError:
    error = ModelError(
        f"the embedded engine's thread has died ({type(cause).__name__}: {cause}), so nothing more "
        "can be sampled here. Start a new engine (or `rolltree serve` again); the cause is above."
    )
    error.__cause__ = cause
    return error


def _step_failed(cause: BaseException) -> ModelError:
    error = ModelError(
        f"the embedded engine failed in a step ({type(cause).__name__}: {cause}); every request in "
        "the batch was lost. If memory ran out, lower max_batch or max_context."
    )
    error.__cause__ = cause
    return error
