"""The thread of an in-process engine: requests, cancellation, pauses, health and shutdown.

`LocalEngine` and `VllmEngine` are the backends of `EngineThread`. `await engine.generate(request)`
works from any event loop. Inside `engine.paused()` no step runs; `publish` takes over new weights.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from reprlib import repr as shown
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from rolltree.inference.request_fields import FIELDS, hints_in
from rolltree.values.errors import (
    ConfigError,
    ModelError,
    PromptTooLong,
    TokenError,
    UnsupportedSetting,
    did_you_mean,
)
from rolltree.values.types import (
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    SamplingParams,
)

logger = logging.getLogger("rolltree.inference")

DEFAULT_MAX_CONTEXT = 2048
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed")
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "logprobs": (True, False, 0, 1),
    "top_logprobs": (0,),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "stream": (False,),
    "echo": (False,),
    "tool_choice": ("auto",),
}
"""Request fields of servers, and the values that ask for what an engine does anyway."""


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one place, the likeliest first, and their logprobs."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """One completion; arrays have shape `[_C]`: one entry per sampled token, with the end token.

    `logprobs` are under the distribution sampled from (at temperature 0, that of temperature 1),
    `raw_logprobs` under the model's own softmax, if the engine has them. `stop` is the stop string,
    or the id in `stop_token_ids`, that ended the completion; None if an end token or the length
    limit did. `routed_experts` is as in `ModelResponse`, if the engine records it. `top` and
    `raw_top` have the likeliest tokens at each place under the one and the other distribution, if
    `top_logprobs` asks for them.
    """

    completion_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    stop: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    wait_s: float  # before it was admitted, and while the engine was paused
    raw_logprobs: FloatArray | None = None
    routed_experts: Any = None
    top: tuple[TopLogprobs, ...] = ()
    raw_top: tuple[TopLogprobs, ...] = ()


class SampledToken(NamedTuple):
    """One sampled token, reported before its completion is done."""

    id: int
    logprob: float
    raw_logprob: float | None
    version: int
    top: TopLogprobs = ()
    raw_top: TopLogprobs = ()


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request in an engine; after it is queued, only the engine's thread touches it."""

    prompt: IntArray
    sampling: SamplingParams
    seed: int
    limit: int  # longest prompt + completion, in tokens
    submitted_s: float = field(default_factory=lambda: time.monotonic())
    on_token: Callable[[SampledToken], None] | None = None
    future: Future[EngineOutput] = field(default_factory=Future)
    num_cached: int = 0
    wait_s: float = 0.0

    def admit(self) -> None:
        """Note that decoding begins: the time waited so far becomes `wait_s`."""
        self.wait_s = time.monotonic() - self.submitted_s

    def settle(self, outcome: EngineOutput | Exception) -> None:
        """Set the request's result or error, unless it was cancelled meanwhile."""
        with suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


@dataclass(slots=True)
class EngineStats:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_computed_tokens: int = 0
    num_sampled_tokens: int = 0


RequestT = TypeVar("RequestT", bound=EngineRequest)


