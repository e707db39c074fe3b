"""`step["tokens"]` behaves as a dict, whose lists are built when they are read."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from rolltree.tokens import StepTokens, TokenTree

EXPECTED = {
    "prompt_ids": [5, 6],
    "prompt_mask": [0, 0],
    "completion_ids": [7, 8],
    "completion_mask": [1, 0],
    "completion_logprobs": [-0.1, -0.25],
}


@pytest.fixture
def view() -> StepTokens:
    tree = TokenTree()
    tree.insert([5, 6], [7, 8], logprobs=[-0.1, -0.25], mask=[1, 0])
    return StepTokens(tree, 0)


def test_reads_give_lists_of_python_numbers(view: StepTokens) -> None:
    assert {key: view[key] for key in view} == EXPECTED
    assert list(view) == list(EXPECTED)
    assert list(view.keys()) == list(EXPECTED)
    assert type(view["prompt_ids"]) is list
    assert {type(value) for value in view["completion_ids"] + view["completion_mask"]} == {int}
    assert list(view.values()) == list(EXPECTED.values())
    assert dict(view.items()) == EXPECTED
    assert view.get("prompt_ids") == [5, 6]
    assert view.get("other", 3) == 3
    assert len(view) == 5
    assert "prompt_ids" in view
    assert view
    with pytest.raises(KeyError):
        view["other"]


def test_equality_both_ways(view: StepTokens) -> None:
    assert view == EXPECTED
    assert view == EXPECTED
    assert view != {**EXPECTED, "prompt_ids": [5]}
    assert (view == 3) is False
    assert view == StepTokens(view.tree, 0)
    assert [{"tokens": view}] == [{"tokens": EXPECTED}]
    assert view != {key: EXPECTED[key] for key in list(EXPECTED)[:4]}
    as_float32 = {**EXPECTED, "completion_logprobs": [-0.10000000149011612, -0.25]}
    assert view == as_float32
    assert view != {**EXPECTED, "completion_logprobs": [-0.1001, -0.25]}
    for other in (None, ["a", "b"], [-0.1]):
        assert view != {**EXPECTED, "completion_logprobs": other}


def test_json_copies_and_unions_see_lists(view: StepTokens) -> None:
    assert json.loads(json.dumps({"tokens": view})) == {"tokens": EXPECTED}
    assert json.loads(json.dumps(view, indent=2, sort_keys=True)) == EXPECTED
    for plain in (
        view.copy(),
        dict(view),
        {**view},
        copy.copy(view),
        pickle.loads(pickle.dumps(view)),
        view | {},
        {} | view,
    ):
        assert type(plain) is dict
        assert plain == EXPECTED
    assert repr(view) == repr(EXPECTED)


def test_deep_copies_take_the_tree_along_once(view: StepTokens) -> None:
    other = StepTokens(view.tree, 0)
    other["completion_mask"] = [0, 0]
    first, second = copy.deepcopy([view, other])
    assert isinstance(first, StepTokens)
    assert first.tree is second.tree
    assert first.tree is not view.tree
    assert first == EXPECTED
    assert second["completion_mask"] == [0, 0]


def test_a_returned_list_and_an_assigned_one_stay(view: StepTokens) -> None:
    view["completion_mask"][0] = 9
    assert view["completion_mask"] == [9, 0]
    view["completion_mask"] = [0, 0]
    view["routed"] = [1]
    assert view.assigned == ("completion_mask", "routed")
    assert view == {**EXPECTED, "completion_mask": [0, 0], "routed": [1]}
    assert view.setdefault("routed", [2]) == [1]
    assert view.setdefault("fresh", [2]) == [2]
    view.update(prompt_mask=[1, 1])
    assert view["prompt_mask"] == [1, 1]
    assert view.tree.mask(0).tolist() == [1, 0]


def test_keys_cannot_be_lost(view: StepTokens) -> None:
    for lose in (
        lambda: view.pop("prompt_ids"),
        view.popitem,
        view.clear,
        lambda: view.__delitem__("prompt_ids"),
    ):
        with pytest.raises(TypeError, match="cannot lose keys"):
            lose()
    assert view == EXPECTED


def test_missing_logprobs_are_an_empty_list_and_weights_stay_fractions() -> None:
    tree = TokenTree()
    tree.insert([1], [2, 3], mask=[0.5, 0.1], prompt_mask=[1])
    view = StepTokens(tree, 0)
    assert view["completion_logprobs"] == []
    assert view["completion_mask"] == [0.5, 0.1]
    assert view["prompt_mask"] == [1]
