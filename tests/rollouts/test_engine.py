import asyncio
import time
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_source import Model, Source, a_request, failed

from rolltree.inference.deadline import Clock
from rolltree.rollouts import GroupScorer, RolloutEngine, RolloutSource, current_episode
from rolltree.rollouts.engine import MAX_READY
from rolltree.values.errors import ConfigError, ConnectionFailed, ServerError


def requests(num):
    return [a_request(index) for index in range(num)]


def engine(play=None, **settings):
    source = play if isinstance(play, Source) else Source(play)
    return RolloutEngine(source, settings.pop("client", Model()), **settings)


async def collect(engine, requests):
    async with aclosing(engine.run(requests)) as results:
        return [result async for result in results]


def test_the_scripted_source_is_a_source():
    assert isinstance(Source(), RolloutSource)
    assert not isinstance(Source(), GroupScorer)


async def test_run_all_keeps_the_order_of_the_requests():
    async def play(request, client, state):
        await asyncio.sleep(0.02 if request.request_id == "r0" else 0)

    results = await engine(play).run_all(requests(5))
    assert [result.request.request_id for result in results] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(result.error is None for result in results)
    assert results[0].states[0]["reward"] == 1.0


async def test_run_yields_in_the_order_of_completion():
    others = []

    async def play(request, client, state):
        if request.request_id != "r0":
            others.append(request.request_id)
        while request.request_id == "r0" and len(others) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    finished = [r.request.request_id for r in await collect(engine(play), requests(3))]
    assert finished[-1] == "r0"


@pytest.mark.parametrize("limit", [1, 3, 50])
async def test_concurrency_is_bounded(limit):
    async def play(request, client, state):
        await asyncio.sleep(0.001)

    source = Source(play)
    await engine(source, max_concurrent=limit).run_all(requests(20))
    assert source.most_running == min(limit, 20)


@settings(max_examples=25, deadline=None)
@given(
    outcomes=st.lists(st.sampled_from(["ok", "error", "raise", "slow"]), max_size=25),
    limit=st.integers(1, 8),
)
def test_every_request_has_one_result_whatever_happens(outcomes, limit):
    async def play(request, client, state):
        outcome = outcomes[request.index_in_group]
        if outcome == "slow":
            await asyncio.sleep(0.001)
        if outcome == "error":
            state["error"] = failed()
        if outcome == "raise":
            raise RuntimeError("broken source")

    async def run():
        source = Source(play)
        results = await engine(source, max_concurrent=limit).run_all(requests(len(outcomes)))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return source, results

    source, results = asyncio.run(run())
    assert sorted(source.cleaned) == sorted(f"r{i}" for i in range(len(outcomes)))
    assert source.most_running <= limit
    for outcome, result in zip(outcomes, results, strict=True):
        assert (result.error is None) == (outcome in ("ok", "slow"))


async def test_no_requests_no_results():
    assert await engine().run_all([]) == []


async def test_a_failed_episode_fails_alone_and_keeps_its_state():
    def play(request, client, state):
        state["trajectory"].append("a step")
        if request.request_id == "r1":
            raise KeyError("world")

    results = await engine(play).run_all(requests(3))
    assert [result.error is None for result in results] == [True, False, True]
    error = results[1].error
    assert (error.type, error.phase) == ("KeyError", "environment")
    assert "in play" in error.traceback
    state = results[1].states[0]
    assert state["trajectory"] == ["a step"]
    assert state["error"] is error
    assert state["reward"] is None


async def test_an_error_in_a_state_is_the_results_error():
    def play(request, client, state):
        state["error"] = failed()

    result = (await engine(play).run_all(requests(1)))[0]
    assert result.error.type == "EngineError"
    assert result.num_attempts == 1


async def test_two_requests_with_one_id_are_refused():
    with pytest.raises(ConfigError, match="'r0'"):
        await engine().run_all([a_request(0), a_request(0)])
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrent": 0},
        {"time_limit_s": 0.0},
        {"time_limit_s": float("nan")},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"retries": -1},
        {"grace_s": -1.0},
    ],
)
def test_settings_that_cannot_work(bad):
    with pytest.raises(ConfigError):
        engine(**bad)


