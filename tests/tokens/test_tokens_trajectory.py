"""`state["trajectory"]`: a list of steps over one tree."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens_kit import examples, ids, logprobs_for

from rolltree.tokens import StepTokens, TokenTree, Trajectory
from rolltree.values.errors import TokenError
from rolltree.values.types import FinishReason, ModelResponse
from step_kit import step


def make_response(
    prompt: list[int] | None, completion: list[int] | None, call_id: int, **changes: Any
) -> ModelResponse:
    fields: dict[str, Any] = {
        "message": {"role": "assistant", "content": "hi"},
        "text": "hi",
        "finish_reason": FinishReason.STOP,
        "prompt_ids": None if prompt is None else np.array(prompt, np.int32),
        "completion_ids": None if completion is None else np.array(completion, np.int32),
        "logprobs": None if completion is None else np.full(len(completion), -0.5, np.float32),
        "versions": None if completion is None else np.full(len(completion), 7, np.int32),
        "temperature": 0.75,
        "call_id": call_id,
        "raw": {"id": "r"},
        "num_prompt_tokens": 9,
        "num_completion_tokens": 4,
    }
    return ModelResponse(**(fields | changes))


def plain_step(prompt: list[int], completion: list[int], **extras: Any) -> Any:
    return step(prompt, completion, logprobs=logprobs_for(completion), **extras)


def test_append_call_makes_a_spec_1_step() -> None:
    trajectory = Trajectory()
    prompt = [{"role": "user", "content": "hello"}]
    step = trajectory.append_call(
        prompt=prompt,
        completion=[{"role": "assistant", "content": "hi"}],
        response=make_response([5, 6], [7], 100),
        agent="solver",
        turn=3,
        extras={"note": 1},
    )
    prompt.append({"role": "user", "content": "later"})
    assert trajectory == [step]
    assert list(step) == [
        "prompt", "completion", "response", "tokens", "reward", "advantage", "extras",
    ]  # fmt: skip
    assert step["prompt"] == [{"role": "user", "content": "hello"}]
    assert step["tokens"] == {
        "prompt_ids": [5, 6],
        "prompt_mask": [0, 0],
        "completion_ids": [7],
        "completion_mask": [1],
        "completion_logprobs": [-0.5],
    }
    assert (step["reward"], step["advantage"], step["response"]) == (None, None, {"id": "r"})
    assert step["extras"] == {
        "agent": "solver",
        "turn": 3,
        "call_id": 100,
        "finish_reason": "stop",
        "temperature": 0.75,
        "num_prompt_tokens": 2,
        "num_completion_tokens": 1,
        "policy_version_min": 7,
        "policy_version_max": 7,
        "note": 1,
    }
    tree = trajectory.tree
    assert (tree.agent(0), tree.turn(0)) == ("solver", 3)
    assert tree.versions(0).tolist() == [7]
    assert tree.temperature(0).tolist() == [0.75]


def test_a_call_without_ids_is_a_step_without_tokens() -> None:
    trajectory = Trajectory()
    step = trajectory.append_call(
        prompt="hello", completion="hi", response=make_response(None, None, 1)
    )
    assert step["tokens"] is None
    assert step["extras"]["num_prompt_tokens"] == 9
    assert trajectory.call_of(0) is None
    assert trajectory.tree.num_calls == 0


def test_extends_is_the_parent_hint_and_foreign_hints_are_ignored() -> None:
    trajectory = Trajectory()
    for made in (
        make_response([1, 2], [3], 50),
        make_response([1, 2, 3, 4], [5], 51, extends=50),
        make_response([1, 2, 3, 4, 5], [6], 52, extends=9999),
    ):
        trajectory.append_call(prompt="", completion="", response=made)
    assert [trajectory.tree.parent(call) for call in range(3)] == [None, 0, None]
    assert [trajectory.call_of(step) for step in range(3)] == [0, 1, 2]
    assert trajectory.tree.num_tokens == 6


def test_a_false_hint_is_refused() -> None:
    trajectory = Trajectory()
    trajectory.append_call(prompt="", completion="", response=make_response([1], [2], 1))
    with pytest.raises(TokenError, match="does not extend"):
        trajectory.append_call(
            prompt="", completion="", response=make_response([1, 9, 9], [2], 2, extends=1)
        )
    assert len(trajectory) == 1


def test_plain_steps_move_into_the_tree_however_they_are_added() -> None:
    trajectory = Trajectory([plain_step([1], [2])])
    trajectory.append(plain_step([1, 2], [3], agent="b", turn=4))
    trajectory += [plain_step([1, 2, 3], [4])]
    trajectory.insert(0, plain_step([9], [9]))
    trajectory[0] = plain_step([8], [8])
    trajectory[0:1] = [plain_step([7], [7])]
    assert all(isinstance(step["tokens"], StepTokens) for step in trajectory)
    assert [step["tokens"]["prompt_ids"] for step in trajectory] == [[7], [1], [1, 2], [1, 2, 3]]
    assert [trajectory.call_of(step) for step in range(4)] == [5, 0, 1, 2]
    assert (trajectory.tree.agent(1), trajectory.tree.turn(1)) == ("b", 4)
    assert trajectory[1]["tokens"] == plain_step([1], [2])["tokens"]


def test_plain_steps_may_lack_masks_and_logprobs_but_not_ids() -> None:
    step = plain_step([1], [2, 3])
    step["tokens"] = {"prompt_ids": [1], "completion_ids": [2, 3], "completion_logprobs": []}
    trajectory = Trajectory([step])
    assert trajectory.tree.logprobs(0) is None
    bad = plain_step([1], [2])
    del bad["tokens"]["completion_ids"]
    with pytest.raises(TokenError, match="no completion_ids"):
        trajectory.append(bad)
    bad = plain_step([1], [2])
    bad["tokens"]["completion_mask"] = [1, 1]
    with pytest.raises(TokenError, match="mask has shape"):
        trajectory.append(bad)
    assert len(trajectory) == 1


def test_extra_token_keys_survive() -> None:
    step = plain_step([1], [2])
    step["tokens"]["routed_experts"] = [[1, 2]]
    trajectory = Trajectory([step])
    assert trajectory[0]["tokens"]["routed_experts"] == [[1, 2]]  # type: ignore[typeddict-item]


def test_slices_and_copies_share_the_tree_and_deep_copies_do_not() -> None:
    trajectory = Trajectory([plain_step([1], [2]), plain_step([1, 2], [3])])
    for view in (trajectory[1:], trajectory.copy(), copy.copy(trajectory)):
        assert isinstance(view, Trajectory)
        assert view.tree is trajectory.tree
    assert trajectory[1:].call_of(0) == 1
    deep = copy.deepcopy(trajectory)
    assert deep.tree is not trajectory.tree
    assert deep == trajectory
    assert deep.call_of(1) == 1
    deep.append(plain_step([4], [5]))
    assert (len(trajectory), trajectory.tree.num_calls) == (2, 2)
    assert deep.call_of(2) == 2


def test_a_trajectory_travels_to_another_process() -> None:
    trajectory = Trajectory([plain_step([1], [2]), plain_step([1, 2], [3])])
    trajectory.append_call(prompt="", completion="", response=make_response([1, 2, 3], [4], 9))
    trajectory.append_call(prompt="", completion="", response=make_response(None, None, 10))
    trajectory[0]["tokens"]["completion_mask"] = [0]  # type: ignore[index]
    twin = pickle.loads(pickle.dumps(trajectory))
    assert isinstance(twin, Trajectory)
    assert twin == trajectory
    assert [twin.call_of(step) for step in range(4)] == [0, 1, 2, None]
    assert twin[0]["tokens"]["completion_mask"] == [0]
    assert twin.tree.mask(0).tolist() == [1]
    more = make_response([1, 2, 3, 4, 5], [6], 11, extends=9)
    twin.append_call(prompt="", completion="", response=more)
    assert twin.tree.parent(3) == 2
    assert trajectory.tree.num_calls == 3


def test_steps_of_another_trajectory_stay_views_on_its_tree() -> None:
    child = Trajectory([plain_step([1], [2])])
    parent = Trajectory()
    parent.extend(child)
    assert parent[0] is child[0]
    assert parent.call_of(0) is None
    assert child.call_of(0) == 0


def test_two_trajectories_can_share_a_tree() -> None:
    tree = TokenTree()
    one, two = Trajectory(tree=tree), Trajectory(tree=tree)
    one.append(plain_step([1, 2], [3]))
    two.append(plain_step([1, 2], [4]))
    assert tree.num_tokens == 4
    assert two.call_of(0) == 1


@examples(100)
@given(st.lists(st.tuples(ids, ids), max_size=8))
def test_views_equal_the_lists_they_were_made_of(calls: list[tuple[list[int], list[int]]]) -> None:
    plain = [plain_step(prompt, completion) for prompt, completion in calls]
    trajectory = Trajectory(copy.deepcopy(plain))
    assert trajectory == plain
    assert [step["tokens"] for step in trajectory] == [step["tokens"] for step in plain]
