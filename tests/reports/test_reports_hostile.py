"""What models, environments and paths are called must not change what a terminal shows."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rolltree.evaluation import build_report
from rolltree.reports import (
    EvalView,
    evaluation_facts,
    evaluation_table,
    phases_table,
    run_lines,
    say,
    transcript,
)
from rolltree.reports.formatting import counts, duration, meter, safe_text
from rolltree.store import Run, StoredRollout, summarize
from rolltree.values.types import RolloutRequest, RolloutResult, State


def printed(*parts, width=100, terminal=False):
    """Return what a real UTF-8 stream got, so that unencodable text fails as in a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(file=stream, width=width, force_terminal=terminal)
    for part in parts:
        console.print(part)
    stream.flush()
    return stream.buffer.getvalue().decode()


def rollout(prompt="q", completion=(), **fields):
    given = {"prompt": prompt, "example_id": 0, "task": "t"}
    request = RolloutRequest(
        request_id="eval/0", env_id="add", input=given, seed=0, sampling_seed=0, group_id="g",
        index_in_group=0,
    )  # fmt: skip
    state = State(input=given, completion=list(completion), trajectory=[], reward=0.5)
    state.update(fields)
    return RolloutResult(request, (state,), None)


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


any_text = st.text(st.characters(), max_size=30)


class TestText:
    def test_half_a_character_can_be_printed(self):
        assert printed(safe_text("a\ud83d b\udc00")) == "a\ufffd b\ufffd\n"

    def test_text_order_cannot_be_turned_round(self):
        assert (
            printed(safe_text("\u202eabc\u202c \u2066d\u2069")) == "\ufffdabc\ufffd \ufffdd\ufffd\n"
        )

    @settings(max_examples=60)
    @given(any_text)
    def test_any_answer_is_printed_inside_its_panel(self, text):
        out = printed(transcript(rollout(completion=[said(text, reasoning_content=text)])))
        assert out.startswith("╭─ eval/0 ")
        assert out.rstrip().endswith("╯")
        assert not {c for c in out if ord(c) < 32} - {"\n", "\t"}

    @settings(max_examples=40)
    @given(any_text)
    def test_any_name_is_printed_in_tables(self, text):
        rows = [
            StoredRollout(
                request_id=str(index), env_id=text, task=f"{text}{index}", example_id=index,
                reward=1.0, metrics={text: 1.0}, truncated=True, truncation_reason=text,
            )
            for index in range(2)
        ]  # fmt: skip
        report = build_report(rows, model=text, run_path=text)
        out = printed(evaluation_table(report), evaluation_facts(report), width=300)
        assert "reward" in out
        assert "2 over 2 examples" in out

    @pytest.mark.parametrize(
        "name", ["[/]", "[/red]", "[red]x", "[bold", "a]b[", "\\[x]", ":smile:"]
    )
    def test_markup_in_names_is_text(self, name):
        rows = [StoredRollout(request_id="0", env_id=name, example_id=0, reward=1.0)]
        report = build_report(rows, model=f"runs/{name}")
        assert f"{name} · runs/{name}" in printed(evaluation_table(report))
        assert printed(transcript(rollout(), title=name)).startswith(f"╭─ {name} ")
        with EvalView(Console(file=io.StringIO(), width=80, force_terminal=True), name) as view:
            assert view.progress is None

    def test_a_line_is_one_line_whatever_it_says(self):
        console = Console(file=io.StringIO(), width=5, force_terminal=True)
        say(console, "[red]a[/red] 123 'x' http://h\x1b[2J")
        assert console.file.getvalue() == "[red]a[/red] 123 'x' http://h␛[2J\n"


