"""A trained store whose rewards are 0 and 1: each number is the same wherever it is told.

Beside `test_viewer_numbers`, which reads it off the drawn page, this one needs no browser.
"""

import json
import re
from statistics import fmean

import pytest
from click.testing import CliRunner

import rolltree as rt
from golden import make_runs
from rolltree.cli import app
from rolltree.evaluation import stored_report
from rolltree.inference.models import make_tiny
from rolltree.store import Run
from rolltree.values.estimate import estimate

pytestmark = pytest.mark.long  # it trains
PHASES = ("eval_before", "eval/000002", "eval_after", "train")


@rt.run_inline
def has_letter(completion):
    return float(any(c.isalpha() for m in completion[:1] for c in m["content"]))


@rt.run_inline
def share(completion):
    said = completion[0]["content"]
    return sum(c.isascii() for c in said) / (len(said) + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("numbers")
    (root / "model").mkdir()
    make_tiny(root / "model", make_runs.TINY)
    rows = [{"question": f"write {c}", "answer": c} for c in "abcdefgh"]
    rubric = rt.Rubric([has_letter])
    rubric.add_metric(share)
    env = make_runs.Letters(
        dataset=rows, eval_dataset=rows, rubric=rubric, max_turns=2, env_id="letters"
    )
    own = {
        "run": {"dir": str(root / "runs" / "real"), "seed": 3},
        "model": {"name": str(root / "model")},
        "eval": {"every": 2, "rollouts_per_example": 3},
    }
    rt.train(make_runs.TRAIN | own, environment=env, reporter=rt.Silent())
    return root / "runs"


@pytest.fixture(scope="module")
def page(start, folder):
    return start(folder)


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def ends(found):
    return {name: found[name] for name in ("mean", "low", "high")}


def right(found):
    return pytest.approx({"mean": found.mean, "low": found.low, "high": found.high}, rel=1e-9)


def by_example(rows, name):
    found = {}
    for row in rows:
        if row[name] is not None and row["status"] == "ok":
            found.setdefault(row["example_id"], []).append(row[name])
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_of_a_phase(page, folder, phase):
    with rt.read_run(folder / "real") as data:
        rows = list(data.rollouts(phase=phase).rows())
    told = {
        "page": page.get(f"/api/runs/real/evaluation?phase={phase}").json()["report"],
        "python": stored_report(Run.open(folder / "real", mode="r"), phase).as_dict(),
        "kept": stored_report(Run.open(folder / "real", mode="r"), phase, outcomes=False).as_dict(),
    }
    printed = command("show", folder / "real", "--phase", phase, "--transcripts", 0)
    reward = estimate(by_example(rows, "reward"))
    wanted = {
        "reward": reward,
        "has_letter": reward,
        "share": estimate(by_example(rows, "metrics/share")),
    }
    assert 0 < reward.mean < 1
    counts = {
        "num_rollouts": len(rows),
        "num_failed": sum(row["status"] == "error" for row in rows),
        "num_truncated": sum(row["truncated"] for row in rows),
        "num_examples": len({row["example_id"] for row in rows}),
    }
    lengths = (
        sum(row["num_completion_tokens"] for row in rows),
        fmean(row["num_completion_tokens"] for row in rows),
    )
    for where, found in told.items():
        assert ends(found["reward"]) == right(reward), where
        # A reward of 0 or 1 is its own chance to pass: one number, one interval.
        assert ends(found["pass_at"]["1"]) == right(reward), where
        for name in ("has_letter", "share"):
            assert ends(found["metrics"][name]) == right(wanted[name]), where
        assert {name: found[name] for name in counts} == counts, where
        usage = found["usage"]
        sampled = usage["num_completion_tokens"], usage["mean_num_completion_tokens"]
        assert sampled == pytest.approx(lengths), where
    text = {}
    for line in printed.splitlines():
        if match := re.match(r" *(\S+) +(\d\.\d{3}) +(\[.*?\]) ", line):
            text.setdefault(match[1], (match[2], match[3]))
    for name, value in {**wanted, "pass@1": reward}.items():
        said = f"[{value.low:.3f}, {value.high:.3f}]"
        assert text[name] == (f"{value.mean:.3f}", said), printed
    intervals = {each for mean, each in text.values() if mean == f"{reward.mean:.3f}"}
    assert len(intervals) == 1, printed
    (line,) = (
        each.split() for each in printed.splitlines() if each.split()[:2] == [phase, str(len(rows))]
    )
    assert line[2:5] == [
        f"{reward.mean:.3f}",
        str(counts["num_failed"]),
        str(counts["num_truncated"]),
    ]


def test_of_the_run(page, folder):
    with Run.open(folder / "real", mode="r") as run:
        reports = {phase: stored_report(run, phase) for phase in PHASES}
    after = reports["eval_after"]
    summary = page.get("/api/runs/real").json()
    shown = json.loads(command("show", folder / "real", "--json"))
    listed = page.get("/api/runs").json()["runs"]
    (ran,) = json.loads(command("runs", folder, "--json"))
    for found in (summary["reward"], shown["reward"], listed[0]["reward"], ran["reward"]):
        assert ends(found) == right(after.reward)
        assert found["of"] == "eval_after"
    for phases in (summary["phases"], shown["phases"]):
        found = {each["phase"]: each for each in phases}
        for phase, report in reports.items():
            each = {"mean": found[phase]["mean_reward"], **found[phase]}
            assert ends(each) == right(report.reward), phase
            assert found[phase]["num_truncated"] == report.num_truncated
    done = {each["phase"]: each["reward"] for each in summary["evaluations"]}
    assert {phase: ends(each) for phase, each in done.items()} == {
        phase: right(reports[phase].reward) for phase in PHASES[:3]
    }
    curves = {each["name"]: each for each in page.get("/api/runs/real/curves").json()["series"]}
    for name in ("eval/reward", "eval/pass@1"):
        each = {
            "mean": curves[name]["values"][-1],
            **{e: curves[name][e][-1] for e in ("low", "high")},
        }
        assert ends(each) == right(after.reward), name
    line = re.search(r"reward (.*?) \(eval_after\)", command("show", folder / "real"))
    assert line[1] == str(after.reward)


def test_of_a_step(page, folder):
    """The mean of a step is over its rollouts, with the group as the unit."""
    told = page.get("/api/runs/real/curves").json()
    curves = {each["name"]: each for each in told["series"]}
    with rt.read_run(folder / "real") as data:
        rows = list(data.rollouts(phase="train").rows())
        steps = {row["step"]: row for row in data.steps().rows()}
    for step in sorted(steps):
        at = told["steps"].index(step)
        mine = [row for row in rows if row["train_step"] == step]
        groups = {}
        for row in mine:
            if row["reward"] is not None:
                groups.setdefault(row["group_id"], []).append(row["reward"])
        metrics = steps[step]
        assert metrics["reward/mean"] == pytest.approx(
            fmean(value for group in groups.values() for value in group)
        )
        assert metrics["train/completions/mean_length"] == pytest.approx(
            fmean(row["num_completion_tokens"] for row in mine)
        )
        assert metrics["is_truncated/mean"] == pytest.approx(
            fmean(row["truncated"] for row in mine)
        )
        found = curves["reward/mean"]
        assert found["values"][at] == metrics["reward/mean"]
        if len({len(group) for group in groups.values()}) == 1 and len(groups) > 1:
            drawn = {e: found[e][at] for e in ("low", "high")} | {"mean": found["values"][at]}
            assert ends(drawn) == right(estimate(groups)), step


def test_of_a_comparison(page, folder):
    names = ["eval_before", "eval_after", "train"]
    arms = [f"{folder}/real:{phase}" for phase in names]
    shown = json.loads(command("compare", *arms, "--json"))
    told = {
        "python": json.loads(json.dumps(rt.compare(*arms).as_dict())),
        "page": page.get("/api/compare?" + "&".join(f"arm=real:{phase}" for phase in names)).json(),
    }
    with Run.open(folder / "real", mode="r") as run:
        reports = [stored_report(run, phase) for phase in names]
    for at, report in enumerate(reports):
        assert ends(shown["arms"][at]["rewards"][0]) == right(report.reward)
    for at, report in enumerate(reports[1:]):
        measures = shown["pairs"][at]["measures"]
        for measure in ("reward", "pass@1", "metric/has_letter"):
            # Over the examples of both arms, which are all of them.
            assert ends(measures[measure]["before"]) == right(reports[0].reward), measure
            assert ends(measures[measure]["after"]) == right(report.reward), measure
        share = report.num_truncated / report.num_rollouts
        assert measures["truncated"]["after"]["mean"] == pytest.approx(share, abs=0.05)
        for where, found in told.items():
            assert found["pairs"][at]["measures"] == measures, where
