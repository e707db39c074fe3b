"""Every model call of a rollout samples with a seed of its own, whoever makes it."""

import asyncio
import copy
import importlib

import numpy as np
import pytest

import rolltree as rt
from rolltree.agents import Agent
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.environments import Environment, MultiTurnEnv, ProtocolEnvironment
from rolltree.inference.client_base import ClientBase
from rolltree.inference.deadline import RolloutClient, seeded
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.values.seeds import CallSeeds, derive_seed
from rolltree.values.types import FinishReason, ModelResponse

ROWS = [{"question": f"question {n}"} for n in range(3)]
ASK = [{"role": "user", "content": "?"}]


class Seeing(ClientBase):
    """Answers each call with the seed that it sampled with."""

    model = "seeing"

    def __init__(self):
        self.seeds = []

    def session(self):
        return self

    async def call(self, call):
        seed = call.sampling.seed
        self.seeds.append(seed)
        await asyncio.sleep(0)
        message = {"role": "assistant", "content": str(seed)}
        return ModelResponse(message, str(seed), FinishReason.STOP)


def family(seed, count):
    return [seed, *(derive_seed(seed, "turn", number) for number in range(1, count))]


def test_call_seeds_by_hand():
    seeds = CallSeeds(7, 3)
    asked = [None, 7, 99, 3, None]
    first, second, third, fourth = family(7, 4)
    assert [seeds.next(seed) for seed in asked] == [first, second, 99, third, fourth]
    again = seeded(seeded(Seeing(), CallSeeds(7)), CallSeeds(8))
    assert isinstance(again, RolloutClient)
    assert isinstance(again.clients[0], Seeing)


class OwnLoop(Environment):
    """Asks three times, each time with the arguments of the rollout."""

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        for _ in range(3):
            answer = await self.get_model_response(client, model, ASK, sampling_args=sampling_args)
            await self.add_model_response(state, ASK, answer)
        return state


class AsksTwice(MultiTurnEnv):
    """Takes the second of two answers in each turn."""

    async def get_model_response(self, *args, **kwargs):
        await super().get_model_response(*args, **kwargs)
        return await super().get_model_response(*args, **kwargs)

    async def env_response(self, messages, state):
        return ASK


class OwnClient(MultiTurnEnv):
    """Asks a user that the model plays, and a judge, on `state["client"]`."""

    async def env_response(self, messages, state):
        said = await state["client"].chat.completions.create(model="m", messages=ASK)
        more = await state["client"].completions.create(model="m", prompt="?")
        state["said"] = [said.choices[0].message.content, more.choices[0].text]
        return ASK

    async def setup_state(self, state):
        state["session"] = rt.inference.as_client(state["client"]).session()
        await state["session"].chat(ASK)
        return state


class AtOnce(OwnLoop):
    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        ask = [client.chat(ASK) for _ in range(5)]
        state["answers"] = [answer.text for answer in await asyncio.gather(*ask)]
        return state


async def judged(state):
    answer = await state["client"].chat(ASK)
    return float(answer.text)


def play(env, **settings):
    return Environment.generate(env, env.dataset, settings.pop("client"), **settings)


CASES = {
    "a rollout of its own": (lambda: OwnLoop(ROWS), 3),
    "two calls a turn": (lambda: AsksTwice(dataset=ROWS, max_turns=2), 4),
    "a judge on the client": (lambda: OwnLoop(ROWS, rubric=rt.Rubric([judged])), 4),
    "state's client": (lambda: OwnClient(dataset=ROWS, max_turns=2), 5),
    "calls at once": (lambda: AtOnce(ROWS), 5),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("wanted", [None, 5])
async def test_every_call_has_its_seed_and_the_same_again(name, wanted):
    make, num_calls = CASES[name]
    args = {} if wanted is None else {"seed": wanted}
    seen = []
    for _ in range(2):
        client = Seeing()
        results = await play(make(), client=client, seed=3, sampling_args=args, max_concurrent=1)
        assert results.metadata.num_failed == 0
        seen.append(client.seeds)
        base = [result.request.sampling_seed for result in results.results]
        base = base if wanted is None else [derive_seed(wanted, seed) for seed in base]
        assert client.seeds == [seed for first in base for seed in family(first, num_calls)]
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 3 * num_calls


@pytest.mark.parametrize("name", list(CASES))
async def test_a_rollout_that_is_retried_has_the_same_seeds(name):
    make, num_calls = CASES[name]

    class Weather(Seeing):
        async def call(self, call):
            is_second = len(self.seeds) == 1
            answer = await super().call(call)
            if is_second:
                raise rt.values.errors.ServerError("gone", status=500, retryable=True)
            return answer

    client, env = Weather(), make()
    engine = RolloutEngine(env, client, retries=1, max_concurrent=1)
    (result,) = await engine.run_all(build_requests(env, "train", indices=[0]))
    assert result.num_attempts == 2
    assert client.seeds[-num_calls:] == family(result.request.sampling_seed, num_calls)


async def test_a_seed_for_one_call_wins():
    class Chosen(OwnLoop):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input, client, model, sampling_args)
            for seed in (41, None, 42):
                await self.get_model_response(
                    client, model, ASK, sampling_args={**sampling_args, "seed": seed}
                )
            return state

    client = Seeing()
    results = await play(Chosen(ROWS[:1]), client=client)
    assert client.seeds == [41, results.results[0].request.sampling_seed, 42]