class EngineThread(ABC, Generic[RequestT]):
    """Everything in an engine except the decoding.

    A backend calls `_start` at the end of its `__init__` and implements `_new_request`, `_step`,
    `_has_work`, `_drop_cancelled`, `_forget_requests` and `_take_weights`.

    Args:
        eos_token_ids: ids that end an answer; they count as sampled and are its last id.
        max_batch: how many requests decode together; further ones wait, which counts as `wait_s`.
        max_context: the most tokens of one request, prompt and completion together.
        version: the policy version of the weights that the engine starts with.
        seed: for requests without a seed of their own.

    Raises:
        ConfigError: `max_batch` or `max_context` leaves no room for a single request.
    """

    label: ClassVar[str]
    survives_failed_steps: ClassVar[bool] = False
    extra_settings: ClassVar[Collection[str]] = ()
    """Names in `SamplingParams.extra` that the engine obeys."""
    takes_grammars: bool = False
    """Whether `structured_outputs` may have a grammar of llguidance's."""
    vocab_size: int

    def __init__(
        self,
        *,
        eos_token_ids: Iterable[int],
        max_batch: int,
        max_context: int,
        version: int,
        seed: int,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("max_context", max_context - 1)):
            if value < 1:
                raise ConfigError(f"{name} is too small for a single request; raise it.")
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.max_batch, self.max_context = max_batch, max_context
        self._version = self._step_version = version
        # A seed per request, so that two equal requests do not get equal answers.
        self._seeds = (
            int(np.random.SeedSequence([seed, n]).generate_state(1, np.uint64)[0])
            for n in itertools.count()
        )
        self._counts = EngineStats()
        self._condition = threading.Condition()
        self._inbox: list[RequestT] = []
        self._in_flight: set[RequestT] = set()
        self._num_pauses = 0
        self._pause_began_s: float | None = None  # None while a step may run
        self._stepping = self._any_cancelled = False
        self._between_steps: list[Future[None]] = []
        self._ended: ModelError | None = None  # why no more requests are answered
        self._stopped: Future[None] = Future()

    def _start(self, name: str) -> None:
        """Start the thread and wait until `_open` has run in it; raises what `_open` raised."""
        opened: Future[None] = Future()
        # A daemon: Python joins other threads before it runs `atexit`, which stops this one.
        self._thread = threading.Thread(target=self._run, args=(opened,), name=name, daemon=True)
        self._thread.start()
        opened.result()
        # The interpreter must not shut down while the thread computes.
        atexit.register(self.close)

    def _open(self) -> None:
        """Create what must be created in the engine's thread."""

    @abstractmethod
    def _new_request(
        self, prompt: IntArray, sampling: SamplingParams, extra: Mapping[str, Any], seed: int
    ) -> RequestT:
        """Return the request, or raise `UnsupportedSetting`; called in the caller's thread."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether any request is waiting or decoding."""

    @abstractmethod
    def _step(self, new: list[RequestT], version: int) -> None:
        """Take in new requests and run one sampling step with weights of this `version`."""

    @abstractmethod
    def _drop_cancelled(self) -> None:
        """Remove requests with cancelled futures from the batch."""

    def _forget_requests(self) -> None:
        """Empty the batch: every request in it fails."""

    @abstractmethod
    def _take_weights(self, version: int) -> None:
        """Take over the trainer's weights between steps. An error ends the engine."""

    def _close(self) -> None:
        """Free what `_open` made."""

    @property
    def version(self) -> int:
        """The policy version of tokens that are sampled from now on."""
        return self._version

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._ended is None and self._thread.is_alive()

    @property
    def stats(self) -> dict[str, int]:
        """Totals since the start, as in `EngineStats`."""
        return asdict(self._counts)

    async def generate(
        self, request: GenerateRequest, on_token: Callable[[SampledToken], None] | None = None
    ) -> EngineOutput:
        """Sample one completion after exactly `request.prompt_ids`.

        Cancelling the awaiting task removes the request from the batch. `on_token`: see `submit`.

        Raises:
            PromptTooLong: there is no room for one more token within `max_context`.
            TokenError: the prompt is empty, or has an id outside the vocabulary.
            UnsupportedSetting: the engine does not support a setting in `request.sampling`.
            ModelError: the engine failed or was closed.
        """
        queued = self._enqueue(request, on_token)
        # An idle engine wakes only after the loop has run all ready tasks, so that requests made
        # together are sampled together.
        asyncio.get_running_loop().call_soon(self._wake)
        return await asyncio.wrap_future(queued)

    def submit(
        self, request: GenerateRequest, on_token: Callable[[SampledToken], None] | None = None
    ) -> Future[EngineOutput]:
        """Queue a request and return its future at once; errors are those of `generate`.

        `on_token` is called in the engine's thread for every sampled token except the last, which
        comes with the answer. It must be quick and must not raise.
        """
        queued = self._enqueue(request, on_token)
        self._wake()
        return queued

    def prepare(self, sampling: SamplingParams) -> None:
        """Do what may take long before a request with these settings; safe in any thread.

        Raises:
            UnsupportedSetting: the engine does not support a setting.
        """

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def _enqueue(
        self, request: GenerateRequest, on_token: Callable[[SampledToken], None] | None = None
    ) -> Future[EngineOutput]:
        # A copy, since the caller may change its array while the request waits.
        sampling, prompt = request.sampling, np.array(request.prompt_ids, np.int32)
        self._check_prompt(prompt)
        check_sampling(sampling)
        extra = extra_of(sampling)
        check_extra(extra, self.extra_settings, self.label)
        self.prepare(sampling)  # not under the lock, which the engine's thread needs
        with self._condition:
            # Under the lock, so that no request is queued after the last step.
            self._check_running()
            seed = sampling.seed if sampling.seed is not None else next(self._seeds)
            queued = self._new_request(prompt, sampling, extra, seed % 2**64)
            queued.on_token = on_token
            self._inbox.append(queued)
            self._in_flight.add(queued)
        queued.future.add_done_callback(lambda future: self._note_done(queued, future))
        return queued.future

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Let no step run inside this block; requests stay where they are and go on afterwards.

        Blocks may nest or overlap: the engine resumes after the last one, and the time is added
        once to the requests' `wait_s`.
        """
        waiter: Future[None] | None = None
        # From here on no step begins; wait for one that is running.
        with self._condition:
            self._num_pauses += 1
            if self._stepping:
                waiter = Future()
                self._between_steps.append(waiter)
            elif self._pause_began_s is None:
                self._pause_began_s = time.monotonic()
        # Even if this task is cancelled while it waits, the pause must end, or the engine would
        # never resume.
        try:
            if waiter is not None:
                await asyncio.wrap_future(waiter)
            yield
        finally:
            with self._condition:
                self._num_pauses -= 1
                if self._num_pauses == 0 and self._pause_began_s is not None:
                    # Waiting is excluded from the time limits of rollouts, and a pause is waiting.
                    paused_s = time.monotonic() - self._pause_began_s
                    self._pause_began_s = None
                    for request in self._in_flight:
                        request.wait_s += paused_s
                self._condition.notify_all()

    def publish(self, version: int) -> None:
        """Sample with the trainer's current weights from now on, as policy `version`.

        All cached keys and values are dropped. Requests in flight go on: what they have so far is
        computed again with the new weights, and their next tokens carry the new version. Call it
        inside `paused()`, after changing the weights.

        Raises:
            ConfigError: the engine is not paused, so a step may be reading the weights.
            ModelError: the engine has ended, or could not take over the weights and ends now,
                since it may hold half of an update.
        """
        # `_begin_step` takes the same lock.
        with self._condition:
            self._check_running()
            if not self._num_pauses or self._stepping:
                raise ConfigError(
                    "publish() was called while the engine may be sampling, so one token could "
                    "come from half an update. Call it inside `async with engine.paused()`."
                )
            try:
                self._take_weights(version)
            except Exception as cause:  # noqa: BLE001  (raised below as a typed error)
                self._end(
                    f"{self.label} could not take over the weights of version {version} "
                    f"({_named(cause)}), so what it would sample is unknown, and it is closed. "
                    "Start a new engine from a checkpoint.",
                    cause,
                )
                self._check_running()
            self._version = version

    async def aclose(self) -> None:
        """Stop the thread after its current step; requests in flight end with `ModelError`."""
        self._ask_to_stop()
        # A cancelled wait must not cancel the future, which the thread has yet to set.
        await asyncio.shield(asyncio.wrap_future(self._stopped))
        self.close()

    def close(self) -> None:
        """Do what `aclose` does, but block; called when the process exits, if not before."""
        self._ask_to_stop()
        self._thread.join()
        atexit.unregister(self.close)

    def _ask_to_stop(self) -> None:
        self._end(
            f"{self.label} is closed, so the request was not answered. Keep the engine open until "
            "the last rollout is done."
        )

    def _end(self, why: str, cause: BaseException | None = None) -> None:
        with self._condition:
            # Keep the first reason: later ones may only be consequences of it.
            if self._ended is None:
                self._ended = ModelError(why)
                self._ended.__cause__ = cause
            self._condition.notify_all()

    def _check_running(self) -> None:
        if self._ended is not None:
            # A new exception for each caller: one that is raised repeatedly would collect the
            # frames of all callers.
            raise ModelError(str(self._ended)) from self._ended.__cause__

    def _check_prompt(self, prompt: IntArray) -> None:
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

    def _note_done(self, request: RequestT, future: Future[EngineOutput]) -> None:
        with self._condition:
            self._in_flight.discard(request)
            self._any_cancelled |= future.cancelled()

    def _run(self, opened: Future[None]) -> None:
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001  (raised where the engine is made)
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while (new := self._begin_step()) is not None:
                try:
                    self._step(new, self._step_version)
                except Exception as cause:  # noqa: BLE001  (becomes every request's typed error)
                    self._fail_step(cause)
                self._end_step()
        except BaseException as cause:  # the thread must not die silently
            self._end(
                f"{self.label}'s thread has died ({_named(cause)}), so nothing more can be sampled "
                "here. Start a new engine (or `rolltree serve` again); the cause is above.",
                cause,
            )
            raise
        finally:
            # Nothing may wait for an engine that has ended: neither a request nor a pause.
            self._lose_requests(self._ended or ModelError(f"{self.label} has ended."))
            self._end_step()
            try:
                self._close()
            finally:
                self._stopped.set_result(None)

    def _fail_step(self, cause: Exception) -> None:
        what = f"{self.label} failed in a step ({_named(cause)}); every request in the batch was"
        advice = "If memory ran out, lower max_batch, max_context or kv_budget_bytes."
        if not self.survives_failed_steps:
            self._end(f"{what} lost and the engine is closed. {advice}", cause)
            return
        error = ModelError(f"{what} lost. {advice}")
        error.__cause__ = cause
        with self._condition:
            # Requests in the inbox were not part of the failed step.
            arrived = set(self._inbox)
        self._lose_requests(error, arrived)

    def _lose_requests(self, error: ModelError, kept: Collection[RequestT] = ()) -> None:
        with self._condition:
            lost = [request for request in self._in_flight if request not in kept]
        self._forget_requests()
        for request in lost:
            request.settle(error)

    def _begin_step(self) -> list[RequestT] | None:
        """Wait until there is work and no pause; return the new requests, or None to stop."""
        with self._condition:
            while self._ended is None and (
                self._num_pauses or not (self._inbox or self._has_work())
            ):
                self._condition.wait()
            if self._ended is not None:
                return None
            # Read once: all tokens of a step are of one version.
            self._stepping, self._step_version = True, self._version
            new, self._inbox = self._inbox, []
            # A flag, so that futures are looked at only after a cancellation.
            cancelled, self._any_cancelled = self._any_cancelled, False
        if cancelled:
            self._drop_cancelled()
            new = [request for request in new if not request.future.cancelled()]
        return new

    def _end_step(self) -> None:
        with self._condition:
            self._stepping = False
            waiters, self._between_steps = self._between_steps, []
            if self._num_pauses and self._pause_began_s is None:
                self._pause_began_s = time.monotonic()
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.set_result(None)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise `UnsupportedSetting` for numbers that cannot be sampled with."""
    checks = {
        "temperature": sampling.temperature == 0 or 1e-6 <= sampling.temperature < float("inf"),
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
    }
    for name, good in checks.items():
        if not good:
            raise UnsupportedSetting(
                f"{name} = {getattr(sampling, name)} is out of range "
                "(temperature 0 or >= 1e-6, 0 < top_p <= 1, top_k >= 0, max_tokens >= 1)."
            )


def extra_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings in `extra`, including those in its `extra_body`."""
    extra = {**sampling.extra, **(sampling.extra.get("extra_body") or {})}
    extra.pop("extra_body", None)
    return extra


def check_extra(extra: Mapping[str, Any], obeyed: Collection[str], label: str) -> None:
    """Raise `UnsupportedSetting` for a setting that would be ignored; wishes are logged once."""
    for name, value in hints_in(extra).items():
        if name not in obeyed:
            _log_hint(label, name, shown(value))
    for name, value in extra.items():
        is_hint = name in FIELDS and FIELDS[name].kind == "hint"
        if not is_hint and name not in obeyed and value not in _NO_EFFECT.get(name, ()):
            raise UnsupportedSetting(
                f"{label} does not support {name} = {shown(value)} and would ignore it."
                f"{did_you_mean(name, (*_SAMPLING, *obeyed))} Remove it, or use a server "
                "that supports it."
            )


@lru_cache(256)
def _log_hint(label: str, name: str, value: str) -> None:
    logger.warning("%s has no use for %s = %s and samples as it is.", label, name, value)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
