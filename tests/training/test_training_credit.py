import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from credit_games import credited
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments.rubrics import write_advantages
from rolltree.samples import TruncationPolicy
from rolltree.training.advantages import CreditPolicy, assign_credit, credit_group
from rolltree.training.credit import (
    COMPARING,
    CREDITS,
    FLOWS,
    Earnings,
    Flow,
    dr_grpo,
    episodic_return,
    flow_credit,
    grpo,
    leave_one_out,
    monte_carlo,
    parents_first,
    resolve_flow,
    subtract_averages,
)
from rolltree.training.metrics import rollout_metrics
from rolltree.values.errors import ConfigError, TrainingError, UnknownName
from rolltree.values.types import ErrorRecord, RolloutRequest, RolloutResult, State

ERROR = ErrorRecord("ServerError", "500", "", "model")


def episode(reward, turns=(0,), rewards=None):
    return Earnings(reward, tuple(rewards or [None] * len(turns)), tuple(turns))


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
        assert episodic_return([episode(3.0, (0, 1)), episode(-1.0)]) == [[3.0, 3.0], [-1.0]]

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
        report = credited(results, "dr_grpo")
        assert advantages(results) == [0.5, -5.0, -0.5, 5.0]
        assert results[1].states[0]["trajectory"][0]["advantage"] == -5.0
        assert len(report.trained) == 4

    def test_places_say_where_the_trained_states_are(self):
        """Groups may be mixed, episodes may have several rollouts, and equal states differ."""
        pair, failed = result(1.0, "a"), result(None, "b", error=ERROR)
        pair = RolloutResult(pair.request, (*pair.states, *deepcopy(pair.states)), None)
        results = [pair, failed, result(3.0, "a", 1, calls=2), result(2.0, "b", 1)]
        results[2].states[0]["trajectory"].clear()
        report = assign_credit(results, "reinforce")
        assert report.places == ((0, 0), (0, 1), (2, 0), (3, 0))
        assert all(
            state is results[result].states[index]
            for state, (result, index) in zip(report.trained, report.places, strict=True)
        )
        assert [values.tolist() for values in report.advantages] == [[1.0], [1.0], [], [2.0]]
        assert report.first_advantages(results) == {
            ("a/0", 0): 1.0,
            ("a/0", 1): 1.0,
            ("b/1", 0): 2.0,
        }

    def test_episodes_count_once_however_many_calls_they_have(self):
        results = [result(1.0, calls=9), result(0.0, index=1, calls=1)]
        credited(results, "dr_grpo")
        assert advantages(results) == [0.5, -0.5]

    def test_agents_of_one_episode_are_compared_with_their_like(self):
        def pair(first, second, index):
            one, two = result(first, index=index), result(second, index=index)
            return RolloutResult(one.request, one.states + two.states, None)

        results = [pair(1.0, 100.0, 0), pair(0.0, 300.0, 1)]
        credited(results, "dr_grpo")
        assert [s["advantage"] for r in results for s in r.states] == [0.5, -100.0, -0.5, 100.0]

    def test_zero_is_the_control(self):
        results = [result(1.0), result(0.0, index=1)]
        report = credited(results, "zero")
        assert advantages(results) == [0.0, 0.0]
        assert len(report.trained) == 2

    def test_failed_episodes_are_left_out_or_count_as_zero(self):
        results = [result(1.0), result(None, index=1, error=ERROR), result(0.4, index=2)]
        report = credited(results, "dr_grpo")
        assert advantages(results) == [pytest.approx(0.3), None, pytest.approx(-0.3)]
        assert report.metrics["credit/failed_share"] == pytest.approx(1 / 3)
        assert report.metrics["credit/untrained_share"] == pytest.approx(1 / 3)
        assert [s["reward"] for s in report.trained] == [1.0, 0.4]
        report = credited(results, "dr_grpo", CreditPolicy(on_error="zero"))
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
        report = credited(results, "dr_grpo", CreditPolicy(truncation=policy))
        assert advantages(results) == expected
        assert report.metrics["credit/truncated_share"] == 0.5

    def test_old_advantages_are_overwritten(self):
        results = [result(None, error=ERROR), result(1.0, index=1)]
        results[0].states[0]["advantage"] = 7.0
        results[0].states[0]["trajectory"][0]["advantage"] = 7.0
        credited(results, "grpo")
        assert advantages(results) == [None, 0.0]
        assert results[0].states[0]["trajectory"][0]["advantage"] is None

    def test_nothing_is_written_into_the_results(self):
        """The rubric's default, reward minus mean, stays in the states; credit is a value."""
        results = [result(1.0), result(0.0, index=1), result(2.0, index=2)]
        states = [r.states[0] for r in results]
        write_advantages(states)
        before = deepcopy(states)
        report = assign_credit(results, "reinforce")
        assert [a.tolist() for a in report.advantages] == [[1.0], [0.0], [2.0]]
        assert states == before
        assert advantages(results) == [0.0, -1.0, 1.0]
        assert [s["trajectory"][0]["advantage"] for s in states] == [0.0, -1.0, 1.0]

    def test_flat_groups_are_counted(self):
        results = [result(1.0, "a"), result(1.0, "a", 1), result(1.0, "b"), result(0.0, "b", 1)]
        assert credited(results, "grpo").metrics["train/frac_reward_zero_std"] == 0.5

    @pytest.mark.parametrize("credit", ["grpo", "dr_grpo", "leave_one_out"])
    @pytest.mark.parametrize(
        "rewards",
        [(0.1 + 0.2, 0.3), (0.1 + 0.2 - 0.3, 0.0), (1e6 + 0.1 + 0.2, 1e6 + 0.3), (0.3,) * 3],
        ids=str,
    )
    def test_rewards_that_differ_by_rounding_are_equal(self, credit, rewards):
        results = [result(reward, index=at) for at, reward in enumerate(rewards)]
        report = credited(results, credit)
        assert not np.concatenate(report.advantages).any()
        assert report.metrics["train/frac_reward_zero_std"] == 1
        assert rollout_metrics(results)["reward/std"] == 0
        assert not credit_group(results, credit, CreditPolicy()).has_signal

    def test_a_small_difference_is_a_signal(self):
        results = [result(reward, index=at) for at, reward in enumerate((0.3, 0.30001, 0.3))]
        assert credited(results, "dr_grpo").metrics["train/frac_reward_zero_std"] == 0
        assert all(values.any() for values in credited(results, "dr_grpo").advantages)

    @pytest.mark.parametrize("reward", [None, math.nan, math.inf])
    def test_a_missing_reward_is_left_out_and_named_not_a_zero(self, reward):
        results = [result(value, index=at) for at, value in enumerate((1.0, reward, 0.0))]
        report = credited(results, "dr_grpo")
        assert [values.tolist() for values in report.advantages] == [[0.5], [-0.5]]
        assert "g/1 did not fail, but has the reward" in report.problems[0]
        assert report.metrics["credit/unusable_share"] == 1 / 3

    def test_unknown_credit(self):
        with pytest.raises(UnknownName, match="Did you mean 'grpo'"):
            credited([], "grop")


