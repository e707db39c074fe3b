"""Worlds others wrote: Gymnasium's interface and TextArena's games."""

import asyncio
import random
import threading
import time

import gymnasium
import pytest
from env_scripts import ScriptedModel

from rolltree.environments import GymEnv, TextArenaEnv
from rolltree.environments.rubrics import Rubric
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.values.errors import ConfigError


async def none_left(name):
    """Fail if a thread of this name is still there after ten seconds; ending takes a moment."""
    for _ in range(1000):
        if not [thread for thread in threading.enumerate() if thread.name == name]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"a thread {name} is left")


class Guess(gymnasium.Env):
    """Guess a number; -1 per wrong guess, 10 for the right one; truncated after `limit`."""

    def __init__(self, limit=99):
        self.action_space = gymnasium.spaces.Discrete(9, start=1)
        self.observation_space = gymnasium.spaces.Text(99)
        self.limit, self.turn, self.num_closed = limit, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, 10))
        return "Guess from 1 to 9.", {}

    def step(self, action):
        self.turn += 1
        hint = "higher" if action < self.secret else "lower" if action > self.secret else "right"
        won = action == self.secret
        return hint, 10.0 if won else -1.0, won, self.turn >= self.limit, {"turn": self.turn}

    def close(self):
        self.num_closed += 1


def searching(messages):
    """Halve the range."""
    low, high, guess = 1, 9, 5
    for said, hint in zip(messages[1::2], messages[2::2], strict=False):
        guess = int(said["content"].split()[-1])
        low, high = (guess + 1, high) if hint["content"] == "higher" else (low, guess - 1)
        guess = (low + high) // 2
    return f"I say {guess}"


def env_of(world=Guess, **settings):
    return GymEnv(world, **{"num_train": 3, "num_eval": 2, "max_turns": 9, **settings})


async def test_a_game_is_played_to_its_end_without_a_further_call():
    env = env_of()
    results = await env.evaluate(ScriptedModel(searching), "m")
    for state in results.state:
        steps = state["trajectory"]
        assert state["terminated"]
        assert not state["truncated"]
        assert state["completion"][-1] == {"role": "user", "content": "right"}
        assert [step["reward"] for step in steps] == [-1.0] * (len(steps) - 1) + [10.0]
        assert state["reward"] == 11.0 - len(steps)
        assert state["world_info"] == {"turn": len(steps)}
        assert state["prompt"][-1] == {"role": "user", "content": "Guess from 1 to 9."}
        assert "world" not in state


async def test_the_last_turn_counts():
    secret = (await env_of().evaluate(ScriptedModel(searching), "m")).state[0]["completion"][-2]
    env = env_of(max_turns=1)
    state = (await env.evaluate(ScriptedModel(secret["content"]), "m")).state[0]
    assert (state["reward"], state["terminated"], state["truncated"]) == (10.0, True, False)


async def test_limits_of_the_world_and_of_the_rollout_are_told_apart():
    def state_of(results):
        state = results.state[0]
        return state["truncated"], state["truncation_reason"], state["reward"]

    wrong = ScriptedModel("0")  # no action: costs a turn, changes nothing
    by_rollout = await env_of(max_turns=2).evaluate(wrong, "m", num_examples=1)
    assert state_of(by_rollout) == (True, "max_steps", 0.0)
    assert "actions are 1 to 9" in by_rollout.state[0]["completion"][1]["content"]
    always = ScriptedModel(lambda messages: f"I say {1 + len(messages) % 9}")
    env = env_of(lambda: Guess(limit=1))
    by_world = [s for s in (await env.evaluate(always, "m")).state if not s["terminated"]]
    assert by_world
    assert all(s["truncation_reason"] == "env" and s["reward"] == -1.0 for s in by_world)


async def test_the_seed_decides_the_world_and_groups_share_it():
    env = env_of()

    async def secrets(run_seed):
        requests = build_requests(env, "train", group_size=2, run_seed=run_seed)
        results = await RolloutEngine(env, ScriptedModel(searching)).run_all(requests)
        return [r.states[0]["completion"][-2]["content"] for r in results]

    first = await secrets(1)
    assert first[::2] == first[1::2]
    assert first == await secrets(1)
    assert len({tuple(first), *[tuple(await secrets(seed)) for seed in range(2, 6)]}) > 1


async def test_worlds_are_closed_once_also_after_failures():
    worlds = []

    def make():
        worlds.append(Guess())
        return worlds[-1]

    env = env_of(make, num_eval=1)
    await env.evaluate(ScriptedModel(ValueError("model down")), "m")
    assert [world.num_closed for world in worlds] == [1, 1]  # the probe of the action space, ours


async def test_a_world_that_hangs_is_left_behind_without_a_thread():
    class Hanging(Guess):
        def step(self, action):
            while True:
                time.sleep(0.001)

    env = env_of(Hanging, num_eval=2)
    engine = RolloutEngine(env, ScriptedModel("5"), time_limit_s=0.5, grace_s=0.0)
    results = await engine.run_all(build_requests(env, "eval"))
    assert [result.error.type for result in results] == ["RolloutTimeout"] * 2
    await none_left("rolltree-world")


