"""Curves, the live table and the report of a stored training run."""

import errno
import io
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import rolltree
from rolltree.evaluation import Estimate
from rolltree.reports import (
    Curve,
    SafeConsole,
    TrainView,
    formatting,
    next_commands,
    print_report,
    reward_curve,
    save_curve,
    save_reward_curve,
    terminal_curve,
    training_report,
)
from rolltree.reports.curves import smooth
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError
from rolltree.values.estimate import estimate as estimate_of
from rolltree.values.types import RolloutRequest, RolloutResult, State


def estimate(mean):
    return Estimate(mean, mean - 0.1, mean + 0.1, "t", 5, 5)


class TestCurves:
    def test_a_rising_line_rises(self):
        text = terminal_curve(Curve("t", range(10), [i / 9 for i in range(10)]), width=20, height=5)
        rows = [line.partition("┤")[2].ljust(20) for line in text.splitlines()[1:6]]
        first = [next(x for x, cell in enumerate(row) if cell != " ") for row in rows]
        assert first == sorted(first, reverse=True)  # further up means further right
        assert text.splitlines()[0] == "t"
        assert text.splitlines()[1].startswith("   1.00 ┤")
        assert text.splitlines()[5].startswith("   0.00 ┤")

    def test_held_out_points(self):
        curve = Curve("t", [1, 2], [0.2, 0.8], [(0, estimate(0.0)), (2, estimate(1.0))])
        rows = terminal_curve(curve, width=10, height=4).splitlines()
        assert "o: held out" in rows[0]
        assert rows[1].endswith("o")
        assert rows[4].startswith("   0.00 ┤o")
        assert "step 2" in rows[6]

    @given(
        st.lists(st.tuples(st.integers(0, 1000), st.floats(-1e6, 1e6)), max_size=30),
        st.integers(2, 40),
        st.integers(2, 20),
    )
    def test_any_points_fit_the_frame(self, points, width, height):
        points.sort()
        curve = Curve("t", [x for x, _ in points], [y for _, y in points])
        lines = terminal_curve(curve, width=width, height=height).splitlines()
        assert len(lines) == (1 if not points else height + 3)

    def test_smooth(self):
        assert smooth([1.0, 3.0, 5.0, 7.0], width=2) == [1.0, 2.0, 4.0, 6.0]
        assert smooth([]) == []

    def test_png(self, tmp_path):
        path = save_curve(
            Curve("t", [1, 2, 3], [0.1, 0.5, 0.9], [(0, estimate(0.1)), (3, estimate(0.9))]),
            tmp_path / "c.png",
        )
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == (1200, 675)

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_an_evaluation_of_any_size_is_drawn(self, tmp_path, value):
        """Bars of a length below 0, by rounding, are refused by matplotlib (6 and 7 of 0s, 1s)."""
        held_out = [(size, estimate_of({i: [value] for i in range(size)})) for size in range(2, 60)]
        assert save_curve(Curve("t", [1, 2], [0.1, 0.5], held_out), tmp_path / "c.png").exists()

    def test_matplotlib_is_optional(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ValueError, match="as a PNG needs the package matplotlib"):
            save_curve(Curve("t", [1], [0.5]), tmp_path / "c.png")


def rollout(phase, example, reward, answer):
    given = {"prompt": [{"role": "user", "content": f"{example} + 1"}], "example_id": example}
    request = RolloutRequest(
        request_id=f"{phase}/{example}/0", env_id="add", input={**given, "task": "t"}, seed=0,
        sampling_seed=0, group_id=f"{phase}/{example}", index_in_group=0, phase=phase,
    )  # fmt: skip
    state = State(
        input={**given, "task": "t"}, trajectory=Trajectory(), reward=reward, error=None,
        completion=[{"role": "assistant", "content": answer}],
    )  # fmt: skip
    return encode_result(RolloutResult(request, (state,), None))


@pytest.fixture
def run(tmp_path):
    config = {
        "model": {"name": "tiny"},
        "env": {"id": "add", "args": {"level": 2}},
        "train": {"num_steps": 3},
    }
    with Run.create(tmp_path / "my run", config=config, kind="train") as made:
        for example in range(4):
            made.add_rollouts(rollout("eval_before", example, 0.0, "no idea"))
        made.add_event("evaluation", {"phase": "eval_before", "metrics": {}}, step=0)
        for step, reward in ((1, 0.1), (2, float("nan")), (3, 0.9)):
            made.add_step(step, {"reward/mean": reward, "train/entropy": 1.0})
        for example in range(4):
            made.add_rollouts(rollout("eval/000003", example, 1.0, f"{example + 1}"))
        made.add_event("evaluation", {"phase": "eval/000003", "metrics": {}}, step=3)
        yield made


