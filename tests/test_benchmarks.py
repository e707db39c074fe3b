"""Every benchmark ends in one way, and each of its bars can fail. Nothing is measured here."""

import asyncio
import json
import subprocess
import sys

import pytest

from bench_kit import FOLDER, NAMES, load
from rolltree.store import Run


@pytest.fixture
def verdict():
    load("samples")
    import verdict

    return verdict


@pytest.mark.parametrize("name", NAMES)
def test_every_script_takes_check_and_json(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        load(name).main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--check" in said
    assert "--json" in said
    summary, _, _ = load(name).__doc__.partition("\n")
    assert summary.split()[0] in said


@pytest.mark.parametrize(
    ("make", "value", "bar", "met"),
    [
        ("at_least", 5.0, ">= 5", True),
        ("at_least", 4.9, ">= 5", False),
        ("at_most", 5.0, "<= 5", True),
        ("at_most", 5.1, "<= 5", False),
        ("below", 5.0, "< 5", False),
        ("below", 4.9, "< 5", True),
        ("above", 5.0, "> 5", False),
        ("above", 5.1, "> 5", True),
        ("at_least", float("nan"), ">= 5", False),
    ],
)
def test_a_bar_is_met_or_missed(verdict, make, value, bar, met):
    found = getattr(verdict.Bar, make)("turns", value, 5)
    assert (found.bar, found.met) == (bar, met)


@pytest.mark.parametrize(
    ("value", "number"),
    [(0.00012345, "0.000123"), (6.812, "6.81"), (99.96, "100"), (841.4, "841"), (46750, "46,750")],
)
def test_a_figure_has_three_digits_and_none_less_before_the_point(verdict, value, number):
    assert verdict.Bar.at_least("x", value, 0).number == number


class TestEnding:
    def ends(self, verdict, capsys, *words, values=(7.0, 3.0), **more):
        options = verdict.make_parser("What it costs.\nMore.").parse_args(words)
        bars = [verdict.Bar.at_least(f"figure {at}", value, 5) for at, value in enumerate(values)]
        shown = lambda: print("the table")  # noqa: E731
        status = verdict.conclude(options, bars, {"rows": [1]}, shown, **more)
        return status, capsys.readouterr().out

    def test_the_last_line_has_the_figures(self, verdict, capsys):
        status, said = self.ends(verdict, capsys, also=["9 templates"])
        assert status == 0
        assert said.splitlines() == [
            "the table",
            "",
            "ok   figure 0: 7 (bar >= 5)",
            "MISS figure 1: 3 (bar >= 5)",
            "figures: 7 figure 0; 3 figure 1; 9 templates",
        ]

    def test_a_missed_bar_fails_only_a_check(self, verdict, capsys):
        assert self.ends(verdict, capsys, "--check")[0] == 1
        assert self.ends(verdict, capsys, "--check", "--json")[0] == 1
        assert self.ends(verdict, capsys, "--json")[0] == 0
        assert self.ends(verdict, capsys, "--check", values=(7.0, 5.0))[0] == 0

    def test_json_is_one_object_and_no_table(self, verdict, capsys):
        _, said = self.ends(verdict, capsys, "--json", values=(3.0,))
        assert json.loads(said) == {
            "results": {"rows": [1]},
            "bars": [{"what": "figure 0", "value": 3.0, "bar": ">= 5", "met": False}],
        }

    def test_without_bars_there_is_the_table_alone(self, verdict, capsys):
        assert self.ends(verdict, capsys, "--check", values=()) == (0, "the table\n")


def met(name, results):
    return [bar.met for bar in load(name).bars(results)]


def test_the_bars_of_ranks_can_fail():
    results = {
        **{f"gradients/{size}": {"grpo": {"gradient": 3e-7}} for size in (2, 3)},
        **{f"resumed/{size}": {"tied-full": [2, 0.0, 4e-7]} for size in (1, 2, 3, 4)},
        "kills_2_1_full/1": [[[1, -9], 1, 0.0, []], [[1, -9], 2, 0.0, []], [[0, 0], 2]],
    }
    assert met("ranks", results) == [True] * 4
    assert load("ranks").bars(results)[0].value == 3e-7
    results["gradients/3"] = {"grpo": {"gradient": 1e-4}}
    results["resumed/4"] = {"tied-full": [2, 1e-9, 1e-4]}
    results["kills_2_1_full/1"][0][2] = 0.5
    assert met("ranks", results) == [False] * 4
    assert load("ranks").bars(results)[-1].value == 1


def test_the_bars_of_kills_can_fail():
    module = load("kills")
    one = {"kills": 50, "lives": 4, "compared": 900, "differ": [], "wrong": []}
    names = [f"{kind} {name}" for kind in module.KINDS for name in module.SIGNALS]
    results = {name: dict(one) for name in names}
    assert met("kills", results) == [True] * 3
    results[names[4]] |= {"kills": 49, "differ": ["a weight"], "wrong": ["exit status 1"]}
    assert met("kills", results) == [False] * 3


def test_the_bars_of_tree_training_can_fail():
    module = load("tree_training")
    good = {
        "tree": {"error": 1e-7, "peak_mb": 90.0},
        "interleave": {"error": 1e-7},
        "tree bf16": {"error": 1e-3},
        "step": {"peak_mb": 100.0, "wall_s_ratio": 6.0, "tokens_ratio": 8.0},
    }
    bad = {
        "tree": {"error": 1e-4, "peak_mb": 110.0},
        "interleave": {"error": 1e-7},
        "tree bf16": {"error": 1e-1},
        "step": {"peak_mb": 100.0, "wall_s_ratio": 4.0, "tokens_ratio": 8.0},
    }
    number = 3 * len(module.SCENES) + len(module.LONG) + 1
    for rows, all_met in ((good, True), (bad, False)):
        results = [{"model": "full", "scene": name, "rows": rows} for name in module.SCENES]
        assert met("tree_training", results) == [all_met] * number
        other = {
            "tree": rows["tree"],
            "step": rows["step"] | {"cpu_s_ratio": 7.0 if all_met else 4.0},
        }
        results = [{"model": "hybrid", "scene": "a", "rows": other}]
        assert met("tree_training", results) == [all_met] * 2


def test_the_bars_of_the_asynchronous_loop_can_fail():
    def results(waiting_s, compute_s, paused_s):
        return {
            "waiting": {0: {"step_s": 1.0}, 1: {"step_s": waiting_s}},
            "compute": {
                0: {"step_s": 1.0},
                1: {"step_s": compute_s, "paused_s": paused_s, "train_s": 1.0},
            },
        }

    assert met("async_loop", results(0.8, 1.2, 0.1)) == [True, True, True]
    assert met("async_loop", results(1.0, 1.3, 0.6)) == [False, False, False]


def test_the_bars_of_learning_can_fail():
    def results(steps, cpu_s, trl_steps=(40, 42, 44)):
        own = {"steps": list(steps), "cpu_s": list(cpu_s)}
        trl = {"steps": list(trl_steps), "cpu_s": [10.0, 10.0, 10.0]}
        return {"tree": own, "interleave": own, "trl": trl}

    assert met("learning", results([40, 41, 42], [6, 6, 6])) == [True] * 4
    assert met("learning", results([50, 51, 52], [13, 13, 13])) == [False] * 4
    assert met("learning", results([40, None, 42], [6, None, 6])) == [False] * 2
    assert met("learning", results([40, 41, 42], [6, 6, 6], (40, None, 44))) == [True] * 2


def test_the_bars_of_the_sandbox_can_fail():
    def row(escape="blocked", attack="stopped", number=120, act="answered"):
        return {
            "missing": ["disk"],
            "escapes": {f"escape {at}": escape for at in range(number)},
            "attacks": {f"attack {at}": attack for at in range(number // 3)},
            "acts": {"chmod 0 .": act},
        }

    absent = {"level": "bubblewrap", "unavailable": "not installed"}
    assert met("sandbox", [row(), absent, row(attack="named")]) == [True] * 5
    bad = [row(), row("ESCAPED", "PASSED: held 9 files", 119, "SandboxError")]
    assert met("sandbox", bad) == [False] * 5
    assert [bar.value for bar in load("sandbox").bars(bad)] == [119, 39, 119, 39, 1]


def test_the_bars_of_http_can_fail():
    def results(cpu_ms, lag_ms, theirs):
        row = {"cpu_ms": cpu_ms, "lag_p99_ms": lag_ms, "turns_per_cpu_s": 1000 / cpu_ms}
        peer = {"turns_per_cpu_s": theirs}
        return {
            "rolltree": {"64": row, "1000": row, "4000": {**row, "cpu_ms": 1.5 * cpu_ms}},
            "burst": {"1000": row},
            "verifiers": {"64": peer, "1000": peer},
        }

    assert met("http", results(0.7, 20.0, 60.0)) == [True] * 8
    assert met("http", results(0.9, 60.0, 160.0)) == [False] * 8
    assert met("http", results(0.7, 20.0, 100.0))[-2:] == [True, False]


def test_the_lag_of_a_held_loop_counts_with_the_waits_it_stands_for():
    load("http")
    from probe import percentile

    assert percentile([0.0] * 99 + [1000.0], 99) == 1000.0
    assert percentile([0.0] * 98 + [1.0, 1000.0], 99) == 1000.0
    assert percentile([0.0] * 98 + [1000.0], 45) == 0.0
    assert percentile([0.0] * 10_000 + [1000.0], 99) == 0.0
    assert percentile([], 99) == 0.0


@pytest.mark.parametrize("place", [str(FOLDER), ""])
def test_a_script_beside_http_py_gets_the_standard_librarys_http(place):
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = sys.path[:]; "
        "import http.client; print(http.__file__, http.client.__file__, sys.path == before)"
    )
    command = [sys.executable, "-c", script, place]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=FOLDER)
    package, module, unchanged = done.stdout.split()
    assert package.endswith("__init__.py")
    assert module.endswith("client.py")
    assert unchanged == "True"


def test_the_bars_of_the_engine_can_fail():
    def results(speed_up, equal):
        return [
            {"model": "tiny", "row": "turns", "speed_up": speed_up, "equal": equal},
            {"model": "tiny", "row": "sampled", "speed_up": speed_up, "equal": None},
            {"model": "tiny", "row": "groups", "speed_up": speed_up, "equal": None},  # no bar
        ]

    assert met("engine_tokens", results(3.1, 1.0)) == [True, True, True]
    assert met("engine_tokens", results(1.2, 0.99)) == [False, False, False]


def test_the_model_of_the_engines_benchmark_answers(tmp_path):
    """`quick.py`, which CI runs, plays with it too; a rollout that fails ends either."""
    engine = load("engine")
    found = asyncio.run(
        engine.evaluate(
            tmp_path / "run",
            engine.LatentModel(0.0, 0.0, told=8, sampled=4),
            engine.make_environment(3, turns=2, told=8),
            3,
            3,
        )
    )
    assert found["cpu_s"] > 0
    with Run.open(tmp_path / "run", "r") as run:
        assert [row.num_calls for row in run.rollouts()] == [2, 2, 2]
