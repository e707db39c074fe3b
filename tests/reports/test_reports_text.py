"""Formatting, transcripts and tables: what a person sees, and what a model cannot do to it."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rolltree.evaluation import EvalProgress, build_report, compare_reports
from rolltree.reports import (
    EvalView,
    SafeConsole,
    comparison_table,
    evaluation_facts,
    evaluation_table,
    phases_table,
    run_lines,
    say,
    transcript,
)
from rolltree.reports.formatting import duration, meter, safe_text
from rolltree.store import Run, StoredRollout, summarize
from rolltree.values.types import ErrorRecord, RolloutRequest, RolloutResult, State


def test_no_columns_are_the_usual_ones(monkeypatch):
    """Some programs set COLUMNS=0, where rich prints nothing."""
    monkeypatch.setenv("COLUMNS", "0")
    file = io.StringIO()
    SafeConsole(file=file).print("something to read")
    assert file.getvalue() == "something to read\n"


def shown(*parts, width=100, terminal=False):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def row(example, reward=None, index=0, **fields):
    given = {"env_id": "add", "task": "t", "example_id": example, "reward": reward, **fields}
    return StoredRollout(request_id=f"{example}/{index}", **given)


class TestFormatting:
    @given(st.text(st.characters()))
    def test_no_text_can_control_the_terminal(self, text):
        out = shown(safe_text(text), width=1000)
        assert not {c for c in out if ord(c) < 32 or 0x7F <= ord(c) < 0xA0} - {"\n", "\t"}

    def test_escape_sequences_and_markup_are_shown_not_obeyed(self):
        out = shown(safe_text("\x1b[31mred [bold]b[/bold] \x07"), terminal=True)
        assert "␛[31mred [bold]b[/bold] ␇" in out

    def test_cut(self):
        assert safe_text("abcdef", limit=4).plain == "abcd … (2 more)"
        assert safe_text("abcd", limit=4).plain == "abcd"

    @pytest.mark.parametrize(
        ("value", "bar"),
        [(0, "    "), (1, "████"), (0.5, "██  "), (0.375, "█▌  "), (7, "████"), (-1, "    ")],
    )
    def test_meter(self, value, bar):
        assert meter(value, 4) == bar

    def test_duration(self):
        assert [duration(s) for s in (0.04, 59.94, 61, 3599, 3660)] == [
            "0.0 s", "59.9 s", "1 min 01 s", "59 min 59 s", "1 h 01 min",
        ]  # fmt: skip

    def test_lines_are_not_broken(self):
        console = Console(file=io.StringIO(), width=10)
        say(console, "rolltree show runs/a very long path [x]")
        assert console.file.getvalue() == "rolltree show runs/a very long path [x]\n"


class TestEvaluation:
    def test_table(self):
        rows = [
            row(i, float(i < 6), index, task="ab"[i % 2], metrics={"len": i})
            for i in range(8)
            for index in range(2)
        ]
        out = shown(evaluation_table(build_report(rows, model="m")))
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert "add · m" in out
        assert "0.750" in lines["reward"]
        assert "[0.354, 1.000]" in lines["reward"]
        assert "0.750" in lines["pass@2"]
        assert "0.750" in lines["a"]
        assert "3.500" in lines["len"]

    def test_one_rollout_each_has_no_pass_at_k(self):
        assert "pass@" not in shown(evaluation_table(build_report([row(0, 1.0)])))

    def test_nothing_scored_is_said(self):
        failed = row(0, status="error", error_type="ServerError")
        assert "no rollout was scored" in shown(evaluation_table(build_report([failed])))

    def test_facts(self):
        rows = [
            row(0, 1.0, num_prompt_tokens=1200, num_completion_tokens=30, num_calls=2),
            row(1, status="error", error_type="ServerError"),
            row(2, 0.0, truncated=True, truncation_reason="max_steps"),
            row(3),
        ]
        out = shown(evaluation_facts(build_report(rows, num_resumed=2, run_path="runs/x")))
        assert "4 over 4 examples, 2 of them from an earlier start" in out
        assert "1 (25%, not in the means)" in out
        assert "1 x ServerError" in out
        assert "1: max_steps 1" in out
        assert "unscored   1 (not in the means)" in out
        assert "1,200 prompt, 30 sampled (7.5 a rollout, 0.5 calls)" in out
        assert "runs/x" in out

    def test_reward_functions_that_raised_are_told_once(self):
        def raised(function, message):
            return {"function": function, "type": "KeyError", "message": f"{message} (f.py:3)"}

        failed = {"type": "KeyError", "message": "'x' (f.py:3)"}
        errors = (failed, raised("broken", "'x'"), raised("other", "'y'"))
        rows = [row(0, 0.0, errors=errors[2:])]
        rows += [row(1, status="error", error_type="KeyError", errors=errors)]
        out = " ".join(shown(evaluation_facts(build_report(rows))).split())
        assert "1 x KeyError, the first: 'x' (f.py:3)" in out
        assert "scoring other raised in 2, the first: KeyError: 'y' (f.py:3)" in out
        assert "broken raised" not in out

    def test_comparison(self):
        before = build_report([row(i, 0.0) for i in range(9)] + [row(9, 1.0)])
        after = build_report([row(i, 1.0) for i in range(10)])
        out = shown(comparison_table(compare_reports(before, after)))
        assert "+0.900" in out
        assert "excludes 0 (10 pairs)" in out
        assert "includes 0: not clear" in shown(comparison_table(compare_reports(before, before)))

    def progress(self, done, **fields):
        given = {
            "num_done": done, "num_total": 40, "num_resumed": 0, "num_failed": 0,
            "num_truncated": 0, "num_scored": done, "mean_reward": 0.5,
            "num_completion_tokens": done,
        }  # fmt: skip
        return EvalProgress(**{**given, **fields})

    def test_progress_without_a_terminal_is_a_few_lines(self):
        console = Console(file=io.StringIO(), width=80)
        with EvalView(console, "add") as view:
            for done in range(41):
                view.update(self.progress(done, num_failed=done // 20, mean_reward=0.25))
        lines = console.file.getvalue().splitlines()
        assert len(lines) == 11
        assert lines[-1] == "40/40  reward 0.250  failed 2"

    def test_progress_in_a_terminal(self):
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        with EvalView(console, "add [red]") as view:
            view.update(self.progress(20, num_truncated=3))
        assert "20/40" in console.file.getvalue()
        assert "truncated 3" in console.file.getvalue()


def result(error=None, **fields):
    given = {"prompt": [{"role": "user", "content": "7 + 5 ="}], "example_id": 0, "task": "t"}
    request = RolloutRequest(
        request_id="eval/add/0/0", env_id="add", input=given, seed=0, sampling_seed=0,
        group_id="g", index_in_group=0,
    )  # fmt: skip
    state = State(
        input=given, completion=[{"role": "assistant", "content": "12"}], reward=1.0,
        metrics={"len": 2}, trajectory=[], **fields,
    )  # fmt: skip
    return RolloutResult(request, (state,), error)


class TestTranscript:
    def test_messages_and_ending(self):
        out = shown(transcript(result(stop_condition="answered")))
        assert "eval/add/0/0" in out
        assert "user      7 + 5 =" in out
        assert "assistant 12" in out
        assert "reward 1.000   len 2   ended by answered" in out

    def test_reasoning_tools_and_emptiness(self):
        calls = [{"function": {"name": "add", "arguments": "{}"}}]
        messages = [
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "content": [{"type": "text", "text": "12"}]},
            {"role": "assistant", "content": None},
        ]
        found = result()
        found.states[0]["completion"] = messages
        out = shown(transcript(found))
        for text in ("hm", 'calls {"function"', '"text": "12"', "(empty)"):
            assert text in out

    def test_a_failure_shows_its_error_and_what_there_was(self):
        found = result(ErrorRecord("ServerError", "500 [bold]", "Traceback", "model"))
        state = found.states[0]
        state["completion"], state["reward"] = None, None
        state["trajectory"] = [
            {
                "prompt": [*state["prompt"], {"role": "user", "content": "again"}],
                "completion": [{"role": "assistant", "content": "so far"}],
            }
        ]
        out = shown(transcript(found))
        for text in ("no reward", "failed", "ServerError: 500 [bold]", "again", "so far"):
            assert text in out

    def test_what_reward_functions_raised_is_shown_once(self):
        def raised(message):
            return {"type": "ValueError", "message": message, "phase": "scoring", "traceback": ""}

        errors = {"a": raised("bad (f.py:1)"), "b": raised("worse (f.py:2)")}
        out = shown(transcript(result(scoring_errors=errors)))
        assert "scoring   ValueError: bad (f.py:1)" in out
        found = result(ErrorRecord(**raised("bad (f.py:1)")), scoring_errors=errors)
        assert shown(transcript(found)).count("bad (f.py:1)") == 1
        assert "scoring   ValueError: worse (f.py:2)" in shown(transcript(found))

    def test_strings_and_truncation(self):
        found = result(truncated=True, truncation_reason="max_steps")
        found.states[0]["input"] = {"prompt": "x" * 50}
        found.states[0]["completion"] = "y"
        out = shown(transcript(found, limit=10))
        assert "x" * 10 + " … (40 more)" in out
        assert "truncated: max_steps" in out


def test_runs(tmp_path):
    with Run.create(tmp_path / "run", kind="train") as run:
        run.add_step(1, {})
        run.add_rollouts([row(0, 0.5, phase=f"eval/{i}", index=i) for i in range(6)])
        run.add_rollouts([row(9, status="error", phase="train", num_completion_tokens=1234)])
        summary = summarize(run)
    path, facts = run_lines(summary)
    assert path == str(tmp_path / "run")
    # The first ones and the last ones: before and after training.
    assert "eval/0 0.500  eval/1 0.500  3 more phases  eval/5 0.500  train -" in facts
    health = {"severity": "warning", "text": "Look \x1b[31mhere."}
    assert run_lines(summary, health)[2] == "  ! Look ␛[31mhere."
    assert facts.startswith("  running, ")
    assert "train  add  1 steps  eval/0 0.500" in facts
    out = shown(phases_table(summary))
    assert "1,234" in out
    assert out.splitlines()[-1].split() == ["train", "1", "-", "1", "0", "0", "1,234"]