def shown(parts):
    console = Console(file=io.StringIO(), width=100)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


class TestReport:
    def test_curve_leaves_out_steps_without_reward(self, run):
        curve = reward_curve(run)
        assert (list(curve.steps), list(curve.rewards)) == ([1, 3], [0.1, 0.9])
        assert [(step, found.mean) for step, found in curve.held_out] == [(0, 0.0), (3, 1.0)]

    def test_before_after_and_transcripts(self, run):
        out = shown(training_report(run, num_transcripts=1))
        assert "mean reward, add" in out
        assert "step 0" in out
        assert "+1.000" in out
        assert "too few examples (4 pairs)" in out
        assert "example 0, step 0 (eval_before)" in out
        assert out.index("no idea") < out.index("assistant 1")
        assert "example 1" not in out

    def test_only_one_evaluation(self, tmp_path):
        with Run.create(tmp_path / "r", config={"model": {"name": "m"}}) as run:
            run.add_rollouts(rollout("eval_before", 0, 0.5, "x"))
            run.add_event("evaluation", {"phase": "eval_before", "metrics": {}}, step=0)
            out = shown(training_report(run))
        assert "m, eval_before" in out
        assert "0.500" in out

    def test_an_empty_run(self, tmp_path):
        with Run.create(tmp_path / "r") as run:
            assert training_report(run) == []
            assert save_reward_curve(run) is None
            assert len(next_commands(run, ["rolltree", "train", "c.toml"])) == 3

    def test_png_in_the_run_directory(self, run):
        assert save_reward_curve(run) == run.path / "reward_curve.png"
        assert (run.path / "reward_curve.png").stat().st_size > 10_000

    def test_commands_can_be_pasted(self, run):
        words = ["rolltree", "train", "c.toml", "train.num_steps=3", "env.args.level=2"]
        look, measure, further = next_commands(run, words)
        path = f"'{run.path}'"
        assert look == f"rolltree show {path} --phase eval/000003 --transcripts 5"
        assert measure == f"rolltree eval add -m '{run.path}/model' -n 50 -a '{{\"level\": 2}}'"
        assert further == "rolltree train c.toml env.args.level=2 train.num_steps=6"

    def test_a_model_that_was_not_exported_is_not_measured(self, tmp_path):
        config = {"env": {"id": "add"}, "checkpoint": {"export": False}}
        with Run.create(tmp_path / "r", config=config) as run:
            look, further = next_commands(run, ["rolltree", "train", "c.toml"])
        assert look.startswith("rolltree show")
        assert further.startswith("rolltree train")


@dataclass
class Start:
    run_path: Path = Path("runs/x")
    first_step: int = 3
    num_steps: int = 4
    num_parameters: int = 1_234_567
    history: tuple = ({"reward/mean": 0.1}, {"reward/mean": 0.2})
    evaluated_steps: tuple = ()


METRICS = {
    "reward/mean": 0.5, "reward/low": 0.42, "reward/high": 0.58, "error/mean": 0.25,
    "train/completions/mean_length": 12.5, "train/entropy": 1.5, "train/kl": 2e-3,
    "train/grad_norm": 0.25, "train/sampling/sampling_logp_difference/mean": 3e-6,
    "samples/reuse_factor": 3.5, "time/wait_for_batch": 2.0, "time/step": 1.0,
}  # fmt: skip


EVALUATED = {"reward": {"mean": 0.1, "low": 0.0, "high": 0.2}}


def play(view):
    view.on_start(Start())
    view.on_eval("eval_before", 0, EVALUATED, True)
    view.on_eval_progress("eval_before", 1, 2)
    view.on_rollouts(3, 7, 8)
    view.on_step(3, METRICS)
    view.on_rollouts(4, 8, 8)
    view.on_step(4, {"reward/mean": 0.75})
    view.on_eval("eval_after", 4, {"reward": None}, False)
    view.on_end(None)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def terminal(width=160):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def last_frame(console):
    """Return what the live display leaves behind, its last table."""
    return console.file.getvalue().rpartition(" reward  ")[2]


