"""Objects of an environment's code that raise when somebody reads them, and what it does late."""

import shelve
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from test_odd_values import ROWS, Writes, one

import rolltree as rt
from rolltree.records import audit, export_run
from rolltree.rollouts.decode import decode_rollout
from rolltree.store import Opaque, Run


class RaisingMap(Mapping):
    """A cache whose server is away."""

    def __init__(self, error=None):
        self.error = error or OSError("the server is away")

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
    "a mapping that exits": lambda folder: RaisingMap(SystemExit(3)),
    "a mapping that interrupts": lambda folder: RaisingMap(KeyboardInterrupt()),
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
