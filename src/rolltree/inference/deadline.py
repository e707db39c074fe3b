"""Time limits of episodes that leave waiting out: a clock, and a client that reports to it.

The clock counts the seconds that an episode, or a part of one, spent itself; what a model call
waited in queues and retries (`ModelResponse.wait_s`) is taken out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rolltree.inference.client import ModelClient
from rolltree.inference.client_base import DelegatingClient, ModelCall
from rolltree.types import ModelResponse


class Clock:
    """Seconds an episode has spent, waiting excluded.

    While a model call is in flight it is unknown how much of it is waiting, so the hard limit is
    suspended until the call returns. With calls in parallel their waits add up, which
    errs on the side of the episode.
    """

    def __init__(self, limit_s: float | None = None, grace_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self.grace_s = grace_s
        self._start = time.monotonic()
        self._waited_s = 0.0
        self._calls_in_flight = 0
        self._scope: asyncio.Timeout | None = None

    @property
    def spent_s(self) -> float:
        """Seconds since the start, without the known waits."""
        return time.monotonic() - self._start - self._waited_s

    @property
    def expired(self) -> bool:
        """Whether the limit is reached: the episode should end at its next turn boundary."""
        return self.limit_s is not None and self.spent_s >= self.limit_s

    def guard(self) -> asyncio.Timeout:
        """Return the scope that cancels the episode `grace_s` after its limit."""
        self._scope = asyncio.timeout(self._remaining_s())
        return self._scope

    def stop(self) -> None:
        """Forget the scope: the episode is over, calls that outlive it are not limited by it."""
        self._scope = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Do not count what happens in the block: neither limit can end the episode there."""
        began = time.monotonic()
        self.call_started()
        try:
            yield
        finally:
            self.call_ended(time.monotonic() - began)

    def call_started(self) -> None:
        """Suspend the hard limit: a model call is in flight."""
        self._calls_in_flight += 1
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(None)

    def call_ended(self, wait_s: float) -> None:
        """Take `wait_s` out of the time spent and set the hard limit again."""
        self._calls_in_flight -= 1
        self._waited_s += wait_s
        remaining = self._remaining_s()
        scope = self._scope
        if scope is None or remaining is None or self._calls_in_flight or scope.expired():
            return
        scope.reschedule(asyncio.get_running_loop().time() + max(remaining, 0.0))

    def _remaining_s(self) -> float | None:
        return None if self.limit_s is None else self.limit_s + self.grace_s - self.spent_s


class TimedClient(DelegatingClient):
    """A client that tells an episode's clock when its calls start, end and waited.

    `model`, when given, is the model that it asks instead of the inner client's.
    """

    def __init__(self, inner: ModelClient, clock: Clock, model: str | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self._model = model

    @property
    def model(self) -> str:
        """The model that is asked when a call names none."""
        return self._model or self._inner.model

    async def call(self, call: ModelCall) -> ModelResponse:
        """Pass the call on, timed."""
        wait_s = 0.0
        self._clock.call_started()
        try:
            if call.model is None and self._model is not None:
                call = replace(call, model=self._model)
            response = await call.to(self._inner)
            wait_s = response.wait_s
            return response
        finally:
            self._clock.call_ended(wait_s)
