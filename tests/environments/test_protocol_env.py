"""Protocols behind the face of an environment: states, scoring, store, samples, credit, resume."""

import asyncio
import random

import pytest

import rolltree as rt
from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import (
    Budget,
    DelegatingProtocol,
    MultiAgentSyncProtocol,
    SingleAgentProtocol,
    SubAgent,
    delegate_tool,
)
from rolltree.environments import EnvGroup, ProtocolEnvironment, SingleTurnEnv
from rolltree.environments.rubrics import Rubric
from rolltree.evaluation import evaluate_async
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import encode_result
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.training.advantages import assign_credit
from rolltree.values.errors import ConfigError
from rolltree.values.steps import ParseResult, StepOutcome


class Guess:
    """Guess the number that the seed made; three wrong ones are too many."""

    in_thread = False
    num_open = 0

    def __init__(self, row=None):
        Guess.num_open += 1

    def reset(self, *, seed=None):
        self.secret, self.tries = random.Random(seed).randrange(3), 0
        return "Guess.", {}

    def step(self, action):
        self.tries += 1
        right = str(self.secret) == action
        return StepOutcome(
            "yes" if right else "no", float(right), terminated=right, truncated=self.tries == 3
        )

    def close(self):
        Guess.num_open -= 1


def number(text):
    return ParseResult(text, 0.0) if text.isdigit() else ParseResult(None, -0.25, "A number.")


def guessing(**settings):
    return ProtocolEnvironment(
        SingleAgentProtocol(lambda: Agent(name="guesser", parser=number), max_steps=4),
        Guess,
        num_train=4,
        num_eval=3,
        env_id="guess",
        **settings,
    )


def count_up(messages):
    """Say "well", then 0, 1, 2: whatever the secret is, it comes."""
    said = [m for m in messages if m["role"] == "assistant"]
    return "well" if not said else str(len(said) - 1)


def a_call(*tasks):
    return {
        "role": "assistant",
        "tool_calls": [
            {"function": {"name": "ask", "arguments": f'{{"task": "{task}"}}'}} for task in tasks
        ],
    }


def family(say=None, **settings):
    """A parent that asks about "a" and "b" and says what it was told; the children shout."""

    def answer(messages):
        first, last = messages[0]["content"], messages[-1]["content"]
        if first in ("a", "b"):
            return first.upper()
        return a_call("a", "b") if last == first else f"told {last}"

    def parent():
        return ToolAgent(name="parent", external_tools=[delegate_tool("ask")])

    def said(completion):
        return float("told" in completion[-1]["content"])

    environment = ProtocolEnvironment(
        DelegatingProtocol(
            parent, {"ask": SubAgent(lambda: Agent(name="child"), budget=Budget(max_calls=2))}
        ),
        dataset=[{"question": f"question {i}", "answer": "x"} for i in range(3)],
        rubric=Rubric([said]),
        rubrics={"child": Rubric([lambda state: float(state["subtask"] == "a")])}
        if settings.pop("scored", True)
        else None,
        env_id="family",
        **settings,
    )
    return environment, ScriptedClient(say or answer)


def run(environment, client, **settings):
    requests = build_requests(environment, "train", group_size=2, **settings)
    return asyncio.run(RolloutEngine(environment, client).run_all(requests))