class TestNumbers:
    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(0, "0.0 s"), (59.94, "59.9 s"), (59.95, "1 min 00 s"), (59.999, "1 min 00 s"),
         (119.6, "2 min 00 s"), (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"),
         (86400, "24 h 00 min")],
    )  # fmt: skip
    def test_durations_carry_over_at_sixty(self, seconds, text):
        assert duration(seconds) == text

    @given(st.floats(0, 1e6))
    def test_durations_never_say_sixty(self, seconds):
        assert "60" not in duration(seconds).replace(" h ", ":").split(":")[-1].split(" ")[0]

    @given(st.floats(), st.integers(1, 30))
    def test_a_meter_is_as_wide_as_asked(self, value, width):
        bar = meter(value, width)
        assert len(bar) == width
        assert set(bar) <= set(" ▏▎▍▌▋▊▉█")

    @given(st.floats(0, 1), st.floats(0, 1))
    def test_a_greater_value_has_no_shorter_bar(self, one, two):
        low, high = sorted((one, two))
        assert meter(low, 8).count("█") <= meter(high, 8).count("█")

    def test_a_meter_of_nan_is_empty(self):
        assert meter(float("nan"), 4) == "    "

    def test_counts(self):
        assert counts({"ServerError": 2, "BadResponse": 1}) == "ServerError 2, BadResponse 1"
        assert counts({}) == ""


class TestTranscript:
    def test_long_texts_are_cut_each_for_itself(self):
        tools = [{"function": {"name": "add", "arguments": "9" * 5000}}]
        messages = [
            said("x" * 1000, reasoning_content="y" * 1000, tool_calls=tools),
            {"role": "tool", "content": "z" * 1000},
        ]
        out = printed(transcript(rollout(completion=messages), limit=20))
        for letter in "xyz":
            assert letter * 20 in out
            assert letter * 21 not in out
        assert out.count("(980 more)") == 3
        assert "9" * 20 not in out  # a call's own words come first
        assert 'calls {"function": { … (' in out

    def test_a_turn_is_read_from_top_to_bottom(self):
        call = {"id": "c0", "function": {"name": "add", "arguments": '{"a": 7, "b": 5}'}}
        messages = [
            said("", reasoning_content="I add.", tool_calls=[call, call]),
            {"role": "tool", "tool_call_id": "c0", "content": "12"},
            said("It is 12."),
        ]
        out = printed(transcript(rollout([{"role": "user", "content": "7 + 5"}], messages)))
        places = [out.index(text) for text in ("7 + 5", "I add.", "calls", "tool", "It is 12.")]
        assert places == sorted(places)
        assert out.count("calls {") == 2
        roles = [line[2:11].strip() for line in out.splitlines() if line.startswith("│")]
        assert [role for role in roles if role] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "ending",
        ]

    def test_odd_messages_are_shown_as_they_are(self):
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}]
        messages = [{"content": "no role"}, said(parts), said("  \n "), "no message"]
        out = printed(transcript(rollout(completion=messages)))
        assert "?         no role" in out
        assert '"type": "image_url"' in out
        assert "(empty)" in out
        assert "no message" not in out

    def test_several_trajectories_have_an_ending_each(self):
        result = rollout(completion=[said("one")])
        other = State(input=result.states[0]["input"], completion=[said("two")], trajectory=[],
                      reward=None, stop_condition="won")  # fmt: skip
        both = RolloutResult(result.request, (*result.states, other), None)
        out = printed(transcript(both))
        assert out.count("ending") == 2
        assert out.index("reward 0.500") < out.index("two") < out.index("no reward   ended by won")

    def test_metrics_that_are_no_numbers_are_left_out(self):
        found = rollout(metrics={"len": 12345.678, "note": "x", "none": None, "flag": True})
        out = printed(transcript(found))
        assert "len 1.23e+04" in out
        assert "note" not in out
        assert "flag 1" in out


def test_a_run_of_odd_names_is_listed(tmp_path):
    with Run.create(tmp_path / "r", kind="train") as run:
        run.add_rollouts(
            [StoredRollout(request_id="a", env_id="[/x]", phase="[red]\x1b[2J", reward=1.0)]
        )
        summary = summarize(run)
    assert "[red]␛[2J" in printed(phases_table(summary))
    console = Console(file=io.StringIO(), width=20)
    for line in run_lines(summary):
        say(console, line)
    assert "\x1b" not in console.file.getvalue()
    assert "[/x]" in console.file.getvalue()
