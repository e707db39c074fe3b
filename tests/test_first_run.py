"""A new user's script: define, evaluate, train, look, with names of `rolltree` only."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltree.store import Run

SCRIPT = Path(__file__).parents[1] / "examples" / "first_run.py"


@pytest.mark.long
def test_it_runs_and_the_same_command_continues(tmp_path):
    for steps in ("2", "3"):
        done = subprocess.run(
            [sys.executable, SCRIPT, "--run-dir", tmp_path / "run", "--num-steps", steps],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert "before training: 0." in done.stdout
        assert f"TrainReport({steps} steps, run {tmp_path / 'run'})" in done.stdout
        assert "eval_after: held-out reward" in done.stdout
    assert "continued at step 3" in done.stderr
    with Run.open(tmp_path / "run", "r") as run:
        assert [row.step for row in run.steps()] == [1, 2, 3]
        assert run.num_rollouts(phase="train") == 3 * 16
        assert run.num_rollouts(phase="eval_before") == 2


def test_it_needs_only_the_public_face():
    names = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(SCRIPT.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert names == {"__future__", "argparse", "rolltree"}
