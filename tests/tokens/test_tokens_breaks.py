"""Causes of breaks, on hand-made conversations.

Ids: 1 system, 2 user, 3 assistant, 9 end of message; 50.. thinking, 60.. answers, 100.. other text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rolltree.tokens import Break, BreakCause, TokenTree, explain_break
from rolltree.tokens.break_causes import surviving_tail

HEAD = [1, 100, 101, 9]
ASK = [2, 110, 111, 112, 9, 3]
MORE = [2, 120, 121, 9, 3]
THINK = [50, 51, 52, 53, 54]
ANSWER = [60, 61, 62, 9]


def texts(ids: list[int]) -> str:
    """A decoder in which 200 reads like 60 61 and thinking is marked."""
    names = {50: "<think>", 54: "</think>", 200: "<60><61>", 201: "\ufffd", 55: " "}
    return "".join(names.get(i, f"<{i}>") for i in ids)


def broken(
    calls: list[tuple[list[int], list[int]]], decode: Any = None, history: int = 0, **extra: Any
) -> Break:
    """Break of the last call against the one before it; `history` calls stand on its path."""
    tree = TokenTree()
    for prompt, completion in calls:
        tree.insert(prompt, completion, agent="a")
    last = len(calls) - 1
    return explain_break(
        tree,
        last,
        last - 1,
        history=list(range(last - 1 - history, last)),
        first_prompt_len=len(calls[0][0]),
        decode=decode,
        **extra,
    )


def test_reasoning_stripped() -> None:
    prompt = HEAD + ASK
    found = broken([(prompt, THINK + ANSWER), (prompt + ANSWER + MORE, ANSWER)])
    assert found.cause is BreakCause.REASONING_STRIPPED
    assert found.position == len(prompt)
    assert (found.call, found.previous) == (1, 0)
    assert found.previous_ids.tolist() == prompt[-16:] + THINK + ANSWER
    assert found.current_ids.tolist() == prompt[-16:] + ANSWER + MORE
    assert (found.previous_text, found.current_text) == (None, None)
    assert "reasoning_stripped at token 10" in str(found)


def test_reasoning_stripped_from_several_calls_of_a_turn_at_once() -> None:
    tool = [4, 130, 9, 3]
    prompt = HEAD + ASK
    first = prompt + THINK + ANSWER
    second = first + tool + THINK + [63, 64, 9]
    stripped = prompt + ANSWER + tool + [63, 64, 9] + MORE
    calls = [(prompt, THINK + ANSWER), (first + tool, [*THINK, 63, 64, 9]), (stripped, ANSWER)]
    assert len(second) > len(stripped)
    assert broken(calls, history=1).cause is BreakCause.REASONING_STRIPPED


def test_reasoning_opened_by_the_generation_prompt() -> None:
    prompt = HEAD + ASK + [50]
    after = HEAD + ASK + ANSWER + MORE + [50]
    found = broken([(prompt, THINK[1:] + ANSWER), (after, ANSWER)])
    assert (found.cause, found.position) == (BreakCause.REASONING_STRIPPED, len(HEAD + ASK))


def test_empty_thinking_block_left_behind() -> None:
    prompt = HEAD + ASK
    after = [*prompt, 50, 54, *ANSWER, *MORE]
    assert broken([(prompt, THINK + ANSWER), (after, [7])]).cause is BreakCause.REASONING_STRIPPED


def test_a_short_answer_needs_the_text_to_tell() -> None:
    prompt = HEAD + ASK
    calls = [(prompt, [*THINK, 9]), ([*prompt, 9, *MORE], [7])]
    assert broken(calls).cause is BreakCause.HISTORY_REWRITTEN
    assert broken(calls, decode=texts).cause is BreakCause.REASONING_STRIPPED
    blank = [(prompt, [55, 60, 61, 9]), ([*prompt, 60, 61, 9, *MORE], [7])]
    assert broken(blank, decode=texts).cause is BreakCause.HISTORY_REWRITTEN


def test_retokenized_needs_a_decoder() -> None:
    prompt = HEAD + ASK
    calls = [(prompt, ANSWER), ([*prompt, 200, 62, 9, *MORE], [7])]
    assert broken(calls).cause is not BreakCause.RETOKENIZED
    found = broken(calls, decode=texts)
    assert found.cause is BreakCause.RETOKENIZED
    assert found.position == len(prompt)
    assert found.previous_text is not None
    assert found.current_text is not None
    assert found.previous_text.endswith("<60><61><62><9>")
    assert found.current_text.endswith("<60><61><62><9>" + texts(MORE))


def test_other_text_is_not_retokenized() -> None:
    prompt = HEAD + ASK
    calls = [(prompt, ANSWER), ([*prompt, 200, 99, 9, *MORE], [7])]
    assert broken(calls, decode=texts).cause is BreakCause.HISTORY_REWRITTEN


def test_an_unfinished_character_at_the_window_is_no_difference() -> None:
    prompt = HEAD + ASK
    calls = [(prompt, [60, 61, 201]), ([*prompt, 200, 62, 9], [7])]
    assert broken(calls, decode=texts).cause is BreakCause.RETOKENIZED


def test_system_or_tool_text_changed() -> None:
    history = ASK + ANSWER + MORE
    calls = [(HEAD + ASK, ANSWER), ([1, 100, 199, 198, 9, *history], [7])]
    found = broken(calls)
    assert (found.cause, found.position) == (BreakCause.SYSTEM_CHANGED, 2)


def test_compaction_replaces_history_by_a_summary() -> None:
    first, second = HEAD + ASK, HEAD + ASK + ANSWER + MORE
    summary = [*HEAD, 2, 140, 9, 3]
    calls = [(first, ANSWER), (second, [70, 71, 72, 9]), (summary, [7])]
    assert broken(calls, history=1).cause is BreakCause.COMPACTION


def test_compaction_that_keeps_the_last_messages() -> None:
    first = HEAD + ASK
    second = first + ANSWER + MORE
    kept = [*HEAD, 2, 140, 9, *MORE, 70, 71, 72, 9, 2, 150, 151, 152, 153, 9, 3]
    calls = [(first, ANSWER), (second, [70, 71, 72, 9]), (kept, [7])]
    assert broken(calls, history=1).cause is BreakCause.COMPACTION


def test_the_same_prompt_sampled_again_breaks_nothing() -> None:
    prompt = HEAD + ASK
    found = broken([(prompt, ANSWER), (prompt, [65, 66, 9])])
    assert (found.cause, found.position) == (BreakCause.SAMPLED_AGAIN, len(prompt))
    assert not found.is_break
    shorter = broken([(prompt, ANSWER), (HEAD, [65, 66, 9])])
    assert (shorter.cause, shorter.is_break) == (BreakCause.HISTORY_REWRITTEN, True)


def test_rollback_and_edited_answers_are_rewritten_history() -> None:
    prompt = HEAD + ASK
    rollback = [(prompt, ANSWER), (prompt + ANSWER[:2], [65, 66, 9])]
    found = broken(rollback)
    assert (found.cause, found.position) == (BreakCause.HISTORY_REWRITTEN, len(prompt) + 2)
    edited = [(prompt, ANSWER), ([*prompt, 80, 81, 82, 83, 84, 9, *MORE], [7])]
    assert broken(edited).cause is BreakCause.HISTORY_REWRITTEN


def test_handoff_is_named_before_anything_else() -> None:
    found = broken([(HEAD + ASK, ANSWER), ([*HEAD, 2, 160, 9, 3], [7])], handoff=True)
    assert found.cause is BreakCause.AGENT_HANDOFF
    assert found.previous is None
    moved = found.of(rollout=4, call=7, previous=6, agent="b")
    assert (moved.rollout, moved.call, moved.previous, moved.agent) == (4, 7, None, "b")


def test_empty_prompt_breaks_at_zero() -> None:
    found = broken([([], [1, 2]), ([], [3])])
    assert (found.cause, found.position) == (BreakCause.SAMPLED_AGAIN, 0)
    assert found.current_ids.tolist() == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5, 7], (4, 1)),
        ([1, 2, 3], [1, 2, 3], (3, 0)),
        ([1, 2, 3], [3, 2, 3, 9], (2, 1)),
        ([1, 2, 3], [4, 5], (0, 0)),
        ([], [1], (0, 0)),
        ([1], [], (0, 0)),
        ([8, 9], [9, 1, 8, 9], (2, 2)),
    ],
)
def test_surviving_tail(old: list[int], new: list[int], expected: tuple[int, int]) -> None:
    assert surviving_tail(np.array(old, np.int32), np.array(new, np.int32)) == expected
