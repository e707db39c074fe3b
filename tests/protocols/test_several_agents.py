"""Several agents: at once over a parallel world, and in turns; truncation per agent."""

import asyncio

import pytest
from protocol_kit import a_call, a_delegator, an_agent

from rolltree._helpers.tasks import being_cancelled
from rolltree.agents import Agent
from rolltree.agents.protocols import (
    EpisodeContext,
    MultiAgentProtocol,
    MultiAgentSyncProtocol,
    Opponent,
    SingleAgentProtocol,
    SingleAgentSyncProtocol,
    TurnProtocol,
)
from rolltree.agents.worlds.interface import bad_action
from rolltree.environments import ProtocolEnvironment
from rolltree.environments.tools import side_by_side
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.testing import ScriptedClient
from rolltree.values.seeds import derive_seed
from rolltree.values.steps import StepOutcome


class Together:
    """Rounds for all; `leave[name]` is (round, "terminated" or "truncated")."""

    in_thread = False

    def __init__(self, *names, leave=None):
        self.possible_agents = list(names)
        self.agents = list(names)
        self.leave = leave or {}
        self.rounds = []

    def reset(self, *, seed=None):
        return {name: (f"hello {name}", {}) for name in self.agents}

    def step(self, actions):
        self.rounds.append(dict(actions))
        number = len(self.rounds)
        outcomes = {}
        for name in self.agents:
            how = self.leave[name][1] if self.leave.get(name, (0,))[0] == number else None
            outcomes[name] = StepOutcome(
                f"round {number}",
                float(number),
                terminated=how == "terminated",
                truncated=how == "truncated",
            )
        self.agents = [name for name in self.agents if not outcomes[name].done]
        return outcomes

    def close(self):
        pass


class Strict(Together):
    """Needs an action of everybody, and takes numbers only."""

    needs_all = True

    def step(self, actions):
        assert set(actions) == set(self.agents)
        bad = {name: f"{a} is not a number" for name, a in actions.items() if not a.isdecimal()}
        if bad:
            return {name: bad_action(ValueError(why)) for name, why in bad.items()}
        return super().step(actions)


class Pick:
    """Two agents take turns; the one that says "win" wins, and the other loses."""

    in_thread = False
    possible_agents = ["x", "y"]

    def reset(self, *, seed=None):
        self.current, self.said = "x", []

    def observe(self, agent):
        return " ".join(self.said) or "empty"

    def step(self, action):
        me = self.current
        other = "y" if me == "x" else "x"
        self.said.append(f"{me}:{action}")
        won = action == "win"
        self.current = None if won else other
        return {
            me: StepOutcome("", float(won), terminated=won),
            other: StepOutcome("", -float(won), terminated=won),
        }

    def close(self):
        pass


def by_seat(rollouts):
    return {rollout.meta["seat"]: rollout for rollout in rollouts}


