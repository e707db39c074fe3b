"""The report that an evaluation leaves in its run: the computed one, and never an old one."""

from dataclasses import replace

import pytest
from test_eval_evaluate import EchoClient, EchoSource
from test_eval_report import failed, row

from rolltree.evaluation import REDUCERS, Settings, build_report, evaluate_async, stored_report
from rolltree.evaluation.reducers import Outcomes
from rolltree.evaluation.report import keep_report
from rolltree.store import Run, StoredRollout


def rows():
    odd = {"metrics": {"api_key": 0.5, "length": 2}, "truncated": True}
    messages = {"errors": ({"message": "it broke"},), "truncation_reason": "time_limit"}
    return [
        *(row(i, k, reward=(i + k) % 3 / 2, **odd) for i in range(4) for k in range(3)),
        StoredRollout(**{**_fields(failed(4)), **messages}),
        row(5),
    ]


def _fields(made):
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", config={"model": "m"}) as run:
        run.add_rollouts(rows())
        keep_report(run, stored_report(run))
        yield run


def aggregates(report):
    return replace(report, outcomes=())


def test_it_is_what_the_rollouts_say(run, monkeypatch):
    computed = aggregates(stored_report(run))
    monkeypatch.setattr(Outcomes, "stored", None)
    assert stored_report(run, outcomes=False) == computed
    with Run.open(run.path, mode="r") as reader:
        assert stored_report(reader, outcomes=False) == computed
        named = stored_report(reader, outcomes=False, model="other", num_resumed=2)
    assert (named.model, named.num_resumed) == ("other", 2)
    assert named.results == computed.results


def late(**fields):
    return row(0, 0, reward=1.0, created_at=0.0, **fields)  # a clock that jumped back


CHANGES = {
    "a new rollout": lambda run: run.add_rollouts([row(9, reward=0.25)]),
    "one is replaced": lambda run: run.add_rollouts([late()], replaced=["eval/e/0/0"]),
    "a failed one is replaced": lambda run: run.add_rollouts(
        [row(4, reward=0.5)], replace_failed=True
    ),
    "rollouts are dropped": lambda run: run.truncate_steps(0, rollout_phases=["eval"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_phase_ends_it(run, change):
    run.add_rollouts([row(8, reward=0.5, phase="later", train_step=3)])
    assert run.kept_report("eval") is not None
    run.add_rollouts([row(7, reward=0.5, train_step=3)])
    keep_report(run, stored_report(run))
    assert run.kept_report("eval") is not None
    CHANGES[change](run)
    assert run.kept_report("eval") is None
    assert stored_report(run, outcomes=False) == aggregates(stored_report(run))


def test_other_phases_do_not_end_it(run):
    run.add_rollouts([row(20, reward=1.0, phase="train")])
    run.add_rollouts(rows())  # the same again: nothing is new
    assert run.kept_report("eval") is not None


def test_a_batch_that_is_not_stored_does_not_end_it(run):
    with pytest.raises(ZeroDivisionError):
        run.add_rollouts(row(9, reward=1 / (i - 1)) for i in range(2))
    assert run.kept_report("eval") is not None


def test_other_settings_and_reducers_are_computed(run):
    settings = Settings(pass_threshold=0.5)
    lenient = stored_report(run, settings=settings, outcomes=False)
    assert lenient == aggregates(stored_report(run, settings=settings))
    assert lenient.pass_at != stored_report(run, outcomes=False).pass_at
    own = {"count": lambda found, settings: len(found)}
    assert stored_report(run, reducers=own, outcomes=False).results == {"count": 14}


def test_a_part_of_a_phase_is_not_kept_for_all_of_it(tmp_path):
    with Run.create(tmp_path) as run:
        run.add_rollouts(rows())
        keep_report(run, build_report(rows()[:6]))
        assert run.kept_report("eval") is None


async def test_an_evaluation_leaves_it(tmp_path):
    with Run.create(tmp_path) as run:
        part = await evaluate_async(EchoSource(), EchoClient(), num_examples=2, run=run)
        first = stored_report(run, outcomes=False)
        whole = await evaluate_async(EchoSource(), EchoClient(), rollouts_per_example=1, run=run)
        assert run.kept_report("eval") is not None
        second = stored_report(run, outcomes=False)
        assert second.results == whole.results
        await evaluate_async(EchoSource(), EchoClient(), num_examples=2, run=run)  # nothing new
        assert stored_report(run, outcomes=False) == second
    assert (first.num_rollouts, second.num_rollouts) == (2, 4)
    assert first.results == part.results


async def test_the_callers_own_results_are_not_kept(tmp_path):
    with Run.create(tmp_path) as run:
        own = {**REDUCERS, "reward": lambda found, settings: None}
        report = await evaluate_async(EchoSource(), EchoClient(), run=run, reducers=own)
        assert report.reward is None
        assert run.kept_report("eval") is None
        assert stored_report(run, outcomes=False).reward.mean == 0.5


def test_what_reward_functions_raised_comes_back(run):
    report = stored_report(run)
    raised = {"right": {"num": 2, "first": "adding.py:12: the judge refused"}}
    keep_report(run, replace(report, results={**report.results, "scoring_errors": raised}))
    assert stored_report(run, outcomes=False).results["scoring_errors"] == raised