def test_something_that_is_no_client():
    with pytest.raises(ConfigError, match="model client"):
        RolloutEngine(Source(), object())


async def test_requests_may_come_from_an_iterator():
    fed = []

    def feed():
        for request in requests(10):
            fed.append(request.request_id)
            yield request

    source = Source()
    runner = engine(source, max_concurrent=2)
    async with aclosing(runner.run(feed())) as results:
        async for _ in results:
            break
    assert 1 <= len(fed) < 10  # taken as they are needed
    assert len(await collect(engine(), feed())) == 10


async def test_an_iterator_that_raises_ends_the_run_after_what_was_started():
    def feed():
        yield a_request(0)
        raise OSError("disk")

    seen = []

    async def consume():
        async for result in engine().run(feed()):
            seen.append(result.request.request_id)

    with pytest.raises(OSError, match="disk"):
        await consume()
    assert seen == ["r0"]


async def test_the_model_of_the_engine_is_asked():
    model = Model()

    async def play(request, client, state):
        assert client.model == "other"
        await client.session().chat("hi")

    results = await engine(play, client=model, model="other").run_all(requests(1))
    assert results[0].error is None
    assert model.models == ["other"]


# RolloutProgress


async def test_progress_counts():
    seen = []

    def play(request, client, state):
        if request.request_id == "r1":
            state["error"] = failed()

    runner = engine(play, max_concurrent=1, on_progress=seen.append)
    await runner.run_all(requests(3))
    assert [(p.num_done, p.num_failed, p.num_total) for p in seen] == [
        (1, 0, 3),
        (2, 1, 3),
        (3, 1, 3),
    ]


async def test_progress_of_an_iterator_has_no_total():
    seen = []
    await collect(engine(on_progress=seen.append), iter(requests(2)))
    assert [p.num_total for p in seen] == [None, None]


# Cancellation


async def test_closing_the_iterator_cancels_what_runs():
    async def play(request, client, state):
        if request.request_id != "r0":
            await asyncio.sleep(60)

    source = Source(play)
    async with aclosing(engine(source, max_concurrent=4).run(requests(10))) as results:
        async for result in results:
            assert result.request.request_id == "r0"
            break
    assert sorted(source.cancelled) == sorted(source.started[1:])
    assert sorted(source.cleaned) == sorted(source.started)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_the_consumer_leaves_no_task():
    all_run = asyncio.Event()

    async def play(request, client, state):
        if source.running == 3:
            all_run.set()
        await asyncio.sleep(60)

    source = Source(play)
    consumer = asyncio.create_task(engine(source, max_concurrent=3).run_all(requests(10)))
    await all_run.wait()
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert len(source.cancelled) == 3
    assert source.running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_consumer_cancels_too():
    async def play(request, client, state):
        if request.request_id != "r0":
            await asyncio.sleep(60)

    source = Source(play)

    def complain(progress):
        raise ValueError("full disk")

    with pytest.raises(ValueError, match="full disk"):
        await engine(source, on_progress=complain).run_all(requests(4))
    assert source.running == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_episode_that_catches_its_cancellation_is_the_last_one():
    begun, has_begun = [], asyncio.Event()

    async def play(request, client, state):
        begun.append(request.request_id)
        has_begun.set()
        try:
            await asyncio.sleep(60)
        except BaseException:  # what a bare `except` in an environment does
            raise ConnectionFailed("the server went away") from None

    task = asyncio.create_task(engine(play, max_concurrent=1, retries=2).run_all(requests(3)))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert begun == ["r0"]


async def test_something_cancelled_inside_an_episode_fails_that_episode_alone():
    async def play(request, client, state):
        if request.request_id == "r1":
            inner = asyncio.create_task(asyncio.sleep(60))
            inner.cancel()
            await inner

    results = await engine(play, max_concurrent=1).run_all(requests(3))
    assert [result.error is None for result in results] == [True, False, True]
    assert (results[1].error.type, results[1].error.phase) == ("CancelledError", "environment")


# Time limits


