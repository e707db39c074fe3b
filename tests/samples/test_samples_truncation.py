"""One policy for truncated rollouts: what it does to sample, loss, baseline and statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from samples_kit import SCOPES, state

from rolltree.samples import (
    TruncationPolicy,
    build_samples,
    truncation_effect,
)
from rolltree.tokens import Trajectory
from rolltree.training import CreditPolicy, assign_credit
from rolltree.values.errors import ConfigError
from rolltree.values.types import RolloutRequest, RolloutResult, State
from step_kit import step

REQUEST = RolloutRequest("r", "env", {"prompt": "p", "example_id": 0, "task": "t"}, 0, 0, "g", 0)


def rollouts(**fields: Any) -> list[State]:
    """A finished rollout with reward 1 and one cut at max_steps with reward 0.25."""
    done = state([step([1], [2, 3], advantage=1.0)], reward=1.0, terminated=True, truncated=False)
    cut = state(
        [step([1], [4], advantage=-1.0)],
        **{"reward": 0.25, "truncated": True, "truncation_reason": "max_steps"} | fields,
    )
    return [done, cut]


TABLE = [
    # policy, reward for credit, in loss, counts elsewhere
    (TruncationPolicy(), 0.25, True, True),
    (TruncationPolicy("drop"), 0.25, False, False),
    (TruncationPolicy("mask"), 0.25, False, True),
    (TruncationPolicy("penalise", penalty=0.5), -0.25, True, True),
    (TruncationPolicy("bootstrap", discount=0.5), 0.75, True, True),
]


@pytest.mark.parametrize(("policy", "reward", "loss", "counts"), TABLE)
def test_the_table(policy: TruncationPolicy, reward: float, loss: bool, counts: bool) -> None:
    done, cut = (truncation_effect(one, policy) for one in rollouts(bootstrap_value=1.0))
    assert (done.mode, done.truncated, done.reward) == ("keep", False, 1.0)
    assert (done.in_loss, done.counts) == (True, True)
    assert (cut.mode, cut.truncated, cut.reason) == (policy.mode, True, "max_steps")
    assert cut.reward == reward
    assert (cut.in_loss, cut.counts) == (loss, counts)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("policy", "_r", "loss", "counts"), TABLE)
def test_samples_follow_the_table(
    scope: Any, policy: TruncationPolicy, _r: float, loss: bool, counts: bool
) -> None:
    batch = build_samples(rollouts(bootstrap_value=1.0), scope, truncation=policy)
    weights = {
        int(r): float(w)
        for s in batch.samples
        for r, w in zip(s.records.rollout, s.records.weight, strict=True)
    }
    assert weights.get(0) == 1.0
    assert weights.get(1) == (None if policy.mode == "drop" else float(loss))
    report = batch.report
    assert report["num_truncated_rollouts"] == 1
    assert report["num_dropped_rollouts"] == (policy.mode == "drop")
    assert report["reward_mean"] == (0.625 if counts else 1.0)  # unshaped
    assert report["num_masked_tokens"] == (policy.mode == "mask")
    assert report["skipped_tokens/truncation_policy"] == (policy.mode == "drop")
    cut = [o for s in batch.samples for o in s.origins if o.truncated]
    assert [(o.truncation_reason, o.terminated) for o in cut] == (
        [] if policy.mode == "drop" else [("max_steps", False)]
    )


def test_the_mode_alone_is_a_policy() -> None:
    for mode in ("keep", "drop", "mask"):
        made = build_samples(rollouts(), "tree", truncation=mode).report
        assert made == build_samples(rollouts(), "tree", truncation=TruncationPolicy(mode)).report
    with pytest.raises(ConfigError, match="Did you mean 'mask'"):
        build_samples(rollouts(), "tree", truncation="masks")  # type: ignore[arg-type]


def test_a_dropped_rollout_leaves_the_group_tree_too() -> None:
    dropped = build_samples(
        rollouts(), "tree", truncation=TruncationPolicy("drop"), group_key=lambda _: 0
    )
    assert dropped.samples[0].ids.tolist() == [1, 2, 3]
    masked = build_samples(
        rollouts(), "tree", truncation=TruncationPolicy("mask"), group_key=lambda _: 0
    )
    assert masked.samples[0].ids.tolist() == [1, 2, 3, 4]
    assert masked.samples[0].records.weight.tolist() == [1, 1, 0]


@pytest.mark.parametrize("otherwise", ["keep", "drop", "mask"])
def test_bootstrap_without_a_value_does_what_was_declared(otherwise: Any) -> None:
    policy = TruncationPolicy("bootstrap", without_value=otherwise)
    effect = truncation_effect(rollouts()[1], policy)
    assert (effect.mode, effect.reward) == (otherwise, 0.25)


def test_only_the_declared_reasons_are_treated() -> None:
    policy = TruncationPolicy("drop", reasons=frozenset({"time_limit"}))
    assert truncation_effect(rollouts()[1], policy).mode == "keep"
    late = rollouts(truncation_reason="time_limit")[1]
    assert truncation_effect(late, policy).mode == "drop"


def test_one_decision_serves_credit_and_samples() -> None:
    """Credit's effects are taken as they are, whatever the policy that made them."""
    states = rollouts(bootstrap_value=1.0)
    policy = TruncationPolicy("drop")
    results = [RolloutResult(REQUEST, (one,), None) for one in states]
    report = assign_credit(results, "reinforce", CreditPolicy(truncation=policy))
    assert [effect.mode for effect in report.effects] == ["keep"]
    assert len(build_samples(report.trained, truncation=report.effects).samples) == 1
    effects = [truncation_effect(one, policy) for one in states]
    assert len(build_samples(states, truncation=effects).samples) == 1
    with pytest.raises(ConfigError, match="2 truncation effects for 1 trajectories"):
        build_samples(states[:1], truncation=effects)


