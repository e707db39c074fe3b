"""What an evaluation of a group of environments says of each, from the rollouts to the page."""

import io

from rich.console import Console

import rolltree as rt
from rolltree.evaluation import compare_environments, compare_reports, stored_report
from rolltree.evaluation.comparison import measure_names
from rolltree.insight.comparison import held_out_gain
from rolltree.reports import evaluation_table
from rolltree.store import Run
from rolltree.store.metric_names import eval_numbers
from rolltree.testing import ScriptedClient


def says(word):
    def right(completion):
        return float(completion[-1]["content"] == word)

    rows = [{"question": f"{word} {n}"} for n in range(30)]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([right]), env_id=word)


def group():
    return rt.EnvGroup([says("a"), rt.EnvGroup([says("b"), says("c")], env_id="inner")])


def measured(run, phase, answer):
    return rt.evaluate(group(), ScriptedClient([answer]), num_examples=24, run=run, phase=phase)


def test_each_environment_has_its_reward_and_metrics(tmp_path):
    with Run.create(tmp_path / "run") as run:
        report = measured(run, "eval", "a")
        assert report.reward.mean == 1 / 3
        found = {name: own["reward"] for name, own in report.environments.items()}
        assert {name: (each.mean, each.num_examples) for name, each in found.items()} == {
            "a": (1.0, 8),
            "inner/b": (0.0, 8),
            "inner/c": (0.0, 8),
        }
        assert report.environments["inner/b"]["metrics"]["right"].mean == 0.0
        # Of the stored rollouts and of the kept aggregates alike.
        assert stored_report(run).environments == report.environments
        assert stored_report(run, outcomes=False).environments == report.environments
        numbers = eval_numbers(report.as_dict())
        assert numbers["eval/env/a/reward"] == numbers["eval/env/a/metrics/right"] == 1.0
        assert numbers["eval/env/a/reward_low"] < 1.0
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(evaluation_table(report))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line[:2] for line in lines if line[:1] in (["a"], ["inner/b"], ["inner/c"])] == [
        ["a", "1.000"],
        ["inner/b", "0.000"],
        ["inner/c", "0.000"],
    ]
    alone = rt.evaluate(says("a"), ScriptedClient(["a"]), num_examples=2)
    assert alone.environments == {}
    assert "env" not in alone.as_dict()


def test_two_evaluations_are_compared_in_each_environment(tmp_path):
    with Run.create(tmp_path / "run") as run:
        before, after = measured(run, "first", "b"), measured(run, "last", "a")
        for step, phase, report in ((0, "first", before), (9, "last", after)):
            run.add_event("evaluation", {"phase": phase, "metrics": report.as_dict()}, step=step)
        found = {name: each.verdict for name, each in compare_environments(before, after).items()}
        assert found == {"a": "higher", "inner/b": "lower", "inner/c": "noise"}
        assert "env/inner/b/metric/right" in measure_names((before, after))
        own = compare_reports(before, after, measure="env/inner/b/metric/right").difference
        assert (own.mean, own.num_examples) == (-1.0, 8)
        gain = held_out_gain(run)
        assert gain["verdict"] == "noise"
        assert {name: each["verdict"] for name, each in gain["environments"].items()} == found
