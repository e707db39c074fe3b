"""Which credits are unbiased: their expected gradient against the true one, by enumeration."""

import numpy as np
import pytest
from credit_games import delegation_game, expected_gradient, stopping_game, true_gradient

from rolltree.training.advantages import CreditPolicy
from rolltree.training.credit import FLOWS, Earnings, Flow, leave_one_out


def close(got, wanted):
    return np.allclose(got, wanted, rtol=0, atol=1e-12)


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


class TestOneAgent:
    policy, plays = stopping_game()
    true = true_gradient(plays, lambda play: play.total)

    def test_the_enumeration_itself(self):
        """Against a difference quotient of the expected reward."""
        assert sum(play.probability for play in self.plays) == pytest.approx(1)
        first, second = self.policy.probabilities("first"), self.policy.probabilities("second")
        # dJ/d(logit of stopping) = p_stop * p_go * (0.3 - value of going on)
        by_hand = first[0] * first[1] * (0.3 - (second[0] - 0.1))
        assert self.true[0] == pytest.approx(by_hand, abs=1e-15)

    @pytest.mark.parametrize("credit", ["reinforce", "episodic", "leave_one_out", "monte_carlo"])
    @pytest.mark.parametrize("size", [2, 3])
    def test_unbiased(self, credit, size):
        assert close(expected_gradient(self.plays, credit, group_size=size), self.true)

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_dr_grpo_is_the_gradient_times_n_minus_1_over_n(self, size):
        got = expected_gradient(self.plays, "dr_grpo", group_size=size)
        assert close(got, self.true * (size - 1) / size)

    def test_grpo_is_biased(self):
        got = expected_gradient(self.plays, "grpo", group_size=3)
        ratios = got / self.true
        assert ratios[0] / ratios[2] < 0.97  # not a multiple: the second decision weighs more
        assert got @ self.true > 0

    def test_per_step_does_not_see_what_an_action_leads_to(self):
        got = expected_gradient(self.plays, "per_step")
        assert got[0] > 0 > self.true[0]  # stopping pays at once, going on pays more later
        assert close(got[2:], self.true[2:])  # of the last turn everything is known

    def test_a_discount_is_a_bias(self):
        got = expected_gradient(self.plays, "monte_carlo", CreditPolicy(discount=0.5))
        assert not close(got, self.true)
        assert close(got[2:], self.true[2:])

    @pytest.mark.parametrize("credit", ["constant", "zero"])
    def test_nothing_is_learned_without_reward(self, credit):
        assert close(expected_gradient(self.plays, credit), np.zeros(4))

    @pytest.mark.parametrize("averages", [None, {}, {"": 0.4}, {"": -7.0}])
    @pytest.mark.parametrize("credit", ["reinforce", "monte_carlo"])
    def test_a_moving_average_is_unbiased_whatever_it_holds(self, credit, averages):
        policy = CreditPolicy(baseline="ema")
        got = expected_gradient(self.plays, credit, policy, averages=averages)
        assert close(got, self.true)


