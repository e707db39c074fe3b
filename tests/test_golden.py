"""Committed runs are read and continued: what a version stored stays what it was."""

import asyncio
import hashlib
import json
import sqlite3
from dataclasses import asdict

import pytest
from click.testing import CliRunner

import rolltree as rt
from golden import make_runs
from golden.pack import EXPECTED, ROOT
from golden_kit import REAL_RUNS, RUNS, SCHEMAS, unpack
from rolltree.cli import app
from rolltree.evaluation import stored_report
from rolltree.inference.models import make_tiny
from rolltree.rollouts.decode import decode_results, export_line
from rolltree.store import Run, list_runs, schema, summarize, to_plain
from rolltree.testing import ScriptedServer
from rolltree.training import fork_run

EVERY_RUN = [f"{version}/{name}" for version in SCHEMAS for name in RUNS]
SCOPES = ("step", "turn", "interleave", "tree")


def version_of(path):
    connection = sqlite3.connect(path / "run.db")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return version


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def as_then(found, line):
    """Return what a line has today, without the keys that came since."""
    if isinstance(line, dict):
        return {key: as_then(found[key], value) for key, value in line.items()}
    if isinstance(line, list) and isinstance(found, list) and len(found) == len(line):
        return [as_then(*pair) for pair in zip(found, line, strict=True)]
    return found


def expected_lines(path):
    """Compare a run's rollouts with what its own version read, and return that."""
    expected = [json.loads(line) for line in (path / EXPECTED).read_text().splitlines()]
    with Run.open(path, "r") as run:
        for row, line in zip(run.rollouts(), expected, strict=True):
            found = json.loads(json.dumps(to_plain(export_line(row))))
            assert as_then(found, line) == line
    return expected


def read_everything(path):
    """Read a run in every way there is, and compare it with what its own version read."""
    expected = expected_lines(path)
    with Run.open(path, "r") as run:
        phases = {line["phase"] for line in expected}
        for result in decode_results(run.rollouts()):
            for state in result.states:
                calls = sum(len(step["tokens"]["completion_ids"]) for step in state["trajectory"])
                for scope in SCOPES if calls else ():
                    built = rt.build_samples([state], scope)
                    assert sum(len(sample.records.target) for sample in built.samples) == calls
        assert run.query("SELECT count(*) AS n FROM rollouts") == [{"n": len(expected)}]
        assert list(run.columns(["reward"])) == [(line["reward"],) for line in expected]
        assert all(row.metrics for row in run.steps())
        assert {event.step for event in run.events("evaluation")} <= {0, 2, 4}
    shown = invoke("show", path)
    for phase in phases:
        assert phase in shown
        assert "{'name'" not in invoke("show", path, "--phase", phase, "--transcripts", 0)
        invoke("show", path, "--phase", phase, "--transcripts", 2)
    invoke("show", path, "--failed", "--transcripts", 9)
    assert str(path) in invoke("runs", path.parent).replace("\n", "")
    report = rt.audit(path)
    assert report.ok, report.findings
    invoke("data", path, "tokens", "--json")
    invoke("export", path, path.parent / "all.jsonl")
    assert (path.parent / "all.jsonl").read_text().count("\n") == len(expected)


def test_the_schema_has_its_runs():
    assert SCHEMAS[-1] == schema.SCHEMA_VERSION


@pytest.mark.parametrize("name", EVERY_RUN)
def test_every_reader_reads_it_and_leaves_it_as_it_is(name, tmp_path):
    path = unpack(name, tmp_path / "runs" / "it")
    before = hashlib.sha256((path / "run.db").read_bytes()).digest()
    assert version_of(path) == int(name.partition("/")[0])
    read_everything(path)
    assert hashlib.sha256((path / "run.db").read_bytes()).digest() == before


@pytest.mark.parametrize("version", SCHEMAS)
def test_what_training_knew_of_its_tokens(version, tmp_path):
    path = unpack(f"{version}/train", tmp_path / "it")
    with Run.open(path, "r") as run:
        found = {(row.step, row.request_id): row for row in run.trained()}
        whole = {row.request_id for row in run.rollouts(phase="train", status="ok", blobs=False)}
    assert {step for step, _ in found} == {1, 2, 3, 4}
    assert {request_id for _, request_id in found} == whole
    for row in found.values():
        assert len(row.advantage) == row.num_sampled.sum() > 0
        assert (row.weight > 0).all()


