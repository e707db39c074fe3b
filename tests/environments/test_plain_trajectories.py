"""`state["trajectory"]` may be any list that an author puts there, under both import names."""

import importlib
from contextlib import nullcontext

import pytest
from env_scripts import ROWS, ScriptedModel, user

import rolltree as rt
from rolltree.agents import Agent
from rolltree.evaluation import evaluate_async
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.values.errors import ConfigError

LIBRARIES = ["rolltree", "rolltree.verifiers"]


def library(name):
    if name == "rolltree":
        return rt.MultiTurnEnv, rt.Rubric, rt.Environment
    rooms = importlib.import_module("rolltree.verifiers.environments")
    rubrics = importlib.import_module("rolltree.verifiers.rubrics")
    return rooms.MultiTurnEnv, rubrics.Rubric, rooms.Environment


def even(steps):
    return [step for index, step in enumerate(steps) if index % 2 == 0]


def emptied(steps):
    return []


def last_two(steps):
    return list(steps)[-2:]


def sliced(steps):
    return steps[1:]


def unpacked(steps):
    return [*steps]


def joined(steps):
    return steps[:0] + list(steps)


def in_order(steps):
    return sorted(steps, key=lambda step: step["extras"]["call_id"])


CHANGES = [even, emptied, last_two, sliced, unpacked, joined, in_order]


def make(name, change, turns=4):
    multi_turn, rubric, _ = library(name)

    class Rewriting(multi_turn):
        async def setup_state(self, state, **kwargs):
            state["trajectory"] = []
            state["mine"] = 0
            return await super().setup_state(state, **kwargs)

        async def env_response(self, messages, state, **kwargs):
            state["mine"] += 1
            if state["mine"] == 2:
                state["trajectory"] = change(state["trajectory"])
            if state["mine"] >= turns:
                state["final_env_response"] = user("over")
            return user(f"turn {state['mine']}")

        @rt.stop
        async def over(self, state):
            return state["mine"] >= turns

    async def num_calls(state):
        return float(len(state["trajectory"]))

    return Rewriting(dataset=ROWS, rubric=rubric([num_calls]), env_id="rewriting")


def model():
    return ScriptedModel("a", "bb", "ccc", "dddd", "eeeee")


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("change", CHANGES)
async def test_a_list_is_played_stored_and_trained(name, change, tmp_path):
    env = make(name, change)
    with Run.create(tmp_path / "run", config={}) as run:
        report = await evaluate_async(env, model(), num_examples=1, run=run)
        assert report.num_failed == 0
        (result,) = decode_results(run.rollouts())
    (state,) = result.states
    steps = state["trajectory"]
    assert state["reward"] == len(steps) > 0
    said = [step["completion"][-1]["content"] for step in steps]
    samples = rt.build_samples([state], "step").samples
    trained = [bytes(sample.records.target.tolist()).decode() for sample in samples]
    assert trained == said
    tree = rt.build_samples([state], "tree").samples[0]
    assert len(tree.records) == sum(map(len, said))


@pytest.mark.parametrize("name", LIBRARIES)
async def test_the_authors_own_list_is_the_one_that_grows(name):
    multi_turn, rubric, _ = library(name)
    mine = []

    class Own(multi_turn):
        async def setup_state(self, state, **kwargs):
            state["trajectory"] = mine
            return state

        async def env_response(self, messages, state, **kwargs):
            assert mine is state["trajectory"]
            assert len(mine) == 1
            mine[0]["tokens"]["completion_mask"][0] = 0
            return user("go on")

    env = Own(dataset=ROWS, rubric=rubric(), max_turns=2)
    state = await env.rollout(env.dataset[0], model(), "m")
    assert [step["completion"][0]["content"] for step in mine] == ["a", "bb"]
    assert list(state["trajectory"]) == mine
    weights = [s.records.weight.tolist() for s in rt.build_samples([state], "step").samples]
    assert weights == [[0], [1, 1]]


@pytest.mark.parametrize("name", LIBRARIES)
async def test_an_overridden_rollout_may_return_a_plain_list(name):
    _, rubric, base = library(name)

    class Own(base):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input, client, model, sampling_args)
            state["trajectory"] = []
            for _ in range(2):
                prompt = state["prompt"]
                answer = await self.get_model_response(client, model, prompt)
                await self.add_model_response(state, prompt, answer)
            state["trajectory"] = [step for step in state["trajectory"] if step["completion"]]
            state["completion"] = state["trajectory"][-1]["completion"]
            return state

    env = Own(dataset=ROWS, rubric=rubric())
    results = await rt.Environment.generate(env, env.dataset, model())
    assert results.metadata.num_failed == 0
    assert [type(state["trajectory"]) for state in results.state] == [rt.Trajectory] * 3
    assert [len(state["trajectory"]) for state in results.state] == [2, 2, 2]


async def test_an_agents_trajectory_may_be_a_plain_list():
    agent = Agent(model())
    agent.trajectory = []
    agent.observe("hello")
    await agent.act()
    agent.trajectory = [step for step in agent.trajectory if step["tokens"]]
    agent.observe("again")
    await agent.act()
    assert [step["completion"][0]["content"] for step in agent.trajectory] == ["a", "bb"]


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("value", [None, (), "text"])
async def test_what_is_no_list_is_named(name, value):
    env = make(name, lambda steps: value)
    plain = name == "rolltree"
    with nullcontext() if plain else pytest.raises(ConfigError) as raised:
        state = await env.rollout(env.dataset[0], model(), "m")
    said = state["environment_errors"]["environment"]["message"] if plain else str(raised.value)
    assert type(value).__name__ in said
