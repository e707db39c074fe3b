"""Every ready-made environment answers recorded rollouts as it answered them before."""

import pytest

from bench_kit import load

replay = load("replay")
SLOW = {"python_tools": 3, "textarena": 5}  # the benchmark replays 100 of these, too
SLOW |= dict.fromkeys(("gym", "math", "reasoning_gym", "tic_tac_toe", "wordle"), 10)


@pytest.mark.parametrize("name", replay.NAMES)
def test_recorded_rollouts_replay_equal(name, tmp_path):
    for package in ("reasoning_gym", "gymnasium", "textarena"):
        if name == package or (name, package) == ("gym", "gymnasium"):
            pytest.importorskip(package)
    num = SLOW.get(name, 100)
    reports, _ = replay.record_and_replay(name, num, tmp_path / "run")
    assert [report.difference for report in reports] == [None] * num
    assert not any(report.stopped for report in reports)
    assert sum(report.num_replayed for report in reports) >= len(reports)
    if num == 100:
        states = [state for report in reports for state in report.live.states]
        assert len({state["reward"] for state in states}) > 1  # right and wrong ones