async def test_a_rubric_with_functions_replaces_the_sum():
    def brief(state):
        return 1.0 / len(state["trajectory"])

    env = env_of(rubric=Rubric([brief]))
    for state in (await env.evaluate(ScriptedModel(searching), "m")).state:
        assert state["reward"] == 1.0 / len(state["trajectory"])


def test_text_becomes_an_action():
    class Walk(Guess):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Discrete(2)

    act = env_of(Walk, action_names=["left", "right"]).to_action
    assert act("Not left. RIGHT!") == 1
    assert act("bright left") == 0
    with pytest.raises(ValueError, match="say one of: left, right"):
        act("up")
    with pytest.raises(ConfigError, match="3 action names and 2 actions"):
        env_of(Walk, action_names=["a", "b", "c"])
    with pytest.raises(ValueError, match="an integer"):
        env_of().to_action("five")


def test_spaces_without_text():
    class Bits(Guess):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.MultiBinary(2)

    with pytest.raises(ConfigError, match="Pass to_action"):
        env_of(Bits)
    assert env_of(Bits, to_action=float).to_action("0.5") == 0.5


async def test_a_world_of_numbers_by_its_id():
    env = GymEnv("CliffWalking-v1", num_train=1, num_eval=1, max_turns=3, in_thread=False)
    state = (await env.evaluate(ScriptedModel("0"), "m")).state[0]
    assert "Pass to_text" in state["error"].message
    env = GymEnv(
        "CliffWalking-v1",
        to_text=lambda cell: f"You stand on cell {cell}.",
        action_names=["up", "right", "down", "left"],
        num_train=1,
        num_eval=1,
        max_turns=2,
    )
    state = (await env.evaluate(ScriptedModel("up"), "m")).state[0]
    assert state["completion"][1]["content"] == "You stand on cell 24."
    assert state["reward"] == -2.0
    with pytest.raises(ConfigError, match="Did you mean 'CliffWalking-v1'"):
        GymEnv("CliffWalkng-v1")


# TextArena


def halving(messages):
    low, high, guess = 1, 20, None
    for message in messages:
        text = message["content"]
        if message["role"] == "assistant":
            guess = int(text.strip("[]"))
        elif "is higher" in text:
            low = guess + 1
        elif "is lower" in text:
            high = guess - 1
    return f"[{(low + high) // 2}]"


async def test_a_single_player_game():
    env = TextArenaEnv("GuessTheNumber-v0", num_train=1, num_eval=3)
    before = random.getstate()
    results = await env.evaluate(ScriptedModel(halving), "m")
    assert random.getstate() == before  # the game's random numbers are its own
    for state in results.state:
        assert state["error"] is None
        assert state["reward"] == 1.0
        assert state["terminated"]
        assert "Congratulations" in state["completion"][-1]["content"]
        assert state["world_info"]["turn_count"] == len(state["trajectory"])
        hints = [m["content"] for m in state["completion"] if m["role"] == "user"]
        assert all("You are playing Guess" not in hint for hint in hints)  # nothing is restated


async def test_games_side_by_side_are_reproducible():
    env = TextArenaEnv("GuessTheNumber-v0", num_train=1, num_eval=8)

    async def told(max_concurrent):
        results = await env.evaluate(ScriptedModel(halving), "m", max_concurrent=max_concurrent)
        return [state["completion"] for state in results.state]

    assert await told(8) == await told(1)


async def test_an_opponent():
    seen = []

    def first_free(observation):
        seen.append(observation)
        board = observation.rpartition("Current Board")[2] or observation
        return next(f"[{n}]" for n in range(9) if str(n) in board)

    env = TextArenaEnv("TicTacToe-v0", opponents=[first_free], num_train=1, num_eval=1)
    state = (await env.evaluate(ScriptedModel("[4]", "[8]", "[2]", "[6]", "[5]"), "m")).state[0]
    assert state["error"] is None
    assert seen
    assert state["terminated"]
    assert state["reward"] in (-1.0, 0.0, 1.0)


def test_unknown_games():
    with pytest.raises(ConfigError, match="Did you mean 'TicTacToe-v0'"):
        TextArenaEnv("TicTacTo-v0")


async def test_a_played_world_can_be_stored_and_read_back(tmp_path):
    from rolltree.rollouts.decode import decode_results
    from rolltree.rollouts.record import encode_result
    from rolltree.store import Run

    env = env_of()
    results = await env.evaluate(ScriptedModel(searching), "m")
    with Run.create(tmp_path / "run", config={}, kind="eval") as run:
        for result in results.results:
            run.add_rollouts(encode_result(result))
        again = list(decode_results(run.rollouts()))
    states = [result.states[0] for result in again]
    assert sorted(s["reward"] for s in states) == sorted(results.reward)
    assert all(s["prompt"][-1]["content"] == "Guess from 1 to 9." for s in states)


async def test_a_finished_state_can_be_copied_and_pickled():
    import copy
    import pickle

    results = await env_of().evaluate(ScriptedModel(searching), "m")
    for state in results.state:
        for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert again["completion"] == state["completion"]
            assert again["world_info"] == state["world_info"]
            assert [step["reward"] for step in again["trajectory"]] == [
                step["reward"] for step in state["trajectory"]
            ]
