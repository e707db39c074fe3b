"""Limits the time of a rollout (`Clock`), and seeds and times its calls (`RolloutClient`).

The clock counts the seconds that an episode, or a part of one, took, without the time that model
calls waited in queues and retries (`ModelResponse.wait_s`). A deadline includes that time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rolltree._helpers.tasks import yield_fairly
from rolltree.inference.call import ModelCall
from rolltree.inference.client import ModelClient, with_inner
from rolltree.inference.client_base import DelegatingClient
from rolltree.values.errors import ConnectionFailed
from rolltree.values.seeds import CallSeeds
from rolltree.values.types import ModelResponse


class Clock:
    """The seconds that an episode has spent, without waiting, and its deadline, with waiting.

    While a model call is in flight it is unknown how much of it is waiting, so the hard limit
    (`limit_s + grace_s`) is suspended until the call returns. The waits of parallel calls add up,
    which errs in the episode's favor. The deadline, `deadline_s` after the start, moves only with
    `postponed`.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        grace_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        self.limit_s = limit_s
        self.grace_s = grace_s
        self.deadline_s = deadline_s
        self.num_calls = 0
        """How many model calls have begun."""
        self.num_answered = 0
        self._start = time.monotonic()
        self._waited_s = 0.0
        self._calls_in_flight = self._num_excluded = 0
        self._num_postponed = 0
        self._postponed_at = 0.0
        self._scope: asyncio.Timeout | None = None

    @property
    def spent_s(self) -> float:
        """Seconds since the start, without the known waits."""
        return time.monotonic() - self._start - self._waited_s

    def at(self, moment: float) -> float:
        """Return how many seconds after its start a moment of `time.monotonic` was."""
        return moment - self._start

    @property
    def is_calling(self) -> bool:
        """Whether a model call is in flight."""
        return self._calls_in_flight > self._num_excluded

    @property
    def expired(self) -> bool:
        """Whether the limit is reached: the episode should end at its next turn boundary."""
        return self.limit_s is not None and self.spent_s >= self.limit_s

    @property
    def past_deadline(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s == 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, which stand still while it is postponed; None without one."""
        if self.deadline_s is None:
            return None
        now = self._postponed_at if self._num_postponed else time.monotonic()
        return max(self._start + self.deadline_s - now, 0.0)

    def guard(self) -> asyncio.Timeout:
        """Return the scope that cancels the episode at its deadline or `grace_s` after its limit.

        The limit counts from the clock's start, without excluded time.
        """
        self._scope = asyncio.timeout(self._remaining_s())
        return self._scope

    def stop(self) -> None:
        """Forget the scope: calls that outlive the episode are not limited by it."""
        self._scope = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block's time: the limit cannot end the episode there, only the deadline."""
        began = time.monotonic()
        self._num_excluded += 1
        self.call_started()
        try:
            yield
        finally:
            self._num_excluded -= 1
            self.call_ended(time.monotonic() - began)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone the deadline by the time that the block takes, such as a server's restart.

        Blocks may nest or overlap: their time is added once.
        """
        if self.deadline_s is None:
            yield
            return
        # The duration is known only when the last block ends; until then the deadline is suspended.
        self._num_postponed += 1
        if self._num_postponed == 1:
            self._postponed_at = time.monotonic()
            self._reschedule()
        try:
            yield
        finally:
            self._num_postponed -= 1
            if not self._num_postponed:
                self.deadline_s += time.monotonic() - self._postponed_at
                self._reschedule()

    def call_started(self) -> None:
        """Suspend the hard limit: a model call is in flight."""
        self.num_calls += 1
        self._calls_in_flight += 1
        self._reschedule()

    def call_ended(self, wait_s: float) -> None:
        """Exclude `wait_s` from the time spent and set the hard limit again."""
        self._calls_in_flight -= 1
        self._waited_s += wait_s
        self._reschedule()

    def _reschedule(self) -> None:
        no_limit = self.limit_s is None and self.deadline_s is None
        # asyncio does not reschedule a scope that has expired.
        if self._scope is None or no_limit or self._scope.expired():
            return
        remaining = self._remaining_s()
        # The scope uses the clock of its loop.
        now = asyncio.get_running_loop().time()
        self._scope.reschedule(None if remaining is None else now + remaining)

    def _remaining_s(self) -> float | None:
        """Return the seconds until the scope cancels; None or infinity if nothing limits it now."""
        left = math.inf if self._num_postponed else self.left_s
        if self.limit_s is None or self._calls_in_flight:
            return left
        own = max(self.limit_s + self.grace_s - self.spent_s, 0.0)
        return own if left is None else min(own, left)


class RolloutClient(DelegatingClient):
    """One rollout's client: it gives each call its seed and model, and reports to the clock.

    Every way of playing a rollout goes through model calls: an environment's own loop, a second
    question in a turn, a judge on `state["client"]`. The sessions of this client share its seeds
    and its clock. Responses record when they were requested and how long they took.

    Args:
        inner: the client that answers.
        clock: the clock of the episode, or of a part of it; with None, calls are not timed.
        seeds: the source of the calls' seeds; with None, calls keep their own.
        model: the model of calls that name none; None for the inner client's.
    """

    def __init__(
        self,
        inner: ModelClient,
        clock: Clock | None = None,
        *,
        seeds: CallSeeds | None = None,
        model: str | None = None,
    ) -> None:
        super().__init__(inner)
        self._clock, self._seeds, self._model = clock, seeds, model

    @property
    def model(self) -> str:
        """The model of calls that name none."""
        return self._model or self._inner.model

    @property
    def has_seeds(self) -> bool:
        """Whether it gives calls their seeds."""
        return self._seeds is not None

    async def call(self, call: ModelCall) -> ModelResponse:
        """Pass the call on with its seed and model, timed."""
        sampling = call.sampling
        # A seed per call: with one for the rollout every call would draw the same numbers.
        if self._seeds is not None:
            sampling = sampling.with_seed(self._seeds.next(sampling.seed))
        model = self._model if call.model is None else call.model
        clock, sent_s, began_s = self._clock, call.sent_s, call.began_s
        if clock is not None:
            began_s = time.monotonic()
            sent_s = round(clock.at(began_s), 6)
        # Not `replace`, which is slow: this runs for every call of every rollout.
        call = ModelCall(
            *(call.prompt, sampling, model, call.tools, call.message_type, sent_s, began_s),
            on_delta=call.on_delta,
            reports_tokens=call.reports_tokens,
        )
        if clock is None:
            return await call.to(self._inner)
        wait_s = 0.0
        clock.call_started()
        try:
            response = await call.to(self._inner)
            wait_s, answered = response.wait_s, time.monotonic()
            clock.num_answered += 1
            if not (response.sent_s or response.time_s):  # a client that makes its own records
                response = response.timed(sent_s, answered - began_s)
            # Many answers may have come at once: those of other rollouts get the loop first, and
            # that is waiting, too.
            await yield_fairly()
            wait_s += time.monotonic() - answered
            return response
        except asyncio.CancelledError as error:
            # A replay that stops has a class of its own. The task's own code may have cancelled it,
            # say with a timeout that it left open, which is not the client's failure.
            task = asyncio.current_task()
            if type(error) is not asyncio.CancelledError or (task and task.cancelling()):
                raise
            raise ConnectionFailed(
                "the model's client cancelled the call, which the rollout had not asked for, so "
                "there is no answer. Has the client been closed, or its event loop ended?"
            ) from error
        finally:
            clock.call_ended(wait_s)


def seeded(client: ModelClient, seeds: CallSeeds) -> ModelClient:
    """Return `client` with a seed for each call; itself if it, or one behind it, gives seeds."""
    layers = with_inner(client)
    has_seeds = any(isinstance(part, RolloutClient) and part.has_seeds for part in layers)
    return client if has_seeds else RolloutClient(client, seeds=seeds)
