import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.errors import TrainingError, UnknownName
from rolltree.samples import TruncationPolicy
from rolltree.training.credit import (
    CREDITS,
    CreditPolicy,
    Episode,
    assign_credit,
    dr_grpo,
    grpo,
    leave_one_out,
    monte_carlo,
    reinforce,
)
from rolltree.types import ErrorRecord, RolloutRequest, RolloutResult, State

ERROR = ErrorRecord("ServerError", "500", "", "model")


def episode(reward, turns=(0,), rewards=None):
    return Episode(reward, tuple(rewards or [None] * len(turns)), tuple(turns))


def result(reward, group="g", index=0, *, calls=1, error=None, **state):
    steps = [{"reward": None, "advantage": None, "extras": {"turn": i}} for i in range(calls)]
    states = (State(reward=reward, trajectory=steps, error=error, **state),)
    request = RolloutRequest(
        f"{group}/{index}", "env", {"prompt": "p", "example_id": 0, "task": "t"}, 0, 0, group, index
    )
    return RolloutResult(request, states, error)


def advantages(results):
    return [r.states[0]["advantage"] for r in results]


class TestByHand:
    def test_grpo_is_the_z_score(self):
        # mean 1.25, deviations -1.25 -0.25 0.75 0.75, their squares sum to 2.75,
        # sample variance 2.75 / 3, std 0.957427
        got = grpo([episode(r) for r in (0, 1, 2, 2)])
        assert got == [
            pytest.approx([-1.305582], abs=1e-5),
            pytest.approx([-0.261116], abs=1e-5),
            pytest.approx([0.783349], abs=1e-5),
            pytest.approx([0.783349], abs=1e-5),
        ]

    def test_dr_grpo_only_centres(self):
        assert dr_grpo([episode(r) for r in (0, 1, 2, 2)]) == [[-1.25], [-0.25], [0.75], [0.75]]

    def test_leave_one_out_compares_with_the_others(self):
        # 0 against (1 + 2 + 2) / 3, 1 against 4 / 3, 2 against 1
        got = leave_one_out([episode(r) for r in (0, 1, 2, 2)])
        assert [value[0] for value in got] == pytest.approx([-5 / 3, -1 / 3, 1.0, 1.0])

    def test_every_call_of_an_episode_gets_its_credit(self):
        got = dr_grpo([episode(1.0, (0, 1, 2)), episode(0.0, (0,))])
        assert got == [[0.5, 0.5, 0.5], [-0.5]]

    def test_reinforce_is_the_reward(self):
        assert reinforce([episode(3.0, (0, 1)), episode(-1.0)]) == [[3.0, 3.0], [-1.0]]

    def test_monte_carlo_discounts_turns_not_calls(self):
        # calls 0 and 1 are one turn: nothing is discounted between them
        got = monte_carlo([episode(0.0, (0, 0, 1), (1.0, 2.0, 4.0))], 0.5)
        assert got == [[1 + 2 + 0.5 * 4, 2 + 0.5 * 4, 4.0]]
        assert monte_carlo([episode(8.0, (0, 1, 3))], 0.5) == [[1.0, 2.0, 8.0]]
        assert monte_carlo([episode(8.0, (0, 1, 3))], 1.0) == [[8.0, 8.0, 8.0]]
        assert monte_carlo([episode(8.0, ())], 0.5) == [[]]

    def test_groups_of_one_and_flat_groups_teach_nothing(self):
        for name in ("grpo", "dr_grpo", "leave_one_out"):
            assert CREDITS[name]([episode(5.0)], 1.0) == [[0.0]]
            assert CREDITS[name]([episode(0.1)] * 3, 1.0) == [[0.0]] * 3

    @given(st.lists(st.floats(-100, 100, width=16), min_size=2, max_size=9))
    def test_group_credits_sum_to_zero_and_keep_the_order(self, rewards):
        for name in ("grpo", "dr_grpo", "leave_one_out"):
            got = [value[0] for value in CREDITS[name]([episode(r) for r in rewards], 1.0)]
            assert sum(got) == pytest.approx(0, abs=1e-6 * (1 + max(map(abs, rewards))))
            order = sorted(range(len(rewards)), key=rewards.__getitem__)
            assert all(got[a] <= got[b] + 1e-9 for a, b in pairwise(order))


