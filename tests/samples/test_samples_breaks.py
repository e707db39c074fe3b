"""Breaks in a batch: which call is compared with which, and the rates."""

from __future__ import annotations

import pytest
from samples_kit import state

from rolltree.samples import build_samples
from rolltree.tokens import BreakCause
from step_kit import step

HEAD = [1, 2, 3]
THINK, ANSWER, MORE = [50, 51, 52, 53], [60, 61, 62, 9], [4, 5]


def test_each_agent_is_compared_with_its_own_latest_call() -> None:
    first = step(HEAD, THINK + ANSWER, agent="a")
    other = step([7, 8], [9], agent="b")
    stripped = step([*HEAD, *ANSWER, *MORE], [9], agent="a")
    batch = build_samples([[first, other, stripped]], "interleave")
    assert [(b.call, b.previous, b.agent, str(b.cause)) for b in batch.breaks] == [
        (1, None, "b", "agent_handoff"),
        (2, 0, "a", "reasoning_stripped"),
    ]
    assert batch.report["break_rate/agent_handoff"] == 0.5
    assert batch.report["break_rate"] == 1.0


def test_a_handoff_says_where_the_agents_part() -> None:
    steps = [step([1, 2, 3], [4], agent="a"), step([1, 2, 8], [5], agent="b")]
    (found,) = build_samples([steps], "interleave").breaks
    assert (found.position, found.previous) == (2, None)
    assert found.previous_ids.tolist() == [1, 2, 3, 4]
    assert found.current_ids.tolist() == [1, 2, 8]


def test_an_agent_that_goes_on_from_anothers_tokens_breaks_nothing() -> None:
    steps = [step([1, 2], [3], agent="a"), step([1, 2, 3, 4], [5], agent="b")]
    batch = build_samples([steps], "interleave")
    assert batch.breaks == ()
    assert [origin.agent for origin in batch.samples[0].origins] == ["a", "b"]


def test_a_call_that_returns_to_an_older_sample_is_no_break() -> None:
    steps = [
        step([1, 2], [3]),
        step([1, 9], [4]),
        step([1, 2, 3, 5], [6]),
        step([1, 9, 4, 5], [7]),
    ]
    batch = build_samples([steps], "interleave")
    assert [b.call for b in batch.breaks] == [1]


@pytest.mark.parametrize("scope", ["step", "interleave", "tree"])
def test_every_scope_reports_the_same_breaks_of_a_rollout(scope: str) -> None:
    steps = [step(HEAD, THINK + ANSWER), step([*HEAD, *ANSWER, *MORE], [9])]
    batch = build_samples([state(steps), state(steps)], scope)  # type: ignore[arg-type]
    assert [(b.rollout, b.call, b.cause) for b in batch.breaks] == [
        (0, 1, BreakCause.REASONING_STRIPPED),
        (1, 1, BreakCause.REASONING_STRIPPED),
    ]


def test_sampled_ranges_of_the_whole_merged_sample_are_known() -> None:
    """Two completions of one sample are stripped at once: the first divergence is the older one."""
    tool = [4, 40, 9]
    second = HEAD + THINK + ANSWER + tool
    third = HEAD + ANSWER + tool + [63, 64, 9] + MORE
    steps = [step(HEAD, THINK + ANSWER), step(second, [*THINK, 63, 64, 9]), step(third, [8])]
    (found,) = build_samples([steps], "interleave").breaks
    assert (found.call, found.previous, found.position) == (2, 1, 3)
    assert found.cause is BreakCause.REASONING_STRIPPED


def test_texts_need_a_decoder_and_get_python_ints() -> None:
    seen: list[object] = []

    def decode(ids: list[int]) -> str:
        seen.extend(ids)
        return "".join(map(chr, ids))

    steps = [step([65, 66], [67]), step([65, 68], [69])]
    (found,) = build_samples([steps], "step", decode=decode).breaks
    assert (found.previous_text, found.current_text) == ("ABC", "AD")
    assert {type(item) for item in seen} == {int}
    (silent,) = build_samples([steps], "step").breaks
    assert (silent.previous_text, silent.current_text) == (None, None)
    assert "was [65, 66, 67], is [65, 68]" in str(silent)
