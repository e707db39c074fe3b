"""A training run on a group of environments: each has its own numbers, in every place."""

from loop_kit import make_config

import rolltree as rt
from rolltree.insight.page.curves import run_curves
from rolltree.store import Run


def short(completion):
    return float(len(completion[-1]["content"]) < 3)


def task(name, num):
    rows = [{"question": f"{name} {n}"} for n in range(num)]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([short]), env_id=name)


def test_the_steps_and_evaluations_of_a_run_have_the_numbers_of_each_environment(model, tmp_path):
    group = rt.EnvGroup([task("a", 40), task("b", 40)])
    config = make_config(
        model,
        tmp_path / "run",
        env={"id": group.env_id},
        algorithm={"groups_per_step": 6, "group_size": 2},
        train={"num_steps": 2},
        eval={"num_examples": 6, "before": True, "after": True},
    )
    report = rt.train(config, environment=group)
    both = {f"env/{name}/{of}" for name in "ab" for of in ("reward/mean", "metrics/short")}
    assert both <= report.metrics[0].keys() | report.metrics[1].keys()
    with Run.open(tmp_path / "run", mode="r") as run:
        for done in run.evaluations():
            assert {each["num_examples"] for each in done.metrics["tasks"].values()} == {3}
            assert {"eval/env/a/reward", "eval/env/b/metrics/short"} <= done.numbers.keys()
        series = [each for each in run_curves(run)["series"] if each["group"] == "Environments"]
        labels = {each["name"]: each["label"] for each in series}
        assert labels["env/a/reward/mean"] == "reward of a in training"
        assert labels["eval/env/b/reward"] == "reward of b, held out"
        assert "env/a/reward/low" not in labels
    assert rt.audit(tmp_path / "run").findings == ()
