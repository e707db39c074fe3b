"""Runs of environments that write odd values pass the audit, and every reader copes with them."""

import datetime
import decimal
import itertools
import uuid

import numpy as np
import pytest
from click.testing import CliRunner
from corrupt_kit import Corrupter

import rolltree as rt
from rolltree.cli import app
from rolltree.insight.page.export import export_page
from rolltree.records import audit, read_run
from rolltree.store import Run
from rolltree.verifiers import verifiers as vf

NAN = float("nan")


@rt.run_inline
def length(completion):
    return float(len(completion[-1]["content"]))


class Own(rt.Rubric):
    """A rubric whose override calls `then` on each state."""

    def __init__(self, then):
        super().__init__([length])
        self.then = then

    async def score_rollout(self, state, score_sem=None):
        await super().score_rollout(state)
        self.then(state)


class Turns(rt.MultiTurnEnv):
    """Two turns; `after` edits the state after the first, `cleaned` at the end."""

    def __init__(self, row=None, rubric=None, after=None, cleaned=None):
        rows = [{"question": f"q{at}", "answer": "1", **(row or {})} for at in range(2)]
        super().__init__(dataset=rows, rubric=rubric or rt.Rubric([length]), max_turns=2)
        self.after, self.cleaned = after, cleaned

    async def env_response(self, messages, state):
        if self.after is not None:
            self.after(state)
        return [{"role": "user", "content": "more"}]

    @rt.cleanup
    async def leave(self, state):
        if self.cleaned is not None:
            self.cleaned(state)


def play(path, env, **settings):
    said = itertools.cycle(["a", "bbb", "cc"])
    with Run.open_or_create(path, config={}, kind="eval") as run:
        client = rt.ScriptedClient(lambda messages: next(said))
        rt.evaluate(env, client, run=run, rollouts_per_example=2, **settings)
    return path


def findings(path):
    return [str(item) for item in audit(path).findings]


def assert_readable(path):
    assert findings(path) == []
    with read_run(path) as data:
        data.story()
        for name in ("rollouts", "calls", "tokens", "breaks", "conversations", "sft"):
            list(getattr(data, name)().batches())
    export_page(path, path / "page.html")
    for command in (
        ["show", str(path), "--transcripts", "9"],
        ["show", str(path), "--json"],
        ["export", str(path), str(path / "rollouts.jsonl")],
        ["export", str(path), str(path / "dataset.jsonl"), "--as", "dataset"],
        ["export", str(path), str(path / "results"), "--as", "results"],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output, done.exception)


def last(state):
    return state["trajectory"][-1]


def rewarding(write):
    @rt.run_inline
    def odd(state):
        write(state)
        return 1.0

    return rt.Rubric([odd])


def put(key, value):
    return lambda state: state.__setitem__(key, value)


def put_step(key, value):
    return lambda state: last(state).__setitem__(key, value)


def put_extra(key, value):
    return lambda state: last(state)["extras"].__setitem__(key, value)


def adjust(state):
    state["reward"] -= 0.25


