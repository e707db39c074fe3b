"""Several agents: at once over a parallel world, and in turns; truncation per agent."""

import asyncio

import pytest
from protocol_kit import a_call, a_delegator, an_agent

from rolltree.agents import Agent
from rolltree.protocols import (
    EpisodeContext,
    MultiAgentProtocol,
    MultiAgentSyncProtocol,
    Opponent,
    SingleAgentProtocol,
    SingleAgentSyncProtocol,
    TurnProtocol,
)
from rolltree.seeds import derive_seed
from rolltree.steps import StepOutcome
from rolltree.testing import ScriptedClient


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
            from rolltree.errors import PromptTooLong

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