class TestAssign:
    def test_groups_are_compared_within_themselves(self):
        results = [result(1.0, "a"), result(10.0, "b"), result(0.0, "a", 1), result(20.0, "b", 1)]
        report = assign_credit(results, "dr_grpo")
        assert advantages(results) == [0.5, -5.0, -0.5, 5.0]
        assert results[1].states[0]["trajectory"][0]["advantage"] == -5.0
        assert len(report.trained) == 4

    def test_episodes_count_once_however_many_calls_they_have(self):
        results = [result(1.0, calls=9), result(0.0, index=1, calls=1)]
        assign_credit(results, "dr_grpo")
        assert advantages(results) == [0.5, -0.5]

    def test_agents_of_one_episode_are_compared_with_their_like(self):
        def pair(first, second, index):
            one, two = result(first, index=index), result(second, index=index)
            return RolloutResult(one.request, one.states + two.states, None)

        results = [pair(1.0, 100.0, 0), pair(0.0, 300.0, 1)]
        assign_credit(results, "dr_grpo")
        assert [s["advantage"] for r in results for s in r.states] == [0.5, -100.0, -0.5, 100.0]

    def test_zero_is_the_control(self):
        results = [result(1.0), result(0.0, index=1)]
        report = assign_credit(results, "zero")
        assert advantages(results) == [0.0, 0.0]
        assert len(report.trained) == 2

    def test_failed_episodes_are_left_out_or_count_as_zero(self):
        results = [result(1.0), result(None, index=1, error=ERROR), result(0.4, index=2)]
        report = assign_credit(results, "dr_grpo")
        assert advantages(results) == [pytest.approx(0.3), None, pytest.approx(-0.3)]
        assert report.metrics["credit/failed_share"] == pytest.approx(1 / 3)
        assert report.metrics["credit/untrained_share"] == pytest.approx(1 / 3)
        assert [s["reward"] for s in report.trained] == [1.0, 0.4]
        report = assign_credit(results, "dr_grpo", CreditPolicy(on_error="zero"))
        mean = 1.4 / 3
        assert advantages(results) == [pytest.approx(1 - mean), None, pytest.approx(0.4 - mean)]
        assert len(report.trained) == 2

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            (TruncationPolicy("keep"), [0.5, -0.5]),
            (TruncationPolicy("drop"), [0.0, None]),
            (TruncationPolicy("mask"), [0.5, -0.5]),
            (TruncationPolicy("penalise", penalty=1.0), [1.0, -1.0]),
        ],
    )
    def test_truncated_episodes_follow_the_policy(self, policy, expected):
        results = [result(1.0), result(0.0, index=1, truncated=True, truncation_reason="max_steps")]
        report = assign_credit(results, "dr_grpo", CreditPolicy(truncation=policy))
        assert advantages(results) == expected
        assert report.metrics["credit/truncated_share"] == 0.5

    def test_old_advantages_are_overwritten(self):
        results = [result(None, error=ERROR), result(1.0, index=1)]
        results[0].states[0]["advantage"] = 7.0
        results[0].states[0]["trajectory"][0]["advantage"] = 7.0
        assign_credit(results, "grpo")
        assert advantages(results) == [None, 0.0]
        assert results[0].states[0]["trajectory"][0]["advantage"] is None

    def test_flat_groups_are_counted(self):
        results = [result(1.0, "a"), result(1.0, "a", 1), result(1.0, "b"), result(0.0, "b", 1)]
        assert assign_credit(results, "grpo").metrics["credit/flat_group_share"] == 0.5

    @pytest.mark.parametrize("reward", [None, math.nan, math.inf])
    def test_a_missing_reward_is_an_error_not_a_zero(self, reward):
        with pytest.raises(TrainingError, match="g/0 did not fail and has the reward"):
            assign_credit([result(reward)], "grpo")

    def test_unknown_credit(self):
        with pytest.raises(UnknownName, match="Did you mean 'grpo'"):
            assign_credit([], "grop")
