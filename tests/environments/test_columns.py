"""A row's columns reach the state and the reward functions, and come back from the store."""

import asyncio
import copy
import importlib
import pickle
import re
from pathlib import Path

import pytest
from env_scripts import ScriptedModel, user

import rolltree as rt
from rolltree.evaluation import evaluate_async
from rolltree.insight.replaying import playable
from rolltree.insight.rescoring import rescore_async
from rolltree.records import replay_many
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.values.errors import ConfigError
from rolltree.values.state import OWN_KEYS, State

ROW = {"question": "q", "ground_truth": "42", "tests": [[1, 2]], "depth": 3, "extra": None}


def by_name(ground_truth, tests, depth):
    return float((ground_truth, tests, depth) == ("42", [[1, 2]], 3))


def by_keyword(completion, **kwargs):
    return float(kwargs.get("ground_truth") == "42" and kwargs["extra"] is None)


def by_state(state):
    row = state["input"]
    return float(state["ground_truth"] == row["ground_truth"] == "42" and row["depth"] == 3)


async def of_group(completions, ground_truth):
    return [float(value == "42") for value in ground_truth]


def make(**settings):
    rubric = rt.Rubric([by_name, by_keyword, by_state, of_group])
    return rt.SingleTurnEnv(dataset=[ROW], rubric=rubric, env_id="columns", **settings)


async def test_columns_reach_state_and_functions_and_come_back(tmp_path):
    env = make()
    assert env.dataset[0]["ground_truth"] == "42"
    with Run.create(tmp_path / "run", config={}) as run:
        report = await evaluate_async(env, ScriptedModel("a"), run=run, rollouts_per_example=2)
        assert report.num_failed == 0
        first, second = decode_results(run.rollouts())
    assert report.reward.mean == 4.0
    for result in (first, second):
        assert {key: result.request.input[key] for key in ROW} == ROW
        assert result.states[0]["ground_truth"] == "42"
        assert "parent_rollout" not in result.states[0]


async def test_columns_are_there_when_scored_again_and_replayed(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, config={}) as run:
        await evaluate_async(make(), ScriptedModel("a"), run=run)
    reports = await asyncio.to_thread(replay_many, path, make())
    assert [report.difference for report in reports] == [None]
    again = tmp_path / "again"
    rubric = rt.Rubric([by_name, by_state])
    await rescore_async(path, rubric=rubric, run_dir=again)
    with Run.open(again, mode="r") as run:
        assert [row.reward for row in run.rollouts()] == [2.0]


def test_a_state_reads_columns_unless_it_has_the_key():
    state = State(input={**ROW, "prompt": user("q"), "answer": "a"}, metrics=None)
    assert state["ground_truth"] == state.get("ground_truth") == "42"
    assert "ground_truth" in state
    assert state.get("depth", "none") == "none"  # rolltree's own key: the row's is in the input
    assert "depth" not in state
    assert list(state) == ["input", "metrics"]
    state["ground_truth"] = "other"
    assert (state["ground_truth"], state["input"]["ground_truth"]) == ("other", "42")
    assert state.setdefault("tests", []) == [[1, 2]]
    assert state.pop("tests") == [[1, 2]]
    assert "tests" not in state
    for twin in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert type(twin) is State
        assert twin == state
        assert twin["extra"] is None
    with pytest.raises(KeyError, match="nothing"):
        state["nothing"]


def test_keys_that_rolltree_reads_are_its_own():
    """A column named like one of them would be taken for what rolltree wrote."""
    read = re.compile(r"\b(?:state|first)(?:\.(?:get|pop|setdefault)\(|\[)\"(\w+)\"")
    source = Path(rt.__file__).parent
    names = {
        name
        for path in source.rglob("*.py")
        if "verifiers" not in path.parts
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    examples = {"won", "left"}  # in docstrings and the scaffold of a new environment
    examples.add("program")  # of ProgramEnv, which refuses such a column
    others = {"exp_avg", "exp_avg_sq", "step", "agent_s", "roles", "control", "launch_id"} | {
        "fields",
        "notes",
        "steps",
    }  # an optimizer's, a record's, a program's, a cluster's
    assert names - OWN_KEYS - set(State.INPUT_FIELDS) - examples - others == set()


async def test_a_row_without_an_answer_is_an_error_where_one_is_asked_for():
    def correct(completion, answer):
        return float(completion[-1]["content"] == answer)

    def lenient(completion, answer=None):
        return float(answer is None)

    env = rt.SingleTurnEnv(dataset=[ROW], rubric=rt.Rubric([correct]))
    state = (await env.generate(env.dataset, ScriptedModel(""))).state[0]
    assert state["reward"] is None
    assert state["error"].type == "ConfigError"
    assert "no column 'answer'" in state["error"].message
    assert "'ground_truth'" in state["error"].message
    env = rt.SingleTurnEnv(dataset=[{**ROW, "answer": None}], rubric=rt.Rubric([lenient]))
    assert (await env.generate(env.dataset, ScriptedModel(""))).state[0]["reward"] == 1.0


async def test_under_verifiers_names_columns_are_in_the_input_only():
    rooms = importlib.import_module("rolltree.verifiers.environments")
    rubrics = importlib.import_module("rolltree.verifiers.rubrics")

    def inside(state, **kwargs):
        forwarded = "ground_truth" in state or "ground_truth" in kwargs
        return float(state["input"]["ground_truth"] == "42" and not forwarded)

    env = rooms.SingleTurnEnv(dataset=[ROW], rubric=rubrics.Rubric([inside]))
    results = await env.generate(env.dataset, ScriptedModel("a"), "m", use_tqdm=False)
    assert results["reward"] == [1.0]
    state = results["state"][0]
    with pytest.raises(KeyError):
        state["ground_truth"]
    assert copy.deepcopy(state).get("ground_truth") is None


async def test_a_column_that_holds_an_object_does_not_stop_a_replay(tmp_path):
    class Picture:
        pass

    rows = [{**ROW, "picture": Picture()}]
    path = tmp_path / "run"
    env = rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([by_name]))
    with Run.create(path, config={}) as run:
        await evaluate_async(env, ScriptedModel("a"), run=run)
    reports = await asyncio.to_thread(replay_many, path, env)
    assert [report.difference for report in reports] == [None]
    with Run.open(path, mode="r") as run:
        (result,) = decode_results(run.rollouts())
    row = result.request.input
    assert "picture" not in playable(result.request).input
    row["info"] = {"held": row["picture"]}
    with pytest.raises(ConfigError, match="Picture"):
        playable(result.request)
