"""Clean runs pass the audit: every golden run, the demo and a run of several agents."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import rolltree as rt
from golden_kit import RUNS, SCHEMAS, unpack
from rolltree.cli import app


@pytest.mark.parametrize(
    "name", [*(f"{v}/{run}" for v in SCHEMAS for run in RUNS), "demo", "delegation"]
)
def test_nothing_is_wrong(name, tmp_path):
    report = rt.audit(unpack(name, tmp_path / "run"))
    assert report.findings == ()
    assert report.ok
    assert report.num_rollouts > 0
    assert report.num_sampled_tokens > 0


def test_the_command_prints_the_checks_and_loads_no_torch(tmp_path):
    path = unpack("4/train", tmp_path / "run")
    program = (
        "import sys; from rolltree.cli import app\n"
        f"app(['audit', {str(path)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "nothing is wrong" in done.stdout
    assert done.stdout.endswith("False\n")


def test_json_is_the_report(tmp_path):
    path = unpack("4/agents", tmp_path / "run")
    done = CliRunner().invoke(app, ["audit", str(path), "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["ok"]
    assert said["num_rollouts"] == rt.audit(path).num_rollouts
    assert {check["name"] for check in said["checks"]} == set(rt.records.CHECKS)


def test_what_cannot_be_opened_is_a_message(tmp_path):
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert done.exit_code == 1
    assert "is not a run directory" in done.output
    path = unpack("4/agents", tmp_path / "run")
    done = CliRunner().invoke(app, ["audit", str(path), "--tokenizer", str(tmp_path)])
    assert done.exit_code == 2
    assert "tokenizer.json" in done.output
