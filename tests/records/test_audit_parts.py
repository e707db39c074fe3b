"""An audit that is shared among processes finds what one process finds."""

from dataclasses import replace

import pytest
from corrupt_kit import Corrupter

import rolltree as rt
from golden_kit import unpack
from rolltree.records.auditing import parts


def found_in_parts(path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST_PART", 8)
    monkeypatch.setattr(parts.os, "sched_getaffinity", lambda pid: {0, 1})
    calls = []
    whole = parts.RolloutPass.check_in_parts
    monkeypatch.setattr(
        parts.RolloutPass, "check_in_parts", lambda *args: calls.append(args) or whole(*args)
    )
    report = rt.audit(path)
    assert calls
    return replace(report, elapsed_s=0.0)


@pytest.mark.parametrize("name", ["4/train", "4/agents"])
def test_a_clean_run(name, tmp_path, monkeypatch):
    path = unpack(name, tmp_path / "run")
    alone = replace(rt.audit(path), elapsed_s=0.0)
    assert alone.ok
    assert found_in_parts(path, monkeypatch) == alone


def test_a_run_with_faults_in_every_part(tmp_path, monkeypatch):
    path = unpack("4/train", tmp_path / "run")
    corrupter = Corrupter(path)
    ids = corrupter.ids("phase = 'train'")
    for request_id in (ids[0], ids[-1]):
        corrupter.edit(request_id, reward=0.123)
    corrupter.copy(ids[0], "train/000001/g99/0")
    alone = replace(rt.audit(path), elapsed_s=0.0)
    assert len(alone.findings) > 3
    assert found_in_parts(path, monkeypatch) == alone


def test_a_damaged_row_of_one_part(tmp_path, monkeypatch):
    path = unpack("4/train", tmp_path / "run")
    corrupter = Corrupter(path)
    corrupter.flip(corrupter.ids()[-1])
    (finding,) = found_in_parts(path, monkeypatch).findings
    assert (finding.check, finding.cause) == ("storage", "damaged")