class TestDelegation:
    policy, plays = delegation_game(child_reward=0.5)
    total = true_gradient(plays, lambda play: play.total)
    root = true_gradient(plays, lambda play: play.rollouts[0].reward)
    parents = np.r_[0:3, 7:9]  # the logits of the parent's two calls
    children = np.r_[3:7]

    def test_the_probabilities_add_up(self):
        assert len(self.plays) == 14
        assert sum(play.probability for play in self.plays) == pytest.approx(1)

    @pytest.mark.parametrize("credit", ["reinforce", "monte_carlo"])
    def test_team_is_the_gradient_of_all_rewards(self, credit):
        got = expected_gradient(self.plays, credit, CreditPolicy(flow=FLOWS["team"]))
        assert close(got, self.total)

    def test_team_with_moving_averages_per_role(self):
        policy = CreditPolicy(flow=FLOWS["team"], baseline="ema")
        averages = {"root": 0.7, "child": -0.2}
        got = expected_gradient(self.plays, "reinforce", policy, averages=averages)
        assert close(got, self.total)

    @pytest.mark.parametrize("credit", ["reinforce", "monte_carlo"])
    def test_shared_is_the_gradient_of_the_roots_reward_if_children_earn_nothing(self, credit):
        _, plays = delegation_game(child_reward=0.0)
        got = expected_gradient(plays, credit, CreditPolicy(flow=FLOWS["shared"]))
        assert close(got, true_gradient(plays, lambda play: play.rollouts[0].reward))

    def test_shared_is_neither_gradient_if_children_earn_something(self):
        got = expected_gradient(self.plays, "reinforce", CreditPolicy(flow=FLOWS["shared"]))
        assert close(got[self.parents], self.root[self.parents])
        assert not close(got[self.children], self.root[self.children])
        assert not close(got[self.children], self.total[self.children])

    def test_own_trains_the_parent_for_the_root_and_the_child_for_itself(self):
        got = expected_gradient(self.plays, "reinforce", CreditPolicy(flow=FLOWS["own"]))
        assert close(got[self.parents], self.root[self.parents])
        # a child's own reward: p(asked) * 0.5 * p0 * p1 for the logit of the answer 1
        p, ask = self.policy.probabilities("b"), self.policy.probabilities("ask")
        assert got[6] == pytest.approx(ask[1] * 0.5 * p[0] * p[1])

    def test_discounted_scales_what_children_inherit(self):
        _, plays = delegation_game(child_reward=0.0)
        root = true_gradient(plays, lambda play: play.rollouts[0].reward)
        got = expected_gradient(plays, "reinforce", CreditPolicy(flow=Flow(down=0.25)))
        assert close(got[self.parents], root[self.parents])
        assert close(got[self.children], 0.25 * root[self.children])

    def test_leave_one_out_is_unbiased_for_parents_and_per_subtask_for_children(self):
        """A child is compared only when another episode got its subtask: with n = 2 its gradient
        is the true one times the probability that the other one did."""
        got = expected_gradient(self.plays, "leave_one_out", CreditPolicy(flow=FLOWS["team"]))
        assert close(got[self.parents], self.total[self.parents])
        ask = self.policy.probabilities("ask")
        assert close(got[3:5], self.total[3:5] * (ask[0] + ask[2]))
        assert close(got[5:7], self.total[5:7] * ask[1])

    def test_dr_grpo_halves_the_gradient_also_with_several_children_in_an_episode(self):
        """The mean of a compared pair of episodes is half its own, whatever each is made of."""
        got = expected_gradient(self.plays, "dr_grpo", CreditPolicy(flow=FLOWS["team"]))
        half = expected_gradient(self.plays, "leave_one_out", CreditPolicy(flow=FLOWS["team"])) / 2
        assert close(got, half)

    def test_counting_rollouts_instead_of_episodes_is_biased(self):
        """Siblings as each other's baseline: the second child exists because the first failed."""

        def gradient(with_owner):
            total = 0.0
            for play in self.plays:
                children = [r for r in play.rollouts if r.agent == "child" and r.subtask == "a"]
                if not children:
                    continue
                # beside this episode, one fixed other episode with one child on the same subtask
                episodes = [
                    Earnings(r.reward, (None,), (0,), "me" if with_owner else None)
                    for r in children
                ] + [Earnings(0.3, (None,), (0,), "other")]
                values = leave_one_out(episodes)[:-1]
                total += play.probability * sum(
                    value[0] * r.scores[0] for value, r in zip(values, children, strict=True)
                )
            return total[3:5]

        expected = sum(
            play.probability * r.reward * r.scores[0]
            for play in self.plays
            for r in play.rollouts
            if r.subtask == "a"
        )[3:5]
        assert close(gradient(True), expected)
        assert not close(gradient(False), expected)
