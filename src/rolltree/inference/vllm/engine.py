"""vLLM in the trainer's process: a thread that steps it, and weights replaced in memory.

The interface is that of the embedded engine: `await engine.generate(request)` from any event loop;
inside `async with engine.paused()` no step runs, and `publish` there copies the trainer's weights
into vLLM and drops every cached key and value. Requests in flight stay, are computed again with the
new weights, and their next tokens carry the new version. The module knows vLLM only as a `Backend`.
It leaves out several machines.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rolltree.errors import ConfigError, ModelError, PromptTooLong, TokenError
from rolltree.inference.vllm.backend import Backend, Progress, Weights
from rolltree.inference.vllm.requests import Pending, VllmOutput, vllm_fields
from rolltree.types import GenerateRequest, IntArray


class VllmEngine:
    """Requests to one `Backend`, which is made in the engine's own thread.

    Args:
        make_backend: makes it; it must be set up for `max_batch` and `max_context`.
        weights: the current weights of the model that is trained, asked at every `publish`.
        eos_token_ids: ids that end an answer; they count as sampled and are its last id.
        max_batch: how many requests vLLM has at a time; further ones wait, which is `wait_s`.
        max_context: prompt and completion of one request, in tokens.
        version: of the weights that the backend starts with.
        seed: for requests that bring none.

    Raises:
        ConfigError: a number is out of range, or the backend cannot be made.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        weights: Callable[[], Weights],
        *,
        eos_token_ids: Iterable[int] = (),
        max_batch: int = 64,
        max_context: int = 2048,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_context", max_context - 1)):
            if value < 1:
                raise ConfigError(f"{name} is too small for a single request; raise it.")
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.max_batch, self.max_context = max_batch, max_context
        self._weights = weights
        self._version = version
        self._seeds = (
            int(np.random.SeedSequence([seed, n]).generate_state(1, np.uint32)[0])
            for n in itertools.count()
        )
        self._condition = threading.Condition()
        self._inbox: list[Pending] = []
        self._num_pauses, self._paused_s = 0, 0.0
        self._stepping = self._any_cancelled = False
        self._between_steps: list[Future[None]] = []
        self._closed: ModelError | None = None
        self._waiting: deque[Pending] = deque()
        self._running: dict[str, Pending] = {}
        self._names = itertools.count()
        self._stopped: Future[None] = Future()
        made: Future[Backend] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_backend, made), name="rolltree-vllm", daemon=True
        )
        self._thread.start()
        self._backend = made.result()
        self.vocab_size = self._backend.vocab_size

    @property
    def version(self) -> int:
        """The policy version that tokens sampled from now on carry."""
        return self._version

    async def generate(self, request: GenerateRequest) -> VllmOutput:
        """Sample one completion after exactly `request.prompt_ids`.

        Cancelling the awaiting task takes the request out of the batch.

        Raises:
            PromptTooLong: no room for one more token within `max_context`.
            TokenError: the prompt is empty, or has an id outside the vocabulary.
            UnsupportedSetting: vLLM cannot do what `request.sampling` asks.
            ModelError: the engine failed or was closed.
        """
        return await asyncio.wrap_future(self.submit(request))

    def submit(self, request: GenerateRequest) -> Future[VllmOutput]:
        """Queue a request and return at once; raises and answers as `generate` does."""
        prompt = np.array(request.prompt_ids, np.int32)
        self._check(prompt)
        with self._condition:
            if self._closed is not None:
                raise self._closed
            fields = vllm_fields(
                request.sampling,
                eos_token_ids=self.eos_token_ids,
                room=self.max_context - len(prompt),
                seed=next(self._seeds),
            )
            pending = Pending(prompt, request.sampling, fields, time.monotonic())
            pending.paused_s_before = self._paused_s
            self._inbox.append(pending)
            self._condition.notify_all()
        pending.future.add_done_callback(self._note_cancelled)
        return pending.future

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No step runs inside this block; requests stay where they are and go on afterwards."""
        waiter: Future[None] | None = None
        with self._condition:
            self._num_pauses += 1
            if self._stepping:
                waiter = Future()
                self._between_steps.append(waiter)
        began_s = time.monotonic()
        try:
            if waiter is not None:
                await asyncio.wrap_future(waiter)
            yield
        finally:
            with self._condition:
                self._num_pauses -= 1
                if self._num_pauses == 0:
                    self._paused_s += time.monotonic() - began_s
                self._condition.notify_all()

    def publish(self, version: int) -> None:
        """Copy the current weights into vLLM; tokens sampled from now on carry `version`.

        Call it inside `paused()`.

        Raises:
            ConfigError: the engine is not paused, so vLLM may be in the middle of a step.
            ModelError: the weights do not fit or vLLM failed; the engine is closed then, since half
                of an update may be in it.
        """
        with self._condition:
            if self._closed is not None:
                raise self._closed
            if not self._num_pauses or self._stepping:
                raise ConfigError(
                    "publish() was called while vLLM may be sampling, so one token could come from "
                    "half an update. Call it inside `async with engine.paused()`."
                )
            try:
                self._backend.load(self._weights())
            except Exception as cause:
                self._closed = ModelError(
                    f"vLLM could not take over the weights of version {version} "
                    f"({type(cause).__name__}: {cause}), so what it would sample is unknown, and "
                    "the engine is closed. Start it anew from a checkpoint."
                )
                self._condition.notify_all()
                raise self._closed from cause
            self._version = version

    async def aclose(self) -> None:
        """Stop the thread and vLLM. Requests still in flight end with `ModelError`."""
        with self._condition:
            if self._closed is None:
                self._closed = ModelError(
                    "the vLLM engine is closed, so the request was not answered. Keep the engine "
                    "open until the last rollout is done."
                )
            self._condition.notify_all()
        await asyncio.shield(asyncio.wrap_future(self._stopped))
        self._thread.join()

    def _check(self, prompt: IntArray) -> None:
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

    def _note_cancelled(self, future: Future[VllmOutput]) -> None:
        if future.cancelled():
            self._any_cancelled = True

    def _run(self, make_backend: Callable[[], Backend], made: Future[Backend]) -> None:
        try:
            backend = make_backend()
        except BaseException as error:  # noqa: BLE001  (raised where the engine is made)
            made.set_exception(error)
            return
        made.set_result(backend)
        try:
            while self._begin_step():
                self._step(backend, self._version)
                self._end_step()
        except Exception as cause:  # noqa: BLE001  (becomes every request's typed error)
            with self._condition:
                self._closed = ModelError(
                    f"vLLM failed in a step ({type(cause).__name__}: {cause}); every request was "
                    "lost and the engine is closed. If memory ran out, lower engine.max_batch or "
                    "engine.kv_budget_bytes."
                )
                self._closed.__cause__ = cause
        finally:
            with self._condition:
                lost = [*self._running.values(), *self._waiting, *self._inbox]
                self._inbox.clear()
            for pending in lost:
                pending.settle(self._closed or ModelError("the vLLM engine's thread was ended."))
            self._end_step()
            try:
                backend.close()
            finally:
                self._stopped.set_result(None)

    def _begin_step(self) -> bool:
        """Wait until there is something to do and nobody has paused; False ends the thread."""
        with self._condition:
            while self._closed is None and (
                self._num_pauses or not (self._inbox or self._waiting or self._running)
            ):
                self._condition.wait()
            if self._closed is not None:
                return False
            self._stepping = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        return True

    def _end_step(self) -> None:
        with self._condition:
            self._stepping = False
            waiters, self._between_steps = self._between_steps, []
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.set_result(None)

    def _step(self, backend: Backend, version: int) -> None:
        if self._any_cancelled:
            self._any_cancelled = False
            gone = [name for name, pending in self._running.items() if pending.future.cancelled()]
            backend.abort(gone)
            for name in gone:
                del self._running[name]
        while self._waiting and len(self._running) < self.max_batch:
            pending = self._waiting.popleft()
            if not pending.future.cancelled():
                self._admit(backend, pending)
        if not self._running:
            return
        for progress in backend.step():
            self._take(progress, version)

    def _admit(self, backend: Backend, pending: Pending) -> None:
        name = f"rolltree-{next(self._names)}"
        try:
            backend.add(name, pending.prompt.tolist(), pending.fields)
        except (ValueError, TypeError) as error:
            pending.settle(
                ModelError(
                    f"vLLM refused the request ({error}), so it has no answer. Change its sampling "
                    "settings."
                )
            )
            return
        pending.wait_s = time.monotonic() - pending.submitted_s
        pending.paused_s_before = self._paused_s
        self._running[name] = pending

    def _take(self, progress: Progress, version: int) -> None:
        pending = self._running.get(progress.request_id)
        if pending is None:
            return
        pending.ids.extend(progress.ids)
        pending.logprobs.extend(progress.logprobs)
        pending.versions.extend([version] * len(progress.ids))
        pending.num_cached = max(pending.num_cached, progress.num_cached)
        if not progress.finished:
            return
        del self._running[progress.request_id]
        pending.wait_s += self._paused_s - pending.paused_s_before
        outcome: VllmOutput | Exception
        try:
            outcome = pending.output(progress.finish_reason, progress.stop_reason)
        except ValueError:
            outcome = ModelError(
                f"vLLM ended a request with finish reason {progress.finish_reason!r}, so its "
                "answer is incomplete. See its log."
            )
        pending.settle(outcome)


def parameters_of(model: Any) -> Callable[[], Weights]:
    """Return what gives a Hugging Face model's weights, named as in its checkpoint.

    Tied weights come once, under the first of their names.
    """

    def weights() -> Weights:
        for name, tensor in model.named_parameters():
            yield name, tensor.detach()
        persistent = model.state_dict(keep_vars=True)
        for name, tensor in model.named_buffers():
            if name in persistent:
                yield name, tensor

    return weights