class TestOneAgent:
    def test_a_state_has_everything_of_the_rollout(self):
        results = guessing().evaluate_sync(ScriptedClient(count_up))
        for state in results.state:
            world = random.Random(state["seed"]).randrange(3)
            assert state["error"] is None
            assert state["agent"] == "guesser"
            assert len(state["trajectory"]) == world + 2  # "well", then 0 to the secret
            assert state["reward"] == 1.0 - 0.25
            assert [s["reward"] for s in state["trajectory"]] == [-0.25, *[0.0] * world, 1.0]
            assert state["terminated"]
            assert not state["truncated"]
            assert state["stop_condition"] == "terminated"
            assert [s["action"] for s in state["environment_steps"]] == [
                str(i) for i in range(world + 1)
            ]
            assert state["metrics"]["parse_failure_rate"] == pytest.approx(1 / (world + 2))
            assert state["trajectory"][0]["extras"]["turn"] == 0
            assert state["completion"][0]["content"] == "well"
            assert state["prompt"] == [{"role": "user", "content": "Guess."}]
        assert Guess.num_open == 0
        assert results.metadata.num_failed == 0

    def test_truncation_reaches_state_and_samples(self):
        environment = guessing()
        results = environment.evaluate_sync(ScriptedClient(lambda messages: "9"))
        state = results.state[0]
        assert (state["truncated"], state["truncation_reason"]) == (True, "env")
        sample = build_samples([state], "interleave").samples[0]
        assert sample.origins[0].truncation_reason == "env"
        assert len(build_samples([state], "step").samples) == 3

    def test_rows_stand_before_the_first_observation(self):
        environment = ProtocolEnvironment(
            SingleAgentProtocol(lambda: Agent(parser=number), max_steps=1),
            lambda row: Guess(),
            dataset=[{"question": "We play.", "answer": ""}],
            system_prompt="Be brief.",
        )
        client = ScriptedClient(["1"])
        environment.evaluate_sync(client)
        assert [m["content"] for m in client.calls[0].messages] == [
            "Be brief.",
            "We play.",
            "Guess.",
        ]

    def test_a_rubric_replaces_the_worlds_reward_and_the_steps_add_up(self):
        environment = guessing(rubric=Rubric([lambda state: 10.0]))
        state = environment.evaluate_sync(ScriptedClient(count_up)).state[0]
        assert state["reward"] == 10.0
        assert sum(step["reward"] for step in state["trajectory"]) == 10.0

    def test_max_seq_len_is_obeyed(self):
        state = guessing(max_seq_len=8).evaluate_sync(ScriptedClient(count_up)).state[0]
        assert state["truncation_reason"] == "max_seq_len"
        assert len(state["trajectory"]) == 1

    def test_a_failed_episode_fails_alone_and_keeps_its_steps(self):
        def sometimes(messages):
            raise_it = len(messages) > 1
            if raise_it and sometimes.count == 0:
                sometimes.count = 1
                raise rt.ModelError("gone")
            return count_up(messages)

        sometimes.count = 0
        results = guessing().evaluate_sync(ScriptedClient(sometimes))
        failed = [s for s in results.state if s["error"] is not None]
        assert len(failed) == 1
        assert (failed[0]["error"].phase, failed[0]["reward"]) == ("model", None)
        assert len(failed[0]["trajectory"]) == 1
        assert Guess.num_open == 0

    def test_a_world_that_cannot_be_made_is_a_failed_episode(self):
        def broken(row):
            raise OSError("no board")

        environment = ProtocolEnvironment(
            SingleAgentProtocol(Agent), broken, num_train=1, num_eval=1
        )
        state = environment.evaluate_sync(ScriptedClient(["x"])).state[0]
        assert state["error"].type == "OSError"

    async def test_a_timed_out_episode_leaves_nothing_behind(self):
        async def slow(messages):
            await asyncio.sleep(0)
            return "well"

        class Hangs(Guess):
            async def step(self, action):
                await asyncio.sleep(60)

        environment = ProtocolEnvironment(
            SingleAgentProtocol(Agent), lambda row: Hangs(), num_train=1, num_eval=1
        )
        engine = RolloutEngine(environment, ScriptedClient(slow), time_limit_s=0.5, grace_s=0.0)
        (result,) = await engine.run_all(build_requests(environment, "eval"))
        assert result.error.type == "RolloutTimeout"
        (state,) = result.states
        assert len(state["trajectory"]) == 1
        assert state["truncation_reason"] == "time_limit"
        assert Guess.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def test_what_a_protocol_would_ignore_is_refused(self):
        class Stops(ProtocolEnvironment):
            @rt.stop
            async def enough(self, state):
                return True

        protocol = SingleAgentProtocol(Agent)
        with pytest.raises(ConfigError, match="'enough' has no effect"):
            Stops(protocol, Guess)
        with pytest.raises(ConfigError, match="'oai_tools' has no effect"):
            ProtocolEnvironment(protocol, Guess, oai_tools=[delegate_tool()])
        with pytest.raises(ConfigError, match="'message_type' has no effect"):
            ProtocolEnvironment(protocol, Guess, message_type="completion")


