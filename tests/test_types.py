"""State's forwarding is the same for every way of asking, and inputs are checked at the door."""

import copy
import dataclasses
import pickle

import pytest

from rolltree.inference.call import ModelCall
from rolltree.values.types import (
    INPUT_FIELDS,
    FinishReason,
    SamplingParams,
    State,
    as_input,
    concat_messages,
)


def make_state() -> State:
    question = [{"role": "user", "content": "7 + 5 ="}]
    return State(input=as_input({"prompt": question, "example_id": 3, "answer": "12"}), reward=None)


def test_forwarded_fields_are_read_written_and_seen_by_in():
    state = make_state()
    assert state["answer"] == "12"
    assert "answer" in state
    assert state.get("answer") == "12"
    state["answer"] = "13"
    assert state["input"]["answer"] == "13"
    assert "answer" not in list(state)


def test_a_field_the_input_lacks_lives_in_the_dict_itself():
    state = make_state()
    assert "info" not in state
    assert state.get("info", "none") == "none"
    with pytest.raises(KeyError):
        state["info"]
    state["info"] = {"a": 1}
    assert state["info"] == {"a": 1}
    assert "info" not in state["input"]


def test_pop_and_del_forward():
    state = make_state()
    assert state.pop("answer") == "12"
    assert "answer" not in state["input"]
    assert state.pop("answer", "gone") == "gone"
    with pytest.raises(KeyError):
        state.pop("answer")
    del state["example_id"]
    assert "example_id" not in state


def test_setdefault_forwards():
    state = make_state()
    assert state.setdefault("answer", "99") == "12"
    assert state.setdefault("depth", 2) == 2
    assert state["depth"] == 2


def test_iteration_len_and_equality_see_own_keys_only():
    state = make_state()
    assert list(state) == ["input", "reward"]
    assert len(state) == 2
    assert state == {"input": state["input"], "reward": None}


@pytest.mark.parametrize(
    "copied",
    [
        State.copy,
        copy.copy,
        copy.deepcopy,
        lambda s: s | {},
        lambda s: pickle.loads(pickle.dumps(s)),
    ],
    ids=["copy", "copy.copy", "deepcopy", "or", "pickle"],
)
def test_no_write_to_a_copy_reaches_the_original(copied):
    state = make_state()
    twin = copied(state)
    assert type(twin) is State
    assert twin == state
    twin["reward"], twin["prompt"] = 1.0, "another"
    twin.pop("answer", None)
    assert state["reward"] is None
    assert state == make_state()
    assert (twin["prompt"], twin["input"]["prompt"]) == ("another", "another")


def test_a_shallow_copy_shares_the_values():
    state = make_state()
    assert state.copy()["prompt"] is state["prompt"]
    assert (state | {"answer": "new"})["input"]["answer"] == "new"


def test_without_an_input_the_fields_are_plain_keys():
    state = State(prompt="hi", answer="a")
    assert state["prompt"] == "hi"
    assert "prompt" in list(state)
    assert set(INPUT_FIELDS) >= set(state)


def test_update_does_not_shadow_the_input():
    state = make_state()
    state.update(answer="14", bonus=1)
    assert state["answer"] == "14"
    assert state["input"]["answer"] == "14"
    assert state["bonus"] == 1
    state |= {"answer": "15"}
    assert state["input"]["answer"] == "15"


def test_as_input_keeps_all_columns_and_defaults_the_task():
    row = {"prompt": "p", "example_id": 0, "answer": None, "level": 3, "note": None}
    kept = {"prompt": "p", "example_id": 0, "level": 3, "note": None}
    assert as_input(row) == {**kept, "task": "default"}


def test_as_input_names_what_is_missing_and_what_is_there():
    with pytest.raises(ValueError, match=r"no 'prompt' and no 'example_id'.*'question'"):
        as_input({"question": "?"})


def test_concat_messages_joins_lists_or_strings_but_not_both():
    user, assistant = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    joined = concat_messages([[user], [assistant]])
    assert joined == [user, assistant]
    assert joined[0] is user
    assert concat_messages(["a", "b"]) == "ab"
    with pytest.raises(TypeError):
        concat_messages([[user], "b"])


def test_a_response_says_what_a_steps_info_has_of_it():
    from rolltree.values.types import ChatResponse

    response = ChatResponse({"role": "assistant", "content": "cut"}, "cut", FinishReason.LENGTH)
    assert response.to_info() == {"finish_reason": "length"}
    assert type(response.to_info()["finish_reason"]) is str


def test_copies_made_by_hand_keep_every_field():
    """They are written out for speed, so a new field could be forgotten."""
    sampling = SamplingParams(0.5, 0.9, 3, 7, ("a",), (2,), 11, {"min_p": 0.1})
    assert sampling.with_seed(12) == dataclasses.replace(sampling, seed=12)
    call = ModelCall("a", sampling, "m", [{}], "completion", 1.0, 2.0, print, True)
    assert call.with_prompt("b") == dataclasses.replace(call, prompt="b")
    for value in (sampling, call):
        kept = dataclasses.asdict(value)
        assert all(kept[each.name] != each.default for each in dataclasses.fields(value))
