"""`rolltree runs`, `show` and `export` on stored runs: no model, no environment, no torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import rolltree as rt
from rolltree.cli import app
from rolltree.evaluation.report import keep_report, stored_report
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, StoredRollout
from rolltree.store.database import Database
from rolltree.tokens import Trajectory
from rolltree.values.errors import ServerError, record_error
from rolltree.values.types import FinishReason, ModelResponse, RolloutRequest, RolloutResult, State


def rollout(phase, example, *, reward=1.0, error=None, train_step=None, answer="12"):
    given = {
        "prompt": [{"role": "user", "content": f"{example} + 5 ="}],
        "example_id": example,
        "task": "add",
    }
    request = RolloutRequest(
        request_id=f"{phase}/{example}", env_id="add", input=given, seed=0, sampling_seed=0,
        group_id="g", index_in_group=0, phase=phase, train_step=train_step,
    )  # fmt: skip
    trajectory = Trajectory()
    message = {"role": "assistant", "content": answer}
    trajectory.append_call(
        prompt=given["prompt"],
        completion=[message],
        response=ModelResponse(
            message=message,
            text=answer,
            finish_reason=FinishReason.STOP,
            prompt_ids=np.arange(6, dtype=np.int32),
            completion_ids=np.array([8, 9], dtype=np.int32),
            logprobs=np.array([-0.5, -0.25], dtype=np.float32),
            versions=np.zeros(2, dtype=np.int32),
            temperature=1.0,
            call_id=0,
        ),
    )
    state = State(
        input=given, trajectory=trajectory, completion=[message], reward=reward, error=error,
        metrics={"length": 2.0},
    )  # fmt: skip
    return encode_result(RolloutResult(request, (state,), error))


@pytest.fixture
def path(tmp_path):
    where = tmp_path / "runs" / "mine"
    with Run.create(where, config={"model": {"name": "tiny"}}, kind="train") as run:
        run.add_rollouts(rollout("eval_before", 0, reward=0.0, answer="seven"))
        run.add_event("evaluation", {"phase": "eval_before"}, step=0)
        for step in (1, 2):
            run.add_rollouts(rollout("train", step, reward=step / 2, train_step=step))
            run.add_step(step, {"reward/mean": step / 2})
        failure = record_error(ServerError("it broke \x1b[2J", status=500, retryable=True), "model")
        run.add_rollouts(rollout("train", 9, reward=None, error=failure, train_step=2))
    return where


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_runs(path):
    first, second, health = invoke("runs", path.parent).splitlines()
    assert first == str(path)
    assert second.startswith("  unknown, 0.")
    for text in ("train", "add", "2 steps", "eval_before 0.000", "train 0.750"):
        assert text in second
    with rt.read_run(path) as data:
        assert health.lstrip(" !") == data.story()[0]["text"]
    (path.parent / "broken").mkdir()
    (path.parent / "broken" / "run.db").write_text("no database")
    assert len(invoke("runs", path.parent).splitlines()) == 3  # what is not a run is skipped


def test_show_a_training_run(path):
    out = invoke("show", path)
    assert "mean reward, add" in out  # the curve
    assert "eval_before" in out
    assert "seven" in out  # the first rollout
    assert out.count("user ") == 1


def test_show_a_phase(path):
    out = invoke("show", path, "--phase", "train", "--transcripts", 2)
    assert "0.750" in out
    assert "1 (33%, not in the means)" in out
    assert "1 x ServerError" in out
    assert "1 + 5 =" in out
    assert "seven" not in out


def test_show_failures_without_their_escape_codes(path):
    out = invoke("show", path, "--failed", "--transcripts", 5)
    assert "ServerError: it broke ␛[2J" in out
    assert "\x1b[2J" not in out
    assert "1 + 5 =" not in out


def test_show_cuts_long_messages(path):
    out = invoke("show", path, "--limit", 3)
    assert "sev … (2 more)" in out


def test_show_chosen_rollouts(path):
    out = invoke("show", path, "--step", 2, "--transcripts", 5)
    assert "2 rollouts: step 2" in out
    assert "2 + 5 =" in out
    assert "1 + 5 =" not in out
    assert invoke("show", path, "--step", -1, "--transcripts", 5) == out
    out = invoke("show", path, "--sort", "-reward", "--transcripts", 2)
    assert out.index("2 + 5 =") < out.index("1 + 5 =")
    assert "4 rollouts: reward, the greatest first" in out
    assert "seven" in invoke("show", path, "--sort", "reward")  # what has no reward comes last
    assert "it broke" in invoke("show", path, "--last")
    out = invoke("show", path, "--where", "reward < 0.8", "--where", "phase=train")
    assert "1 rollout: reward < 0.8 and phase=train" in out
    assert "1 + 5 =" in out


def test_show_tells_what_happened_and_what_came_out(path):
    first, *advice = invoke("show", path).splitlines()[:2]
    assert (first[0], advice[0][:8]) == ("!", "    They")
    assert advice[0].endswith("(rolltree docs first-hour#something-fails)")
    lines = [line for line in invoke("show", path).splitlines() if line[:4] != "    "]
    assert "! 33 % of rollouts failed: 1 with ServerError (model)." in lines[:2]
    assert "reward 1.000 (step 2)  4 rollouts  1 failed: ServerError 1" in lines[2]
    assert "of rollouts failed" not in invoke("show", path, "--phase", "train")
    data = json.loads(invoke("show", path, "--json"))
    with rt.read_run(path) as stored:
        assert data["story"] == stored.story()
    assert [each["text"] for each in data["story"]] == [line[2:] for line in lines[:2]]
    assert data["reward"] == {"mean": 1.0, "low": None, "high": None, "of": "step 2"}
    assert data["failures"] == {"ServerError": 1}


def test_runs_json(path):
    (found,) = json.loads(invoke("runs", path.parent, "--json"))
    shown = json.loads(invoke("show", path, "--json"))
    assert found.pop("health") == shown["story"][0]
    assert found == {name: shown[name] for name in found} | {"age_s": found["age_s"]}


def test_a_transcript_says_what_was_paid_for(path):
    assert "(weights not recorded)" in invoke("show", path)
    parts = [{"task": "", "agent": "", "functions": [["length", 0.25], ["other", 0.0]]}]
    with Run.open(path) as run:
        run.set_meta("reward_weights", [{"env_id": "add", "since": 0.0, "parts": parts}])
    out = invoke("show", path, "--where", "reward=1")
    assert [line.split() for line in out.splitlines() if "length" in line] == [
        ["│", "length", "2", "0.25", "0.5", "│"]
    ]
    assert "not by a function" in out
    assert "weights not recorded" not in out
    (row,) = json.loads(invoke("show", path, "--where", "reward=1", "--json"))["rollouts"]
    assert row["rewards"] == {
        "is_recorded": True,
        "functions": [{"name": "length", "value": 2.0, "weight": 0.25, "contribution": 0.5}],
        "rest": 0.5,
        "metrics": {},
    }


def test_show_json(path):
    data = json.loads(invoke("show", path, "--where", "reward > 0.4", "--transcripts", 9, "--json"))
    assert [phase["phase"] for phase in data["phases"]] == ["eval_before", "train"]
    assert [row["reward"] for row in data["rollouts"]] == [0.5, 1.0]
    assert data["rollouts"][0]["completion"] == [{"role": "assistant", "content": "12"}]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_show_does_not_check_the_whole_file(path, monkeypatch, words):
    """Each row that is shown is checked; checking all others takes seconds in a large run."""
    checked = []
    monkeypatch.setattr(Database, "check", lambda database: checked.append(database._check_file))
    invoke("show", path, *words)
    assert True not in checked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "has no training rollouts of step 7; it has them for steps 1 to 2"),
        (["--phase", "trian"], "Did you mean 'train'"),
        (["--sort", "rewrad"], "Did you mean 'reward'"),
        (["--sort", ""], "cannot be sorted by ''"),
        (["--last", "--sort", ""], "choose one"),
        (["--transcripts", "0", "--sort", "rewrad"], "Did you mean 'reward'"),
        (["--where", "reward <"], "Write conditions like"),
        (["--last", "--sort", "reward"], "choose one"),
    ],
)
def test_show_mistakes(path, words, said):
    result = CliRunner().invoke(app, ["show", str(path), *words])
    assert result.exit_code == 2
    assert said in result.stderr


def test_export(path, tmp_path):
    assert "wrote 4 rollouts" in invoke("export", path, tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["eval_before", "train", "train", "train"]
    tokens = lines[0]["trajectory"][0]["tokens"]
    assert tokens == {
        "prompt_ids": [0, 1, 2, 3, 4, 5],
        "prompt_mask": [0, 0, 0, 0, 0, 0],
        "completion_ids": [8, 9],
        "completion_mask": [1, 1],
        "completion_logprobs": [-0.5, -0.25],
    }
    assert lines[3]["errors"][0]["type"] == "ServerError"
    assert lines[3]["reward"] is None
    assert "wrote 3" in invoke("export", path, tmp_path / "train.jsonl", "--phase", "train")


NOT_TO_SHOW = ["torch", "pydantic", "asyncio", "rolltree.inference"]
NOT_TO_CHOOSE = [*NOT_TO_SHOW, "numpy", "rolltree.tokens"]
"""Half of the time of `rolltree show` was importing these; only the story reads tokens."""


@pytest.mark.parametrize("words", [[], ["--phase", "eval_before"], ["--failed"]])
def test_reading_imports_little_and_works_while_the_run_is_written(path, words):
    unwanted = NOT_TO_CHOOSE if words else NOT_TO_SHOW
    program = (
        "import sys; from rolltree.cli import app\n"
        f"sys.argv = {['rolltree', 'show', str(path), *words]}\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('LOADED', sorted(set({unwanted}) & set(sys.modules)))"
    )
    with Run.open(path):  # somebody holds the run
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100"},
        )
    assert done.stdout.splitlines()[-1] == "LOADED []"
    assert "mean reward, add" in done.stdout
    assert "ending" in done.stdout  # of a transcript


@pytest.mark.parametrize("record", [b"not JSON", b"[]", b"{}", b'{"version": 1, "table": 3}'])
def test_a_record_that_rolltree_did_not_write_is_one_sentence(tmp_path, record):
    with Run.create(tmp_path) as run:
        run.add_rollouts([StoredRollout(request_id="by hand", record=record)])
    result = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: rollout 'by hand' has a record that rolltree did not write")
    assert "mean reward" in result.stdout


def test_an_evaluation_is_shown_from_its_report(tmp_path, monkeypatch):
    with Run.create(tmp_path) as run:
        run.add_rollouts([row for i in range(3) for row in rollout("eval", i, reward=i / 2)])
        keep_report(run, stored_report(run))
    shown = invoke("show", tmp_path, "--phase", "eval", "--transcripts", "0")
    assert "3 over 3 examples" in shown
    monkeypatch.setattr("rolltree.evaluation.report._kept", lambda *_: None)
    assert invoke("show", tmp_path, "--phase", "eval", "--transcripts", "0") == shown
