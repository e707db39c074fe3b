"""`step["tokens"]` against a plain dict: whatever a caller does with one works with the other."""

from __future__ import annotations

import collections
import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import examples, ids, logprobs_for

from rolltree.tokens import StepTokens, TokenTree, Trajectory

KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
PLAIN = {
    "prompt_ids": [5, 6],
    "prompt_mask": [0, 0],
    "completion_ids": [7, 8],
    "completion_mask": [1, 0],
    "completion_logprobs": [-0.1, -0.25],
}


def made() -> StepTokens:
    tree = TokenTree()
    tree.insert([5, 6], [7, 8], logprobs=[-0.1, -0.25], mask=[1, 0])
    return StepTokens(tree, 0)


def match(tokens: Any) -> Any:
    match tokens:
        case {"prompt_ids": [first, *_], "completion_ids": sampled, **rest}:
            return first, sampled, sorted(rest)
        case _:
            return None


READS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "unpack": lambda tokens: {**tokens},
    "keywords": lambda tokens: dict(x=1, **tokens),
    "list": list,
    "sorted": sorted,
    "reversed": lambda tokens: list(reversed(tokens)),
    "keys": lambda tokens: list(tokens.keys()),
    "values": lambda tokens: list(tokens.values()),
    "items": lambda tokens: list(tokens.items()),
    "loop": lambda tokens: [(key, tokens[key]) for key in tokens],
    "get": lambda tokens: [tokens.get(key) for key in (*KEYS, "other")],
    "get with default": lambda tokens: tokens.get("other", [3]),
    "in": lambda tokens: [key in tokens for key in (*KEYS, "other", 3, None)],
    "len": len,
    "bool": bool,
    "repr": repr,
    "str": str,
    "format": "{}".format,
    "json": lambda tokens: json.dumps(tokens, sort_keys=True),
    "json indented": lambda tokens: json.dumps([tokens], indent=1),
    "copy": copy.copy,
    "copied": lambda tokens: tokens.copy(),
    "pickle": lambda tokens: pickle.loads(pickle.dumps(tokens)),
    "or": lambda tokens: tokens | {"x": 1, "prompt_ids": [0]},
    "or from the right": lambda tokens: {"x": 1, "prompt_ids": [0]} | tokens,
    "match": match,
    "zip": lambda tokens: list(
        zip(tokens["completion_ids"], tokens["completion_mask"], strict=True)
    ),
    "ChainMap": lambda tokens: dict(collections.ChainMap({}, tokens)),
    "OrderedDict": lambda tokens: list(collections.OrderedDict(tokens).items()),
    "max": max,
    "is a dict": lambda tokens: isinstance(tokens, dict),
    "equal": lambda tokens: (tokens == PLAIN, tokens == PLAIN, tokens != PLAIN),
    "equal to less": lambda tokens: tokens == {"prompt_ids": [5, 6]},
    "equal to another kind": lambda tokens: (tokens == [1], tokens is None, tokens == "x"),
    "in a list": lambda tokens: [PLAIN, tokens].index(tokens),
    "counted": lambda tokens: [tokens, 3, tokens].count(PLAIN),
}


@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_gives_what_a_dict_gives(name: str) -> None:
    assert READS[name](made()) == READS[name](dict(PLAIN))


def set_one(tokens: Any) -> None:
    tokens["completion_mask"] = [0, 0]


def set_new(tokens: Any) -> None:
    tokens["routed"] = [[1], [2]]


def set_none(tokens: Any) -> None:
    tokens["routed_experts"] = None


def update(tokens: Any) -> None:
    tokens.update({"prompt_ids": [9]}, note="x")


def update_pairs(tokens: Any) -> None:
    tokens.update([("prompt_mask", [1, 1]), ("extra", 0)])


def setdefault(tokens: Any) -> None:
    assert tokens.setdefault("prompt_ids", []) == [5, 6]
    assert tokens.setdefault("extra", [1]) == [1]
    assert tokens.setdefault("nothing") is None


def merge(tokens: Any) -> None:
    tokens |= {"completion_logprobs": [-1.0, -2.0], "x": 1}


def set_twice(tokens: Any) -> None:
    tokens["prompt_ids"] = [1]
    tokens["prompt_ids"] = []


WRITES = (set_one, set_new, set_none, update, update_pairs, setdefault, merge, set_twice)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_every_way_of_writing_leaves_what_a_dict_holds(write: Callable[[Any], None]) -> None:
    view, plain = made(), dict(PLAIN)
    write(view)
    write(plain)
    assert view == plain
    assert dict(view) == plain
    assert list(view.items()) == list(plain.items())
    assert copy.deepcopy(view) == plain
    assert pickle.loads(pickle.dumps(view)) == plain
    assert StepTokens(view.tree, 0) == PLAIN  # the tree is what it was
    travelled = Trajectory(tree=view.tree)
    travelled.append({"prompt": [], "completion": [], "tokens": view})  # type: ignore[typeddict-item]
    assert pickle.loads(pickle.dumps(travelled))[0]["tokens"] == plain


def test_none_under_a_key_of_ones_own_is_a_value() -> None:
    """Other frameworks write `routed_experts: None` into every step."""
    step = {"prompt": [], "completion": [], "tokens": {**PLAIN, "routed_experts": None}}
    trajectory = Trajectory([step])  # type: ignore[list-item]
    view: Any = trajectory[0]["tokens"]
    assert view["routed_experts"] is None
    assert view == {**PLAIN, "routed_experts": None}
    assert view.assigned == ("routed_experts",)
    assert view.as_recorded
    twin = pickle.loads(pickle.dumps(trajectory))
    assert twin[0]["tokens"] == {**PLAIN, "routed_experts": None}
    assert twin.call_of(0) == 0


@pytest.mark.parametrize("key", KEYS)
def test_none_under_a_token_key_is_a_value_too(key: str) -> None:
    view = made()
    view[key] = None
    assert view[key] is None
    assert view == {**PLAIN, key: None}
    assert view.assigned == (key,)
    assert copy.deepcopy(view) == view


@pytest.mark.parametrize("key", KEYS)
def test_assigning_a_token_key_is_noticed_if_it_says_something_else(key: str) -> None:
    view = made()
    assert view.as_recorded
    view[key] = list(view[key])
    assert view.as_recorded
    assert view == PLAIN
    view[key] = view[key][:1]
    assert not view.as_recorded
    assert view.assigned == (key,)


def test_a_view_cannot_be_a_key() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(made())


def test_views_of_one_call_read_one_tree_and_write_apart() -> None:
    one = made()
    two = StepTokens(one.tree, 0)
    one["completion_mask"] = [0, 0]
    assert two["completion_mask"] == [1, 0]
    assert one != two


@examples(80)
@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6))
def test_views_equal_dicts_of_lists_for_any_tree(calls: list[tuple[list[int], list[int]]]) -> None:
    tree = TokenTree()
    for seed, (prompt, completion) in enumerate(calls):
        tree.insert(prompt, completion, logprobs=logprobs_for(completion, seed))
    for call, (prompt, completion) in enumerate(calls):
        plain = {
            "prompt_ids": prompt,
            "prompt_mask": [0] * len(prompt),
            "completion_ids": completion,
            "completion_mask": [1] * len(completion),
            "completion_logprobs": logprobs_for(completion, call),
        }
        assert StepTokens(tree, call) == plain
        assert json.loads(json.dumps(StepTokens(tree, call))) == plain
