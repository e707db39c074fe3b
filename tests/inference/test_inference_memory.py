from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inference_templates import TOOLS, assistant, user

from rolltree.inference.buffer import IdPath
from rolltree.inference.memory import CallMemory, Match


def test_a_history_continues_the_longest_earlier_call() -> None:
    memory: CallMemory[str] = CallMemory()
    first, second = [user("a")], [user("a"), assistant("b"), user("c")]
    memory.add(first, assistant("b"), "call 1")
    memory.add(second, assistant("d"), "call 2")
    assert memory.find([*second, assistant("d"), user("e")]) == Match("call 2", 4)
    assert memory.find([*second, assistant("other"), user("e")]) == Match("call 1", 2)
    assert memory.find([*first, assistant("b")]) == Match("call 1", 2)
    assert memory.find(first) is None
    assert memory.find([]) is None


def test_an_edited_message_breaks_the_match() -> None:
    memory: CallMemory[str] = CallMemory()
    messages = [user("a")]
    memory.add(messages, assistant("b"), "call")
    messages[0]["content"] = "edited in place"
    assert memory.find([*messages, assistant("b")]) is None
    assert memory.find([user("a"), assistant("b")]) is not None


def test_branches_are_told_apart() -> None:
    memory: CallMemory[int] = CallMemory()
    for number, answer in enumerate(["x", "y", "z"]):
        memory.add([user("a")], assistant(answer), number)
    assert memory.find([user("a"), assistant("y"), user("b")]) == Match(1, 2)


def test_equal_answers_are_told_apart_by_identity_then_by_time() -> None:
    memory: CallMemory[int] = CallMemory()
    answers = [assistant("same"), assistant("same")]
    for number, answer in enumerate(answers):
        memory.add([user("a")], answer, number)
    for number, answer in enumerate(answers):
        assert memory.find([user("a"), answer]) == Match(number, 2)
    assert memory.find([user("a"), assistant("same")]) == Match(1, 2)


def test_assistant_messages_are_equal_by_what_was_said() -> None:
    memory: CallMemory[int] = CallMemory()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "r"}
    memory.add([user("a")], answer, 7)
    spelled = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "other", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    assert memory.find([user("a"), spelled]) == Match(7, 2)
    spelled["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    assert memory.find([user("a"), spelled]) is None
    assert memory.find([user("a"), assistant("")]) is None


def test_a_users_extra_fields_count() -> None:
    memory: CallMemory[int] = CallMemory()
    memory.add([user("a")], assistant("b"), 0)
    assert memory.find([{**user("a"), "name": "ann"}, assistant("b")]) is None


def test_tools_and_model_keep_histories_apart() -> None:
    memory: CallMemory[int] = CallMemory()
    history = [user("a"), assistant("b")]
    memory.add(history[:1], history[1], 0, TOOLS, "big")
    assert memory.find(history, TOOLS, "big") == Match(0, 2)
    assert memory.find(history, [dict(tool) for tool in TOOLS], "big") == Match(0, 2)
    assert memory.find(history, None, "big") is None
    assert memory.find(history, TOOLS, "small") is None


def test_interleaved_look_ups_do_not_disturb_each_other() -> None:
    memory: CallMemory[int] = CallMemory()
    one, two = [user("1"), user("x")], [user("2"), user("y")]
    memory.find(one)
    memory.find(two)
    memory.add(one, assistant("a"), 1)
    memory.add(two, assistant("b"), 2)
    assert memory.find([*one, assistant("a")]) == Match(1, 3)
    assert memory.find([*two, assistant("b")]) == Match(2, 3)


MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant"]),
    st.sampled_from("ab"),
)


@given(
    st.lists(st.tuples(st.lists(MESSAGES, max_size=4), MESSAGES), max_size=8),
    st.lists(MESSAGES, max_size=6),
)
def test_the_trie_finds_what_a_search_finds(
    calls: list[tuple[list[dict[str, str]], dict[str, str]]], history: list[dict[str, str]]
) -> None:
    memory: CallMemory[int] = CallMemory()
    for number, (messages, answer) in enumerate(calls):
        memory.add(messages, answer, number)
    candidates = [
        (len(messages) + 1, number)
        for number, (messages, answer) in enumerate(calls)
        if history[: len(messages) + 1] == [*messages, answer]
    ]
    match = memory.find(history)
    assert (match is None) == (not candidates)
    if match is not None:
        assert match.num_old == max(candidates)[0]
        assert (match.num_old, match.call) in candidates


def test_a_path_is_read_only_and_keeps_its_ids() -> None:
    path = IdPath.of([1, 2])
    longer = path.extended([3])
    assert path.ids.tolist() == [1, 2]
    assert longer.ids.tolist() == [1, 2, 3]
    assert longer.ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        longer.ids[0] = 9


def test_appending_in_place_shares_memory_and_branching_copies() -> None:
    path = IdPath.of(range(10))
    one = path.extended([1])
    two = path.extended([2])
    assert np.shares_memory(path.ids, one.ids)
    assert not np.shares_memory(path.ids, two.ids)
    assert one.ids[-1] == 1
    assert two.ids[-1] == 2


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 99), max_size=50))))
def test_any_tree_of_extensions_keeps_every_path(
    steps: list[tuple[int, list[int]]],
) -> None:
    paths, expected = [IdPath.of([])], [[]]
    for parent, new in steps:
        index = parent % len(paths)
        paths.append(paths[index].extended(new))
        expected.append(expected[index] + new)
    assert [path.ids.tolist() for path in paths] == expected


def test_memory_is_linear_in_tokens() -> None:
    path = IdPath.of([])
    paths = [path := path.extended(range(10)) for _ in range(1000)]
    buffers = {id(each.ids.base): each.ids.base for each in paths}
    held = sum(base.nbytes for base in buffers.values() if base is not None)
    assert held <= 4 * 4 * 10_000
