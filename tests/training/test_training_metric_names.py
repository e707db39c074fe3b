"""docs/metrics.md lists what runs log: all of it, and nothing else."""

import re
from collections import Counter
from pathlib import Path

import pytest
from loop_kit import make_config, start
from test_training_metrics import ERROR, result, step

import docs_kit
import rolltree
from golden_kit import SCHEMAS, unpack
from rolltree.evaluation import build_report
from rolltree.store import Run, StoredRollout
from rolltree.store.metric_names import eval_numbers
from rolltree.training.metrics import rollout_metrics

PAGE = docs_kit.text_of("metrics.md")
LISTED = PAGE


def names_in(text):
    """Return the names in the first columns of the tables, `<...>` being anything."""
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    found = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [name for name in found if "/" in name]


def pattern(name):
    return re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name)))


@pytest.fixture(scope="module")
def logged(model, tmp_path_factory):
    """The names that a synchronous and an asynchronous run log, and rollouts made by hand."""
    folder = tmp_path_factory.mktemp("runs")
    algorithm = {"kl": "k3", "kl_coef": 0.01, "correction": "token_tis", "dynamic_sampling_max": 1}
    algorithm |= {
        "overlong_tokens": 4,
        "overlong_buffer": 2,
        "baseline": "ema",
        "name": "reinforce",
    }
    one = make_config(model, folder / "sync", train={"num_steps": 1}, algorithm=algorithm)
    two = make_config(model, folder / "async", train={"num_steps": 2, "async_steps": 1})
    names = {name for config in (one, two) for each in start(config).metrics for name in each}
    hurt = [result(0, 1.0, [step(3, 10)], metrics={"found": 1.0}), result(1, None, [], error=ERROR)]
    agents = [result(0, 0.0, [], agent="white"), result(1, 1.0, [], agent="black", group="h")]
    return names | set(rollout_metrics(hurt)) | set(rollout_metrics(agents))


def evaluation():
    """Return the metrics of an evaluation in which everything happened, as the loop stores them."""
    rows = [
        StoredRollout(
            request_id=f"{n}", example_id=n // 2, index_in_group=n % 2, task="t", **fields
        )
        for n, fields in enumerate(
            (
                {"reward": 1.0, "metrics": {"m": 1.0}, "stop_condition": "done"},
                {
                    "reward": 0.0,
                    "metrics": {"m": 0.0},
                    "truncated": True,
                    "truncation_reason": "max_turns",
                },
                {"reward": 0.0},
                {"status": "error", "error_type": "ServerError"},
            )
        )
    ]
    return eval_numbers(build_report(rows).as_dict())


def test_all_metrics_are_listed_and_all_listed_ones_exist(logged):
    listed = [name for name in names_in(LISTED) if not name.startswith("eval/")]
    assert [name for name, number in Counter(listed).items() if number > 1] == []
    missing = [n for n in sorted(logged) if not any(pattern(each).fullmatch(n) for each in listed)]
    assert missing == []
    source = "".join(
        path.read_text() for path in (Path(rolltree.__file__).parent / "training").glob("*.py")
    )
    for name in listed:
        seen = any(map(pattern(name).fullmatch, logged))
        assert seen or f'"{name.partition("<")[0]}' in source, f"nothing logs {name}"


def test_the_metrics_of_an_evaluation_are_listed():
    listed = [pattern(name) for name in names_in(LISTED) if name.startswith("eval/")]
    found = evaluation()
    assert [name for name in found if not any(each.fullmatch(name) for each in listed)] == []
    assert [each for each in listed if not any(map(each.fullmatch, found))] == []


@pytest.mark.parametrize("version", SCHEMAS)
def test_runs_of_every_schema_are_read_with_the_listed_names(version, tmp_path):
    listed = [pattern(name) for name in names_in(LISTED)]
    with Run.open(unpack(f"{version}/train", tmp_path / "run"), "r") as run:
        names = {name for step in run.steps() for name in step.metrics}
        names |= {name for done in run.evaluations() for name in done.numbers}
    assert {"reward/mean", "time/step", "eval/reward"} <= names
    assert [name for name in names if not any(each.fullmatch(name) for each in listed)] == []


def test_a_tracker_that_makes_files_of_names_can_hold_all(logged):
    """MLflow's file store keeps a name as a path: no name may lie below another."""
    names = logged | set(evaluation())
    assert [n for n in names if any(other.startswith(f"{n}/") for other in names)] == []