class TestOtherCredits:
    def test_per_step_is_the_turns_own_reward_for_all_its_calls(self):
        got = CREDITS["per_step"]([episode(9.0, (0, 0, 1), (None, 2.0, 4.0))], 1.0)
        assert got == [[2.0, 2.0, 4.0]]
        assert CREDITS["per_step"]([episode(9.0, (0, 1))], 1.0) == [[0.0, 9.0]]

    def test_constant_and_episodic(self):
        assert CREDITS["constant"]([episode(-3.0, (0, 1))], 1.0) == [[1.0, 1.0]]
        assert CREDITS["episodic"]([episode(-3.0, (0, 1))], 1.0) == [[-3.0, -3.0]]

    def test_rollouts_of_one_episode_count_as_one(self):
        # episode x has the rollouts 1 and 0, episode y has 0.2; the mean is (0.5 + 0.2) / 2
        group = [replace(episode(r), episode=o) for r, o in ((1.0, "x"), (0.0, "x"), (0.2, "y"))]
        assert [v[0] for v in dr_grpo(group)] == pytest.approx([0.65, -0.35, -0.15])
        assert [v[0] for v in leave_one_out(group)] == pytest.approx([0.8, -0.2, -0.3])
        # variance: (0.65^2 + 0.35^2) / 4 + 0.15^2 / 2, times 2 for Bessel
        std = (((0.65**2 + 0.35**2) / 4 + 0.15**2 / 2) * 2) ** 0.5
        assert [v[0] for v in grpo(group)] == pytest.approx(
            [0.65 / std, -0.35 / std, -0.15 / std], rel=1e-4
        )

    def test_a_single_episode_has_no_advantage(self):
        alone = [replace(episode(r), episode="x") for r in (1.0, 0.0)]
        for name in COMPARING:
            assert CREDITS[name](alone, 1.0) == [[0.0], [0.0]]