class TestDelegation:
    def test_one_request_gives_all_rollouts(self):
        environment, client = family()
        results = run(environment, client)
        assert len(results) == 6
        for result in results:
            root, a, b = result.states
            assert result.error is None
            assert [s["agent"] for s in result.states] == ["parent", "child", "child"]
            assert root["rollout_id"] == result.request.request_id
            assert {s["parent_rollout"] for s in (a, b)} == {root["rollout_id"]}
            assert [s["parent_step"] for s in (a, b)] == [0, 0]
            assert [(s["subtask"], s["result"]) for s in (a, b)] == [("a", "A"), ("b", "B")]
            assert [s["reward"] for s in result.states] == [1.0, 1.0, 0.0]
            assert (root["depth"], a["depth"]) == (0, 1)
            assert a["input"] is not root["input"]

    def test_an_unscored_child_keeps_what_it_earned(self):
        environment, client = family(scored=False)
        assert [s["reward"] for s in run(environment, client)[0].states] == [1.0, 0.0, 0.0]

    def test_generate_returns_what_was_asked_for_and_the_rest_beside_it(self):
        environment, client = family()
        results = environment.generate_sync(environment.dataset, client)
        assert [s["agent"] for s in results.state] == ["parent"] * 3
        assert [len(r.states) for r in results.results] == [3, 3, 3]
        assert results.metadata.avg_reward == 1.0

    def test_store_and_back(self, tmp_path):
        environment, client = family()
        results = run(environment, client)
        with Run.create(tmp_path) as store:
            store.add_rollouts([row for r in results for row in encode_result(r)])
            rows = list(store.rollouts(phase="eval"))
        assert [(row.agent, row.depth) for row in rows[:3]] == [
            ("parent", 0),
            ("child", 1),
            ("child", 1),
        ]
        assert rows[1].parent_rollout == rows[0].request_id
        again = {r.request.request_id: r for r in decode_results(rows)}
        for result in results:
            for before, after in zip(
                result.states, again[result.request.request_id].states, strict=True
            ):
                for key in ("agent", "rollout_id", "parent_rollout", "parent_step", "subtask"):
                    assert before.get(key) == after.get(key)
                assert (
                    build_samples([before], "step").report == build_samples([after], "step").report
                )

    def test_credit_compares_children_with_children_of_their_subtask(self):
        environment, client = family()
        results = run(environment, client)
        results[0].states[1]["reward"] = 0.0
        report = assign_credit(results[:2], "dr_grpo")
        assert [a[0] for a in report.advantages] == [0.0, -0.5, 0.0, 0.0, 0.5, 0.0]
        assert len(report.trained) == 6

    def test_a_child_that_fails_does_not_fail_the_episode(self, tmp_path):
        def answer(messages):
            if messages[0]["content"] == "b":
                raise rt.ModelError("gone")
            last = messages[-1]["content"]
            return a_call("b") if last == messages[0]["content"] else f"told {last}"

        environment, client = family(answer)
        result = run(environment, client)[0]
        assert result.error is None
        assert result.states[1]["error"].type == "ModelError"
        assert result.states[0]["reward"] == 1.0
        rows = encode_result(result)
        assert [row.status for row in rows] == ["ok", "ok"]
        assert rows[1].errors[0]["type"] == "ModelError"
        report = assign_credit([result], "reinforce")
        assert [s["agent"] for s in report.trained] == ["parent"]

    async def test_evaluation_counts_episodes_and_resumes(self, tmp_path):
        environment, client = family()
        with Run.create(tmp_path) as store:
            report = await evaluate_async(environment, client, run=store, num_examples=2)
            assert (report.num_rollouts, report.num_failed) == (2, 0)
            assert report.reward.mean == 1.0  # the parents'; the children's mean is 0.5
            calls = len(client.calls)
            again = await evaluate_async(environment, client, run=store, num_examples=3)
            assert (again.num_rollouts, again.num_resumed) == (3, 2)
            assert len(client.calls) == calls + 4

    def test_in_a_group_of_environments(self):
        environment, client = family()
        other = SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}], env_id="other")
        group = EnvGroup([environment, other], env_names=["family", "other"])
        requests = build_requests(group, "train", indices=[0])
        (result,) = asyncio.run(RolloutEngine(group, client).run_all(requests))
        assert [s["reward"] for s in result.states] == [1.0, 1.0, 0.0]
        assert {s["task"] for s in result.states} == {"family"}


class TestSeveralAgents:
    def test_each_agent_is_a_state_and_is_compared_with_its_like(self):
        class Same:
            in_thread = False
            possible_agents = ["left", "right"]

            def __init__(self, row):
                self.agents = ["left", "right"]

            def reset(self, *, seed=None):
                return {name: ("Say yes or no.", {}) for name in self.agents}

            def step(self, actions):
                agents, self.agents = self.agents, []
                return {
                    name: StepOutcome("", float(actions[name] == "yes"), terminated=True)
                    for name in agents
                }

            def close(self):
                pass

        agents = {name: (lambda name=name: Agent(name=name)) for name in ("left", "right")}
        environment = ProtocolEnvironment(MultiAgentSyncProtocol(agents), Same, num_train=1)
        said = iter(["yes", "no", "no", "no"])
        client = ScriptedClient(lambda messages: next(said))
        results = run(environment, client)
        assert [[s["agent"] for s in r.states] for r in results] == [["left", "right"]] * 2
        report = assign_credit(results, "dr_grpo")
        by_agent = {"left": [], "right": []}
        for state, advantages in zip(report.trained, report.advantages, strict=True):
            by_agent[state["agent"]].append(advantages[0])
        assert sorted(by_agent["left"] + by_agent["right"]) == [-0.5, 0.0, 0.0, 0.5]
        states = environment.generate_sync(
            environment.get_dataset(1), ScriptedClient(["yes"])
        ).state
        assert [s["agent"] for s in states] == ["left", "right"]
