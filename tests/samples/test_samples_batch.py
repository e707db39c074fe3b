"""`build_samples`: options, advantages, labels and the report."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from samples_kit import SCOPES, flat_of, state, trained

from rolltree.rollouts import RolloutEngine
from rolltree.samples import DEFAULT_SCOPE, build_samples
from rolltree.samples.report import SkipReason
from rolltree.samples.resolve import changed_sampling
from rolltree.tokens import Trajectory
from rolltree.training import load_train_config
from rolltree.values.errors import ConfigError, TokenError
from rolltree.values.types import FinishReason, State
from step_kit import step


def test_an_unknown_scope_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'interleave'"):
        build_samples([], "interleaved")  # type: ignore[arg-type]


def test_the_default_scope_is_one_constant() -> None:
    """For `build_samples`, for batches of an engine, and for training."""
    default = inspect.signature(build_samples).parameters["scope"].default
    assert default == DEFAULT_SCOPE == load_train_config({}).train.scope
    assert (
        inspect.signature(RolloutEngine.generate_batch).parameters["scope"].default == DEFAULT_SCOPE
    )


def test_a_group_key_without_a_tree_would_be_ignored() -> None:
    with pytest.raises(ConfigError, match="group_key"):
        build_samples([], "step", group_key=lambda _: 0)


def test_nothing_in_nothing_out() -> None:
    for scope in SCOPES:
        batch = build_samples([], scope)
        assert (batch.samples, batch.breaks, batch.skipped) == ([], (), ())
        assert batch.report["num_rollouts"] == 0
        empty = build_samples([state([]), [], Trajectory()], scope)
        assert empty.samples == []
        assert empty.report["num_rollouts"] == 3


def test_a_broken_step_is_named() -> None:
    bad = step([1], [2, 3], logprobs=[-0.5])
    with pytest.raises(TokenError, match="step 1 of rollout 1"):
        build_samples([[step([1], [2])], [step([1], [2]), bad]], "step")


@pytest.mark.parametrize("scope", SCOPES)
def test_an_advantage_comes_from_the_step_then_the_state_then_is_zero(scope: Any) -> None:
    steps = [step([1], [2], advantage=0.0), step([1, 2, 3], [4])]
    batch = build_samples([state(steps, advantage=3.0), [step([5], [6])]], scope)
    got = {
        (int(r), int(c)): float(a)
        for s in batch.samples
        for r, c, a in zip(s.records.rollout, s.records.call, s.records.advantage, strict=True)
    }
    assert got == {(0, 0): 0.0, (0, 1): 3.0, (1, 0): 0.0}
    assert batch.report["num_calls_without_advantage"] == 1


def test_a_call_without_a_prompt_loses_its_first_token_and_says_so() -> None:
    for scope in SCOPES:
        batch = build_samples([[step([], [1, 2])]], scope)
        assert trained(batch.samples[0]) == [(0, 2, 0)]
        assert batch.samples[0].records.offset.tolist() == [1]
        assert [(str(s.reason), s.num_tokens) for s in batch.skipped] == [("no_source", 1)]
        assert build_samples([[step([], [1])]], scope).samples == []


def test_an_empty_completion_is_skipped_but_may_be_extended() -> None:
    steps = [step([1, 2], []), step([1, 2, 3], [4])]
    batch = build_samples([steps], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3, 4]]
    assert [str(s.reason) for s in batch.skipped] == ["empty_completion"]
    assert batch.breaks == ()


def test_versions_and_temperatures_reach_the_records() -> None:
    steps = [
        step([1], [2, 3], policy_version=4, temperature=0.5),
        step([1, 2, 3], [5], policy_version=5, temperature=1.5),
    ]
    (sample,) = build_samples([steps], "interleave").samples
    assert sample.records.version.tolist() == [4, 4, 5]
    assert sample.records.temperature.tolist() == [0.5, 0.5, 1.5]
    assert sample.records.offset.tolist() == [0, 1, 0]


def test_states_are_read_and_never_changed() -> None:
    steps = [step([1], [2]), step([1, 2], [3])]
    one = state(list(steps), reward=1.0)
    before = repr(one)
    for scope in SCOPES:
        build_samples([one], scope, max_seq_len=2)
    assert repr(one) == before
    trajectory = Trajectory(steps)
    size = trajectory.tree.to_bytes()
    build_samples([trajectory, trajectory], "tree", group_key=lambda _: 0)
    assert trajectory.tree.to_bytes() == size


def test_a_slice_uses_only_its_own_calls() -> None:
    trajectory = Trajectory([step([1], [2]), step([1, 2, 3], [4]), step([9], [8])])
    (tree,) = build_samples([trajectory[1:2]], "tree").samples
    assert tree.ids.tolist() == [1, 2, 3, 4]
    assert trained(tree) == [(2, 4, 0)]


def test_steps_from_several_trees_are_gathered() -> None:
    child = Trajectory([step([1], [2])])
    mixed: list[Any] = [child[0], step([1, 2, 3], [4]), Trajectory([step([1, 5], [6])])[0]]
    batch = build_samples([mixed], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3, 4], [1, 5, 6]]


def test_an_assigned_mask_is_honoured() -> None:
    trajectory = Trajectory([step([1], [2, 3])])
    trajectory[0]["tokens"]["completion_mask"] = [0, 1]  # type: ignore[index]
    (sample,) = build_samples([trajectory], "interleave").samples
    assert sample.records.weight.tolist() == [0, 1]


def test_group_members_may_share_one_tree() -> None:
    one = Trajectory([step([1], [2])])
    two = Trajectory(tree=one.tree)
    two.append(step([1], [3]))
    (sample,) = build_samples([one, two], "tree", group_key=lambda _: 0).samples
    assert sample.ids.tolist() == [1, 2, 3]
    assert sample.records.rollout.tolist() == [0, 1]


def test_groups_are_kept_apart() -> None:
    states = [State(trajectory=[step([1], [2])], group=g) for g in ("a", "b", "a")]
    batch = build_samples(states, "tree", group_key=lambda one: one["group"])
    assert [s.records.rollout.tolist() for s in batch.samples] == [[0, 2], [1]]
    assert [s.info["rollouts"] for s in batch.samples] == [(0, 2), (1,)]


def test_origins_name_rollout_agent_and_finish_reason() -> None:
    steps = [
        step([1], [2], agent="a", finish_reason=FinishReason.TOOL_CALLS),
        step([1, 2, 3], [4], agent="b", finish_reason="stop"),
    ]
    one = state(steps, request_id="q1", reward=2.0, terminated=True)
    (sample,) = build_samples([one], "interleave").samples
    assert [(o.rollout_id, o.agent, o.calls, o.finish_reason) for o in sample.origins] == [
        ("q1", "a", (0,), "tool_calls"),
        ("q1", "b", (1,), "stop"),
    ]


def test_the_report_by_hand() -> None:
    steps = [step([1, 2], [3]), step([1, 2, 3, 4], [5, 6]), step([7], [8], mask=[0])]
    report = build_samples([state(steps, reward=2.0), state([step(None)])], "interleave").report
    expected = {
        "num_rollouts": 2,
        "num_failed_rollouts": 0,
        "num_calls": 3,
        "num_samples": 2,
        "num_tokens": 8,
        "num_raw_tokens": 11,
        "num_sampled_tokens": 4,
        "num_trained_tokens": 3,
        "num_masked_tokens": 1,
        "num_skipped_tokens": 0,
        "num_breaks": 1,
        "break_rate": 0.5,
        "break_rate/compaction": 0.5,
        "skipped/no_tokens": 1,
        "reward_mean": 2.0,
    }
    assert {key: report[key] for key in expected} == expected
    assert all(isinstance(value, int | float) for value in report.values())


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("temperature", None), ("sampling", "x")], ids=str
)
def test_a_call_whose_sampling_is_unreadable_counts_as_sampled_differently(
    key: str, value: Any
) -> None:
    changed = changed_sampling({"extras": {"temperature": 1.0, key: value}})
    assert changed == f"{key} = {value!r}"


@pytest.mark.parametrize(
    "tokens", ["x", 5, {"prompt_ids": [1], "completion_ids": [2], "completion_mask": 5}], ids=str
)
def test_tokens_that_are_no_lists_are_masked_as_invalid(tokens: Any) -> None:
    call = {"prompt": [], "completion": [], "tokens": tokens, "extras": {}}
    batch = build_samples([State(trajectory=[call], reward=1.0)], "step", skip_invalid=True)
    assert batch.samples == []
    assert batch.report[f"skipped/{SkipReason.INVALID_TOKENS}"] == 1