def delegated(index, root, children, **more):
    """A result of one root with two calls and children as (reward, parent step, subtask)."""
    made = result(root, index=index, calls=2)
    state = made.states[0]
    state.update(rollout_id=f"g/{index}", agent="root")
    states = [state]
    for number, (reward, step, subtask) in enumerate(children):
        child = result(reward, index=index).states[0]
        child.update(rollout_id=f"g/{index}#{number}", parent_rollout=f"g/{index}")
        child.update(parent_step=step, subtask=subtask, agent="child", **more)
        states.append(child)
    return RolloutResult(made.request, tuple(states), None)


def all_advantages(results):
    return [[s["advantage"] for s in r.states] for r in results]


class TestFlow:
    def node(self, reward, rewards=None, parent=None, call=0):
        calls = rewards or (None,)
        turns = tuple(range(len(calls)))
        return Earnings(reward, tuple(calls), turns, parent=parent, parent_call=call)

    def chain(self):
        """Root 1 = 0 + 1; its child in the first call 0.5; a grandchild 0.25; a later child 2."""
        return [
            self.node(1.0, (0.0, 1.0)),
            self.node(0.5, parent=0, call=0),
            self.node(0.25, parent=1, call=0),
            self.node(2.0, parent=0, call=1),
        ]

    def test_own(self):
        nodes = self.chain()
        assert flow_credit(nodes, FLOWS["own"]) == nodes

    def test_shared_adds_the_parents(self):
        got = flow_credit(self.chain(), FLOWS["shared"])
        assert [e.reward for e in got] == [1.0, 1.5, 1.75, 3.0]
        assert [e.rewards for e in got] == [[0.0, 1.0], [1.5], [1.75], [3.0]]

    def test_discounted_along_each_edge(self):
        got = flow_credit(self.chain(), resolve_flow("discounted", 0.1))
        assert [e.reward for e in got] == pytest.approx([1.0, 0.6, 0.31, 2.1])

    def test_team_is_the_same_for_everybody(self):
        got = flow_credit(self.chain(), FLOWS["team"])
        assert [e.reward for e in got] == [3.75] * 4
        # what follows the second call: 1 and the later child's 2; the first child sees all
        assert [e.rewards for e in got] == [[0.75, 3.0], [3.75], [3.75], [3.0]]

    @pytest.mark.parametrize(("flow", "last"), [("team", 1.75), ("shared", 1.75), ("own", 0.25)])
    def test_a_parent_without_calls_passes_on_what_it_earns(self, flow, last):
        nodes = [
            self.node(1.0, (0.0, 1.0)),
            Earnings(0.5, (), (), parent=0, parent_call=1),
            self.node(0.25, parent=1),
        ]
        got = flow_credit(nodes, FLOWS[flow])
        assert (got[1].rewards, got[2].rewards, got[2].reward) == ([], [last], last)

    def test_order_does_not_matter(self):
        nodes = self.chain()
        turned = [
            replace(n, parent=None if n.parent is None else 3 - n.parent) for n in reversed(nodes)
        ]
        for flow in FLOWS.values():
            assert [e.rewards for e in flow_credit(turned, flow)] == [
                e.rewards for e in flow_credit(nodes, flow)[::-1]
            ]

    def test_a_circle_is_an_error(self):
        with pytest.raises(TrainingError, match="each other's parents"):
            parents_first([1, 0])

    def test_settings(self):
        assert resolve_flow("discounted") == Flow(down=0.5)
        with pytest.raises(UnknownName, match="Did you mean 'shared'"):
            resolve_flow("shard")
        with pytest.raises(ConfigError, match="does not read it"):
            resolve_flow("own", 0.5)
        with pytest.raises(ConfigError, match="from 0 to 1"):
            resolve_flow("discounted", 1.5)

    @given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=6), st.data())
    def test_team_gives_everybody_the_sum(self, rewards, data):
        nodes = [
            self.node(r, parent=None if not i else data.draw(st.integers(0, i - 1)))
            for i, r in enumerate(rewards)
        ]
        got = flow_credit(nodes, FLOWS["team"])
        assert [e.reward for e in got] == pytest.approx([sum(rewards)] * len(rewards), abs=1e-6)


