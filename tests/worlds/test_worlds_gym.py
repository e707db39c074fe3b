"""Gymnasium's worlds by text: spaces, rendering, snapshots, and where their calls run."""

import asyncio
import contextlib
import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rolltree.agents.worlds import BAD_ACTION, CanSnapshot, GymWorld, World, action_reader, drive
from rolltree.agents.worlds.gym import plain_ansi
from rolltree.values.errors import ConfigError
from rolltree.values.steps import StepOutcome

LAKE = ["left", "down", "right", "up"]


async def none_left(name):
    """Fail if a thread of this name is still there after ten seconds; ending takes a moment."""
    for _ in range(1000):
        if not [thread for thread in threading.enumerate() if thread.name == name]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"a thread {name} is left")


def lake(**settings):
    args = {"render_mode": "ansi", "is_slippery": False}
    return GymWorld(
        "FrozenLake-v1", to_text="render", action_names=LAKE, world_args=args, **settings
    )


def test_frozen_lake_is_read_and_walked():
    world = lake()
    assert isinstance(world, World)
    obs, _ = world.reset(seed=3)
    assert obs == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert world.step("go right").obs == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    fallen = world.step("Down!")
    assert (fallen.reward, fallen.terminated, fallen.truncated) == (0.0, True, False)
    assert fallen.done
    world.reset(seed=3)
    for move in ("down", "down", "right", "down", "right"):
        assert not world.step(move).done
    assert world.step("right").reward == 1.0
    world.close()


def test_a_time_limit_is_a_truncation():
    world = lake()
    world.reset(seed=0)
    outcomes = [world.step("left") for _ in range(100)]
    assert [outcome.truncated for outcome in outcomes] == [False] * 99 + [True]
    assert not outcomes[-1].terminated


def test_what_is_no_action_changes_nothing():
    world = lake()
    world.reset(seed=0)
    outcome = world.step("jump")
    assert outcome == StepOutcome(
        "Invalid action: say one of: left, down, right, up",
        info={BAD_ACTION: "say one of: left, down, right, up"},
    )
    assert world.step("right").obs.startswith("  (Right)\nS[F]FF")
    assert world.step(2).obs.startswith("  (Right)\nSF[F]F")  # what a parser made is taken as it is


def test_blackjack_is_seeded():
    def hand(seed):
        world = GymWorld(
            "Blackjack-v1",
            to_text=lambda seen: f"You have {seen[0]}, the dealer shows {seen[1]}.",
            action_names=["stick", "hit"],
        )
        first, _ = world.reset(seed=seed)
        outcome = world.step("I stick.")
        assert outcome.terminated
        assert outcome.reward in (-1.0, 0.0, 1.0)
        return first, outcome.reward

    assert hand(5) == hand(5)
    assert len({hand(seed) for seed in range(8)}) > 1
    assert hand(2**40 + 5)  # longer seeds than 31 bits are cut


# Spaces


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3), "I choose 1, no, 2", 2),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.MultiDiscrete([2, 4]), "1 and 3", [1, 3]),
        (spaces.Box(-1.0, 1.0, (2,)), "not 5 but -0.5, .25", [-0.5, 0.25]),
        (spaces.Box(0, 9, (1,), dtype=np.int64), "7", [7]),
        (spaces.Box(-1.0, 1.0, (2, 2)), "1e-1 0 1 -1", [[0.1, 0], [1, -1]]),
        (spaces.Text(5), "hello", "hello"),
    ],
)
def test_text_becomes_an_action_of_the_space(space, text, action):
    read = action_reader(space)(text)
    np.testing.assert_allclose(read, action, rtol=1e-6) if not isinstance(read, str) else None
    assert isinstance(read, str) or np.asarray(read).shape == np.asarray(action).shape
    assert read in space


@pytest.mark.parametrize(
    ("space", "text", "why"),
    [
        (spaces.Discrete(3), "none", "say an integer"),
        (spaces.Discrete(3), "3", "actions are 0 to 2"),
        (spaces.MultiDiscrete([2, 4]), "1", "say 2 numbers"),
        (spaces.MultiDiscrete([2, 4]), "1 4", r"at most \[1, 3\]"),
        (spaces.MultiDiscrete([2, 4]), "0.5 1", "whole"),
        (spaces.Box(-1.0, 1.0, (2,)), "0 2", "number 2 must be from -1 to 1"),
        (spaces.Box(0, 9, (1,), dtype=np.int64), "0.5", "whole"),
        (spaces.Box(-1.0, 1.0, (1,)), "up", "say 1 number"),
        (spaces.Text(3), "hello", "1 to 3 characters"),
    ],
)
def test_other_text_is_told_why(space, text, why):
    with pytest.raises(ValueError, match=why):
        action_reader(space)(text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        *(("Up!", 0), ("go up! now", 0), ("I add +1.", 1), ("x+1", 1), ("c++ it is", 2)),
        *(("so: 1", 3), ("not +1 but 1", 3), ("c++11", 2)),
    ],
)
def test_names_may_begin_and_end_with_any_character(text, action):
    read = action_reader(spaces.Discrete(4), ("up!", "+1", "C++", "1"))
    assert read(text) == action


