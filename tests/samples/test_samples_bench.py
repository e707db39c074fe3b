"""The benchmark runs, counts right, and its bars can fail."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench_kit import load
from rolltree.samples import build_samples


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("samples")


@pytest.mark.parametrize(
    ("pattern", "samples", "unique"),
    [
        ("prefix holds", 1, 16 * 700),
        ("breaks 10 %", 2, 16 * 700 + 100),  # the 100 kept tokens of one answer, once more
        ("breaks 50 %", 9, 16 * 700 + 8 * 100),
        ("every turn breaks", 16, 16 * 700 + 15 * 100),
        ("8 agents round robin", 8, 16 * 700),
    ],
)
def test_patterns_cost_what_can_be_worked_out_by_hand(
    bench: Any, pattern: str, samples: int, unique: int
) -> None:
    calls = bench.make_calls(16, pattern)
    tree = bench.insert_arrays(calls)
    assert tree.num_tokens == bench.num_unique_tokens(calls) == unique
    token_in = bench.insert_token_in(calls)
    assert token_in.num_tokens == unique
    for call in range(16):
        assert np.array_equal(tree.path_ids(call), token_in.path_ids(call))
    steps = bench.steps_of(tree)
    interleaved = build_samples([steps], "interleave")
    assert len(interleaved.samples) == samples
    (forest,) = build_samples([steps], "tree").samples
    assert forest.num_tokens == unique
    assert len(forest.records) == interleaved.report["num_trained_tokens"] == 16 * 300


def test_stripped_reasoning_table_is_quadratic_and_linear(bench: Any) -> None:
    rows = {row["turns"]: row for row in bench.stripped_table()}
    assert rows[32]["step"] == rows[32]["interleave"] == 270_400
    assert rows[32]["tree"] == 25_500
    assert rows[64]["interleave"] / rows[32]["interleave"] > 3.8
    assert rows[64]["tree"] / rows[32]["tree"] < 2.05


def test_a_trajectory_of_32_turns_is_small(bench: Any) -> None:
    assert bench.trajectory_bytes(bench.make_calls(32, "prefix holds")) < 500_000


def test_growth_tells_quadratic_from_linear(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the clock counts the tokens that were sampled, or those of prompts."""
    clock = [0]
    monkeypatch.setattr(bench, "build_samples", lambda *args: None)
    monkeypatch.setattr(bench, "time", SimpleNamespace(process_time=lambda: clock[0]))

    def costs(size: Any) -> float:
        def insert(calls: list[Any]) -> Any:
            clock[0] += sum(map(size, calls))
            return bench.TokenTree()

        monkeypatch.setattr(bench, "insert_token_in", insert)
        return float(bench.growth(rounds=1))

    assert costs(lambda call: len(call.completion)) == 1
    assert costs(lambda call: len(call.prompt)) > 3


def test_check_fails_when_a_bar_is_missed(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "turns": 8, "pattern": "prefix holds", "scope": "tree", "raw_tokens": 1, "insert_s": 0.0,
        "token_in_s": 0.0, "build_s": 0.0, "raw_tokens_per_s": 1.0, "peak_bytes": 1, "samples": 1,
        "tokens": 1, "trained": 1,
    }  # fmt: skip
    monkeypatch.setattr(bench, "measure", lambda turns, pattern: [row])
    monkeypatch.setattr(bench, "bars", lambda rows: [bench.Bar.at_least("speed", 1, 2)])
    monkeypatch.setattr(sys, "argv", ["samples.py", "--check"])
    assert bench.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "MISS speed: 1 (bar >= 2)"
    assert lines[-1] == "figures: 1 speed"
    monkeypatch.setattr(sys, "argv", ["samples.py", "--json"])
    assert bench.main() == 0
    assert '"met": false' in capsys.readouterr().out