class TestHierarchicalGroups:
    own = CreditPolicy(flow=FLOWS["own"])

    def test_children_are_compared_on_their_subtask_and_parents_on_the_task(self):
        results = [
            delegated(0, 1.0, [(0.8, 0, "a"), (0.3, 1, "b")]),
            delegated(1, 0.0, [(0.2, 0, "a")]),
        ]
        report = credited(results, "dr_grpo", self.own)
        assert all_advantages(results) == [
            [0.5, pytest.approx(0.3), 0.0],
            [-0.5, pytest.approx(-0.3)],
        ]
        assert report.metrics["credit/alone_group_share"] == pytest.approx(1 / 3)  # subtask b

    def test_a_child_inherits_by_default(self):
        results = [delegated(0, 1.0, [(0.0, 0, "a")]), delegated(1, 0.0, [(0.0, 0, "a")])]
        credited(results, "dr_grpo")
        assert all_advantages(results) == [[0.5, 0.5], [-0.5, -0.5]]

    def test_monte_carlo_inherits_what_follows_the_delegating_call(self):
        results = [delegated(0, 1.0, [(0.25, 0, "a"), (0.5, 1, "b")])]
        steps = results[0].states[0]["trajectory"]
        steps[0]["reward"], steps[1]["reward"] = 4.0, -3.0
        credited(results, "monte_carlo")
        assert [s["advantage"] for s in steps] == [1.0, -3.0]
        assert all_advantages(results) == [[1.0, 1.25, -2.5]]

    def test_a_failed_child_is_not_trained_and_its_episode_is(self):
        results = [delegated(0, 1.0, [(None, 0, "a")]), delegated(1, 0.0, [(0.0, 0, "a")])]
        results[0].states[1]["error"] = ERROR
        report = credited(results, "dr_grpo", self.own)
        assert all_advantages(results) == [[0.5, None], [-0.5, 0.0]]
        assert len(report.trained) == 3

    def test_children_of_a_dropped_parent_inherit_nothing_and_are_dropped(self):
        results = [delegated(0, 1.0, [(0.5, 0, "a")]), delegated(1, 0.0, [(0.0, 0, "a")])]
        results[0].states[0].update(truncated=True, truncation_reason="max_steps")
        drop = TruncationPolicy("drop")
        credited(results, "reinforce", CreditPolicy(truncation=drop))
        assert all_advantages(results) == [[None, None], [0.0, 0.0]]
        credited(results, "reinforce", CreditPolicy(truncation=drop, flow=FLOWS["own"]))
        assert all_advantages(results) == [[None, 0.5], [0.0, 0.0]]

    def test_an_episode_with_an_unknown_parent_is_left_out_and_named(self):
        results = [delegated(i, 1.0, [(0.5, 0, "a")]) for i in range(2)]
        results[0].states[1]["parent_rollout"] = "elsewhere"
        report = credited(results, "reinforce")
        assert len(report.trained) == 2
        assert "'elsewhere', which is not among" in report.problems[0]
        assert report.metrics["credit/unusable_share"] == 0.5

    def test_a_group_is_whole_or_dropped(self):
        results = [result(1.0, "a"), result(None, "a", 1, error=ERROR), result(1.0, "b")]
        report = credited(results, "reinforce", CreditPolicy(on_error="drop_group"))
        assert advantages(results) == [None, None, 1.0]
        assert report.metrics["credit/num_dropped_groups"] == 1

    @pytest.mark.parametrize("on_error", ["exclude", "drop_group"])
    def test_a_failed_sub_agent_is_in_no_baseline(self, on_error):
        results = [delegated(i, 1.0, [(r, 0, "s")]) for i, r in enumerate((1.0, 0.5, None))]
        results[2].states[1]["error"] = ERROR  # its episode did not fail
        credited(results, "dr_grpo", CreditPolicy(on_error=on_error))
        assert [r.states[1]["advantage"] for r in results] == [0.25, -0.25, None]

    def test_a_penalty_reaches_the_returns(self):
        results = [result(3.0, calls=2, truncated=True, truncation_reason="max_steps")]
        for step, reward in zip(results[0].states[0]["trajectory"], (1.0, 2.0), strict=True):
            step["reward"] = reward
        policy = CreditPolicy(truncation=TruncationPolicy("penalise", penalty=0.5))
        credited(results, "monte_carlo", policy)
        got = [step["advantage"] for step in results[0].states[0]["trajectory"]]
        assert got == [2.5, 1.5]

    def test_steps_that_repeat_the_rollouts_reward_earn_it_once(self):
        results = [result(1.0, calls=3, has_step_rewards=False)]
        for step in results[0].states[0]["trajectory"]:
            step["reward"] = 1.0  # as a rubric without step functions writes it
        credited(results, "monte_carlo")
        assert [s["advantage"] for s in results[0].states[0]["trajectory"]] == [1.0, 1.0, 1.0]


