"""Objects of an environment's code that raise when somebody reads them, and what it does late."""

import asyncio
import shelve
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from datasets import Dataset
from test_odd_values import ROWS, PaidWorld, Writes, one

import rolltree as rt
from rolltree.agents import Agent
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.environments import ProtocolEnvironment
from rolltree.records import audit, export_run
from rolltree.rollouts.decode import decode_rollout
from rolltree.store import Run
from rolltree.verifiers import verifiers as vf


class RaisingMap(Mapping):
    """A cache whose server is away."""

    def __init__(self, error=OSError):
        self.error = error

    def __getitem__(self, key):
        raise self.error

    def __iter__(self):
        raise self.error

    def __len__(self):
        return 1


class RaisingDict(dict):
    def __iter__(self):
        raise OSError("away")

    keys = items = copy = __len__ = __iter__


class RaisingList(list):
    def __iter__(self):
        raise OSError("away")


class RaisingFloat(float):
    def __float__(self):
        raise OSError("away")

    __repr__ = __abs__ = __float__


class RaisingText(str):
    __slots__ = ()

    def __str__(self):
        raise OSError("away")

    __repr__ = __str__


class Unprintable:
    def __str__(self):
        raise OSError("away")

    __repr__ = __str__


class Faceless:
    @property
    def __class__(self):
        raise OSError("away")


class Dumping:
    def model_dump(self):
        raise OSError("away")


def closed_shelf(folder):
    with shelve.open(str(folder / "cards")) as shelf:
        shelf["a"] = 1
    return shelf


def cells():
    """A board whose cells know each other."""
    made = [{"number": number} for number in range(30)]
    for cell in made:
        cell["neighbours"] = made
    return made


RAISING = {
    "a closed shelf": closed_shelf,
    "a dead proxy": lambda folder: weakref.proxy(Unprintable()),
    "a mapping": lambda folder: RaisingMap(),
    "a mapping that exits": lambda folder: RaisingMap(SystemExit),
    "a mapping that interrupts": lambda folder: RaisingMap(KeyboardInterrupt),
    "a dict": lambda folder: RaisingDict(a=1),
    "a list": lambda folder: RaisingList([1]),
    "a float": lambda folder: RaisingFloat(0.5),
    "a text": lambda folder: RaisingText("a"),
    "an object": lambda folder: Unprintable(),
    "a faceless object": lambda folder: Faceless(),
    "a model": lambda folder: Dumping(),
    "a class of models": lambda folder: Dumping,
    "a long integer": lambda folder: 10**5000,
    "a list in itself": lambda folder: (own := []).append(own) or own,
    "no time": lambda folder: np.datetime64("NaT"),
    "long doubles": lambda folder: np.zeros(2, np.longdouble),
    "neighbours": lambda folder: cells(),
    "an object in an array": lambda folder: np.full(1, Unprintable(), object),
    "a key": lambda folder: {Unprintable(): 1},
}
PLACES = {
    "state": lambda state, value: state.__setitem__("cards", value),
    "info": lambda state, value: state.__setitem__("info", {"cards": [value]}),
    "task": lambda state, value: state.__setitem__("task", value),
    "answer": lambda state, value: state.__setitem__("answer", value),
    "extras": lambda state, value: state["trajectory"][-1]["extras"].__setitem__("cards", value),
    "error": lambda state, value: state.__setitem__("error", value),
    "an error's message": lambda state, value: state.__setitem__("error", {"message": value}),
    "errors": lambda state, value: state.__setitem__("environment_errors", {"own": value}),
    "an error's fields": lambda state, value: state.__setitem__(
        "environment_errors", {"own": {"message": value}}
    ),
    "tool errors": lambda state, value: state.__setitem__("tool_errors", [value]),
    "metrics": lambda state, value: state.__setitem__("metrics", {"cards": value}),
    "all metrics": lambda state, value: state.__setitem__("metrics", value),
    "stop condition": lambda state, value: state.__setitem__("stop_condition", value),
    "flag": lambda state, value: state.__setitem__("truncated", value),
    "input": lambda state, value: state.__setitem__("input", value),
    "timing": lambda state, value: state.__setitem__("timing", value),
    "completion": lambda state, value: state.__setitem__("completion", value),
    "final": lambda state, value: state.__setitem__("final_env_response", value),
    "content": lambda state, value: state["trajectory"][-1]["completion"][0].update(content=value),
    "cleaned_up": lambda state, value: state.__setitem__("cleaned_up", value),
    "tools": lambda state, value: state.__setitem__("oai_tools", value),
    "steps": lambda state, value: state.__setitem__("trajectory", value),
    "reason": lambda state, value: state.update(truncated=True, truncation_reason=value),
}


