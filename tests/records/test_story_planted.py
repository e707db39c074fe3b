"""Every detector finds its planted run and leaves its healthy neighbour alone.

The runs are those of `benchmarks/planted`, which `benchmarks/story.py` counts.
"""

import pytest

import rolltree as rt
from bench_kit import load
from rolltree.narrator.detectors import DETECTORS

load("story")

import planted  # noqa: E402  the benchmark's folder is on the path from here on
from planted import trained, written  # noqa: E402


def alarms(path):
    with rt.read_run(path) as data:
        return planted.kinds_of_alarms(data.story())


def test_every_detector_names_runs_that_exist():
    never_alarm = {kind for kind, each in DETECTORS.items() if each.severity == "info"}
    assert DETECTORS.keys() ^ planted.RUNS.keys() == never_alarm
    for kind, (planted_run, neighbour) in planted.RUNS.items():
        assert kind in written.FAULTS[planted_run].kinds
        assert neighbour in written.HEALTHY
    assert len(written.FAULTS) + len(trained.FAULTS) >= 30
    assert len(written.HEALTHY) + len(trained.HEALTHY) >= 30


@pytest.mark.parametrize("name", written.FAULTS)
def test_a_planted_fault_is_named(tmp_path, name):
    fault = written.FAULTS[name]
    assert alarms(written.write(tmp_path / "run", fault.course)) & set(fault.kinds)


@pytest.mark.parametrize("name", written.HEALTHY)
def test_a_healthy_run_is_not_accused(tmp_path, name):
    assert alarms(written.write(tmp_path / "run", written.HEALTHY[name])) == set()


@pytest.mark.long
@pytest.mark.parametrize("name", [*trained.FAULTS, *trained.HEALTHY])
def test_a_trained_run_is_told_rightly(tmp_path, name):
    if name in trained.FAULTS:
        fault = trained.FAULTS[name]
        assert alarms(trained.train(tmp_path / "run", fault.run)) & set(fault.kinds)
    else:
        found = alarms(trained.train(tmp_path / "run", trained.HEALTHY[name]))
        assert found <= planted.CLOCKED
