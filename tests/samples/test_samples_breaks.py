"""Breaks in a batch: which call is compared with which, and the rates."""

from __future__ import annotations

from typing import Any

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


# -- what the messages tell ------------------------------------------------------------------------


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, *calls: str, **more: Any) -> dict[str, Any]:
    made = [{"id": "c", "function": {"name": name, "arguments": "{}"}} for name in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


class Told:
    """Calls of one agent, whose messages are spelled as ids, character by character."""

    def __init__(self, *, strips: bool = False) -> None:
        self.steps: list[Any] = []
        self._spoken: dict[str, list[int]] = {}
        self._strips = strips

    def call(self, messages: list[dict[str, Any]], answer: dict[str, Any]) -> dict[str, Any]:
        prompt = [id_ for message in messages for id_ in self._ids(message, self._strips)]
        head, completion = [1, ord("a")], self._ids(answer, False)
        made = step(prompt + head, completion[2:], prompt=[*messages], completion=[answer])
        self.steps.append(made)
        return answer

    def _ids(self, message: dict[str, Any], strips: bool) -> list[int]:
        thought = "" if strips else message.get("reasoning_content", "")
        names = "".join(f"({call['function']['name']})" for call in message.get("tool_calls", ()))
        text = f"{thought and f'<think>{thought}</think>'}{message['content'] or ''}{names}"
        return [1, ord(message["role"][0]), *map(ord, text), 2]

    def causes(self) -> tuple[list[str], list[tuple[int, int | None, str]]]:
        """Return the breaks by cause, and all that began a sample: call, compared with, cause."""
        batch = build_samples([self.steps], "interleave", decode=lambda ids: "".join(map(chr, ids)))
        begun = [sample.info["break"] for sample in batch.samples[1:]]
        rates = {key for key, rate in batch.report.items() if key.startswith("breaks/") and rate}
        assert rates == {f"breaks/{each.cause}" for each in batch.breaks}
        assert batch.report["num_breaks"] == len(batch.breaks)
        return [str(each.cause) for each in batch.breaks], [
            (each.call, each.previous, str(each.cause)) for each in begun
        ]


def test_a_sub_agent_of_its_own_system_message_breaks_nothing() -> None:
    told = Told()
    main = [system("You plan the work."), user("Write a sort, and tests for it.")]
    main += [told.call(main, said("first the sort")), user("go on")]
    main += [told.call(main, said("then the tests")), user("go on")]
    sub = [system("Title?"), user("Write a sort, and tests for it.")]
    told.call(sub, said("a sort"))
    main += [told.call(main, said("all is done")), user("thanks")]
    sub += [said("a sort"), user("shorter")]
    told.call(sub, said("sort"))
    breaks, begun = told.causes()
    assert (breaks, begun) == ([], [(2, 1, "another_conversation")])


def sub_agents(lead: str, sub: str, *, num_turns: int = 2) -> Told:
    """A lead that asks two sub-agents, one after the other, and goes on."""
    told = Told()
    main = [system(lead), user("Fix the file, and ask two others.")]
    main += [told.call(main, said("look", "read")), {"role": "tool", "content": "a - b"}]
    main += [told.call(main, said("ask", "agent", "agent"))]
    for task in ("Count the lines.", "Name the function."):
        own = [system(sub), user(task)]
        for turn in range(num_turns - 1):
            own += [told.call(own, said(f"look {turn}", "read")), {"role": "tool", "content": "x"}]
        told.call(own, said("done"))
        main += [{"role": "tool", "content": "done"}]
    told.call(main, said("fixed"))
    return told


@pytest.mark.parametrize("sub", ["You are asked by another agent.", "You work."])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_sub_agents_of_one_system_message_break_nothing(sub: str, num_turns: int) -> None:
    breaks, begun = sub_agents("You work.", sub, num_turns=num_turns).causes()
    assert breaks == []
    assert {cause for *_, cause in begun} == {"another_conversation"}
    assert len(begun) == 2


def test_a_history_that_is_compacted_while_tools_were_asked_for_is_a_break() -> None:
    told = Told()
    main = [system("You work."), user("Fix the file, whatever it takes.")]
    main += [told.call(main, said("look", "read")), {"role": "tool", "content": "a - b"}]
    main += [told.call(main, said("again", "read")), {"role": "tool", "content": "a - b"}]
    short = [main[0], user("So far: a - b.")]
    short += [told.call(short, said("edit", "edit")), {"role": "tool", "content": "edited"}]
    told.call(short, said("fixed"))
    assert told.causes()[0] == ["compaction"]


def test_a_break_after_a_sub_agent_is_explained_by_its_own_conversation() -> None:
    told = Told(strips=True)
    main = [system("You plan the work."), user("Write a sort.")]
    main += [told.call(main, said("first", reasoning_content="hmm, a sort")), user("go on")]
    told.call([system("Title?"), user("Write a sort.")], said("a sort"))
    told.call(main, said("done", reasoning_content="so"))
    breaks, begun = told.causes()
    assert breaks == ["reasoning_stripped"]
    assert begun == [(1, 0, "another_conversation"), (2, 0, "reasoning_stripped")]


def test_samples_of_one_prompt_break_nothing_in_any_order() -> None:
    told = Told()
    one, two = [user("one")], [user("another question")]
    for messages in (one, two, one, two, one):
        told.call(messages, said(f"answer {len(told.steps)}"))
    breaks, begun = told.causes()
    assert breaks == []
    assert begun == [
        (1, 0, "another_conversation"),
        *((call, call - 2, "sampled_again") for call in (2, 3, 4)),
    ]


def test_a_summary_is_compaction_and_a_changed_system_message_is_named() -> None:
    told = Told()
    main = [system("Work."), user("a long question")]
    main += [told.call(main, said("a long answer")), user("and a second question")]
    told.call(main, said("another long answer"))
    told.call([main[0], user("so far: all")], said("well"))
    assert told.causes()[0] == ["compaction"]
    told = Told()
    told.call([system("Work."), user("question")], said("answer"))
    now = [system("Work. It is 5."), user("question"), said("answer"), user("more")]
    told.call(now, said("well"))
    assert told.causes()[0] == ["system_or_tools_changed"]
    told = Told()
    told.call([system("It is 4."), user("question")], said("answer"))
    told.call([system("It is 5."), *now[1:]], said("well"))
    assert told.causes()[0] == ["system_or_tools_changed"]


def test_text_beside_a_call_that_is_not_sent_back_is_no_stripped_reasoning() -> None:
    for thought in ({}, {"reasoning_content": "hmm"}):
        told = Told(strips=True)
        asked = [user("look it up")]
        told.call(asked, said("Let me look.", "search", **thought))
        told.call([*asked, said(None, "search"), user("found")], said("well"))
        assert told.causes()[0] == ["history_rewritten"]
    told = Told(strips=True)
    told.call(asked, said("Let me look.", "search", reasoning_content="hmm"))
    told.call([*asked, said("Let me look.", "search"), user("found")], said("well"))
    assert told.causes()[0] == ["reasoning_stripped"]
