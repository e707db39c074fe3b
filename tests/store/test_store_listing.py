"""How a run ended and how far it is, told without reading its rollouts."""

import contextlib
import os
import subprocess
import sys

import pytest

from rolltree.store import Run, StoredRollout, list_runs, summarize
from rolltree.values.errors import Stopped, StoreError


def rollouts(num, phase="eval"):
    return [StoredRollout(request_id=f"{phase}/{i}", env_id="e", phase=phase) for i in range(num)]


def found(path):
    with Run.open(path, mode="r") as run:
        return summarize(run)


def evaluated(path, num, *, planned=4, error=None):
    """Store `num` of `planned` rollouts, and leave the run as `error` says."""
    try:
        with Run.open_or_create(path, config={}, kind="eval") as run:
            run.plan("phase/eval", planned)
            run.add_rollouts(rollouts(num))
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    return found(path)


@pytest.mark.parametrize(
    "config",
    [{"train": {"num_steps": "many"}}, {"train": {"num_steps": -5}}, {"train": 5, "eval": "x"}],
)
def test_settings_of_wrong_types_plan_nothing(tmp_path, config):
    with Run.create(tmp_path / "run", config=config, kind="train") as run:
        run.add_step(1, {})
    assert (found(tmp_path / "run").num_planned_steps, found(tmp_path / "run").state) == (
        *(None, "unknown"),
    )


class TestState:
    def test_a_run_that_is_written_is_running(self, tmp_path):
        with Run.create(tmp_path / "run", kind="eval") as run:
            run.add_rollouts(rollouts(1))
            seen = found(tmp_path / "run")
            assert seen.state == "running"
            assert seen.writer.startswith(f"process {os.getpid()} on ")
        assert found(tmp_path / "run").state == "unknown"  # nobody said how many there are to be

    def test_looking_at_a_run_does_not_keep_a_writer_out(self, tmp_path):
        """A thousand looks while a writer starts again and again."""
        Run.create(tmp_path / "run").close()
        program = (
            "import sys; from rolltree.store.database import WriterLock; from pathlib import Path\n"
            "print('ready', flush=True)\n"
            "while True: WriterLock.holder(Path(sys.argv[1]))"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "run" / "run.lock")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as looker:
            looker.stdout.readline()
            try:
                for _ in range(100):
                    Run.open(tmp_path / "run").close()
            finally:
                looker.kill()

    def test_two_writers_are_refused_all_the_same(self, tmp_path):
        with Run.create(tmp_path), pytest.raises(StoreError, match="is being written by process"):
            Run.open(tmp_path)

    def test_everything_planned_is_there(self, tmp_path):
        assert evaluated(tmp_path, 4).state == "done"
        more = evaluated(tmp_path, 4, planned=8)  # continued with more examples
        assert (more.state, more.phases[0].num_planned) == ("killed", 8)

    @pytest.mark.parametrize(
        ("error", "state"),
        [
            (None, "killed"),
            (KeyboardInterrupt(), "stopped"),
            (Stopped("SIGTERM"), "stopped"),
            (ValueError("no\nsuch thing"), "failed"),
        ],
    )
    def test_how_it_ended(self, tmp_path, error, state):
        seen = evaluated(tmp_path, 2, error=error)
        assert seen.state == state
        assert seen.error == ("ValueError: no\nsuch thing" if state == "failed" else None)
        with Run.open_or_create(tmp_path, config={}, kind="eval") as run:  # goes on: not yet over
            run.add_rollouts(rollouts(3))
        assert found(tmp_path).state == "killed"
        assert evaluated(tmp_path, 4, error=error).state == "done"

    def test_secrets_are_not_in_the_error(self, tmp_path):
        with contextlib.suppress(ValueError), Run.create(tmp_path) as run:
            run.protect("hunter2hunter2")
            raise ValueError("the key hunter2hunter2 is wrong")
        assert "hunter2" not in found(tmp_path).error

    @pytest.mark.parametrize(
        ("num_steps", "events", "state"),
        [
            (3, (), "killed"),
            (4, ("evaluation_begun",), "killed"),
            (4, ("evaluation_begun", "evaluation"), "done"),
        ],
    )
    def test_training(self, tmp_path, num_steps, events, state):
        config = {"train": {"num_steps": 4}, "eval": {"after": True}}
        with Run.create(tmp_path, config=config, kind="train") as run:
            run.add_event("evaluation", {"phase": "eval_before"}, step=0)
            for step in range(1, num_steps + 1):
                run.add_step(step, {"loss": 1.0})
            for kind in events:
                run.add_event(kind, {"phase": "eval_after"}, step=4)
        seen = found(tmp_path)
        assert (seen.state, seen.num_steps, seen.num_planned_steps) == (state, num_steps, 4)

    def test_a_run_that_goes_on_for_more_steps(self, tmp_path):
        with Run.create(tmp_path, config={"train": {"num_steps": 2}}, kind="train") as run:
            for step in (1, 2, 3):
                run.add_step(step, {})
        assert found(tmp_path).state == "done"
        with Run.open(tmp_path) as run:
            run.plan("steps", 5)  # its config keeps the 2 of its first start
        assert (found(tmp_path).state, found(tmp_path).num_planned_steps) == ("killed", 5)


def test_no_rollout_is_read(tmp_path, monkeypatch):
    evaluated(tmp_path / "a", 4)
    said = []
    real = Run.open

    def traced(*args, **options):
        run = real(*args, **options)
        run._database._connection.set_trace_callback(said.append)
        return run

    monkeypatch.setattr(Run, "open", traced)
    assert [run.state for run in list_runs(tmp_path)] == ["done"]
    assert said
    assert not [sql for sql in said if "rollouts" in sql.lower().partition("from")[2]]