class TestAtOnce:
    async def test_all_are_asked_at_the_same_time(self):
        together = asyncio.Barrier(3)

        async def answer(messages):
            async with asyncio.timeout(5):
                await together.wait()
            return "move 1"

        names = ("a", "b", "c")
        world = Together(*names, leave=dict.fromkeys(names, (2, "terminated")))
        protocol = MultiAgentSyncProtocol({name: an_agent(answer, name=name) for name in names})
        rollouts = await protocol.run(world)
        assert world.rounds == [dict.fromkeys(names, "1")] * 2
        assert [r.rollout_id for r in rollouts] == ["episode/a", "episode/b", "episode/c"]
        assert all(r.terminated and len(r.steps) == 4 for r in rollouts)

    async def test_truncation_is_per_agent(self):
        world = Together("a", "b", "c", leave={"a": (1, "terminated"), "b": (2, "truncated")})
        agents = {name: an_agent(lambda messages: "move 1", name=name) for name in "abc"}
        found = by_seat(await MultiAgentSyncProtocol(agents, max_steps=3).run(world))
        assert (found["a"].terminated, found["a"].truncated) == (True, False)
        assert found["b"].truncation_reason == "env"
        assert found["c"].truncation_reason == "max_steps"
        assert [len(found[name].agent_steps) for name in "abc"] == [1, 2, 3]
        assert [set(actions) for actions in world.rounds] == [{*"abc"}, {*"bc"}, {"c"}]
        assert found["c"].steps[-1].truncated
        assert found["a"].steps[-1].info == {}

    async def test_an_answer_without_an_action_is_absent_and_told(self):
        world = Together("a", "b", leave={"a": (2, "terminated"), "b": (2, "terminated")})
        agents = {"a": an_agent(["hm", "move 2"]), "b": an_agent(["move 1", "move 1"])}
        found = by_seat(await MultiAgentSyncProtocol(agents).run(world))
        assert world.rounds == [{"b": "1"}, {"a": "2", "b": "1"}]
        assert found["a"].agent_steps[1].prompt[-1]["content"] == "Say: move N\nround 1"
        first = found["a"].environment_steps[0]
        assert (first.action, first.reward) == (None, 1.0)  # the world's reward is not lost

    async def test_one_that_is_out_leaves_the_others_playing(self):
        world = Together("a", "b", leave={"b": (3, "terminated")})
        agents = {"a": an_agent(["move 1"] * 3), "b": an_agent(["move 1"] * 3)}
        agents["a"].context = Short()
        found = by_seat(await MultiAgentSyncProtocol(agents).run(world))
        assert found["a"].truncation_reason == "max_seq_len"
        assert found["b"].terminated
        assert [set(actions) for actions in world.rounds] == [{"a", "b"}, {"b"}, {"b"}]
        assert found["a"].reward == pytest.approx(0.25 + 1 + 2 + 3)  # what it still earned

    async def test_if_nobody_acts_the_world_is_not_stepped(self):
        world = Together("a", "b", leave={"a": (1, "terminated"), "b": (1, "terminated")})
        agents = {"a": an_agent(["hm", "move 2"]), "b": an_agent(["well", "move 1"])}
        found = by_seat(await MultiAgentSyncProtocol(agents).run(world))
        assert world.rounds == [{"a": "2", "b": "1"}]
        assert found["a"].agent_steps[1].prompt[-1]["content"] == "Say: move N"
        assert [step.reward for step in found["a"].steps] == [-0.5, 0.25, 1.0]

    @pytest.mark.parametrize("bad", ["hm", "move no"])
    async def test_a_world_that_needs_everybody_waits_for_an_action(self, bad):
        world = Strict("a", "b", leave={"a": (2, "terminated"), "b": (2, "terminated")})
        agents = {
            "a": an_agent([bad, bad, "move 2", "move 3"]),
            "b": an_agent(["move 1", "move 4"]),
        }
        found = by_seat(await MultiAgentSyncProtocol(agents).run(world))
        assert world.rounds == [{"a": "2", "b": "1"}, {"a": "3", "b": "4"}]
        assert [len(found[name].agent_steps) for name in "ab"] == [4, 2]
        told = found["a"].agent_steps[1].prompt[-1]["content"]
        assert told.startswith("Say: move N" if bad == "hm" else "Invalid action: no")
        assert all(rollout.error is None and rollout.terminated for rollout in found.values())
        assert found["b"].environment_steps[0].action == "1"
        assert found["b"].environment_steps[0].reward == 1.0

    async def test_a_world_that_needs_everybody_ends_without_an_action(self):
        agents = {"a": an_agent(lambda messages: "hm"), "b": an_agent(["move 1"])}
        world = Strict("a", "b")
        found = by_seat(await MultiAgentSyncProtocol(agents, max_steps=3).run(world))
        assert world.rounds == []
        assert {rollout.truncation_reason for rollout in found.values()} == {"max_steps"}
        assert (found["a"].reward, found["b"].reward) == (-1.5, 0.25)

    async def test_a_world_that_needs_everybody_ends_when_one_is_out(self):
        agents = {"a": an_agent(["hm"]), "b": an_agent(["move 1"])}
        protocol = MultiAgentSyncProtocol(agents, stop_on_parse_error=True)
        found = by_seat(await protocol.run(Strict("a", "b")))
        assert (found["a"].terminated, found["b"].truncation_reason) == (True, "env")

    async def test_an_opponent_without_a_model(self):
        made = []

        def make(seed):
            made.append(seed)
            return lambda obs: f"saw {obs}"

        world = Together("a", "b", leave={"a": (2, "terminated"), "b": (2, "terminated")})
        agents = {"a": an_agent(["move 1"] * 2), "b": Opponent(make)}
        (rollout,) = await MultiAgentSyncProtocol(agents).run(world, EpisodeContext(seed=4))
        assert made == [derive_seed(4, "opponent", "b")]
        assert world.rounds == [{"a": "1", "b": "saw hello b"}, {"a": "1", "b": "saw round 1"}]
        assert (rollout.error, rollout.terminated) == (None, True)

    async def test_external_tools(self):
        world = Together("a", "b", leave={"a": (1, "terminated"), "b": (1, "terminated")})
        agents = {
            "a": a_delegator([a_call("x"), "move 1"]),
            "b": an_agent(["move 1"]),
        }
        found = by_seat(
            await MultiAgentSyncProtocol(agents, external_tool_handler=lambda request: "told").run(
                world
            )
        )
        assert found["a"].agent_steps[0].tool_answers[0].text == "told"
        assert [s.action_target for s in found["a"].agent_steps] == ["external", "env"]

    async def test_stop_on_parse_error(self):
        world = Together("a", "b", leave={"b": (2, "terminated")})
        agents = {"a": an_agent(["hm"]), "b": an_agent(["move 1"] * 2)}
        found = by_seat(await MultiAgentSyncProtocol(agents, stop_on_parse_error=True).run(world))
        assert found["a"].terminated
        assert len(found["a"].agent_steps) == 1
        assert len(found["b"].agent_steps) == 2

    async def test_a_failing_agent_is_named_and_the_others_are_kept(self):
        async def slow(messages):
            await asyncio.sleep(30)

        agents = {"a": an_agent([]), "b": an_agent(slow)}
        found = by_seat(await MultiAgentSyncProtocol(agents).run(Together("a", "b")))
        assert found["a"].error.type == "BadResponse"
        assert found["b"].error is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_seats_have_their_own_seeds(self):
        clients = {name: ScriptedClient(["move 1"]) for name in "ab"}
        agents = {name: Agent(client, name=name) for name, client in clients.items()}
        await MultiAgentSyncProtocol(agents, max_steps=1).run(
            Together("a", "b"), EpisodeContext(sampling_seed=3)
        )
        for name, client in clients.items():
            assert client.calls[0].sampling.seed == derive_seed(3, "seat", name)

    @pytest.mark.parametrize(
        ("names", "message"), [("a", "'b' has no agent"), ("abc", "'c' is not one of them")]
    )
    async def test_every_seat_has_an_agent(self, names, message):
        agents = {name: an_agent(["move 1"]) for name in names}
        with pytest.raises(ValueError, match=message):
            await MultiAgentSyncProtocol(agents).run(Together("a", "b"))

    def test_other_names(self):
        assert SingleAgentSyncProtocol is SingleAgentProtocol
        assert MultiAgentProtocol is MultiAgentSyncProtocol


