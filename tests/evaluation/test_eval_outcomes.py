"""Outcomes in columns: they are those of the rows, stored or not, in little memory."""

import tracemalloc
from dataclasses import fields, replace
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from test_eval_reducers import row_lists

from rolltree import Rubric, SingleTurnEnv
from rolltree.evaluation import EpisodeOutcome, evaluate_async, outcomes
from rolltree.evaluation.reducers import Outcomes
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.requests import DistinctRequests, build_requests
from rolltree.store import Run, StoredRollout
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError

ROW = StoredRollout(
    request_id="a",
    env_id="e",
    example_id=7,
    task="t",
    reward=0.5,
    num_attempts=2,
    num_completion_tokens=3,
    truncated=True,
    truncation_reason="max_steps",
    metrics={"m": 1, "text": "x", "nan": float("nan")},
)


def test_an_outcome_is_what_its_rows_say():
    other = replace(ROW, trajectory_index=1, reward=1.5, num_completion_tokens=4, metrics={"n": 2})
    failed = replace(ROW, request_id="b", status="error", error_type="E", metrics={})
    first, second = found = outcomes([ROW, failed, other])
    assert (first.request_id, first.example, first.reward) == ("a", ("e", "t", 7), 1.0)
    assert (first.num_completion_tokens, first.num_attempts, first.failed) == (7, 2, False)
    assert first.metrics == {"m": 1.0, "n": 2.0}
    assert first.truncation_reason == "max_steps"
    assert type(first.num_completion_tokens) is int
    assert (second.reward, second.error_type, second.metrics) == (None, "E", {})
    assert found[-1] == found[1:][0] == second
    with pytest.raises(IndexError):
        found[2]


@settings(max_examples=25, deadline=None)
@given(row_lists())
def test_columns_are_the_fields_of_the_outcomes(rows):
    found = outcomes(rows)
    for field in fields(EpisodeOutcome):
        assert found.values(field.name) == [getattr(outcome, field.name) for outcome in found]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=row_lists())
def test_stored_rows_give_the_same_outcomes(rows):
    with TemporaryDirectory() as folder, Run.create(f"{folder}/run") as run:
        run.add_rollouts(rows)
        run.add_rollouts([replace(row, request_id="x", phase="other") for row in rows[:1]])
        assert Outcomes.stored(run, "eval") == outcomes(rows)


def test_rows_written_apart_are_one_outcome(tmp_path):
    with Run.create(tmp_path / "run") as run:
        for row in (ROW, replace(ROW, request_id="b"), replace(ROW, trajectory_index=1, reward=1)):
            run.add_rollouts([row])
        assert Outcomes.stored(run, "eval").values("reward") == [0.75, 0.5]


def test_they_are_in_the_order_of_the_ids_and_those_of_others_are_left_out(tmp_path):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(replace(ROW, request_id=name) for name in ("a", "b", "c"))
        found = Outcomes.stored(run, "eval", ["c", "d", "a"])
    assert found.values("request_id") == ["c", "a"]
    assert (found.has("c"), found.has("d"), found.has("b")) == (True, False, False)
    found.remove("c")
    assert (len(found), found.has("c"), found[0].request_id) == (1, False, "a")
    found.add([replace(ROW, request_id="d", reward=None)])
    assert [outcome.reward for outcome in found] == [None, 0.5]


def test_an_outcome_costs_a_tenth_of_an_object():
    ids = [f"eval/env/{number}/{member}" for number in range(100) for member in range(4)]
    tracemalloc.start()
    try:
        found = Outcomes(ids)
        before = tracemalloc.get_traced_memory()[0]
        for number, request_id in enumerate(ids):
            row = replace(ROW, request_id=request_id, example_id=number // 4, reward=number / 7)
            found.add([replace(row, total_ms=number / 3, metrics={"m": number / 9})])
        assert (tracemalloc.get_traced_memory()[0] - before) / len(ids) < 150
    finally:
        tracemalloc.stop()


def environment(num, asked=None):
    class Env(SingleTurnEnv):
        def example(self, split, index):
            asked.append(index)
            return super().example(split, index)

    rows = [{"question": str(number), "answer": ""} for number in range(num)]
    return Env(dataset=rows, rubric=Rubric([lambda completion: 1.0]), env_id="e")


async def test_a_resume_makes_only_the_requests_that_are_missing(tmp_path):
    asked = []
    env = environment(20, asked)
    with Run.create(tmp_path / "run") as run:
        await evaluate_async(env, ScriptedClient(lambda m: "x"), num_examples=17, run=run)
        asked.clear()
        report = await evaluate_async(env, ScriptedClient(lambda m: "x"), run=run)
    assert sorted(set(asked)) == [0, 17, 18, 19]  # the first one tells the settings
    assert (report.num_rollouts, report.num_resumed) == (20, 17)
    assert [outcome.example[2] for outcome in report.outcomes] == list(range(20))


def test_a_plan_is_the_list_of_its_requests():
    asked = []
    plan = build_requests(environment(3, asked), "eval", group_size=2, run_seed=5)
    assert not asked
    listed = list(plan)
    assert asked == [0, 1, 2]
    assert [request.request_id for request in listed] == plan.request_ids
    assert [plan[at] for at in range(len(plan))] == listed == plan[:]
    assert plan[-1] == listed[-1]
    assert [len(group) for group in plan.groups()] == [2, 2, 2]
    left = list(plan.without(lambda request_id: request_id.endswith("/0")))
    assert left == listed[1::2]


async def test_the_ids_of_a_plan_are_not_remembered_and_others_are():
    env, client = environment(3, []), ScriptedClient(lambda m: "x")
    plan = build_requests(env, "eval", group_size=2)
    todo = plan.without(lambda request_id: False)
    assert isinstance(todo, DistinctRequests)
    assert len(await RolloutEngine(env, client).run_all(todo)) == 6
    twice = build_requests(env, "eval", indices=[0, 1, 0])
    with pytest.raises(ConfigError, match="have the id"):
        async for _ in RolloutEngine(env, client).run(twice.without(lambda request_id: False)):
            pass
