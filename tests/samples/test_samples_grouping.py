"""Which calls share a sample: open ends, turns, and rollouts read from states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples_kit import state

from rolltree.samples import TruncationPolicy, concat_records, take_records, truncation_effect
from rolltree.samples.assemble import make_records, on_one_tree
from rolltree.samples.build import OpenEnds, by_prefix, turns_of
from rolltree.samples.resolve import ResolvedRollout, resolve_rollout
from rolltree.tokens import ROOT, StepTokens, TokenTree, Trajectory
from rolltree.values.errors import TokenError
from step_kit import step


def resolve(index: int, trajectory: Any) -> ResolvedRollout:
    effect = truncation_effect(trajectory, TruncationPolicy())
    return resolve_rollout(index, trajectory, effect)


def tree_with(*paths: list[int]) -> TokenTree:
    tree = TokenTree()
    for path in paths:
        tree.insert(path, [])
    return tree


def test_the_deepest_open_end_on_the_path_is_taken() -> None:
    tree = tree_with([1, 2, 3, 4], [1, 2], [1, 2, 3], [1, 9])
    ends = OpenEnds(tree)
    for sample, call in enumerate((1, 2, 3)):
        ends.open(tree.calls.end(call), sample)
    prompt = tree.calls.end(0)
    assert ends.take(prompt) == 1  # 1 2 3
    assert ends.take(prompt) == 0  # 1 2
    assert ends.take(prompt) is None  # 1 9 is on another branch
    assert ends.take(tree.calls.end(3)) == 2


def test_of_equal_ends_the_last_opened_is_taken() -> None:
    tree = tree_with([1, 2])
    ends = OpenEnds(tree)
    for sample in range(3):
        ends.open(tree.calls.end(0), sample)
    assert [ends.take(tree.calls.end(0)) for _ in range(4)] == [2, 1, 0, None]


def test_nothing_extends_an_empty_path() -> None:
    tree = tree_with([], [1])
    ends = OpenEnds(tree)
    ends.open(ROOT, 0)
    assert ends.take(tree.calls.end(1)) is None
    assert ends.take(ROOT) is None


def test_groups_of_a_rollout_and_of_its_turns() -> None:
    steps = [
        step([1], [2], agent="a", turn=0, advantage=1.0),
        step([1, 2], [3], agent="a", turn=0, advantage=2.0),
        step([1, 2, 3], [4], agent="a", turn=1, advantage=3.0),
        step([1, 2, 3, 4], [5], agent="b", turn=1, advantage=4.0),
    ]
    rollout = resolve(0, steps)
    (group,) = by_prefix(rollout.tree, rollout.calls)
    assert [call.index for call in group] == [0, 1, 2, 3]
    turns = [[(call.index, call.advantage) for call in calls] for calls in turns_of(rollout)]
    assert turns == [[(0, 2.0), (1, 2.0)], [(2, 3.0)], [(3, 4.0)]]


def test_resolve_reads_a_state() -> None:
    one = state(
        [step(None), step([1], [2], reward=0.5, agent="a", finish_reason="stop")],
        reward=1,
        advantage=0.25,
        request_id="q",
        truncated=True,
        truncation_reason="env",
    )
    rollout = resolve(3, one)
    assert (rollout.index, rollout.rollout_id, rollout.reward) == (3, "q", 1.0)
    assert (rollout.terminated, rollout.truncated, rollout.truncation_reason) == (
        False, True, "env",
    )  # fmt: skip
    assert [step.advantage for step in rollout.steps] == [0.25, 0.25]
    (call,) = rollout.calls
    assert (call.index, call.agent, call.turn, call.finish_reason) == (1, "a", None, "stop")
    assert not rollout.failed


def test_labels_of_the_tree_fill_in_for_missing_extras() -> None:
    tree = TokenTree()
    tree.insert([1], [2], agent="solver", turn=4)
    rollout = resolve(0, [{"tokens": StepTokens(tree, 0)}])
    assert (rollout.calls[0].agent, rollout.calls[0].turn) == ("solver", 4)


def test_a_recorded_trajectory_is_used_as_it_is() -> None:
    trajectory = Trajectory([step([1], [2]), step(None), step([1, 2], [3])])
    trajectory[0]["tokens"]["note"] = "extra keys change nothing"  # type: ignore[index,typeddict-unknown-key]
    assert resolve(0, trajectory).tree is trajectory.tree
    assert resolve(0, list(trajectory)).tree is trajectory.tree
    trajectory[0]["tokens"]["completion_mask"] = [0]  # type: ignore[index]
    fresh = resolve(0, trajectory)
    assert fresh.tree is not trajectory.tree
    assert fresh.tree.mask(0).tolist() == [0]
    assert [call.handle for call in fresh.calls] == [0, 1]


def test_a_view_of_another_tree_in_a_trajectory_is_copied() -> None:
    trajectory = Trajectory([step([1], [2])])
    other = Trajectory([step([1, 2], [3], policy_version=5)])
    trajectory.append(other[0])
    rollout = resolve(0, trajectory)
    assert rollout.tree.num_tokens == 3
    assert rollout.tree.versions(1).tolist() == [5]
    assert trajectory.tree.num_calls == 1


def test_a_broken_plain_step_is_named() -> None:
    bad = step([1], [2])
    bad["tokens"]["completion_ids"] = None
    with pytest.raises(TokenError, match="step 0 of rollout 2"):
        resolve(2, [bad])


def test_sharing_a_tree_moves_handles_once_per_tree() -> None:
    one, two = Trajectory([step([1], [2])]), Trajectory([step([1], [3]), step([1, 3], [4])])
    shared = on_one_tree([resolve(0, one), resolve(1, two), resolve(2, two[1:])])
    assert shared[0].tree.num_calls == 3
    assert [[call.handle for call in rollout.calls] for rollout in shared] == [[0], [1, 2], [2]]
    same = on_one_tree([resolve(0, one), resolve(1, one)])
    assert same[0].tree is one.tree
    assert same[0].calls[0].handle == 0


def test_records_mix_constants_arrays_and_missing_values() -> None:
    steps = [
        step([1], [2, 3], mask=[0.5, 1.0], logprobs=[]),
        step([1, 2, 3], [4], policy_version=7, temperature=0.5),
        step([1, 2, 3, 4], []),
    ]
    for made_step, advantage in zip(steps, [1.5, None, 9.0], strict=True):
        made_step["advantage"] = advantage
    rollout = resolve(5, steps)
    source = np.array([0, 1, 2], np.int32)
    made = make_records(rollout, rollout.calls, source)
    assert made.target.tolist() == [2, 3, 4]
    assert np.isnan(made.logprob).tolist() == [True, True, False]
    assert made.weight.tolist() == [0.5, 1.0, 1.0]
    assert made.temperature.tolist() == [1.0, 1.0, 0.5]
    assert made.version.tolist() == [0, 0, 7]
    assert made.advantage.tolist() == [1.5, 1.5, 0.0]
    assert (made.rollout.tolist(), made.call.tolist()) == ([5] * 3, [0, 0, 1])
    assert made.offset.tolist() == [0, 1, 0]
    failed = make_records(replace(rollout, failed=True), rollout.calls, source)
    assert failed.weight.tolist() == [0] * 3
    cut = make_records(rollout, rollout.calls, np.array([-1, 0, 1], np.int32))
    assert cut.target.tolist() == [3, 4]


def test_taking_and_joining_records() -> None:
    rollout = resolve(0, [step([1], [2, 3])])
    made = make_records(rollout, rollout.calls, np.array([0, 1], np.int32))
    second = take_records(made, np.array([False, True]), source=np.array([9], np.int32))
    assert (second.source.tolist(), second.target.tolist()) == ([9], [3])
    joined = concat_records([made, concat_records([]), second])
    assert joined.target.tolist() == [2, 3, 3]
    assert len(concat_records([])) == 0
    for name in ("source", "target", "version"):
        assert getattr(joined, name).dtype == np.int32
