import asyncio

import pytest
from scripted_source import Model, a_request

from rolltree.inference.client import as_client
from rolltree.inference.deadline import RolloutClient
from rolltree.rollouts import Clock, Episode, current_episode
from rolltree.rollouts.requests import playing
from rolltree.values.types import GenerateRequest, SamplingParams


@pytest.fixture
def now(monkeypatch):
    """A clock that a test sets."""

    class Now:
        seconds = 100.0

    monkeypatch.setattr("rolltree.inference.deadline.time.monotonic", lambda: Now.seconds)
    return Now


def test_waiting_is_not_spent(now):
    clock = Clock(limit_s=10.0)
    now.seconds += 8.0
    assert clock.spent_s == 8.0
    clock.call_started()
    now.seconds += 30.0
    clock.call_ended(wait_s=29.0)
    assert clock.spent_s == 9.0
    assert not clock.expired
    now.seconds += 1.0
    assert clock.expired


def test_without_a_limit_nothing_expires(now):
    clock = Clock()
    now.seconds += 1e6
    assert not clock.expired


async def test_the_guard_cancels_after_limit_and_grace():
    clock = Clock(limit_s=0.01, grace_s=0.02)
    with pytest.raises(TimeoutError):
        async with clock.guard() as scope:
            await asyncio.sleep(5)
    assert scope.expired()
    assert clock.spent_s >= 0.03


async def test_a_call_in_flight_suspends_the_guard():
    clock = Clock(limit_s=0.5)
    client = RolloutClient(Model(delay_s=0.6, wait_s=0.6), clock)
    async with clock.guard() as scope:
        await client.chat("hi")
        assert not clock.expired
    assert not scope.expired()


async def test_generation_that_was_no_waiting_counts():
    clock = Clock(limit_s=0.02)
    client = RolloutClient(Model(delay_s=0.1, wait_s=0.0), clock)

    async def play():
        async with clock.guard():
            await client.chat("hi")
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await play()


async def test_the_guard_stays_suspended_until_the_last_parallel_call():
    clock = Clock(limit_s=0.5)
    quick = RolloutClient(Model(delay_s=0.01, wait_s=0.01), clock)
    slow = RolloutClient(Model(delay_s=0.6, wait_s=0.6), clock)
    async with clock.guard() as scope:
        await asyncio.gather(quick.chat("a"), slow.chat("b"))
    assert not scope.expired()


async def test_excluded_blocks_do_not_count():
    clock = Clock(limit_s=0.5)
    async with clock.guard() as scope:
        with clock.excluded():
            await asyncio.sleep(0.6)
        assert clock.spent_s < 0.5
    assert not scope.expired()


async def test_failed_calls_end_too():
    class Failing(Model):
        async def chat(self, messages, **settings):
            raise ConnectionError("gone")

    clock = Clock(limit_s=0.02)
    client = RolloutClient(Failing(), clock)

    async def play():
        async with clock.guard():
            with pytest.raises(ConnectionError):
                await client.chat("hi")
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await play()


async def test_calls_after_the_end_of_the_episode_do_not_fail():
    clock = Clock(limit_s=5.0)
    client = RolloutClient(Model(), clock)
    async with clock.guard():
        pass
    clock.stop()
    assert (await client.chat("late")).text == "hi"


async def test_a_timed_client_is_a_client():
    inner = Model()
    client = RolloutClient(inner, Clock())
    assert as_client(client) is client
    assert client.model == "scripted"
    session = client.session()
    assert isinstance(session, RolloutClient)
    request = GenerateRequest(prompt_ids=[1], sampling=SamplingParams())
    assert (await client.generate(request)).text == "hi"
    await client.aclose()  # does not close the inner client


async def test_a_timed_client_can_name_another_model():
    inner = Model()
    session = RolloutClient(inner, Clock(), model="other").session()
    assert session.model == "other"
    await session.chat("hi")
    await session.chat("hi", model="third")
    assert inner.models == ["other", "third"]


async def test_the_current_episode_belongs_to_its_task():
    seen = {}

    async def play(name):
        with playing(Episode(a_request(request_id=name))):
            await asyncio.sleep(0)
            seen[name] = current_episode().request.request_id

    await asyncio.gather(play("a"), play("b"))
    assert seen == {"a": "a", "b": "b"}
    assert current_episode() is None


def test_episodes_nest():
    outer, inner = Episode(a_request(0)), Episode(a_request(1))
    with playing(outer):
        with playing(inner):
            assert current_episode() is inner
        assert current_episode() is outer


async def test_an_answer_carries_when_it_was_asked_for_and_how_long_that_took(now):
    clock = Clock()
    now.seconds += 2.0

    class Slow(Model):
        async def chat(self, messages, **settings):
            now.seconds += 3.0
            return await super().chat(messages, **settings)

    part = Clock()  # of a delegated rollout: the episode's times count
    inner = RolloutClient(Slow(delay_s=0.0, wait_s=1.0), clock)
    now.seconds += 1.0
    answer = await RolloutClient(inner, part).chat("hi")
    assert (answer.sent_s, answer.time_s, answer.wait_s) == (3.0, 3.0, 1.0)
