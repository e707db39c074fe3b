"""Delegation: own context and budget per child, concurrency, failures as answers, all rollouts."""

import asyncio

import pytest
from protocol_kit import CountWorld, a_call, a_delegator, an_agent, move

from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import (
    Budget,
    DelegatingProtocol,
    EpisodeContext,
    Recording,
    SubAgent,
    delegate_tool,
)
from rolltree.testing import ScriptedAnswer, ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.values.types import FinishReason


def child(answers, **settings):
    """A kind of child whose answers are said in a row, or by a function of the messages."""
    return SubAgent(lambda: an_agent(answers, name="child"), **settings)


async def delegate(parent_answers, *, children=None, world=None, context=None, **settings):
    kinds = children or {"delegate": child(["move done"])}
    protocol = DelegatingProtocol(
        lambda: a_delegator(parent_answers, *kinds, name="parent"), kinds, **settings
    )
    return await protocol.run(world or CountWorld(end=1), context)


def answers_of(rollout):
    return [a.text for step in rollout.agent_steps for a in step.tool_answers]


class TestTheFamily:
    async def test_both_rollouts_are_returned_and_know_each_other(self):
        parent, sub = await delegate(
            ["move 0", a_call("solve it"), "move 1"], world=CountWorld(end=2)
        )
        assert (parent.agent, parent.depth, parent.parent_rollout) == ("parent", 0, None)
        assert (sub.agent, sub.depth, sub.parent_rollout) == ("child", 1, parent.rollout_id)
        # steps of the parent: agent, world, agent (which asked)
        assert sub.parent_step == 2
        assert sub.rollout_id == "episode/delegate.2.0"
        assert sub.meta["subtask"] == "solve it"
        assert (sub.terminated, sub.meta["result"]) == (True, "done")
        assert answers_of(parent) == ["done"]
        assert parent.reward == pytest.approx(2.5)

    async def test_a_child_has_its_own_context(self):
        seen = []

        def answer(messages):
            seen.append([m["content"] for m in messages])
            return "move done"

        await delegate([a_call("only this"), "move 1"], children={"delegate": child(answer)})
        assert seen == [["only this"]]

    @pytest.mark.parametrize(
        ("task", "said"), [(5, "5"), (True, "true"), (["a"], '["a"]'), ({"a": 1}, '{"a": 1}')]
    )
    async def test_the_task_of_a_child_is_a_text_whatever_the_parent_wrote(self, task, said):
        kind = child(["move done"], task_of=lambda arguments: task)
        _, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert (sub.meta["subtask"], sub.error, sub.meta["result"]) == (said, None, "done")

    async def test_a_child_may_have_its_own_world(self):
        made = []

        def world(arguments):
            made.append(CountWorld(end=2, reward=0.125))
            return made[-1]

        kind = child(["move a", "move b"], world=world)
        _, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert made[0].actions == ["a", "b"]
        assert made[0].num_closed == 1
        assert sum(step.reward for step in sub.environment_steps) == 0.25
        assert sub.agent_steps[0].prompt[-1]["content"] == "start"

    async def test_children_of_one_message_run_at_once_and_are_returned_in_order(self):
        together = asyncio.Barrier(2)

        async def answer(messages):
            task = messages[0]["content"]
            async with asyncio.timeout(60):
                await together.wait()
            await asyncio.sleep(0.01 if task == "slow" else 0)
            return f"move {task}"

        parent, *subs = await delegate(
            [a_call(["slow", "fast"]), "move 1"], children={"delegate": child(answer)}
        )
        assert [s.meta["subtask"] for s in subs] == ["slow", "fast"]
        assert answers_of(parent) == ["slow", "fast"]
        assert [s.rollout_id.rsplit("/")[-1] for s in subs] == ["delegate.0.0", "delegate.0.1"]

    async def test_at_most_so_many_at_once(self):
        running, most = 0, 0

        async def answer(messages):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return "move x"

        await delegate(
            [a_call(["a"] * 5), "move 1"],
            children={"delegate": child(answer)},
            max_concurrent=2,
        )
        assert most == 2

    async def test_several_kinds_and_other_tools_beside_them(self):
        kinds = {"adder": child(["move sum"]), "namer": child(["move name"])}

        def make():
            tools = [delegate_tool(name) for name in ("adder", "namer", "clock")]
            script = [a_call("x", "adder"), a_call("y", "namer"), a_call("z", "clock"), "move 1"]
            return ToolAgent(ScriptedClient(script), external_tools=tools, parser=move)

        protocol = DelegatingProtocol(
            make, kinds, external_tool_handler=lambda request: f"{request.name} says noon"
        )
        parent, *subs = await protocol.run(CountWorld(end=1))
        assert answers_of(parent) == ["sum", "name", "clock says noon"]
        assert [s.meta["tool"] for s in subs] == ["adder", "namer"]

    async def test_seeds_are_fixed_by_who_asked_and_when(self):
        seeds = []
        for _ in range(2):
            client = ScriptedClient(["move a"])
            kind = SubAgent(lambda client=client: Agent(client, name="child", parser=move))
            await delegate(
                [a_call(["p", "q"]), "move 1"],
                children={"delegate": kind},
                context=EpisodeContext(sampling_seed=5),
            )
            seeds.append(sorted(call.sampling.seed for call in client.calls))
        assert seeds[0] == seeds[1]
        assert len({*seeds[0], 5}) == 3