@pytest.mark.parametrize("text", ["cup!", "+12", "xc++", "x1"])
def test_a_name_inside_a_word_is_not_an_action(text):
    with pytest.raises(ValueError, match="say one of"):
        action_reader(spaces.Discrete(4), ("up!", "+1", "C++", "1"))(text)


@given(st.text(max_size=30))
def test_no_text_makes_a_reader_fail_otherwise(text):
    for space in (spaces.Discrete(4), spaces.Box(-1e3, 1e3, (2,)), spaces.MultiDiscrete([3, 3])):
        with contextlib.suppress(ValueError):
            assert action_reader(space)(text) in space


def test_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="Pass to_action"):
        action_reader(spaces.MultiBinary(2))
    with pytest.raises(ConfigError, match="names would do nothing"):
        action_reader(spaces.Box(0, 1), ("a",))
    with pytest.raises(ConfigError, match="Did you mean 'FrozenLake-v1'"):
        GymWorld("FrozenLak-v1")
    with pytest.raises(ConfigError, match="'own' or 'deepcopy'"):
        lake(snapshots="copy")
    world = GymWorld("FrozenLake-v1", to_text="render", action_names=LAKE)
    with (
        pytest.raises(ConfigError, match='render_mode="ansi"'),
        pytest.warns(UserWarning, match="render"),
    ):
        world.reset()
    with pytest.raises(ConfigError, match="Pass to_text"):
        GymWorld("FrozenLake-v1", action_names=LAKE).reset()


def test_ansi():
    assert plain_ansi("\x1b[41mS\x1b[0mF\x1b[1;32mG\x1b[0m\n") == "[S]F[G]"
    assert plain_ansi("plain") == "plain"


# Snapshots


def play_on(world):
    return [(o.obs, o.reward, o.done) for o in map(world.step, ["right", "right", "down"])]


def test_a_declared_copy_is_a_snapshot_that_can_be_restored_again_and_again():
    world = lake(snapshots="deepcopy")
    assert isinstance(world, CanSnapshot)
    world.reset(seed=1)
    world.step("down")
    saved = world.snapshot()
    first = play_on(world)
    for _ in range(2):
        world.restore(saved)
        assert play_on(world) == first
    slippery = GymWorld(
        "FrozenLake-v1", to_text=str, action_names=LAKE, snapshots="deepcopy"
    )  # its random numbers are saved, too
    slippery.reset(seed=1)
    saved = slippery.snapshot()
    first = play_on(slippery)
    slippery.restore(saved)
    assert play_on(slippery) == first


def test_without_a_declaration_only_a_worlds_own_snapshots_count():
    with pytest.raises(ConfigError, match="snapshots='deepcopy'"):
        lake().snapshot()

    class Counter(gymnasium.Env):
        action_space, observation_space = spaces.Text(9), spaces.Text(9)
        count = 0

        def reset(self, *, seed=None, options=None):
            self.count = 0
            return "0", {}

        def step(self, action):
            self.count += 1
            return str(self.count), 0.0, False, False, {}

        def snapshot(self):
            return self.count

        def restore(self, saved):
            self.count = saved

    world = GymWorld(Counter)
    world.reset()
    world.step("a")
    saved = world.snapshot()
    assert world.step("a").obs == "2"
    world.restore(saved)
    assert world.step("a").obs == "2"


# Driving


class Slow:
    """A hand-written world whose steps block."""

    def __init__(self, **marks):
        self.threads, self.ended, self.started = [], [], threading.Event()
        vars(self).update(marks)

    def reset(self, *, seed=None):
        self.threads.append(threading.current_thread())
        return f"seed {seed}", {}

    def step(self, action):
        try:
            self.started.set()
            while action == "hang":
                time.sleep(0.001)
            return StepOutcome(action, 1.0, terminated=True)
        finally:
            self.ended.append(action)

    async def close(self):
        self.threads.append(threading.current_thread())


async def test_blocking_worlds_run_in_a_thread_unless_they_say_otherwise():
    world = Slow()
    assert await drive(world.reset, seed=4) == ("seed 4", {})
    assert await drive(world.step, "go") == StepOutcome("go", 1.0, terminated=True)
    await drive(world.close)  # asynchronous methods run in the loop
    main = threading.main_thread()
    assert [thread is main for thread in world.threads] == [False, True]
    quick = Slow(in_thread=False)
    await drive(quick.reset, seed=1)
    assert quick.threads == [main]


async def test_a_world_that_hangs_is_left_with_nothing_behind():
    world = Slow()
    before = len(asyncio.all_tasks())
    task = asyncio.create_task(drive(world.step, "hang"))
    await asyncio.to_thread(world.started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await none_left("rolltree-world")
    assert world.ended == ["hang"]
    assert len(asyncio.all_tasks()) == before