def test_a_states_last_step_says_so_too() -> None:
    """The policy and the origins read the same flags."""
    one = state([step([1], [2], truncated=True, truncation_reason="env")])
    (sample,) = build_samples([one], truncation=TruncationPolicy("mask")).samples
    assert sample.origins[0].truncation_reason == "env"
    assert sample.records.weight.tolist() == [0]


def test_a_length_stop_is_not_a_truncated_episode() -> None:
    one = state([step([1], [2], finish_reason="length")], reward=1.0, truncated=False)
    batch = build_samples([one], "step", truncation=TruncationPolicy("drop"))
    (origin,) = batch.samples[0].origins
    assert (origin.finish_reason, origin.truncated, origin.truncation_reason) == (
        "length", False, None,
    )  # fmt: skip


@pytest.mark.parametrize("recorded", [True, False])
def test_a_call_beyond_max_seq_len_truncates_its_rollout(recorded: bool) -> None:
    steps: Any = [step([1, 2, 3], [4, 5]), step([1], [2])]
    one = state(Trajectory(steps) if recorded else steps, reward=1.0)
    policy = TruncationPolicy("drop")
    assert truncation_effect(one, policy, max_seq_len=5).mode == "keep"
    effect = truncation_effect(one, policy, max_seq_len=4)
    assert (effect.mode, effect.reason) == ("drop", "max_seq_len")
    assert build_samples([one], "step", truncation=policy, max_seq_len=4).samples == []
    assigned = state(Trajectory(steps))
    assigned["trajectory"][0]["tokens"]["completion_ids"] = [4]
    assert truncation_effect(assigned, policy, max_seq_len=4).mode == "keep"


def test_an_episodes_own_reason_wins() -> None:
    effect = truncation_effect(rollouts()[1], TruncationPolicy("drop"), max_seq_len=2)
    assert effect.reason == "max_steps"