@pytest.mark.parametrize("name", [name for name in EVERY_RUN if name.endswith("train")])
def test_a_writer_changes_nothing_that_readers_read(name, tmp_path):
    path = unpack(name, tmp_path / "it")
    with Run.open(path, "r") as reader:
        before = list(reader.columns(["request_id", "reward"]))
        with Run.open(path) as run:
            assert version_of(path) == schema.SCHEMA_VERSION
            assert list(run.columns(["request_id", "reward"])) == before
            run.add_event("notice", {"message": "by a later version"})
        assert list(reader.columns(["request_id", "reward"])) == before  # it was open all the time
        assert reader.num_rollouts() == len(before)
        assert reader.query("SELECT count(*) AS n FROM rollouts") == [{"n": len(before)}]
    expected_lines(path)


@pytest.mark.parametrize("name", [*(f"{v}/agents" for v in SCHEMAS), "delegation-evaluated"])
def test_sums_and_reports_give_one_mean_reward_where_rollouts_delegate(name, tmp_path):
    path = unpack(name, tmp_path / "it")
    found = []
    for mode in ("r", "w", "r"):
        with Run.open(path, mode) as run:
            for phase in summarize(run).phases:
                reports = [stored_report(run, phase.phase, outcomes=kept) for kept in (True, False)]
                means = [report.reward.mean for report in reports]
                assert means == pytest.approx([phase.mean_reward] * 2)
                assert run.kept_report(phase.phase) is not None  # a writer changes no rollouts
            found.append([asdict(part) for part in run.totals()])
        assert rt.audit(path).ok
    assert found[0] == found[1] == found[2]
    for part in found[0]:
        assert part["num_scored"] * 2 <= part["num_rollouts"] + 15  # all delegate but a few
    assert version_of(path) == schema.SCHEMA_VERSION


@pytest.mark.parametrize("version", SCHEMAS)
def test_training_goes_on(version, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = unpack(f"{version}/train", tmp_path / "runs" / "train")
    (tmp_path / "model").mkdir()
    make_tiny(tmp_path / "model", make_runs.TINY)
    with Run.open(path, "r") as run:
        before = run.steps()
    environment = make_runs.letters_environment()
    forked = fork_run("runs/train", num_steps=5, run_dir="runs/fork")
    report = rt.train(make_runs.TRAIN, environment=environment, num_steps=5, reporter=rt.Silent())
    assert len(report.metrics) == 5
    with Run.open(path, "r") as run:
        assert run.steps()[:4] == before
        assert run.num_rollouts(phase="train") == 5 * 8
        assert {e.data["phase"] for e in run.events("evaluation")} >= {"eval_before", "eval_after"}
        assert forked.train.num_steps == 5
    again = rt.train(forked, environment=environment, reporter=rt.Silent())
    keys = ("reward/mean", "rollout/total_sampled_tokens")
    for key in [key for key in keys if key in again.metrics[4]]:
        assert again.metrics[4][key] == report.metrics[4][key]


@pytest.mark.parametrize("version", SCHEMAS)
def test_an_evaluation_goes_on(version, tmp_path, monkeypatch):
    path = unpack(f"{version}/tools", tmp_path / "tools")
    monkeypatch.chdir(ROOT)
    with ScriptedServer(make_runs.shopper, model="scripted") as server:
        command = make_runs.tools_command(server.base_url, str(path))
        invoke(*command)
        assert len(server.requests) == 2 * 3  # only what a server failed is played again
        command[command.index("-n") + 1] = "5"
        assert json.loads(invoke(*command, "--json"))["num_resumed"] == 8
        assert len(server.requests) == 4 * 3
    path = unpack(f"{version}/agents", tmp_path / "agents")
    client = make_runs.agents_client()
    monkeypatch.setattr(make_runs, "agents_client", lambda: client)
    with Run.open(path) as run:
        report = asyncio.run(make_runs.evaluate_agents(run))
        assert report.num_resumed == report.num_rollouts == 24
        assert not client.calls


@pytest.mark.parametrize("name", REAL_RUNS)
def test_the_runs_of_the_documentation_are_whole(name, tmp_path):
    path = unpack(name, tmp_path / "runs" / name)
    (found,) = list_runs(tmp_path)
    with Run.open(path, "r") as run:
        assert len(list(run.columns(["reward"]))) == sum(p.num_rollouts for p in found.phases)
        assert run.query("SELECT count(*) AS n FROM steps") == [{"n": found.num_steps}]