class TestNothingShownFailsARun:
    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("save_reward_curve", ValueError("'yerr' must not contain negative values")),
            ("save_reward_curve", OSError(errno.ENOSPC, "No space left on device")),
            ("terminal_curve", ZeroDivisionError("height")),
            ("compare_reports", ConfigError("no scored example in common")),
            ("transcript", RecursionError("deep")),
            ("next_commands", KeyError("env")),
        ],
    )
    def test_a_part_that_fails_is_a_warning(self, run, monkeypatch, caplog, where, error):
        def fail(*args, **options):
            raise error

        formatting._warn.cache_clear()
        module = "curves" if where == "terminal_curve" else "training"
        monkeypatch.setattr(f"rolltree.reports.{module}.{where}", fail)
        console = Console(file=io.StringIO(), width=100)
        print_report(run, console)
        said = console.file.getvalue()
        if where == "save_reward_curve":
            assert f"curve  {error} ({type(error).__name__})" in said
        else:
            assert f"({type(error).__name__}: {error})" in caplog.text
        assert str(run.path) in said.replace("\n", "")
        assert ("Held-out examples" in said) == (where != "compare_reports")
        assert ("┤" in said) == (where != "terminal_curve")

    def test_a_full_disk_behind_the_output(self, run, caplog):
        formatting._warn.cache_clear()
        with open("/dev/full", "w", encoding="utf-8") as full:
            print_report(run, SafeConsole(file=full, only_shows=True))
            assert "nothing more is printed" in caplog.text
            assert "No space left" in caplog.text
            with pytest.raises(OSError, match="No space left"):  # a result is not lost in silence
                SafeConsole(file=full).print("a result")
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, full.fileno())
            os.close(nowhere)

    def test_nobody_reads_any_more(self):
        """Rich would end the program; Python's own flush at the end is the program's affair."""
        read, write = os.pipe()
        os.close(read)
        pipe = open(write, "w", encoding="utf-8")  # noqa: SIM115  its own flush fails at the end
        console = SafeConsole(file=pipe)
        console.print("one")
        console.print("two")
        assert console.quiet
        with pytest.raises(BrokenPipeError):
            pipe.close()

    def test_progress(self, caplog):
        formatting._warn.cache_clear()
        with TrainView(Console(file=io.StringIO())) as view:
            view.on_step(1, {"reward/mean": "no number"})
            view.on_eval("eval_after", 1, {"reward": {"mean": None}}, False)
            view.on_step(2, {"reward/mean": 0.5})
        assert caplog.text.count("progress cannot be shown") == 2