ODD = {
    "NaN in a column": lambda: Turns({"score": NAN}),
    "NaN as the answer": lambda: Turns({"answer": NAN}),
    "NaN in info": lambda: Turns({"info": {"scores": [1.0, NAN]}}),
    "an array in a column": lambda: Turns({"cells": np.array([1, 2])}),
    "an array as the answer": lambda: Turns({"answer": np.array([1, 2])}),
    "an array of texts": lambda: Turns({"info": {"names": np.array(["a", "b"])}}),
    "an object in info": lambda: Turns({"info": {"what": object()}}),
    "an object as the answer": lambda: Turns({"answer": object()}),
    "a task that is a uuid": lambda: Turns({"task": uuid.UUID(int=3)}),
    "a task that is a date": lambda: Turns({"task": datetime.date(2024, 5, 1)}),
    "a task that is a Decimal": lambda: Turns({"task": decimal.Decimal("1.50")}),
    "a task with a lone surrogate": lambda: Turns({"task": "a\ud800"}),
    "a task of the state": lambda: Turns(after=put("task", uuid.UUID(int=3))),
    "a task of the state, scored": lambda: Turns(rubric=rewarding(put("task", object()))),
    "an immense example_id": lambda: Turns({"example_id": 10**400}),
    "an example_id of 10**3000": lambda: Turns({"example_id": 10**3000}),
    "an example_id that is a uuid": lambda: Turns({"example_id": uuid.UUID(int=3)}),
    # step rewards of the author
    "a step reward": lambda: Turns(after=put_step("reward", 0.5)),
    "a step reward at the end": lambda: Turns(cleaned=put_step("reward", 0.5)),
    "a step reward of a reward function": lambda: Turns(rubric=rewarding(put_step("reward", 0.5))),
    "step rewards of an override": lambda: Turns(rubric=Own(put_step("reward", 0.5))),
    "step rewards everywhere": lambda: Turns(
        after=put_step("reward", 0.5), cleaned=put_step("reward", 0.25)
    ),
    # rewards and advantages of the author
    "an adjusted reward": lambda: Turns(rubric=Own(adjust)),
    "an advantage of a reward function": lambda: Turns(rubric=rewarding(put("advantage", 0.5))),
    "an advantage of an override": lambda: Turns(rubric=Own(put("advantage", 0.5))),
    "an advantage of the environment": lambda: Turns(after=put("advantage", 0.5)),
    # labels
    "an agent": lambda: Turns(after=put_extra("agent", 7)),
    "an array for an agent": lambda: Turns(after=put_extra("agent", np.array([1, 2]))),
    "an array for a temperature": lambda: Turns(after=put_extra("temperature", np.array([1, 2]))),
    "an array for settings": lambda: Turns(after=put_extra("sampling", np.array([1, 2]))),
    "an array for an end": lambda: Turns(rubric=rewarding(put_extra("finish_reason", np.ones(2)))),
    "a list for an end": lambda: Turns(rubric=rewarding(put_extra("finish_reason", ["stop"]))),
    "a lost input": lambda: Turns(rubric=Own(put("input", None))),
    "a turn": lambda: Turns(after=put_extra("turn", "opening")),
    "a temperature": lambda: Turns(after=put_extra("temperature", "hot")),
    "a temperature in a list": lambda: Turns(after=put_extra("temperature", [0.5])),
    "an end": lambda: Turns(after=put_extra("finish_reason", "because")),
    "an end in a list": lambda: Turns(after=put_extra("finish_reason", ["because"])),
    "a call_id": lambda: Turns(after=put_extra("call_id", {"odd": 1})),
    "a count": lambda: Turns(after=put_extra("num_prompt_tokens", "many")),
    "a version": lambda: Turns(after=put_extra("policy_version_min", "first")),
    # names and messages
    "a rollout_id": lambda: Turns(after=put("rollout_id", {"odd": [1]})),
    "a rollout_id in the end": lambda: Turns(rubric=rewarding(put("rollout_id", {"odd": [1]}))),
    "a prompt": lambda: Turns(rubric=rewarding(put("prompt", 7))),
    "a prompt in the input": lambda: Turns(
        rubric=rewarding(lambda state: state["input"].__setitem__("prompt", {"a": 1}))
    ),
    "a prompt of texts": lambda: Turns(rubric=rewarding(put("prompt", ["a", 7]))),
    "a prompt of an override": lambda: Turns(rubric=Own(put("prompt", 7))),
    "a list in a completion": lambda: Turns(
        after=lambda state: last(state)["completion"].append([{"role": "user", "content": "x"}])
    ),
    "a number in a prompt": lambda: Turns(after=lambda state: last(state)["prompt"].append(7)),
    "content of an odd type": lambda: Turns(
        after=lambda state: last(state)["completion"][0].__setitem__("content", 7)
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_nothing_is_wrong(name, tmp_path):
    assert_readable(play(tmp_path / "run", ODD[name]()))


def add(key, value):
    return lambda fields: fields.update({key: fields[key] + value})


def add_step(value):
    def edit(record):
        record["state"]["steps"][0]["reward"] += value

    return edit


@rt.run_inline
def of_step(step_index):
    return 0.5 * step_index


@rt.run_inline
def of_group(completions):
    return [float(len(each[-1]["content"])) for each in completions]


def with_steps():
    rubric = rt.Rubric([length])
    rubric.add_step_reward_func(of_step)
    return rubric


class OwnGroup(rt.Rubric):
    """A rubric that adjusts rewards and advantages after its functions of groups, and more."""

    async def score_group(self, states, score_sem=None):
        await super().score_group(states)
        for state in states:
            state["reward"] -= 0.25
            state["advantage"], state["input"] = 0.125, None


class OldGroup(vf.Rubric):
    """A rubric of verifiers that sets everything itself."""

    async def score_group(self, states, score_sem):
        for state in states:
            state["reward"], state["advantage"] = 1.0, 0.125
            state["trajectory"][0]["reward"] = 0.5


RUBRICS = {
    "functions": lambda: rt.Rubric([length]),
    "steps": with_steps,
    "group": lambda: rt.Rubric([of_group]),
    "parts": lambda: rt.RubricGroup([rt.Rubric([length]), with_steps_only()]),
    "verifiers": lambda: vf.Rubric(funcs=[length]),
}


def with_steps_only():
    rubric = rt.Rubric()
    rubric.add_step_reward_func(of_step)
    return rubric


@pytest.mark.parametrize("name", RUBRICS)
def test_a_changed_step_reward_is_found(name, tmp_path):
    path = play(tmp_path / "run", Turns(rubric=RUBRICS[name]()))
    assert_readable(path)
    corrupter = Corrupter(path)
    corrupter.record(corrupter.ids("1")[0], add_step(0.5))
    assert {(each.check, each.cause) for each in audit(path).findings} == {
        ("rewards", "step_rewards")
    }


@pytest.mark.parametrize("name", ["group", "verifiers"])
def test_a_changed_advantage_is_found(name, tmp_path):
    path = play(tmp_path / "run", Turns(rubric=RUBRICS[name](), after=put("advantage", 3.0)))
    assert_readable(path)
    corrupter = Corrupter(path)
    change = add("advantage", 0.5)
    corrupter.record(corrupter.ids("1")[0], lambda record: change(record["state"]["fields"]))
    found = {(each.check, each.cause) for each in audit(path).findings}
    assert found == {("advantages", "advantage_differs")}


@pytest.mark.parametrize("rubric", [OwnGroup([of_group]), OldGroup(funcs=[length])])
def test_an_own_score_group_is_nothing_wrong(rubric, tmp_path):
    assert_readable(play(tmp_path / "run", Turns(rubric=rubric)))


def test_a_rollout_id_of_the_environment_is_rescored_as_its_own(tmp_path):
    path = play(tmp_path / "run", ODD["a rollout_id"]())
    rt.rescore(path, rubric=rt.Rubric([length]), run_dir=tmp_path / "again")
    assert_readable(tmp_path / "again")


def test_rows_in_numpys_format(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"q{at}", "answer": "1", "info": {"cells": [1, 2]}} for at in range(2)]
    dataset = datasets.Dataset.from_list(rows).with_format("numpy")
    env = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[length]))
    assert_readable(play(tmp_path / "run", env))
