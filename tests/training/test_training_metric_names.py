"""The table of metrics lists what runs log, all of it and nothing else; so does docs/metrics.md."""

import re
from pathlib import Path

import pytest
from loop_kit import make_config, start
from test_training_metrics import ERROR, result, step

import rolltree
from golden import outputs
from golden_kit import SCHEMAS, unpack
from rolltree.evaluation import build_report
from rolltree.store import Run, StoredRollout
from rolltree.store.metric_names import eval_numbers
from rolltree.store.metric_table import metric_of, metric_rows
from rolltree.training.metrics import rollout_metrics

LISTED = metric_rows()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


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
    mixed = [result(n, float(n), [], group=name, task=name) for n, name in enumerate("aabb")]
    for each in mixed:
        each.states[0]["metrics"] = {"found": 1.0}
    names |= set(rollout_metrics(mixed, ["a", "b"]))
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
    return eval_numbers(build_report(rows, environments=["t", "other"]).as_dict())


def test_all_metrics_are_listed_and_all_listed_ones_exist(logged):
    listed = [name for name in LISTED if not name.startswith("eval/")]
    missing = [n for n in sorted(logged) if not any(pattern(each).fullmatch(n) for each in listed)]
    assert missing == []
    source = "".join(
        path.read_text() for path in (Path(rolltree.__file__).parent / "training").glob("*.py")
    )
    for name in listed:
        seen = any(map(pattern(name).fullmatch, logged))
        assert seen or f'"{name.partition("<")[0]}' in source, f"nothing logs {name}"


def test_the_page_shows_every_section_as_the_table_has_it():
    page = PAGE.read_text(encoding="utf-8")
    shown = [block["name"] for block in outputs.TABLE.finditer(page)]
    assert sorted(shown) == sorted({metric.section for metric in LISTED.values()})
    assert outputs.with_tables(page) == page, "`make docs` writes today's metrics"


def test_a_name_with_parts_finds_its_row():
    nested = metric_of("eval/env/a/b/reward")
    assert (nested.label, nested.chart) == ("reward of a/b, held out", "reward of a/b")
    assert metric_of("eval/pass@16_low").bounds == (0.0, 1.0)
    assert metric_of("env/a/metrics/x_share").bounds[0] < 0, "an environment's own numbers are free"
    assert metric_of("reward/mean") is LISTED["reward/mean"]
    assert metric_of("reward/median") is None


def test_the_metrics_of_an_evaluation_are_listed():
    listed = [pattern(name) for name in LISTED if name.startswith("eval/")]
    found = evaluation()
    assert [name for name in found if not any(each.fullmatch(name) for each in listed)] == []
    assert [each for each in listed if not any(map(each.fullmatch, found))] == []


@pytest.mark.parametrize("version", SCHEMAS)
def test_runs_of_every_schema_are_read_with_the_listed_names(version, tmp_path):
    listed = [pattern(name) for name in LISTED]
    with Run.open(unpack(f"{version}/train", tmp_path / "run"), "r") as run:
        names = {name for step in run.steps() for name in step.metrics}
        names |= {name for done in run.evaluations() for name in done.numbers}
    assert {"reward/mean", "time/step", "eval/reward"} <= names
    assert [name for name in names if not any(each.fullmatch(name) for each in listed)] == []


def test_a_tracker_that_makes_files_of_names_can_hold_all(logged):
    """MLflow's file store keeps a name as a path: no name may lie below another."""
    names = logged | set(evaluation())
    assert [n for n in names if any(other.startswith(f"{n}/") for other in names)] == []