async def test_an_episode_that_hangs_is_cancelled_and_keeps_its_state():
    async def play(request, client, state):
        state["trajectory"].append("a step")
        if request.request_id == "r1":
            await asyncio.sleep(60)

    source = Source(play)
    results = await engine(source, time_limit_s=0.5, grace_s=0.0).run_all(requests(3))
    assert [result.error is None for result in results] == [True, False, True]
    error = results[1].error
    assert (error.type, error.phase) == ("RolloutTimeout", "timeout")
    assert "0.5 s" in error.message
    state = results[1].states[0]
    assert state["trajectory"] == ["a step"]
    assert (state["truncated"], state["truncation_reason"]) == (True, "time_limit")
    assert state["reward"] is None
    assert source.cancelled == ["r1"]


async def test_waiting_for_the_server_does_not_count():
    async def play(request, client, state):
        session = client.session()
        for _ in range(3):
            await session.chat("hi")

    slow = Model(delay_s=0.2, wait_s=0.2)
    results = await engine(play, client=slow, time_limit_s=0.5, grace_s=0.0).run_all(requests(2))
    assert [result.error for result in results] == [None, None]


async def test_generation_time_counts():
    async def play(request, client, state):
        session = client.session()
        for _ in range(30):
            await session.chat("hi")
            await asyncio.sleep(0)

    slow = Model(delay_s=0.1, wait_s=0.0)
    results = await engine(play, client=slow, time_limit_s=0.08, grace_s=0.0).run_all(requests(1))
    assert results[0].error.type == "RolloutTimeout"


def assert_past_deadline(result, phase="timeout"):
    assert (result.error.type, result.error.phase) == ("RolloutTimeout", phase)
    assert "deadline_s = 0.3 s" in result.error.message
    for state in result.states:
        assert (state["reward"], state["error"]) == (None, result.error)


async def test_the_deadline_counts_what_the_time_limit_leaves_out():
    async def play(request, client, state):
        if request.request_id == "r0":
            await client.session().chat("hi")  # as if the server were silent
        if request.request_id == "r1":
            with current_episode().clock.excluded():  # as scoring is
                await asyncio.sleep(60)
        if request.request_id == "r2":
            await asyncio.sleep(60)

    source = Source(play)
    for limits in ({}, {"time_limit_s": 50.0}):
        found = engine(source, client=Model(delay_s=60.0), deadline_s=0.3, **limits)
        *late, in_time = await found.run_all(requests(4))
        for result in late:
            assert_past_deadline(result)
            assert result.states[0]["truncation_reason"] == "time_limit"
        assert in_time.error is None


async def test_the_deadline_is_put_off_while_no_server_answers():
    clock = Clock(deadline_s=0.05)
    async with clock.guard() as scope:
        with clock.postponed():
            await asyncio.sleep(0.1)
            assert not clock.past_deadline
        assert clock.deadline_s > 0.15
    assert not scope.expired()
    with pytest.raises(TimeoutError):
        async with clock.guard():
            await asyncio.Event().wait()
    assert clock.past_deadline


async def test_overlapping_postponements_count_once_and_end():
    clock = Clock(deadline_s=0.2)
    async with clock.guard() as scope:
        began, first, second = time.monotonic(), clock.postponed(), clock.postponed()
        first.__enter__()
        await asyncio.sleep(0.05)
        second.__enter__()
        await asyncio.sleep(0.2)
        first.__exit__(None, None, None)
        await asyncio.sleep(0.05)
        assert 0.0 < clock.left_s <= 0.2  # the time left stands still
        second.__exit__(None, None, None)
        assert 0.29 < clock.deadline_s - 0.2 < time.monotonic() - began
    assert not scope.expired()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5), clock.guard() as scope:
            await asyncio.Event().wait()
    assert scope.expired()


async def test_a_retry_has_the_time_that_the_server_was_away():
    async def play(request, client, state):
        if played.append(0) or len(played) > 1:
            return
        with current_episode().clock.postponed():
            await asyncio.sleep(0.3)
        raise ConnectionFailed("gone")

    played = []
    result = (await engine(play, deadline_s=0.2, retries=1).run_all(requests(1)))[0]
    assert (result.error, len(played)) == (None, 2)