class TestBudgets:
    async def test_depth(self):
        def make():
            return a_delegator([a_call("deeper"), "move gave up"], name="child")

        kind = {"delegate": SubAgent(make, max_steps=2)}
        shallow = await delegate([a_call("x"), "move 1"], children=kind)
        assert [r.depth for r in shallow] == [0, 1]
        assert answers_of(shallow[1]) == ["You cannot delegate further. Do it yourself."]
        deep = await delegate([a_call("x"), "move 1"], children=kind, max_depth=3)
        assert [r.depth for r in deep] == [0, 1, 2, 3]
        assert deep[3].parent_rollout == deep[2].rollout_id
        assert deep[0].terminated

    async def test_a_deep_chain_with_one_place_does_not_wait_for_itself(self):
        def make():
            return a_delegator([a_call("deeper"), "move ok"], name="child")

        async with asyncio.timeout(10):
            rollouts = await delegate(
                [a_call("x"), "move 1"],
                children={"delegate": SubAgent(make, max_steps=2)},
                max_depth=3,
                max_concurrent=1,
            )
        assert len(rollouts) == 4

    async def test_children(self):
        parent, *subs = await delegate([a_call(["a"] * 3), "move 1"], max_children=2)
        assert len(subs) == 2
        assert answers_of(parent) == [
            "done",
            "done",
            "No more subtasks can be handed out. Go on with what you have.",
        ]

    async def test_model_calls(self):
        kind = child(lambda messages: "hm", budget=Budget(max_calls=3), max_steps=9)
        parent, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert len(sub.agent_steps) == 3
        assert sub.truncation_reason == "budget"
        assert answers_of(parent) == ["The agent did not finish (budget). It said last: hm"]
        assert parent.error is None

    async def test_tokens_are_never_sampled_beyond_the_budget(self):
        kind = child(
            lambda messages: "no answer here",
            budget=Budget(max_tokens=20, max_calls=None),
            max_steps=9,
        )
        _, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        sizes = [s.record["extras"]["num_completion_tokens"] for s in sub.agent_steps]
        assert sizes == [15, 5]  # 14 characters and the end; the rest
        assert sub.agent_steps[1].finish_reason == FinishReason.LENGTH
        assert sub.truncation_reason == "budget"

    async def test_time_at_the_turn_boundary(self):
        async def answer(messages):
            await asyncio.sleep(0.6)
            return "hm"

        kind = child(answer, budget=Budget(time_limit_s=0.5), max_steps=50)
        parent, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert sub.truncation_reason == "time_limit"
        assert len(sub.agent_steps) == 1
        assert parent.terminated

    async def test_a_child_that_hangs_is_stopped(self, monkeypatch):
        monkeypatch.setattr("rolltree.agents.protocols.delegation.GRACE_S", 0.0)

        class Hangs(CountWorld):
            async def step(self, action):
                await asyncio.sleep(60)

        made = []
        kind = child(
            ["move 1"],
            world=lambda arguments: made.append(Hangs()) or made[-1],
            budget=Budget(time_limit_s=0.5),
        )
        parent, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert (sub.error.type, sub.error.phase) == ("TimeoutError", "timeout")
        assert made[0].num_closed == 1
        assert parent.terminated

    async def test_turns(self):
        kind = child(lambda messages: "hm", max_steps=2)
        _, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert sub.truncation_reason == "max_steps"

    @pytest.mark.parametrize("name", ["max_calls", "max_tokens", "time_limit_s"])
    def test_a_budget_of_nothing_is_an_error(self, name):
        with pytest.raises(ConfigError, match=f"{name} = 0"):
            Budget(**{name: 0})

    @pytest.mark.parametrize("name", ["max_depth", "max_children", "max_concurrent"])
    def test_limits_under_which_no_child_can_run(self, name):
        with pytest.raises(ConfigError, match=f"{name} is 0"):
            DelegatingProtocol(an_agent([]), {"delegate": child([])}, **{name: 0})


class TestFailures:
    async def test_a_child_that_fails_is_an_answer_to_the_parent(self):
        kind = child([])  # its model has nothing to say
        parent, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert (sub.error.type, sub.error.phase) == ("BadResponse", "model")
        assert answers_of(parent)[0].startswith("The agent failed: BadResponse: the script has 0")
        assert parent.agent_steps[0].tool_answers[0].error == sub.error
        assert (parent.error, parent.terminated) == (None, True)

    async def test_a_child_that_cannot_be_made_is_an_answer_too(self):
        def broken():
            raise RuntimeError("no such model")

        (parent,) = await delegate([a_call("x"), "move 1"], children={"delegate": SubAgent(broken)})
        assert "no such model" in answers_of(parent)[0]
        assert parent.terminated

    async def test_a_timeout_of_its_world_is_not_its_budget(self):
        class Slow(CountWorld):
            def step(self, action):
                raise TimeoutError("the site does not answer")

        kind = child(["move 1"], world=lambda args: Slow(), budget=Budget(time_limit_s=60.0))
        _, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert (sub.error, sub.truncation_reason) == (None, "env")

    async def test_its_answer_was_cut_off(self):
        kind = child([ScriptedAnswer("move 1", FinishReason.LENGTH)], max_steps=1)
        parent, sub = await delegate([a_call("x"), "move 1"], children={"delegate": kind})
        assert sub.truncation_reason == "max_steps"
        assert answers_of(parent) == ["The agent did not finish (max_steps). It said last: move 1"]

    async def test_cancelling_keeps_all_rollouts_closes_worlds_and_leaves_no_task(self):
        started = asyncio.Event()
        made = []

        async def hang(messages):
            started.set()
            await asyncio.sleep(60)

        kinds = {"delegate": child(hang, world=lambda args: made.append(CountWorld()) or made[-1])}
        protocol = DelegatingProtocol(lambda: a_delegator([a_call(["a", "b"])]), kinds)
        recording = Recording()
        task = asyncio.create_task(protocol.run(CountWorld(), None, recording))
        await started.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [r.depth for r in recording.rollouts()] == [0, 1, 1]
        assert [world.num_closed for world in made] == [1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}
