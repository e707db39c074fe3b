"""Retry policy for transient failures of model calls.

A failed attempt raises `Retry` around the error to be reported; any other exception ends the call.
Waits double from attempt to attempt, with full jitter, and are never shorter than the server's
Retry-After. Retries are counted and timed, never silent.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Generic, TypeVar

import msgspec

from rolltree.values.errors import (
    CallTimeout,
    ConfigError,
    ConnectionFailed,
    RolltreeError,
    ServerError,
)

ResultT = TypeVar("ResultT")


PATIENCE_S: ContextVar[float | None] = ContextVar("patience_s", default=None)
"""How long calls of this context retry a server that cannot be reached, or that gives the same
answer 500 again; None: as often as their policy allows. A gateway sets it, whose agents retry by
themselves."""


class RetryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often and for how long to retry.

    Waits are drawn from `[0, first_wait_s * 2**attempt]`, at most `max_wait_s` each. If a
    Retry-After exceeds `max_retry_after_s`, the call fails at once.
    """

    max_retries: int = 6
    first_wait_s: float = 0.5
    max_wait_s: float = 30.0
    max_retry_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or min(self.first_wait_s, self.max_wait_s) < 0:
            raise ConfigError(
                f"{self} has a negative count or time; they must be >= 0. Use 0 for no retries."
            )

    def wait_s(self, attempt: int, after_s: float | None) -> float:
        """Return how long to wait after failed attempt number `attempt` (0, 1, ...)."""
        # `2.0 ** attempt` overflows at 1,024.
        ceiling = min(self.first_wait_s * 2.0 ** min(attempt, 60), self.max_wait_s)
        return max(random.uniform(0.0, ceiling), after_s or 0.0)


ONCE = RetryPolicy(max_retries=0)
"""For requests that somebody else repeats: a pool, or who waits for a server."""
WHILE_AWAY = RetryPolicy(max_wait_s=15.0)
"""The waits of who looks again and again whether a server or a sandbox is back."""


class Retry(Exception):
    """An attempt failed with `error` and may be retried, in `after_s` at the earliest."""

    def __init__(self, error: RolltreeError, after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ResultT]):
    """A result, the number of failed attempts before it, and the time of these and the waits."""

    value: ResultT
    num_retries: int
    wait_s: float


async def with_retries(
    policy: RetryPolicy,
    attempt: Callable[[], Awaitable[ResultT]],
    *,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
    where: str = "the server",
    may_retry: Callable[[], bool] = lambda: True,
) -> Outcome[ResultT]:
    """Call `attempt` until it succeeds, the policy is exhausted or `deadline_s` has passed.

    An attempt that takes longer than `timeout_s` counts as failed and may be retried. `where` names
    the server in messages. `may_retry` is called after a failed attempt: an answer that has been
    passed on in part cannot be retried.

    Raises:
        CallTimeout: the deadline passed, or would pass before the next attempt.
        ModelError: the last attempt's error, with a note on how many were made.
    """
    start = began = monotonic()
    number, before = 0, None
    while True:
        left_s = None if deadline_s is None else start + deadline_s - began
        limits = [limit_s for limit_s in (timeout_s, left_s) if limit_s is not None]
        try:
            # One scope for both limits; two cost 3 % of a turn (design/0015).
            async with asyncio.timeout(min(limits, default=None)) as limit:
                return Outcome(await attempt(), number, began - start)
        except Retry as failure:
            last = failure
        except TimeoutError as error:
            # A timeout inside the attempt.
            if not limit.expired():
                raise
            last = Retry(
                ConnectionFailed(
                    f"{where} gave no answer in time ({min(limits):.3g} s). The call is lost. Is "
                    "the server overloaded? Raise timeout_s or send fewer requests."
                )
            )
            last.__cause__ = error
        now = monotonic()
        too_long = (last.after_s or 0.0) > policy.max_retry_after_s
        wait_s = policy.wait_s(number, last.after_s)
        # Checked before the number of retries, since the deadline is the better message.
        if deadline_s is not None and now - start >= deadline_s:
            break
        is_lasting = isinstance(last.error, ConnectionFailed) or _is_same_500(last.error, before)
        patience_s, before = PATIENCE_S.get() if is_lasting else None, last.error
        too_late = patience_s is not None and now - start + wait_s > patience_s
        if number == policy.max_retries or too_long or too_late or not may_retry():
            last.error.add_note(
                f"{number + 1} attempts in {now - start:.1f} s"
                + (f"; the server asks to wait {last.after_s:g} s" if too_long else "")
            )
            raise last.error from last.__cause__
        # Do not wait for a retry that would begin after the deadline.
        if deadline_s is not None and now - start + wait_s >= deadline_s:
            break
        await asyncio.sleep(wait_s)
        number, began = number + 1, monotonic()
    raise CallTimeout(
        f"{where} gave no answer within deadline_s = {deadline_s:g} s, in which it was asked "
        f"{number + 1} times. The call is lost. Is the server overloaded or stuck? Raise "
        f"deadline_s or send fewer requests. The last error: {last.error}"
    ) from last.error


def _is_same_500(error: RolltreeError, before: RolltreeError | None) -> bool:
    """Whether a server has said 500 twice in the same words: a lasting fault.

    Words with digits may be those of the request: its id, or a time.
    """
    errors = (error, before)
    if not all(isinstance(each, ServerError) and each.status == 500 for each in errors):
        return False
    said, said_before = (re.sub(r"\w*\d\w*", "", str(each)) for each in errors)
    return said == said_before


def parse_retry_after(value: str | None) -> float | None:
    """Return a Retry-After header (seconds or an HTTP date) in seconds from now, or None.

    >>> parse_retry_after("2")
    2.0
    """
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(value).timestamp() - time(), 0.0)
    except ValueError:
        return None