async def test_the_deadline_is_one_for_all_attempts():
    async def play(request, client, state):
        await asyncio.sleep(0.1)
        raise ConnectionFailed("gone")

    began = time.monotonic()
    found = engine(play, deadline_s=0.3, retries=10**9)
    result = (await found.run_all(requests(1)))[0]
    assert result.error.type in ("RolloutTimeout", "ConnectionFailed")
    assert 1 <= result.num_attempts <= 4
    assert time.monotonic() - began < 30.0


async def test_an_episode_can_end_by_itself_in_time():
    async def play(request, client, state):
        for _ in range(1000):
            if current_episode().clock.expired:
                break
            await asyncio.sleep(0.005)
        state["truncated"] = True

    results = await engine(play, time_limit_s=0.02, grace_s=30.0).run_all(requests(1))
    assert results[0].error is None
    assert results[0].states[0]["truncated"]
    assert results[0].states[0]["reward"] == 1.0


async def test_a_timeout_of_the_source_itself_is_an_ordinary_failure():
    def play(request, client, state):
        raise TimeoutError("tool took too long")

    results = await engine(play, time_limit_s=5.0).run_all(requests(1))
    assert (results[0].error.type, results[0].error.phase) == ("TimeoutError", "environment")
    assert not results[0].states[0].get("truncated")


# Retries


async def test_failed_model_calls_are_tried_again_and_counted():
    tries = []

    def play(request, client, state):
        tries.append(request.sampling_seed)
        if len(tries) < 3:
            raise ConnectionFailed("gone")

    result = (await engine(play, retries=5).run_all(requests(1)))[0]
    assert result.error is None
    assert result.num_attempts == 3
    assert tries == [0, 0, 0]  # the same seeds: a retry is not a second draw


class Backend:
    class ServerError(Exception):
        """An environment's own exception, which only has the name of rolltree's."""


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (ServerError("it broke", status=500, retryable=True), 3),
        (ServerError("no such field", status=400, retryable=False), 1),
        (ValueError("no number"), 1),
        (Backend.ServerError("the game's server"), 1),
    ],
)
async def test_only_failures_of_the_server_are_tried_again(error, attempts):
    def play(request, client, state):
        raise error

    result = (await engine(play, retries=2).run_all(requests(1)))[0]
    assert result.error.type == type(error).__name__
    assert result.num_attempts == attempts


# Groups


class GroupSource(Source):
    has_group_rewards = True

    def __init__(self, play=None, score=None):
        super().__init__(play)
        self.scored = []
        self.score = score

    async def score_group(self, states):
        self.scored.append([state["example_id"] for state in states])
        if self.score is not None:
            self.score(states)
        for rank, state in enumerate(states):
            state["reward"] = float(rank)


def grouped(num_groups, size):
    return [
        a_request(g * size + m, group=f"g{g}", index_in_group=m)
        for m in range(size)
        for g in range(num_groups)
    ]


async def test_groups_are_scored_when_their_last_member_is_done():
    source = GroupSource()
    assert isinstance(source, GroupScorer)
    results = await collect(engine(source, max_concurrent=3), iter(grouped(4, 3)))
    assert sorted(source.scored) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    groups = [result.request.group_id for result in results]
    assert [groups[i] for i in range(0, 12, 3)] == [groups[i + 2] for i in range(0, 12, 3)]
    assert [r.states[0]["reward"] for r in results] == [0.0, 1.0, 2.0] * 4


async def test_failed_members_are_left_out_of_the_comparison():
    def play(request, client, state):
        if request.index_in_group == 1:
            state["error"] = failed()

    source = GroupSource(play)
    results = await engine(source).run_all(grouped(1, 3))
    assert source.scored == [[0, 2]]
    assert [r.error is None for r in results] == [True, False, True]
    assert [r.states[0]["reward"] for r in results] == [0.0, None, 1.0]


async def test_a_group_in_which_everybody_failed_is_not_scored():
    def play(request, client, state):
        state["error"] = failed()

    source = GroupSource(play)
    results = await engine(source).run_all(grouped(1, 2))
    assert source.scored == []
    assert all(result.error is not None for result in results)


