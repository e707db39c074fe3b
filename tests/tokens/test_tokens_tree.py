"""TokenTree by hand: what goes in comes out, hints are checked, refusals leave no trace."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from rolltree.tokens import PlacedStream, TokenStream, TokenTree
from rolltree.values.errors import TokenError


def test_one_call_comes_back_exactly() -> None:
    tree = TokenTree()
    call = tree.insert(
        [5, 6],
        [7, 8],
        logprobs=[-0.5, -0.25],
        temperature=0.7,
        versions=[3, 4],
        mask=[1, 0],
        agent="solver",
        turn=2,
    )
    assert call == 0
    assert tree.prompt_ids(0).tolist() == [5, 6]
    assert tree.completion_ids(0).tolist() == [7, 8]
    assert tree.path_ids(0).tolist() == [5, 6, 7, 8]
    assert tree.logprobs(0).tolist() == [-0.5, -0.25]  # type: ignore[union-attr]
    assert tree.temperature(0).tolist() == pytest.approx([0.7, 0.7])
    assert tree.versions(0).tolist() == [3, 4]
    assert tree.mask(0).tolist() == [1, 0]
    assert tree.prompt_mask(0).tolist() == [0, 0]
    assert (tree.agent(0), tree.turn(0), tree.parent(0)) == ("solver", 2, None)
    dtypes = (
        tree.path_ids(0).dtype,
        tree.logprobs(0).dtype,  # type: ignore[union-attr]
        tree.versions(0).dtype,
        tree.mask(0).dtype,
    )
    assert dtypes == (np.int32, np.float32, np.int32, np.float32)


def test_shared_prefixes_are_stored_once() -> None:
    tree = TokenTree()
    tree.insert([1, 2, 3], [4, 5])
    tree.insert([1, 2, 3], [4, 6])  # a sibling that shares one sampled token
    tree.insert([1, 2, 3, 4, 6, 7], [8])
    assert tree.num_tokens == 8
    assert tree.completion_ids(1).tolist() == [4, 6]
    assert tree.prompt_ids(2).tolist() == [1, 2, 3, 4, 6, 7]


def test_every_tokenization_stays_indexed() -> None:
    """After a re-tokenized turn, a turn that continues the original tokens finds them."""
    tree = TokenTree()
    first = tree.insert([1], [20, 21])
    tree.insert([1, 99, 2], [3])  # 99 is the same text as 20 21
    before = tree.num_tokens
    third = tree.insert([1, 20, 21, 2], [4])
    assert tree.num_tokens == before + 2
    assert tree.calls.end(first).run == tree.calls.prompt_end(first).run
    assert tree.path_ids(third).tolist() == [1, 20, 21, 2, 4]


def test_parent_hint_and_suffix_give_the_same_tree() -> None:
    plain, hinted, suffix = TokenTree(), TokenTree(), TokenTree()
    for tree in (plain, hinted, suffix):
        tree.insert([1, 2], [3])
    plain.insert([1, 2, 3, 4], [5])
    hinted.insert([1, 2, 3, 4], [5], parent=0)
    suffix.insert_suffix(0, [4], [5])
    assert hinted.to_bytes() == suffix.to_bytes()
    assert plain.path_ids(1).tolist() == hinted.path_ids(1).tolist() == [1, 2, 3, 4, 5]
    assert plain.num_tokens == hinted.num_tokens == 5
    assert (plain.parent(1), hinted.parent(1)) == (None, 0)


def test_a_second_child_of_the_same_parent_shares_what_the_first_added() -> None:
    tree = TokenTree()
    root = tree.insert([1, 2], [3])
    tree.insert_suffix(root, [4, 5], [6])
    again = tree.insert_suffix(root, [4, 5], [7])
    assert tree.num_tokens == 7
    assert tree.path_ids(again).tolist() == [1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 4], [9, 2, 3, 4]])
def test_a_parent_that_is_no_prefix_is_refused(prompt: list[int]) -> None:
    tree = TokenTree()
    tree.insert([1, 2], [3])
    with pytest.raises(TokenError, match="does not extend call 0"):
        tree.insert(prompt, [5], parent=0)
    assert tree.num_calls == 1


def test_verify_checks_more_than_the_boundary() -> None:
    tree = TokenTree()
    long = np.arange(500, dtype=np.int32)
    tree.insert(long, [1])
    wrong = np.concatenate([[7], long[1:], [1, 2]]).astype(np.int32)
    with pytest.raises(TokenError, match="does not extend"):
        tree.insert(wrong, [5], parent=0, verify=True)


def test_an_unknown_parent_is_refused() -> None:
    tree = TokenTree()
    for parent in (0, -1, 5):
        with pytest.raises(TokenError, match="not in this tree"):
            tree.insert_suffix(parent, [1], [2])


@pytest.mark.parametrize(
    "bad",
    [
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, float("nan")]},
        {"mask": [1]},
        {"mask": [1, float("inf")]},
        {"versions": [1, 2, 3]},
        {"versions": 2**40},
        {"versions": 1.5},
        {"versions": [1.5, 2]},
        {"temperature": [1.0]},
        {"temperature": "hot"},
        {"prompt_mask": [1]},
        {"versions": -1},
        {"versions": [3, -1]},
        {"versions": True},
        {"versions": [[1], [2, 3]]},
        {"temperature": -1.0},
        {"mask": -1},
        {"mask": [1, -0.5]},
        {"mask": "1"},
        {"prompt_mask": [0, -1, 0]},
        {"logprobs": ["-0.5", "-0.5"]},
        {"logprobs": [True, False]},
        {"logprobs": [0.5, -0.5]},
        {"logprobs": [[-0.5], [-0.5, 1]]},
        {"turn": "x"},
        {"turn": 1.5},
        {"turn": -1},
        {"turn": 2**31},
        {"turn": True},
        {"agent": None},
        {"agent": ["solver"]},
        {"agent": "\ud800"},
        {"parent": "0"},
        {"parent": 0.0},
        {"streams": {"x": np.zeros(3)}},
        {"streams": {"x": np.array(["a", "b"])}},
        {"streams": {"x": np.zeros(2, complex)}},
        {"streams": {"x": np.zeros((2, *[1] * 8))}},
        {"streams": {"x": [[1], [2, 3]]}},
        {"streams": {"x": TokenStream(np.zeros(1), start="x")}},  # type: ignore[arg-type]
        {"streams": {"x": PlacedStream([np.zeros(1)], [0.5])}},  # type: ignore[list-item]
        {"streams": {"x": PlacedStream([np.zeros(1)], ["0"])}},  # type: ignore[list-item]
        {"streams": {"x": PlacedStream([np.array("a")], [0])}},
        {"streams": {"x": PlacedStream([np.zeros(1)], None)}},  # type: ignore[arg-type]
        {"streams": {"good": np.zeros(2), 7: np.zeros(2)}},
        {"streams": {"\ud800": np.zeros(2)}},
        {"streams": [np.zeros(2)]},
    ],
)
def test_a_refused_call_leaves_no_trace(bad: dict[str, object]) -> None:
    tree = TokenTree()
    tree.insert([1], [2], logprobs=[-0.5], agent="a", turn=3)
    before = tree.to_bytes()
    with pytest.raises(TokenError):
        tree.insert([1, 2, 3], [4, 5], **bad)  # type: ignore[arg-type]
    if not bad.keys() & {"parent", "prompt_mask"}:
        with pytest.raises(TokenError):
            tree.insert_suffix(0, [3], [4, 5], **bad)  # type: ignore[arg-type]
    if bad.keys() <= {"agent", "turn", "streams"}:
        with pytest.raises(TokenError):
            tree.label(0, **{"turn": 9, "streams": {"y": np.zeros(1)}, **bad})  # type: ignore[arg-type]
    with pytest.raises(TokenError, match="-5"):
        tree.insert(np.array([1, -5], np.int32), [2])
    with pytest.raises(TokenError, match="prompt_ids is not an array"):
        tree.insert([[1], [2, 3]], [2])
    assert tree.to_bytes() == before
    good = tree.insert([7], [8], logprobs=[-0.25], turn=np.int64(4))
    assert tree.logprobs(good).tolist() == [-0.25]  # type: ignore[union-attr]
    assert (tree.agent(0), tree.turn(0), tree.turn(good)) == ("a", 3, 4)


def test_empty_prompts_and_completions_are_calls_too() -> None:
    tree = TokenTree()
    assert tree.insert([], [1]) == 0
    assert tree.insert([1], []) == 1
    assert tree.insert([], []) == 2
    assert [tree.path_ids(call).tolist() for call in range(3)] == [[1], [1], []]
    assert [tree.path_len(call) for call in range(3)] == [1, 1, 0]
    assert tree.num_tokens == 1
    assert tree.logprobs(1) is None
    assert tree.mask(1).tolist() == []


def test_results_are_copies() -> None:
    tree = TokenTree()
    tree.insert([1, 2], [3], logprobs=[-0.5], mask=[0.25])
    for read in (tree.path_ids, tree.logprobs, tree.mask, tree.versions):
        values = read(0)
        assert values is not None
        values[:] = 7
    assert tree.path_ids(0).tolist() == [1, 2, 3]
    assert tree.logprobs(0).tolist() == [-0.5]  # type: ignore[union-attr]
    assert tree.mask(0).tolist() == [0.25]


def test_find_counts_the_longest_stored_prefix() -> None:
    tree = TokenTree()
    tree.insert([1, 2], [3])
    assert [tree.find(x) for x in ([], [2], [1], [1, 2, 3], [1, 2, 3, 4], [1, 3])] == [
        0, 0, 1, 3, 3, 1,
    ]  # fmt: skip


def test_copies_and_pickles_go_through_bytes() -> None:
    tree = TokenTree()
    tree.insert([1, 2], [3], logprobs=[-0.5])
    for twin in (copy.deepcopy(tree), pickle.loads(pickle.dumps(tree))):
        twin.insert([1, 2, 3, 4], [5])
        assert (twin.num_calls, tree.num_calls) == (2, 1)
        assert twin.logprobs(0).tolist() == [-0.5]


def test_a_rollout_of_128_turns_is_small() -> None:
    """128 turns of 400 new prompt tokens and 300 sampled: 358 KB of ids, 154 KB of logprobs."""
    tree = TokenTree()
    rng = np.random.default_rng(0)
    parent = None
    for _ in range(128):
        new = rng.integers(0, 150_000, 400, dtype=np.int32)
        sampled = rng.integers(0, 150_000, 300, dtype=np.int32)
        logprobs = -rng.random(300, dtype=np.float32)
        if parent is None:
            parent = tree.insert(new, sampled, logprobs=logprobs)
        else:
            parent = tree.insert_suffix(parent, new, sampled, logprobs=logprobs)
    assert tree.num_tokens == 128 * 700
    assert tree.arena.num_runs == 1
    assert tree.nbytes < 1_000_000
    assert len(tree.to_bytes()) < 128 * 700 * 4 + 128 * 300 * 4 + 12_000


def stripped(turns: int) -> TokenTree:
    """A rollout whose template drops 200 of the last 300 sampled tokens before every turn."""
    tree, rng = TokenTree(), np.random.default_rng(0)
    history = np.empty(0, np.int32)
    for _ in range(turns):
        prompt = np.concatenate([history, rng.integers(0, 1000, 400, dtype=np.int32)])
        sampled = rng.integers(0, 1000, 300, dtype=np.int32)
        tree.insert(prompt, sampled, logprobs=-rng.random(300, dtype=np.float32))
        history = np.concatenate([prompt, sampled[200:]])
    return tree


def test_memory_and_bytes_stay_linear_when_history_is_rewritten() -> None:
    small, large = stripped(16), stripped(64)
    assert large.num_tokens == 64 * 700 + 63 * 100
    assert large.nbytes < 4.5 * small.nbytes
    assert len(large.to_bytes()) < 4.1 * len(small.to_bytes())
    assert large.arena.num_runs == 64