def stored(env, folder, answers=("x",) * 8, **settings):
    """Evaluate into a run; return its rows, once everything has read them."""
    path = folder / "run"
    with Run.open_or_create(path, config={}, kind="eval") as run:
        report = rt.evaluate(env, rt.ScriptedClient([*answers]), run=run, **settings)
    assert not report.num_failed, report
    assert audit(path).findings == ()
    for name in ("rollouts.jsonl", "results", "dataset"):
        assert export_run(path, folder / name, name.partition(".")[0])
    with Run.open(path) as run:
        return [decode_rollout(row) for row in run.rollouts()]


class Leaves(rt.MultiTurnEnv):
    """Leaves one of the objects at a place of the state after the first answer."""

    def __init__(self, place, folder, **settings):
        rows = [{"question": name, "answer": "12"} for name in RAISING]
        settings = {"rubric": rt.Rubric([one])} | settings
        super().__init__(dataset=rows, max_turns=2, env_id="leaves", **settings)
        self.place, self.folder = place, folder

    def leave(self, state):
        name = state["question"]
        PLACES[self.place](state, RAISING[name](self.folder))

    async def env_response(self, messages, state):
        self.leave(state)
        return [{"role": "user", "content": "more"}]


def rewards_by_name(results):
    return {result.request.input["question"]: result.states[0].reward for result in results}


@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_raises_when_it_is_read_ends_neither_run_nor_rollout(place, tmp_path):
    results = stored(Leaves(place, tmp_path), tmp_path, ["x"] * 99)
    assert rewards_by_name(results) == dict.fromkeys(RAISING, 1.0)


@pytest.mark.parametrize("place", PLACES)
def test_a_reward_function_may_leave_it_as_well(place, tmp_path):
    def leaves(state):
        leave(state)
        return 1.0

    leave = Leaves(place, tmp_path).leave
    env = rt.SingleTurnEnv(dataset=Leaves(place, tmp_path).dataset, rubric=rt.Rubric([leaves]))
    results = stored(env, tmp_path, ["x"] * 99)
    assert rewards_by_name(results) == dict.fromkeys(RAISING, 1.0)


# What it does late: reward functions, cleanups, overrides, worlds


def cancels_itself():
    asyncio.current_task().cancel()


RUINS = {
    "no trajectory": lambda state: state.pop("trajectory"),
    "no timing": lambda state: state.pop("timing"),
    "times": lambda state: state["timing"].clear(),
    "nothing": lambda state: state.clear(),
    "a text": lambda state: state.__setitem__("trajectory", "gone"),
    "a number": lambda state: state.__setitem__("trajectory", [1]),
    "no steps": lambda state: state["trajectory"].clear(),
    "no input": lambda state: state.__setitem__("input", None),
    "metrics": lambda state: state.__setitem__("metrics", 5),
    "errors": lambda state: state.__setitem__("scoring_errors", 5),
    "error": lambda state: state.__setitem__("error", "bad"),
    "step": lambda state: state["trajectory"].append(1),
    "step's keys": lambda state: state["trajectory"][0].clear(),
    "cleaned_up": lambda state: state.__setitem__("cleaned_up", np.ones(2)),
}


@pytest.mark.parametrize("kind", ["rollout", "group"])
@pytest.mark.parametrize("name", [name for name in RUINS if name != "step"])
def test_a_reward_function_for_verifiers_may_ruin_the_state(name, kind, tmp_path):
    def ruins(state):
        RUINS[name](state)
        return 1.0

    def ruins_all(states):
        return [*map(ruins, states)]

    functions = [ruins if kind == "rollout" else ruins_all, one]
    rubric = vf.RubricGroup([vf.Rubric(funcs=functions, weights=[0.5, 0.5])])
    env = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric)
    results = stored(env, tmp_path, rollouts_per_example=2)
    assert [result.states[0].reward for result in results] == [1.0] * 4


async def cancelled_by_hand():
    raise asyncio.CancelledError


async def cancelled_task():
    cancels_itself()
    await asyncio.sleep(0)


async def cancelled_at_the_end():
    cancels_itself()


CANCELS = [cancelled_by_hand, cancelled_task, cancelled_at_the_end]


@pytest.mark.parametrize("cancels", CANCELS)
@pytest.mark.parametrize(
    ("library", "kind"),
    [(rt, "rollout"), (rt, "group"), (rt, "step"), (vf, "rollout"), (vf, "group")],
)
def test_a_metric_that_cancels_itself_costs_itself_only(cancels, library, kind, tmp_path):
    async def broken(state):
        await cancels()
        return 1.0

    async def broken_group(states):
        await cancels()
        return [1.0 for _ in states]

    async def late(state):
        await asyncio.sleep(0.01)
        return 1.0

    broken = broken_group if kind == "group" else broken
    rubric = library.Rubric(funcs=[late, one], weights=[0.5, 0.5])
    if kind == "step":
        rubric.add_step_reward_func(broken, 0.0)
    else:
        rubric.add_metric(broken, 0.0)
    env = library.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=rubric)
    results = stored(env, tmp_path, rollouts_per_example=2)
    for result in results:
        (state,) = result.states
        assert (state.reward, state.error) == (1.0, None)
        assert list(state.get("scoring_errors") or {}) in ([broken.__name__], [])