async def test_scoring_that_raises_is_recorded_with_the_group():
    def score(states):
        raise ZeroDivisionError("no members")

    results = await engine(GroupSource(score=score)).run_all(grouped(2, 2))
    assert [result.error.type for result in results] == ["ZeroDivisionError"] * 4
    assert [result.error.phase for result in results] == ["scoring"] * 4
    assert [result.states[0]["reward"] for result in results] == [None] * 4


async def test_scoring_that_awaits_what_it_cancelled_fails_its_group_alone():
    class Cancels(GroupSource):
        async def score_group(self, states):
            if states[0]["example_id"] == 0:
                inner = asyncio.create_task(asyncio.sleep(60))
                inner.cancel()
                await inner
            await super().score_group(states)

    results = await engine(Cancels()).run_all(grouped(2, 2))
    found = {result.request.request_id: result.error for result in results}
    assert [found[name] and found[name].type for name in ("r0", "r1", "r2", "r3")] == [
        "CancelledError", "CancelledError", None, None,
    ]  # fmt: skip


async def test_scoring_that_is_cancelled_leaves_no_task():
    scoring = asyncio.Event()

    class Hangs(GroupSource):
        async def score_group(self, states):
            scoring.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(engine(Hangs()).run_all(grouped(2, 2)))
    await scoring.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_that_scoring_leaves_in_a_state_reaches_the_result():
    def score(states):
        states[0]["error"] = failed("JudgeDown", "scoring")

    results = await engine(GroupSource(score=score)).run_all(grouped(1, 2))
    assert [result.error.type if result.error else None for result in results] == [
        "JudgeDown",
        None,
    ]


async def test_a_source_that_can_compare_but_does_not_is_not_held_back():
    source = GroupSource()
    source.has_group_rewards = False
    await engine(source).run_all(grouped(1, 2))
    assert source.scored == []


async def test_a_comparison_that_hangs_has_a_deadline():
    class Hangs(GroupSource):
        async def score_group(self, states):
            await asyncio.sleep(60)

    for result in await engine(Hangs(), deadline_s=0.3).run_all(grouped(1, 4)):
        assert_past_deadline(result, "scoring")


async def most_in_a_round(source, work):
    """Return the most episodes that came to a point in one round of the event loop."""
    most, task = 0, asyncio.ensure_future(work)
    while not task.done():
        before = len(source.passed)
        await asyncio.sleep(0)
        most = max(most, len(source.passed) - before)
    await task
    return most


@pytest.mark.parametrize("where", ["start", "answer"])
async def test_many_episodes_do_not_hold_the_loop_together(monkeypatch, where):
    monkeypatch.setattr("rolltree._helpers.tasks.ROUND_S", 0.0, raising=False)
    all_asked = asyncio.Event()

    class Waiting(Model):
        async def chat(self, messages, **settings):
            await all_asked.wait()
            return await super().chat(messages, **settings)

    async def play(request, client, state):
        if where == "start":
            source.passed.append(request.request_id)
        source.num_asked += 1
        if source.num_asked == 300:
            all_asked.set()
        await client.chat([])
        if where == "answer":
            source.passed.append(request.request_id)

    source = Source(play)
    source.passed, source.num_asked = [], 0
    runs = engine(source, client=Waiting(), max_concurrent=300).run_all(requests(300))
    assert await most_in_a_round(source, runs) <= 8
    assert len(source.passed) == 300


async def test_episodes_wait_for_a_consumer_that_is_slow():
    source = Source()
    running = engine(source, max_concurrent=10)
    async with aclosing(running.run_ready(requests(2000))) as batches:
        num_taken = len(await anext(batches))
        for _ in range(2000):
            await asyncio.sleep(0)
        assert num_taken < len(source.started) <= num_taken + MAX_READY + 10
        async for batch in batches:
            num_taken += len(batch)
    assert num_taken == len(source.started) == 2000


async def test_an_environment_that_calls_exit_fails_its_rollout_and_not_the_program():
    async def play(request, client, state):
        if request.request_id == "r0":
            raise SystemExit(0)

    results = await engine(play).run_all(requests(2))
    assert [result.error and result.error.type for result in results] == ["SystemExit", None]
    assert "exit(0)" in results[0].error.message
