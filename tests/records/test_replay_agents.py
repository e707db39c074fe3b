"""Replays of tools, worlds, several agents and sub-agents."""

import json
import random

import pytest

import rolltree as rt
from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import (
    Budget,
    DelegatingProtocol,
    MultiAgentSyncProtocol,
    Opponent,
    SingleAgentProtocol,
    SubAgent,
    TurnProtocol,
    delegate_tool,
)
from rolltree.environments import ProtocolEnvironment
from rolltree.records import replay, replay_many
from rolltree.values.steps import StepOutcome


def record(folder, env, say, **settings):
    with rt.Run.create(folder, kind="eval") as run:
        rt.evaluate(env, rt.ScriptedClient(say), run=run, **settings)
    return folder


def a_call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": name, "type": "function", "function": function}


def calling(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def user(messages):
    return next(m["content"] for m in messages if m["role"] == "user")


# -- tools ----------------------------------------------------------------------------------------


def tool_env(double, **settings):
    return rt.ToolEnv(
        tools=[double], dataset=[{"question": "q", "answer": "6"}], env_id="tools", max_turns=4,
        **settings,
    )  # fmt: skip


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def test_tools_are_live(tmp_path):
    said = [calling(a_call("double", number=3), a_call("double", number="x")), "6"]
    run = record(tmp_path / "run", tool_env(double), said)
    assert replay(run, "eval/tools/0/0", tool_env(double)).is_equal

    def wrong(number: int) -> int:
        """Double a number."""
        return 3 * number

    wrong.__name__ = "double"
    found = replay(run, "eval/tools/0/0", tool_env(wrong)).difference
    assert (found.kind, found.call, found.where) == ("prompt", 1, "message 2 of the prompt (tool)")
    assert (found.recorded["content"], found.live["content"]) == ("6", "9")

    def renamed(number: int, base: int = 2) -> int:
        """Double a number."""
        return base * number

    found = replay(run, "eval/tools/0/0", tool_env(renamed)).difference
    assert (found.kind, found.call) == ("tools", 0)
    assert (found.recorded, found.live) == (["double"], ["renamed"])


# -- a world --------------------------------------------------------------------------------------


class Dice:
    """Each step shows a number that the seed decides."""

    in_thread = False
    sides = 6

    def __init__(self, row=None):
        self.rng = random.Random()

    def reset(self, *, seed=None):
        self.rng = random.Random(seed)
        return "Roll.", {}

    def step(self, action):
        seen = self.rng.randint(1, self.sides)
        return StepOutcome(f"{action}: {seen}", reward=seen / 10, truncated=seen == 7)

    def close(self):
        pass


def dice_env(world=Dice):
    protocol = SingleAgentProtocol(lambda: Agent(name="player"), max_steps=3)
    return ProtocolEnvironment(protocol, world, num_train=0, num_eval=4, env_id="dice")


def test_a_world_gets_its_seed_again_and_its_rewards_are_compared(tmp_path):
    run = record(tmp_path / "run", dice_env(), lambda _: "roll")
    assert all(report.is_equal for report in replay_many(run, dice_env()))

    class Stingy(Dice):
        def step(self, action):
            outcome = super().step(action)
            return StepOutcome(outcome.obs, reward=0.0)

    found = replay(run, "eval/dice/0/0", dice_env(Stingy)).difference
    assert (found.kind, found.agent) == ("world", "player")
    assert found.where == "reward of the world's step 0"


# -- several agents -------------------------------------------------------------------------------


class Talk:
    """Two agents at once: each hears what the other said."""

    in_thread = False
    possible_agents = ("ann", "bob")
    prefix = "heard"

    def __init__(self, row=None):
        self.turn, self.agents = 0, ["ann", "bob"]

    def reset(self, *, seed=None):
        return {name: (f"hello {name}", {}) for name in self.agents}

    def step(self, actions):
        self.turn += 1
        other = {"ann": "bob", "bob": "ann"}
        self.agents = ["ann", "bob"] if self.turn < 2 else []
        return {
            name: StepOutcome(
                f"{self.prefix} {actions.get(other[name])}", 1.0, terminated=self.turn == 2
            )
            for name in self.possible_agents
        }

    def close(self):
        pass


def talk_env(world=Talk, bob=None):
    agents = {"ann": lambda: Agent(name="ann"), "bob": lambda: Agent(bob, name="bob")}
    protocol = MultiAgentSyncProtocol(agents, max_steps=4)
    return ProtocolEnvironment(protocol, world, num_train=0, num_eval=2, env_id="talk")


def say_who(messages):
    return f"{len(messages)} {user(messages)[-3:]}"


def test_each_agent_gets_its_own_answers(tmp_path):
    run = record(tmp_path / "run", talk_env(), say_who)
    for report in replay_many(run, talk_env()):
        assert (report.difference, report.num_replayed) == (None, 4)

    class Louder(Talk):
        prefix = "HEARD"

    found = replay(run, "eval/talk/1/0", talk_env(Louder)).difference
    assert (found.kind, found.call) == ("prompt", 1)
    assert found.agent in ("ann", "bob")
    assert found.live["content"].startswith("HEARD")


def test_an_agent_with_a_model_of_its_own_is_not_asked(tmp_path):
    bob = rt.ScriptedClient(lambda messages: f"bob {len(messages)}")
    run = record(tmp_path / "run", talk_env(bob=bob), say_who, num_examples=1)
    num_calls = len(bob.calls)
    report = replay(run, "eval/talk/0/0", talk_env(bob=bob))
    assert (report.difference, report.num_replayed) == (None, 4)
    assert len(bob.calls) == num_calls


# -- sub-agents -----------------------------------------------------------------------------------


def parent():
    return ToolAgent(name="parent", external_tools=[delegate_tool("ask")])


def delegating(*, max_children=8, child="child", child_calls=3):
    children = {"ask": SubAgent(lambda: Agent(name=child), budget=Budget(max_calls=child_calls))}
    protocol = DelegatingProtocol(parent, children, max_children=max_children, max_steps=3)
    rows = [{"question": "add", "answer": "3"}] * 2
    return ProtocolEnvironment(protocol, dataset=rows, env_id="family")


def family(messages):
    if user(messages) != "add":
        if user(messages) == "fail":
            raise rt.ModelError("no answer")
        return f"done {user(messages)} {random.random():.6f}"
    if messages[-1]["role"] == "tool":
        return "3"
    tasks = ("one", "two", "two", "fail")  # two of them ask for the same and get other answers
    return calling(*({**a_call("ask", task=task), "id": f"c{n}"} for n, task in enumerate(tasks)))


def test_sub_agents_are_asked_again_and_fail_again(tmp_path):
    run = record(tmp_path / "run", delegating(), family)
    for report in replay_many(run, delegating()):
        assert report.difference is None
        recorded, live = report.recorded.states, report.live.states
        assert len(recorded) == len(live) == 5
        assert [state.get("result") for state in live] == [s.get("result") for s in recorded]
        assert live[4]["error"].type == "ModelError"


@pytest.mark.parametrize(
    ("settings", "kind", "agent"),
    [({"max_children": 2}, "prompt", "parent"), ({"child": "other"}, "rollouts", "child")],
)
def test_another_family_is_a_difference(tmp_path, settings, kind, agent):
    run = record(tmp_path / "run", delegating(), family)
    found = replay(run, "eval/family/0/0", delegating(**settings)).difference
    assert (found.kind, found.agent) == (kind, agent)


def test_players_without_a_model_take_their_turns(tmp_path):
    class Count:
        in_thread = False
        possible_agents = ["me", "you"]

        def __init__(self, row=None):
            self.current, self.number = None, 0

        def reset(self, *, seed=None):
            self.current, self.number = "me", seed % 5

        def observe(self, agent):
            return str(self.number)

        def step(self, action):
            self.number += int(action)
            self.current = None if self.number > 12 else {"me": "you", "you": "me"}[self.current]
            return {
                name: StepOutcome(str(self.number), 0.5, terminated=self.current is None)
                for name in self.possible_agents
            }

        def close(self):
            pass

    def env():
        other = Opponent(lambda seed: lambda seen: (int(seen) + seed) % 3 + 1)
        players = {"me": lambda: Agent(name="me"), "you": other}
        return ProtocolEnvironment(TurnProtocol(players, max_steps=20), Count, num_train=0,
                                   num_eval=3, env_id="count")  # fmt: skip

    run = record(tmp_path / "run", env(), lambda _: "3")
    reports = replay_many(run, env())
    assert [report.difference for report in reports] == [None] * 3
    assert all(report.num_replayed > 1 for report in reports)
