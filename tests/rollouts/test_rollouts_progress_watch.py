"""Rollouts that make no progress are named, with what they wait for; they are left alone."""

import asyncio
import threading
import time

import pytest

import rolltree as rt
from rolltree.inference.deadline import Clock
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.progress_watch import ProgressWatch
from rolltree.testing import ScriptedClient
from rolltree.values.types import RolloutRequest
from wait_kit import until

ROWS = [{"question": "q", "answer": "a"}] * 4
STALL_S = 0.2


class NeverAnswers(rt.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        await asyncio.Event().wait()


class Gathers(rt.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        await asyncio.gather(asyncio.sleep(0), asyncio.create_task(self.look_up()))

    async def look_up(self):
        await asyncio.sleep(600)


class Blocks(rt.MultiTurnEnv):
    def __init__(self, number, **settings):
        super().__init__(**settings)
        self.all_in_flight = asyncio.Barrier(number)

    async def env_response(self, messages, state, **_):
        await self.all_in_flight.wait()
        time.sleep(1.5)  # noqa: ASYNC251  this is the mistake
        return []


async def slow_judge(completion, **_):
    await asyncio.sleep(600)


def blocks_in_a_thread(completion, **_):
    release.wait(600)
    return 1.0


release = threading.Event()


class Hangs(ScriptedClient):
    async def respond(self, call, memory=None):
        await asyncio.sleep(600)


def requests(number, step=4):
    return [
        RolloutRequest(f"train/{i}", "e", {"prompt": "q"}, i, i, f"g{i}", 0, train_step=step)
        for i in range(number)
    ]


async def notices(env, client=None, number=4, enough=1):
    """Play until so many notices have come; return them."""
    heard = []
    engine = RolloutEngine(env, client or ScriptedClient(["x"] * 1000), notify=heard.append)
    engine.watch.stall_s = STALL_S
    playing = asyncio.create_task(engine.run_all(env_requests(env, number)))
    try:
        await until(lambda: len(heard) >= enough or playing.done())
    finally:
        release.set()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        release.clear()
    return heard


def env_requests(env, number):
    return [
        RolloutRequest(
            f"train/{i}", env.env_id, env.example("train", i), i, i, f"g{i}", 0, train_step=4
        )
        for i in range(number)
    ]


def single(*funcs):
    return rt.SingleTurnEnv(dataset=ROWS, rubric=rt.Rubric(funcs=list(funcs)))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (NeverAnswers(dataset=ROWS), "for env_response (NeverAnswers.env_response, "),
        (Gathers(dataset=ROWS), "for env_response (Gathers.look_up, "),
        (single(slow_judge), "for a reward function (slow_judge, "),
        (single(blocks_in_a_thread), "for a reward function"),
    ],
)
async def test_what_rollouts_wait_for_is_named(env, said):
    (notice,) = await notices(env)
    assert notice.startswith("4 rollouts of step 4 have been waiting 0 s ")
    assert said in notice
    assert "train/0, train/1, train/2 and 1 more" in notice


async def test_a_model_that_does_not_answer_is_named():
    (notice,) = await notices(single(), Hangs(["x"]), number=1)
    assert notice.startswith("1 rollout of step 4 has been waiting")
    assert "for an answer of the model: train/0." in notice


async def test_the_notice_comes_again_after_twice_the_time():
    first, second = await notices(NeverAnswers(dataset=ROWS), enough=2)
    assert first.partition("waiting")[0] == second.partition("waiting")[0]


@pytest.mark.parametrize(
    ("number", "held_up"),
    [
        (4, "so none of 4 rollouts in flight goes on (train/0, train/1, train/2 and 1 more)"),
        (1, "so the only rollout in flight does not go on (train/0)"),
    ],
)
async def test_what_blocks_the_event_loop_is_named(number, held_up):
    found = await notices(Blocks(number, dataset=ROWS), number=number)
    assert "Blocks.env_response (test_rollouts_progress_watch.py:" in found[0]
    assert f"blocks the event loop, {held_up}" in found[0]


async def test_rollouts_that_advance_are_not_named():
    heard = []
    watch = ProgressWatch(heard.append, stall_s=60.0)
    with watch.over(requests(1)[0]) as flight:
        flight.clock = Clock()

        def look(at_s):
            watch._looped_s = now_s = flight_began_s + at_s
            watch._look(now_s)

        flight_began_s = flight.since_s
        for at_s in range(15, 600, 15):
            flight.clock.call_started()
            flight.clock.call_ended(0.0)
            look(at_s)
        assert heard == []
        # A wait counts as a stall once it takes twice as long as one that has ended.
        for at_s in range(600, 900, 15):
            look(at_s)
        assert len(heard) == 3  # after 60, 120 and 240 s
        flight.clock.call_started()
        flight.clock.call_ended(0.0)
        for at_s in range(900, 1400, 15):
            look(at_s)
        assert len(heard) == 3
        look(1600)
        assert len(heard) == 4


def test_an_engine_may_be_used_in_one_event_loop_after_another():
    heard = []
    watch = ProgressWatch(heard.append, stall_s=0.2)

    async def play(seconds):
        with watch.over(requests(1)[0]) as flight:
            for _ in range(int(seconds / 0.05)):
                flight.clock = Clock()
                await asyncio.sleep(0.05)

    asyncio.run(play(0.05))
    asyncio.run(play(0.8))
    assert heard == []
    assert watch._loop is not None


async def test_the_thread_ends_when_nothing_is_in_flight():
    watch = ProgressWatch(lambda message: None, stall_s=0.1)
    with watch.over(requests(1)[0]):
        assert [t for t in threading.enumerate() if t.name == "rolltree-watch"]
    await until(lambda: watch._thread is None)
