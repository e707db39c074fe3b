"""The engine benchmark does the work it measures, and each of its bars can fail."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench_kit import load
from rolltree.store import Run


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("engine")


def test_rollouts_in_flight_have_four_thousand_tokens(bench: Any, tmp_path: Any) -> None:
    found = bench.in_flight(tmp_path / "run", 12, 0.0, 0.005)
    assert 0.0 <= found["lag_p50_ms"] <= found["lag_p99_ms"] <= found["lag_max_ms"]
    with Run.open(tmp_path / "run", mode="r") as run:
        rows = list(run.rollouts(blobs=False))
    assert [row.num_unique_tokens for row in rows] == [4000] * 12
    assert {row.num_completion_tokens for row in rows} == {2000}


def test_a_resume_runs_what_is_missing_and_the_run_is_shown(bench: Any, tmp_path: Any) -> None:
    options = argparse.Namespace(stored=40)
    assert bench.run_case("stored", tmp_path, options)["growth"] >= 1.0
    assert bench.run_case("show_phase", tmp_path, options)["cpu_s"] > 0.0
    assert bench.run_case("resume", tmp_path, options)["planning_cpu_s"] > 0.0
    with pytest.raises(SystemExit, match="0 rollouts were run, and 10 were missing"):
        bench.run_case("resume", tmp_path, options)


def test_a_long_rollout_has_its_turns(bench: Any, tmp_path: Any) -> None:
    assert bench.long(tmp_path / "run", 10, num=1)["last_turns_ms"] > 0.0
    with Run.open(tmp_path / "run", mode="r") as run:
        (row,) = run.rollouts(blobs=False)
    assert (row.num_calls, row.num_unique_tokens) == (10, 4000)


def test_each_bar_can_be_missed(bench: Any) -> None:
    good = {
        "fast": {"lag_p99_ms": 20.0, "peak_mib": 700.0},
        "slow": {"lag_p99_ms": 20.0, "peak_mib": 700.0},
        "stored": {"growth": 1.05, "lag_p99_ms": 20.0},
        "show": {"cpu_s": 0.2},
        "show_phase": {"cpu_s": 0.2},
        "resume": {"planning_cpu_s": 1.0, "lag_p99_ms": 20.0},
        "long": {"lag_p99_ms": 20.0, "last_turns_ms": 1.0},
    }
    all_met = [bar.met for bar in bench.bars(good)]
    assert all_met == [True] * len(all_met)
    for case, figures in good.items():
        for name, value in figures.items():
            bad = {**good, case: {**figures, name: 100 * value}}
            assert [bar.met for bar in bench.bars(bad)].count(False) == 1, (case, name)
