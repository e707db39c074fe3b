"""The message table: exact, and O(new messages) per step."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.rollouts.message_table import MessageReader, MessageTable
from rolltree.store import loads

contents = st.sampled_from(["a", "b", "", "7 + 5 =", "\ud800"]) | st.integers(0, 2) | st.none()
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": contents},
    optional={"tool_calls": st.lists(st.dictionaries(st.text(max_size=2), contents), max_size=2)},
)
histories = st.lists(messages, max_size=6) | st.text(max_size=6) | st.none() | st.just(("x", 1))


def roundtrip(all_histories):
    table = MessageTable()
    references = [table.add(history) for history in all_histories]
    reader = MessageReader(loads(table.to_json()))
    return table, [reader.get(reference) for reference in references]


@settings(max_examples=200)
@given(st.lists(histories, max_size=6))
def test_every_history_comes_back(all_histories):
    _, back = roundtrip(all_histories)
    assert back == all_histories
    assert [type(item) for item in back] == [type(item) for item in all_histories]


def test_append_only_history_costs_what_is_new():
    history, prompts = [], []
    for turn in range(100):
        history = [*history, {"role": "user", "content": f"u{turn}"}]
        prompts.append(history)
        history = [*history, {"role": "assistant", "content": f"a{turn}"}]
    table, back = roundtrip(prompts)
    assert back == prompts
    assert table.num_messages == 199
    assert table.num_nodes == 199  # not 10,000


def test_copied_messages_are_one():
    first = [{"role": "user", "content": "hi"}]
    table, _ = roundtrip([first, json.loads(json.dumps(first))])
    assert table.num_messages == 1
    assert table.num_nodes == 1


def test_equal_looking_values_stay_different():
    table, back = roundtrip([[{"content": 1}], [{"content": True}], [{"content": 1.0}]])
    assert table.num_messages == 3
    assert [type(history[0]["content"]) for history in back] == [int, bool, float]


def test_a_rewritten_history_costs_its_references_not_its_messages():
    history = [{"role": "user", "content": str(i)} for i in range(50)]
    table, _ = roundtrip([history, history[:10] + history[20:]])
    assert table.num_messages == 50
    assert table.num_nodes == 50 + 30


def test_growing_strings_cost_what_is_new():
    text, prompts = "", []
    for turn in range(100):
        text += f"question {turn}: "
        prompts.append(text)
        text += f"answer {turn}. "
    table, back = roundtrip(prompts)
    assert back == prompts
    assert len(table.to_json()) < 3 * len(text) + 100 * 20


def test_a_message_changed_between_steps_is_another():
    """Histories are encoded when the rollout is over; equal objects are equal messages."""
    message = {"role": "user", "content": "one"}
    table = MessageTable()
    first = table.add([message])
    second = table.add([{**message, "content": "two"}])
    reader = MessageReader(loads(table.to_json()))
    assert reader.get(first) != reader.get(second)


def test_fresh_lists():
    _, (first, second) = roundtrip([[{"role": "user"}]] * 2)
    first.append("more")
    assert second == [{"role": "user"}]


@pytest.mark.parametrize("empty", [[], ""])
def test_empty_histories_keep_their_type(empty):
    assert roundtrip([empty])[1] == [empty]