def test_plain_lists_carry_their_flags_in_the_last_step() -> None:
    steps = [step([1], [2]), step([1], [3], truncated=True, truncation_reason="env")]
    batch = build_samples([steps], "step", truncation=TruncationPolicy("mask"))
    assert {o.truncation_reason for s in batch.samples for o in s.origins} == {"env"}
    assert batch.report["num_masked_tokens"] == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mode": "penalize"}, "penalise"),
        ({"mode": "bootstrap", "without_value": "bootstrap"}, "keep"),
        ({"mode": "drop", "penalty": 1.0}, "penalty"),
        ({"mode": "keep", "discount": 0.9}, "discount"),
        ({"mode": "mask", "without_value": "keep"}, "without_value"),
        ({"mode": "penalise"}, "positive"),
        ({"mode": "penalise", "penalty": -1.0}, "positive"),
    ],
)
def test_settings_that_would_be_ignored_are_errors(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TruncationPolicy(**options)


def test_a_rollout_without_a_reward_stays_without_one() -> None:
    effect = truncation_effect(rollouts(reward=None)[1], TruncationPolicy("penalise", penalty=1.0))
    assert effect.reward is None


def cut_by_max_tokens(finish_reason: str, **fields: Any) -> State:
    """A rollout of two answers, the last of which ended for this reason."""
    steps = [
        step([1], [2], finish_reason="length", turn=0),
        step([1, 2, 3], [4], finish_reason=finish_reason, turn=1),
    ]
    return state(steps, **{"reward": 0.25, "terminated": True, "truncated": False} | fields)


@pytest.mark.parametrize("mode", ["keep", "mask", "drop"])
def test_a_cut_completion_is_no_truncated_episode(mode: Any) -> None:
    one = cut_by_max_tokens("length")
    effect = truncation_effect(one, TruncationPolicy(mode))
    assert (effect.mode, effect.truncated, effect.in_loss) == ("keep", False, True)
    assert effect.is_completion_cut
    report = build_samples([one], truncation=TruncationPolicy(mode)).report
    assert report["num_truncated_completions"] == 1
    assert report["num_masked_completions"] == report["num_masked_tokens"] == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("mode", ["keep", "mask", "drop"])
def test_cut_completions_can_be_masked(scope: Any, mode: Any) -> None:
    """The last answer decides: an earlier one that was cut and went on is trained, as in TRL."""
    policy = TruncationPolicy(mode, mask_truncated_completions=True)
    both = [cut_by_max_tokens("length"), cut_by_max_tokens("stop", reward=0.75)]
    batch = build_samples(both, scope, truncation=policy)
    weights: dict[int, set[float]] = {0: set(), 1: set()}
    for sample in batch.samples:
        for rollout, weight in zip(sample.records.rollout, sample.records.weight, strict=True):
            weights[int(rollout)].add(float(weight))
    assert weights == {0: {0.0}, 1: {1.0}}
    assert batch.report["num_masked_completions"] == 1
    assert batch.report["num_masked_tokens"] == 2
    assert batch.report["reward_mean"] == 0.5  # its reward counts


def test_credit_counts_the_rewards_of_masked_completions() -> None:
    results = [
        RolloutResult(
            replace(REQUEST, request_id=f"r{index}"),
            (cut_by_max_tokens(reason, reward=reward),),
            None,
        )
        for index, (reason, reward) in enumerate(
            [("length", 0.0), ("stop", 1.0), ("length", 0.5), ("stop", 0.5)]
        )
    ]
    for is_on in (False, True):
        policy = CreditPolicy(truncation=TruncationPolicy(mask_truncated_completions=is_on))
        report = assign_credit(results, "dr_grpo", policy)
        assert [a[0] for a in report.advantages] == [-0.5, 0.5, 0.0, 0.0]
        assert report.metrics["credit/truncated_completions_share"] == 0.5
        assert report.metrics["credit/masked_completions_share"] == 0.5 * is_on
        assert report.metrics["credit/truncated_share"] == 0.0
        assert [effect.in_loss for effect in report.effects] == [not is_on, True] * 2


def test_a_rollout_that_is_cut_both_ways_follows_both() -> None:
    one = cut_by_max_tokens("length", truncated=True, truncation_reason="max_steps")
    policy = TruncationPolicy("penalise", penalty=1.0, mask_truncated_completions=True)
    effect = truncation_effect(one, policy)
    assert (effect.reward, effect.counts, effect.in_loss) == (-0.75, True, False)


def test_advantages_given_by_value_win_and_must_fit() -> None:
    state = cut_by_max_tokens("stop", advantage=7.0)
    (sample,) = build_samples([state], advantages=[[0.5, 0.25]]).samples
    assert set(sample.records.advantage.tolist()) == {0.5, 0.25}
    (sample,) = build_samples([state]).samples
    assert set(sample.records.advantage.tolist()) == {7.0}
    for wrong in ([], [[0.5]]):
        with pytest.raises(ConfigError, match="cannot be matched"):
            build_samples([state], advantages=wrong)