class TestMovingAverages:
    def test_by_hand(self):
        policy = CreditPolicy(flow=FLOWS["own"], baseline="ema", baseline_decay=0.75)
        results = [delegated(0, 1.0, [(0.4, 0, "a"), (0.0, 0, "b")]), delegated(1, 0.0, [])]
        report = credited(results, "reinforce", policy, {"root": 0.2})
        # no children are known yet and no other episode has one: nothing is subtracted
        assert all_advantages(results) == [[0.8, 0.4, 0.0], [-0.2]]
        # root: 0.75 * 0.2 + 0.25 * 0.5; child: the mean of its one episode
        assert report.averages == {"root": pytest.approx(0.275), "child": pytest.approx(0.2)}
        assert report.metrics["credit/average/child"] == pytest.approx(0.2)
        report = credited(results, "reinforce", policy, report.averages)
        assert all_advantages(results)[0] == pytest.approx([0.725, 0.2, -0.2])
        assert report.averages["child"] == pytest.approx(0.2)

    def test_the_first_step_compares_episodes(self):
        results = [result(r, index=i) for i, r in enumerate((1.0, 0.0, 0.5))]
        credited(results, "reinforce", CreditPolicy(baseline="ema"))
        assert advantages(results) == pytest.approx([0.75, -0.75, 0.0])

    def test_a_rollout_without_an_episode_is_its_own(self):
        rollouts = [Earnings(r, (None,), (0,)) for r in (1.0, 0.0, 0.5)]
        values = [[rollout.reward] for rollout in rollouts]
        assert subtract_averages(rollouts, values, {}, 0.9) == ([[0.75], [-0.75], [0.0]], {"": 0.5})

    def test_they_are_passed_on_unchanged_without_the_baseline(self):
        report = assign_credit([result(1.0)], "reinforce", averages={"x": 3.0})
        assert report.averages == {"x": 3.0}

    @pytest.mark.parametrize("credit", ["grpo", "zero"])
    def test_no_two_baselines(self, credit):
        with pytest.raises(ConfigError, match="leave the baseline out"):
            credited([result(1.0)], credit, CreditPolicy(baseline="ema"))