async def test_a_rollout_outside_an_engine_counts_its_calls():
    client, env = Seeing(), AsksTwice(dataset=ROWS, max_turns=2)
    await env.rollout(env.dataset[0], client, "m", {"seed": 9})
    assert client.seeds == family(9, 4)
    client.seeds.clear()
    await env.rollout(env.dataset[0], client, "m")
    assert client.seeds == [None] * 4


@pytest.mark.parametrize("args", [{}, {"seed": 5}])
async def test_under_verifiers_names_every_call_has_its_seed(args):
    rooms = importlib.import_module("rolltree.verifiers.environments")

    class Thrice(rooms.SingleTurnEnv):
        async def setup_state(self, state, **kwargs):
            state["said"] = [
                (
                    await self.get_model_response(
                        state["client"], state["model"], ASK, sampling_args=state["sampling_args"]
                    )
                )
                .choices[0]
                .message.content
                for _ in range(3)
            ]
            return await super().setup_state(state, **kwargs)

    env = Thrice(dataset=ROWS)
    seen = []
    for _ in range(2):
        results = await env.generate(env.dataset, Seeing(), "m", args, use_tqdm=False)
        seen.append([answer for state in results["state"] for answer in state["said"]])
        assert len(set(seen[-1])) == 9
    assert (seen[0] == seen[1]) == bool(args)  # without a seed each `generate` samples anew
    for _ in range(2):
        results = await Environment.generate(env, env.dataset, Seeing(), "m", args)
        seen.append([answer for state in results.state for answer in state["said"]])
        assert len(set(seen[-1])) == 9
    assert seen[2] == seen[3]


@pytest.mark.parametrize("name", ["rolltree", "rolltree.verifiers"])
async def test_copies_and_sessions_of_the_client_count_with_it(name):
    rooms = rt if name == "rolltree" else importlib.import_module(f"{name}.environments")

    class Copies(rooms.SingleTurnEnv):
        async def setup_state(self, state):
            client = state["client"]
            for each in (client, copy.copy(client), client.session()):
                await rt.inference.as_client(each).chat(ASK)
            return state

    client, env = Seeing(), Copies(dataset=ROWS[:1], rubric=None)
    results = await play(env, client=client)
    assert results.metadata.num_failed == 0
    assert client.seeds == family(results.results[0].request.sampling_seed, 4)


async def test_agents_and_a_world_that_asks_never_share_a_seed():
    class World:
        def __init__(self, client):
            self.client, self.left = client, 3

        def reset(self, *, seed=None):
            return "begin", {}

        async def step(self, action):
            self.left -= 1
            await self.client().chat(ASK)
            return rt.StepOutcome("on", terminated=self.left == 0)

        def close(self):
            pass

    class Asking(ProtocolEnvironment):
        async def setup_state(self, state):
            self.asked = state["client"]
            return state

    client = Seeing()
    env = Asking(
        SingleAgentProtocol(Agent), lambda row: World(lambda: env.asked), num_train=1, num_eval=1
    )
    results = await play(env, client=client)
    assert results.metadata.num_failed == 0
    assert len(set(client.seeds)) == len(client.seeds) == 6


async def test_an_agent_that_asks_at_once_has_a_seed_for_each_call():
    client = Seeing()
    agent = Agent(client)
    agent.reset(seed=4)
    await asyncio.gather(*(agent._sample(ASK) for _ in range(3)))
    assert client.seeds == family(4, 3)


async def test_first_tokens_of_two_calls_are_uncorrelated():
    """The seed decides the random numbers: with one seed the first ids were equal every time."""
    rows = [{"question": f"number {n}"} for n in range(48)]
    env = OwnLoop(rows)
    client = rt.local_client(*rt.load_model("tiny"))
    args = {"max_tokens": 1, "temperature": 5.0}
    results = await play(env, client=client, sampling_args=args)
    ids = np.array(
        [[s["tokens"]["completion_ids"][0] for s in x["trajectory"]] for x in results.state], float
    )
    assert results.metadata.num_failed == 0
    for one, other in ((0, 1), (1, 2), (0, 2)):
        # 48 independent pairs: five standard deviations of the correlation
        assert abs(np.corrcoef(ids[:, one], ids[:, other])[0, 1]) < 5 / np.sqrt(48)
