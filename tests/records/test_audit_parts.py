"""An audit that is shared among processes finds what one process finds."""

from dataclasses import replace

import pytest
from corrupt_kit import Corrupter

import rolltree as rt
from golden_kit import unpack


def reports(path):
    """Audit a run alone and shared by two processes; return both reports without their times."""
    return [replace(rt.audit(path, num_processes=num), elapsed_s=0.0) for num in (1, 2)]


@pytest.mark.parametrize("name", ["4/train", "4/agents"])
def test_a_clean_run(name, tmp_path):
    alone, shared = reports(unpack(name, tmp_path / "run"))
    assert alone.ok
    assert shared == alone


def test_a_run_with_faults_in_every_part(tmp_path):
    path = unpack("4/train", tmp_path / "run")
    corrupter = Corrupter(path)
    ids = corrupter.ids("phase = 'train'")
    for request_id in (ids[0], ids[-1]):
        corrupter.edit(request_id, reward=0.123)
    corrupter.copy(ids[0], "train/000001/g99/0")
    alone, shared = reports(path)
    assert len(alone.findings) > 3
    assert shared == alone


def test_more_processes_than_rollouts(tmp_path):
    path = unpack("4/agents", tmp_path / "run")
    report = rt.audit(path, num_processes=1)
    shared = rt.audit(path, num_processes=report.num_rollouts + 1)
    assert replace(shared, elapsed_s=0.0) == replace(report, elapsed_s=0.0)


def test_a_damaged_row_of_one_part(tmp_path):
    path = unpack("4/train", tmp_path / "run")
    corrupter = Corrupter(path)
    corrupter.flip(corrupter.ids()[-1])
    for report in reports(path):
        (finding,) = report.findings
        assert (finding.check, finding.cause) == ("storage", "damaged")