class TestTrainView:
    def test_without_a_terminal_one_line_per_event(self):
        console = Console(file=io.StringIO(), width=80)
        clock = Clock()
        with TrainView(console, clock) as view:
            view.on_start(Start(num_steps=6))
            view.on_eval("eval_before", 0, EVALUATED, True)
            clock.now = 30.0
            view.on_step(3, METRICS)
            clock.now = 50.0
            view.on_step(4, {"reward/mean": 0.75})
            view.on_eval("eval_after", 4, {"reward": None}, False)
        lines = console.file.getvalue().splitlines()
        assert lines == [
            "1,234,567 parameters, run runs/x, continued at step 3",
            "held out, eval_before (step 0): 0.100 [0.000, 0.200], from an earlier start",
            "step 3/6  reward 0.500 [0.42, 0.58]  failed 25%  length 12.5  entropy 1.500  "
            "KL 2.0e-03  grad norm 0.25  |Δ logprob| 3.0e-06  reuse 3.5x  rollout s 2.0  "
            "step s 1.0  eta 1 min 30 s",
            "step 4/6  reward 0.750  eta 50.0 s",
            "held out, eval_after (step 4): no reward",
        ]

    def test_in_a_terminal_a_table_with_the_steps_before(self):
        console = terminal()
        with TrainView(console) as view:
            view.on_rollouts(1, 3, 8)
            play(view)
        last = last_frame(console)
        for text in ("1/4", "2/4", "3/4", "4/4", "0.750", "████", "eval_after (step 4): no reward"):
            assert text in last
        for text in ("0.500 [0.42, 0.58]", "length", "KL", "grad norm", "2.0e-03", "12.5", "0.25"):
            assert text in last
        assert "rollouts" not in last  # nothing is said to be going on any more
        assert "ETA" not in last

    def test_the_time_left_counts_down(self):
        """Steps of 10 s, two to go, 4 s of the next one gone."""
        console, clock = terminal(), Clock()
        with TrainView(console, clock) as view:
            view.on_start(Start(first_step=1, num_steps=4, history=()))
            for step in (1, 2):
                clock.now += 10
                view.on_step(step, METRICS)
            clock.now += 4
            view.on_rollouts(3, 1, 8)
            console.print(view._render())
            assert "step 3/4: rollouts 1/8  (24.0 s, ETA 16.0 s)" in console.file.getvalue()

    def test_a_continued_run_knows_the_time_of_its_steps(self):
        console, clock = Console(file=io.StringIO(), width=80), Clock()
        view = TrainView(console, clock)
        view.on_start(Start(first_step=3, num_steps=5, history=({"time/step": 8.0},) * 2))
        assert view._left() == "24.0 s"

    def test_the_time_left_contains_the_evaluations_that_are_to_come(self):
        """One of 30 s before the first step, steps of 10 s, one more after steps 2 and 4."""
        clock = Clock()
        view = TrainView(Console(file=io.StringIO()), clock)
        view.on_start(Start(first_step=1, num_steps=4, history=(), evaluated_steps=(2, 4)))
        clock.now = 30.0
        view.on_eval("eval_before", 0, EVALUATED, False)
        found = []
        for step in (1, 2, 3, 4):
            clock.now += 10
            view.on_step(step, METRICS)
            found.append(view._left())
            if step == 2:
                clock.now += 30
                view.on_eval("eval/000002", 2, EVALUATED, False)
                found.append(view._left())
        assert found == ["1 min 30 s", "1 min 20 s", "50.0 s", "40.0 s", "30.0 s"]
        clock.now += 12
        view.on_eval_progress("eval_after", 4, 10)
        assert view._left() == "18.0 s"
        view.on_eval("eval_after", 4, EVALUATED, False)
        assert view._left() == ""

    def test_a_stored_evaluation_says_how_long_the_next_takes(self):
        view = TrainView(Console(file=io.StringIO()), Clock())
        history = ({"time/step": 8.0},) * 2
        view.on_start(Start(first_step=3, num_steps=5, history=history, evaluated_steps=(5,)))
        assert view._left() == "24.0 s and an evaluation"
        view.on_eval("eval_before", 0, EVALUATED | {"elapsed_s": 20.0}, True)
        assert view._left() == "44.0 s"

    def test_evaluations_that_nobody_timed_are_counted(self):
        view = TrainView(Console(file=io.StringIO()), Clock())
        history = ({"time/step": 8.0},) * 2
        view.on_start(Start(first_step=3, num_steps=5, history=history, evaluated_steps=(4, 5)))
        assert view._left() == "24.0 s and 2 evaluations"

    @pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
    def test_what_does_not_fit_is_left_out_whole(self, width):
        console = terminal(width)
        with TrainView(console) as view:
            view.on_start(Start(first_step=1, num_steps=9, history=()))
            view.on_step(1, METRICS)
        last = last_frame(console)
        assert "…" not in last
        assert "0.500 [0.42, 0.58]" in last
        assert ("grad norm" in last) == (width >= 80)
        assert ("reuse" in last) == (width >= 120)

    @pytest.mark.parametrize("width", [12, 16, 20])
    def test_a_step_has_one_line_also_where_nothing_fits(self, width):
        console = terminal(width)
        with TrainView(console) as view:
            view.on_start(Start(first_step=1, num_steps=9, history=()))
            for step in (1, 2):
                view.on_step(step, METRICS)
        table = console.file.getvalue().rpartition("reward")[2].splitlines()[1:-1]
        assert [line.split()[0][:5] for line in table] == ["0.500", "0.500"]

    def test_a_column_that_no_step_has_is_left_out(self):
        console = terminal()
        with TrainView(console) as view:
            view.on_start(Start(first_step=1, num_steps=2, history=()))
            view.on_step(1, {name: value for name, value in METRICS.items() if name != "train/kl"})
        assert "KL" not in last_frame(console)

    def test_many_steps_keep_the_table_short(self):
        console = terminal()
        with TrainView(console) as view:
            view.on_start(Start(first_step=1, num_steps=99, history=()))
            for step in range(1, 60):
                view.on_step(step, METRICS)
        last = last_frame(console)
        assert last.count("/99") == 14
        assert "59/99" in last

    def test_it_is_a_reporter(self):
        """Every method of training's protocol is there; read from its source, without torch."""
        source = Path(rolltree.__file__).with_name("training") / "reporter.py"
        needed = set(re.findall(r"def (on_\w+)", source.read_text()))
        assert {"on_start", "on_step"} <= needed <= set(dir(TrainView))


def test_reports_need_no_torch():
    program = "import sys, rolltree.reports; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