class Short:
    """A context that no longer fits from the second call on."""

    def view(self, history):
        return list(history)

    async def prepare(self, history, num_tokens, ask):
        if num_tokens:
            from rolltree.values.errors import PromptTooLong

            raise PromptTooLong("too long")
        return history


class TestInTurns:
    async def test_the_loser_loses_by_the_others_move(self):
        agents = {"x": an_agent(["move a", "move win"]), "y": an_agent(["move b"])}
        found = by_seat(await TurnProtocol(agents).run(Pick()))
        assert [s.reward for s in found["x"].environment_steps] == [0.0, 1.0]
        assert [s.reward for s in found["y"].environment_steps] == [-1.0]
        assert found["x"].terminated
        assert found["y"].terminated
        assert found["y"].environment_steps[-1].terminated

    async def test_each_sees_the_world_when_its_turn_comes(self):
        agents = {"x": an_agent(["move a", "move win"]), "y": an_agent(["move b"])}
        found = by_seat(await TurnProtocol(agents).run(Pick()))
        said = [m["content"] for m in found["x"].agent_steps[1].prompt]
        assert said == ["empty", "move a", "x:a y:b"]
        assert found["y"].agent_steps[0].prompt[-1]["content"] == "x:a"

    async def test_an_answer_without_an_action_keeps_the_turn(self):
        agents = {"x": an_agent(["hm", "move win"]), "y": an_agent([])}
        found = by_seat(await TurnProtocol(agents).run(Pick()))
        assert found["x"].agent_steps[1].prompt[-1]["content"] == "Say: move N\nempty"
        assert found["y"].meta["early_reward"] == -1.0  # it lost before it could act
        assert found["y"].steps == ()

    async def test_max_steps_counts_all_turns(self):
        agents = {name: an_agent(lambda messages: "move a") for name in "xy"}
        found = by_seat(await TurnProtocol(agents, max_steps=3).run(Pick()))
        assert [len(found[name].agent_steps) for name in "xy"] == [2, 1]
        assert {r.truncation_reason for r in found.values()} == {"max_steps"}

    async def test_stop_on_parse_error(self):
        agents = {"x": an_agent(["move a"]), "y": an_agent(["hm"])}
        found = by_seat(await TurnProtocol(agents, stop_on_parse_error=True).run(Pick()))
        assert (found["y"].terminated, found["y"].truncated) == (True, False)
        assert found["x"].truncation_reason == "env"

    async def test_an_opponent_without_a_model(self):
        made = []

        def make(seed):
            made.append(seed)
            return lambda obs: "win" if obs.count("y") == 1 else f"saw[{obs}]"

        agents = {"x": an_agent(["move a", "move b"]), "y": Opponent(make)}
        (rollout,) = await TurnProtocol(agents).run(Pick(), EpisodeContext(seed=4))
        assert made == [derive_seed(4, "opponent", "y")]
        assert rollout.reward == -0.5  # twice 0.25 for the form, and the loss
        assert rollout.agent_steps[1].prompt[-1]["content"] == "x:a y:saw[x:a]"


async def test_agents_that_fail_together_end_their_rollout_and_not_the_run():
    """One worker plays all: a failed episode leaves it as it was."""

    def fail(messages):
        raise ValueError("no answer today")

    protocol = MultiAgentSyncProtocol({"a": Agent, "b": Agent}, max_steps=2)
    env = ProtocolEnvironment(protocol, lambda row: Together("a", "b"), dataset=[{"question": "?"}])
    requests = build_requests(env, "eval", num_examples=1, group_size=3)
    results = await RolloutEngine(env, ScriptedClient(fail), max_concurrent=1).run_all(requests)
    assert [result.error.type for result in results] == ["ValueError"] * 3


@pytest.mark.parametrize("num_failing", [1, 2])
async def test_a_failure_beside_others_leaves_no_cancellation_behind(num_failing):
    ended = []

    async def job(number):
        try:
            await asyncio.sleep(0 if number < num_failing else 1000)
            raise ValueError(number)
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="0"):
        await side_by_side([job(number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert not being_cancelled()
