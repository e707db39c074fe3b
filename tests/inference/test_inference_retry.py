from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import RetryPolicy
from rolltree.inference.retry import PATIENCE_S, Retry, parse_retry_after, with_retries
from rolltree.values.errors import ConfigError, ConnectionFailed, ServerError

FAST = RetryPolicy(max_retries=3, first_wait_s=0.001)


class Flaky:
    """Fails as long as there are failures."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.num_attempts = 0

    async def __call__(self) -> str:
        self.num_attempts += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


async def test_success_costs_nothing() -> None:
    outcome = await with_retries(FAST, Flaky())
    assert (outcome.value, outcome.num_retries) == ("done", 0)
    assert outcome.wait_s < 5.0


async def test_retries_are_counted_and_timed() -> None:
    flaky = Flaky(Retry(ConnectionFailed("a")), Retry(ConnectionFailed("b"), after_s=0.05))
    outcome = await with_retries(FAST, flaky)
    assert (outcome.value, outcome.num_retries, flaky.num_attempts) == ("done", 2, 3)
    assert 0.05 <= outcome.wait_s < 60.0


async def test_the_last_error_is_raised_with_a_note() -> None:
    flaky = Flaky(*(Retry(ConnectionFailed(str(number))) for number in range(9)))
    with pytest.raises(ConnectionFailed, match="3") as caught:
        await with_retries(FAST, flaky)
    assert flaky.num_attempts == 4
    assert caught.value.__notes__[0].startswith("4 attempts in ")


async def test_other_errors_are_not_retried() -> None:
    flaky = Flaky(ServerError("no", status=404, retryable=False))
    with pytest.raises(ServerError):
        await with_retries(FAST, flaky)
    assert flaky.num_attempts == 1


async def test_a_wait_beyond_the_limit_fails_at_once() -> None:
    flaky = Flaky(Retry(ConnectionFailed("a"), after_s=3600.0))
    start = monotonic()
    with pytest.raises(ConnectionFailed) as caught:
        await with_retries(FAST, flaky)
    assert monotonic() - start < 60.0
    assert "asks to wait 3600 s" in caught.value.__notes__[0]


async def test_no_retries_when_switched_off() -> None:
    flaky = Flaky(Retry(ConnectionFailed("a")))
    with pytest.raises(ConnectionFailed):
        await with_retries(RetryPolicy(max_retries=0), flaky)
    assert flaky.num_attempts == 1


@given(st.integers(0, 2000), st.floats(0, 100), st.floats(0, 100))
def test_waits_stay_between_the_servers_wish_and_the_ceiling(
    attempt: int, first_wait_s: float, after_s: float
) -> None:
    policy = RetryPolicy(first_wait_s=first_wait_s, max_wait_s=30.0)
    wait_s = policy.wait_s(attempt, after_s)
    assert after_s <= wait_s <= max(30.0, after_s)


def test_waits_double() -> None:
    policy = RetryPolicy(first_wait_s=1.0, max_wait_s=1000.0)
    means = [sum(policy.wait_s(k, None) for _ in range(2000)) / 2000 for k in range(4)]
    for mean, expected in zip(means, [0.5, 1.0, 2.0, 4.0], strict=True):
        assert mean == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("setting", ["max_retries", "first_wait_s", "max_wait_s"])
def test_negative_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="negative"):
        RetryPolicy(**{setting: -1})


def test_retry_after_in_both_forms() -> None:
    assert parse_retry_after(None) is None
    assert parse_retry_after("1.5") == 1.5
    assert parse_retry_after("-3") == 0.0
    assert parse_retry_after("soon") is None
    later = datetime.now(UTC) + timedelta(seconds=30)
    seconds = parse_retry_after(format_datetime(later, usegmt=True))
    assert seconds is not None
    assert 25 < seconds <= 30


@pytest.mark.parametrize(
    ("status", "said", "num_attempts"),
    [
        (500, ["no such layer (request 7f3a, 1 s)", "no such layer (request 9b21, 2 s)"], 2),
        (500, ["no such layer", "out of memory"], 5),
        (502, ["bad gateway"], 5),
        (503, ["loading"], 5),
        (504, ["no answer"], 5),
    ],
)
async def test_the_same_answer_500_again_is_lasting_where_agents_retry_by_themselves(
    status: int, said: list[str], num_attempts: int
) -> None:
    """A server that restarts gives no answer, or 502 to 504, and keeps its time."""
    asked = []

    async def attempt() -> None:
        asked.append(said[len(asked) % len(said)])
        raise Retry(ServerError(asked[-1], status=status, retryable=True))

    policy = RetryPolicy(max_retries=4, first_wait_s=0.0)
    for patience_s, wanted in ((None, 5), (-1.0, num_attempts)):
        asked.clear()
        token = PATIENCE_S.set(patience_s)
        with pytest.raises(ServerError):
            await with_retries(policy, attempt)
        PATIENCE_S.reset(token)
        assert len(asked) == wanted
