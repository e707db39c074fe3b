"""`rolltree train` asked to stop, alone and under torchrun, each time continued by the other."""

import signal
import subprocess
import sys

import pytest
from test_cli_train import config, invoke, wait_for, what_it_holds  # noqa: F401  (a fixture)

from rolltree.cli.app import STOPPED_STATUS
from rolltree.store import Run, summarize

SETTINGS = ["optim.lr=1e-3", "checkpoint.every=1000", "eval.before=false", "eval.after=false"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]


def num_steps(path):
    with Run.open(path, mode="r") as run:
        return len(list(run.steps()))


@pytest.mark.long
def test_sigterm_saves_and_any_number_of_ranks_continues(config, tmp_path):  # noqa: F811
    words = ["train", str(config), *SETTINGS]
    done = 0
    for launcher, status in (([], STOPPED_STATUS), (TORCHRUN, 1)):  # torchrun's own is always 1
        process = subprocess.Popen(
            [sys.executable, "-m", *launcher, "rolltree", *words, "train.num_steps=5000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(tmp_path / "run", lambda run, done=done: len(list(run.steps())) >= done + 2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert errors.count("stopped by SIGTERM; progress is saved.") == 1
        assert process.returncode == status, errors
        assert f"step {done + 1}/" in errors
        assert f"step {done}/" not in errors
        done = num_steps(tmp_path / "run")
        with Run.open(tmp_path / "run", mode="r") as run:
            seen = summarize(run)
        assert (seen.state, seen.num_planned_steps) == ("stopped", 5000)
        latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
        assert latest.strip() == f"step-{done:06d}"

    more = f"train.num_steps={done + 2}"
    continued = invoke(*words, more)
    assert continued.exit_code == 0, continued.output
    assert f"step {done}/" not in continued.stderr
    whole = invoke(*words, more, f"run.dir={tmp_path / 'whole'}")
    assert whole.exit_code == 0, whole.output
    (rows, steps), (rows_again, steps_again) = (
        what_it_holds(tmp_path / name) for name in ("whole", "run")
    )
    # what was sampled for the step that SIGTERM interrupted is stored, and used
    assert [row for row in rows_again if row in rows] == rows
    assert len(steps) == len(steps_again) == done + 2
    for step, again in zip(steps, steps_again, strict=True):
        assert step == pytest.approx(again, rel=1e-3, abs=1e-4)
