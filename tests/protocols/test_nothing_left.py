"""An episode that is cancelled, timed out or killed leaves no thread, process or file behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from protocol_kit import CountWorld, an_agent

from rolltree.agents import Agent
from rolltree.agents.protocols import EpisodeContext, MultiAgentSyncProtocol, SingleAgentProtocol
from rolltree.agents.protocols.episode import open_world
from rolltree.agents.worlds import ParallelGame
from rolltree.environments import ProtocolEnvironment
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.testing import ScriptedClient
from wait_kit import until

PLAY = """
    import asyncio, sys, time
    from rolltree.agents import Agent
    from rolltree.environments import ProtocolEnvironment
    from rolltree.agents.protocols import SingleAgentProtocol
    from rolltree.rollouts import RolloutEngine, build_requests
    from rolltree.testing import ScriptedClient

    class Hangs:
        def __init__(self, row): pass
        def reset(self, *, seed=None): return "go", {}
        def step(self, action):
            sys.stdout.write("stepping\\n"); sys.stdout.flush()
            while True: time.sleep(0.01)
        def close(self): pass

    environment = ProtocolEnvironment(SingleAgentProtocol(Agent), Hangs, num_train=4)
    engine = RolloutEngine(environment, ScriptedClient(["move"]))
    asyncio.run(engine.run_all(build_requests(environment, "train", num_examples=1)))
"""


class Loops(CountWorld):
    """Blocks in its thread until somebody stops it."""

    in_thread = True

    def step(self, action):
        while True:
            time.sleep(0.005)


def world_threads():
    return [thread for thread in threading.enumerate() if "rolltree-world" in thread.name]


async def all_ended():
    """Whether the worlds' threads end; a loaded machine may need a moment to schedule them."""
    await until(lambda: not world_threads())
    return True


async def test_a_timed_out_episode_stops_the_thread_of_its_world():
    worlds = []
    environment = ProtocolEnvironment(
        SingleAgentProtocol(Agent), lambda row: worlds.append(Loops()) or worlds[-1], num_train=2
    )
    engine = RolloutEngine(environment, ScriptedClient(["x"]), time_limit_s=0.5, grace_s=0.0)
    results = await engine.run_all(build_requests(environment, "train", num_examples=2))
    assert [result.error.type for result in results] == ["RolloutTimeout"] * 2
    assert [world.num_closed for world in worlds] == [1, 1]
    assert await all_ended()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_episode_stops_the_thread_of_its_world():
    protocol = SingleAgentProtocol(lambda: an_agent(["move 1"]))
    task = asyncio.create_task(protocol.run(Loops()))
    while not world_threads():  # noqa: ASYNC110  the thread knows no event loop
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert await all_ended()


async def test_a_world_that_fails_to_close_does_not_swallow_the_cancellation():
    class Stuck(CountWorld):
        def close(self):
            raise OSError("the port is taken")

    async def play():
        async with open_world(Stuck):
            await asyncio.sleep(60)

    task = asyncio.create_task(play())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as ended:
        await task
    assert "the port is taken" in repr(ended.value.__cause__)


def test_a_killed_run_leaves_no_process_and_no_file(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = tmp_path / "play.py"
    script.write_text(textwrap.dedent(PLAY))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "stepping\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not session_members(process.pid)
    assert list(temporary.iterdir()) == []


def session_members(session):
    """The processes that are still in a session, from /proc."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == session:
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


async def test_a_parallel_game_of_pettingzoo_to_its_end():
    """Rock, paper, scissors: real rules, per-agent rewards, and the world's own truncation."""
    game = ParallelGame("classic/rps-v2", action_names=["rock", "paper", "scissors"], to_text=seen)
    agents = {
        "player_0": Agent(ScriptedClient(lambda messages: "paper"), name="player_0"),
        "player_1": Agent(ScriptedClient(lambda messages: "rock"), name="player_1"),
    }
    rollouts = await MultiAgentSyncProtocol(agents, max_steps=200).run(game, EpisodeContext(seed=1))
    game.close()
    first, second = rollouts
    assert (first.reward, second.reward) == (len(first.environment_steps), -len(first.agent_steps))
    assert {r.truncation_reason for r in rollouts} == {"env"}
    assert first.steps[-1].truncated


def seen(observation, agent):
    return f"They chose {observation}."
