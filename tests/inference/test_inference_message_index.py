from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from inference_templates import TOOLS, assistant, user

from rolltree.inference.message_index import Match, MessageIndex


def test_a_history_continues_the_longest_earlier_call() -> None:
    index = MessageIndex()
    first, second = [user("a")], [user("a"), assistant("b"), user("c")]
    index.add(first, assistant("b"), 1)
    index.add(second, assistant("d"), 2)
    assert index.find([*second, assistant("d"), user("e")]) == Match(2, 4)
    assert index.find([*second, assistant("other"), user("e")]) == Match(1, 2)
    assert index.find([*first, assistant("b")]) == Match(1, 2)
    assert index.find(first) is None
    assert index.find([]) is None


def test_an_edited_message_breaks_the_match() -> None:
    index = MessageIndex()
    messages = [user("a")]
    index.add(messages, assistant("b"), 1)
    messages[0]["content"] = "edited in place"
    assert index.find([*messages, assistant("b")]) is None
    assert index.find([user("a"), assistant("b")]) is not None


def test_branches_are_told_apart() -> None:
    index = MessageIndex()
    for number, answer in enumerate(["x", "y", "z"]):
        index.add([user("a")], assistant(answer), number)
    assert index.find([user("a"), assistant("y"), user("b")]) == Match(1, 2)


def test_equal_answers_are_told_apart_by_identity_then_by_time() -> None:
    index = MessageIndex()
    answers = [assistant("same"), assistant("same")]
    for number, answer in enumerate(answers):
        index.add([user("a")], answer, number)
    for number, answer in enumerate(answers):
        assert index.find([user("a"), answer]) == Match(number, 2)
    assert index.find([user("a"), assistant("same")]) == Match(1, 2)


def test_assistant_messages_are_equal_by_what_was_said() -> None:
    index = MessageIndex()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "r"}
    index.add([user("a")], answer, 7)
    spelled = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "other", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    assert index.find([user("a"), spelled]) == Match(7, 2)
    spelled["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    assert index.find([user("a"), spelled]) is None
    assert index.find([user("a"), assistant("")]) is None


def test_no_arguments_are_empty_arguments() -> None:
    index = MessageIndex()

    def answer(arguments: str) -> dict[str, object]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    index.add([user("a")], answer(""), 7)
    assert index.find([user("a"), answer("{}")]) == Match(7, 2)
    assert index.find([user("a"), answer("[]")]) is None


def test_an_argument_that_the_agent_sets_to_its_default_is_the_same_call() -> None:
    index = MessageIndex()
    schema = {"properties": {"path": {}, "all": {"type": "boolean", "default": False}}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": schema}}]

    def answer(arguments: str) -> dict[str, object]:
        call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    short, long = answer('{"path": "a"}'), answer('{"all": false, "path": "a"}')
    index.add([user("a")], short, 7, tools)
    assert index.find([user("a"), long], tools) == Match(7, 2)
    for other in ('{"path": "a", "all": true}', '{"path": "a", "all": 0}', '{"all": false}'):
        assert index.find([user("a"), answer(other)], tools) is None
    # What was sent back as it is takes precedence, however old it is.
    index.add([user("a")], long, 8, tools)
    assert index.find([user("a"), answer('{"path": "a"}')], tools) == Match(7, 2)
    assert index.find([user("a"), answer('{"all": false, "path": "a"}')], tools) == Match(8, 2)
    index.add([user("a")], short, 7)
    assert index.find([user("a"), long]) is None


def test_a_users_extra_fields_count() -> None:
    index = MessageIndex()
    index.add([user("a")], assistant("b"), 0)
    assert index.find([{**user("a"), "name": "ann"}, assistant("b")]) is None


def test_tools_and_model_keep_histories_apart() -> None:
    index = MessageIndex()
    history = [user("a"), assistant("b")]
    index.add(history[:1], history[1], 0, TOOLS, "big")
    assert index.find(history, TOOLS, "big") == Match(0, 2)
    assert index.find(history, [dict(tool) for tool in TOOLS], "big") == Match(0, 2)
    assert index.find(history, None, "big") is None
    assert index.find(history, TOOLS, "small") is None


def test_interleaved_look_ups_do_not_disturb_each_other() -> None:
    index = MessageIndex()
    one, two = [user("1"), user("x")], [user("2"), user("y")]
    index.find(one)
    index.find(two)
    index.add(one, assistant("a"), 1)
    index.add(two, assistant("b"), 2)
    assert index.find([*one, assistant("a")]) == Match(1, 3)
    assert index.find([*two, assistant("b")]) == Match(2, 3)


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
    index = MessageIndex()
    for number, (messages, answer) in enumerate(calls):
        index.add(messages, answer, number)
    candidates = [
        (len(messages) + 1, number)
        for number, (messages, answer) in enumerate(calls)
        if history[: len(messages) + 1] == [*messages, answer]
    ]
    match = index.find(history)
    assert (match is None) == (not candidates)
    if match is not None:
        assert match.num_old == max(candidates)[0]
        assert (match.num_old, match.call) in candidates