@pytest.mark.parametrize("name", RUINS)
def test_a_cleanup_may_ruin_the_state(name, tmp_path):
    class Ruins(rt.SingleTurnEnv):
        @rt.cleanup
        async def tidy(self, state):
            RUINS[name](state)

    env = Ruins(dataset=ROWS, rubric=rt.Rubric([one]))
    results = stored(env, tmp_path)
    assert [result.states[0].reward for result in results] == [1.0, 1.0]


@pytest.mark.parametrize("way", ["rollout", "world", "verifiers"])
@pytest.mark.parametrize("name", RUINS)
def test_a_cleanup_of_other_environments_may_ruin_the_state(name, way, tmp_path):
    class Own(rt.SingleTurnEnv):
        async def rollout(self, *given, **named):
            return await super().rollout(*given, **named)

    kind = {"rollout": Own, "world": ProtocolEnvironment, "verifiers": vf.SingleTurnEnv}[way]

    class Ruins(kind):
        @rt.cleanup
        async def tidy(self, state):
            RUINS[name](state)

    if way == "world":
        protocol = SingleAgentProtocol(Agent, max_steps=2)
        env = Ruins(protocol, world=lambda row: PaidWorld(1.0), num_eval=2, rubric=rt.Rubric([one]))
    else:
        rubric = vf.Rubric(funcs=[one]) if way == "verifiers" else rt.Rubric([one])
        env = Ruins(dataset=Dataset.from_list(ROWS), rubric=rubric)
    results = stored(env, tmp_path)
    assert [result.states[0].reward for result in results] == [1.0, 1.0]


ODD_RESPONSES = [
    *(3, 2.5, True, b"x", [], {}, (), object(), {"role": "assistant", "content": "x"}),
    *({"choices": []}, {"choices": None}, {"choices": [None]}, {"choices": [{"message": {}}]}),
    *(SimpleNamespace(content="x"), SimpleNamespace(choices=[]), None, "x", Mock(), RaisingMap()),
    {"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]},
    {"choices": [{"message": {"content": 5}}], "usage": 5},
    {"choices": [{"message": {"content": "x"}, "token_ids": [1], "logprobs": 5}]},
    ValueError("x"),
]


@pytest.mark.parametrize("library", [rt, vf])
@pytest.mark.parametrize("response", ODD_RESPONSES, ids=lambda each: type(each).__name__)
def test_an_odd_response_of_an_override_after_an_answer_is_scored(response, library, tmp_path):
    class Odd(library.SingleTurnEnv):
        async def get_model_response(self, *given, **named):
            await super().get_model_response(*given, **named)
            return response

    rubric = library.Rubric(funcs=[one])
    env = Odd(dataset=Dataset.from_list(ROWS), rubric=rubric)
    results = stored(env, tmp_path)
    assert [result.states[0].reward for result in results] == [1.0, 1.0]


class CancellingWorld(PaidWorld):
    """Cancels the task that it runs in."""

    def __init__(self, method, cancels):
        super().__init__(1.0)
        self.method, self.cancels = method, cancels

    def step(self, action):
        if self.method == "step":
            self.cancels()
        return super().step(action)

    def reset(self, *, seed=None):
        if self.method == "reset":
            self.cancels()
        return super().reset(seed=seed)

    async def close(self):
        if self.method == "close":
            self.cancels()


def raises_cancelled():
    raise asyncio.CancelledError


@pytest.mark.parametrize("cancels", [cancels_itself, raises_cancelled])
@pytest.mark.parametrize("method", ["step", "close"])
@pytest.mark.parametrize("rubric", [None, rt.Rubric([one])])
def test_a_world_that_cancels_itself_is_scored(method, cancels, rubric, tmp_path):
    env = ProtocolEnvironment(
        SingleAgentProtocol(Agent, max_steps=2),
        world=lambda row: CancellingWorld(method, cancels),
        num_eval=2,
        rubric=rubric,
    )
    for result in stored(env, tmp_path):
        assert result.error is None
        assert result.states[0].reward is not None


@pytest.mark.parametrize("cancels", CANCELS)
def test_a_rubric_that_cancels_itself_is_scored(cancels, tmp_path):
    class Cancels(rt.Rubric):
        async def score_rollout(self, *given, **named):
            await super().score_rollout(*given, **named)
            await cancels()

    env = rt.SingleTurnEnv(dataset=ROWS, rubric=Cancels([one]))
    for result in stored(env, tmp_path):
        assert result.states[0].reward is not None


@pytest.mark.parametrize("key", ["truncation_reason", "stop_condition", "agent", "task", "metrics"])
def test_a_lone_surrogate_in_a_text_makes_no_run_look_changed(key, tmp_path):
    def write(state):
        state["truncated"] = True
        state[key] = {"\ud800": 1.0} if key == "metrics" else "\ud800"

    results = stored(Writes(write), tmp_path)
    assert [result.states[0].reward for result in results] == [1.0, 1.0]
