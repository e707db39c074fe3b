"""Rows to reports: what counts, what does not, and that it is said."""

import json
import math

import pytest

from rolltree.evaluation import (
    REDUCERS,
    Settings,
    build_report,
    compare_reports,
    outcomes,
    stored_report,
)
from rolltree.store import Run, StoredRollout
from rolltree.values.errors import ConfigError


def row(example, index=0, reward=None, **fields):
    return StoredRollout(
        request_id=f"eval/e/{example}/{index}",
        env_id="e",
        example_id=example,
        index_in_group=index,
        reward=reward,
        **{"task": "t", **fields},
    )


def failed(example, index=0, kind="ServerError"):
    return row(example, index, status="error", error_type=kind)


class TestCounting:
    def test_failures_are_never_zeros(self):
        report = build_report(
            [row(0, reward=1.0), failed(1), failed(2, kind="BadResponse"), row(3)]
        )
        assert report.reward.mean == 1.0
        assert report.reward.num_examples == 1
        assert (report.num_rollouts, report.num_failed, report.num_unscored) == (4, 2, 1)
        assert report.results["failures"] == {"ServerError": 1, "BadResponse": 1}

    def test_nothing_scored(self):
        report = build_report([failed(0)])
        assert report.reward is None
        assert report.pass_at == {}
        assert report.tasks == {}
        assert build_report([]).num_rollouts == 0

    def test_an_errors_reward_is_not_used_and_nan_is_no_reward(self):
        rows = [row(0, reward=0.7, status="error", error_type="E"), row(1, reward=math.nan)]
        report = build_report(rows)
        assert report.reward is None
        assert (report.num_failed, report.num_unscored) == (1, 1)

    def test_rewards_whose_sum_no_float_holds_have_a_mean(self):
        report = build_report([row(index, reward=1.5e308) for index in range(3)])
        assert report.reward.mean == pytest.approx(1.5e308)

    def test_episodes_not_trajectories(self):
        """Two agents in one episode: one outcome with their mean, their tokens summed."""
        rows = [
            row(0, reward=1.0, num_prompt_tokens=3, num_calls=1, metrics={"m": 1}, truncated=True),
            row(
                0, reward=0.0, num_prompt_tokens=4, num_calls=2, trajectory_index=1, truncated=True
            ),
            row(1, reward=0.5),
        ]
        first, second = outcomes(rows)
        assert (first.reward, first.num_prompt_tokens, first.num_calls) == (0.5, 7, 3)
        assert first.truncation_reason == "unknown"
        assert first.metrics == {"m": 1.0}
        assert second.reward == 0.5
        assert build_report(rows).reward.num_examples == 2

    def test_truncations_and_stops(self):
        rows = [
            row(0, reward=0.0, truncated=True, truncation_reason="max_steps", stop_condition="a"),
            row(1, reward=1.0, stop_condition="solved"),
            row(2, reward=1.0, stop_condition="solved"),
        ]
        report = build_report(rows)
        assert report.num_truncated == 1
        assert report.reward.mean == pytest.approx(2 / 3)  # a truncated rollout has its reward
        assert report.results["truncations"] == {"max_steps": 1}
        assert list(report.results["stops"].items()) == [("solved", 2), ("a", 1)]

    def test_reward_functions_that_raised_are_counted_with_the_first_message(self):
        def raised(example, function, message, **fields):
            error = {"function": function, "type": "KeyError", "message": message}
            return row(example, errors=(error,), **fields)

        rows = [
            raised(0, "b", "x", reward=0.0),
            raised(1, "a", "y", reward=0.0),
            raised(2, "a", "z", status="error", error_type="KeyError"),
            row(3, reward=1.0, errors=({"type": "E", "message": "of no function"},)),
            raised(4, "a", "of an agent", reward=0.0),
            row(4, trajectory_index=1, reward=0.0),
        ]
        found = build_report(rows).results["scoring_errors"]
        assert list(found.items()) == [
            ("a", {"num": 3, "first": "KeyError: y"}),
            ("b", {"num": 1, "first": "KeyError: x"}),
        ]

    def test_tasks_and_metrics(self):
        rows = [
            row(0, reward=1.0, task="add", metrics={"len": 2, "flag": True, "note": "x"}),
            row(1, reward=0.0, task="add", metrics={"len": 4, "flag": None}),
            row(2, reward=0.5, task="mul"),
            row(3, reward=None, task="mul", status="error", metrics={"len": 100}),
        ]
        report = build_report(rows)
        assert {name: t.mean for name, t in report.tasks.items()} == {"add": 0.5, "mul": 0.5}
        assert {name: m.mean for name, m in report.metrics.items()} == {"len": 3.0, "flag": 1.0}

    def test_usage(self):
        rows = [
            row(0, num_calls=2, num_prompt_tokens=10, num_completion_tokens=4, total_ms=30.0),
            row(1, num_calls=1, num_prompt_tokens=20, num_completion_tokens=2, num_attempts=3),
        ]
        usage = build_report(rows).results["usage"]
        assert (usage["num_calls"], usage["num_prompt_tokens"]) == (3, 30)
        assert (usage["mean_num_completion_tokens"], usage["mean_total_ms"]) == (3.0, 15.0)
        assert usage["num_retried"] == 1


class TestPassAtK:
    def test_by_hand(self):
        # example 0 passes 1 of 4, example 1 passes 4 of 4
        rows = [row(0, i, reward=float(i == 0)) for i in range(4)]
        rows += [row(1, i, reward=1.0) for i in range(4)]
        found = build_report(rows).pass_at
        assert {k: e.mean for k, e in found.items()} == {1: 0.625, 2: 0.75, 4: 1.0}

    def test_examples_with_too_few_rollouts_are_left_out_and_it_shows(self):
        rows = [row(0, i, reward=1.0) for i in range(3)] + [row(1, 0, reward=0.0), failed(1, 1)]
        found = build_report(rows).pass_at
        assert {k: (e.mean, e.num_examples) for k, e in found.items()} == {
            1: (0.5, 2),
            2: (1.0, 1),
            3: (1.0, 1),
        }

    def test_rewards_of_0_and_1_have_one_interval(self):
        """A reward that is its own pass is one number: 11 of 24, eight examples of three."""
        passed = (3, 3, 2, 1, 1, 1, 0, 0)
        rows = [row(n, i, reward=float(i < num)) for n, num in enumerate(passed) for i in range(3)]
        found = build_report(rows)
        assert f"{found.reward.mean:.3f}" == "0.458"
        assert found.pass_at[1] == found.reward

    def test_threshold(self):
        rows = [row(0, reward=0.8), row(1, reward=0.2)]
        assert build_report(rows).pass_at[1].mean == 0.0
        lenient = build_report(rows, settings=Settings(pass_threshold=0.5))
        assert lenient.pass_at[1].mean == 0.5


class TestReport:
    def test_own_reducers(self):
        best = lambda found, settings: max(o.reward for o in found)  # noqa: E731
        report = build_report([row(0, reward=0.2), row(1, reward=0.9)], reducers={"best": best})
        assert report.results == {"best": 0.9}
        assert report.reward is None
        assert build_report([], reducers={**REDUCERS}).results.keys() == REDUCERS.keys()

    def test_as_dict_is_json(self):
        data = build_report([row(0, reward=1.0), row(1, reward=0.0)], model="m").as_dict()
        back = json.loads(json.dumps(data, allow_nan=False))
        assert back["reward"]["mean"] == 0.5
        assert back["pass_at"]["1"]["num_examples"] == 2
        assert back["env_id"] == "e"

    def test_stored_report(self, tmp_path):
        with Run.create(tmp_path, config={"model": "m"}) as run:
            run.add_rollouts([row(0, reward=1.0), row(1, reward=0.0, phase="other")])
            report = stored_report(run)
        assert (report.num_rollouts, report.model, report.env_id) == (1, "m", "e")


class TestCompare:
    def report(self, rewards, **options):
        return build_report([row(i, reward=r) for i, r in rewards.items()], **options)

    def test_paired_by_hand(self):
        # differences 1, 2, 3 on the common examples: 2 +- 2.484
        a = self.report({0: 0.0, 1: 5.0, 2: 10.0, 7: 1.0})
        b = self.report({0: 1.0, 1: 7.0, 2: 13.0, 8: 1.0, 9: 1.0})
        found = compare_reports(a, b)
        assert found.difference.mean == 2.0
        assert found.difference.low == pytest.approx(-0.484, abs=1e-3)
        assert (found.before.mean, found.after.mean) == (5.0, 7.0)
        assert (found.num_only_a, found.num_only_b) == (1, 2)
        assert not found.is_significant

    def test_pairing_sees_what_the_two_intervals_do_not(self):
        """Every example gains 0.1 to 0.2, while examples differ by far more than that."""
        before = {i: float(i) for i in range(10)}
        after = {i: i + 0.1 + 0.01 * (i % 2) for i in range(10)}
        found = compare_reports(self.report(before), self.report(after))
        assert found.is_significant
        assert found.before.high > found.after.low

    def test_worse_is_significant_too(self):
        found = compare_reports(
            self.report({0: 1.0, 1: 1.0, 2: 0.9, 3: 1.0, 4: 1.0, 5: 0.8}),
            self.report(dict.fromkeys(range(6), 0.0)),
        )
        assert found.difference.mean < 0
        assert found.is_significant

    def test_rollouts_of_an_example_are_averaged_first(self):
        a = build_report([row(0, 0, reward=0.0), row(0, 1, reward=1.0), row(1, reward=0.0)])
        b = build_report([row(0, reward=1.0), row(1, reward=1.0)])
        assert compare_reports(a, b).difference.mean == pytest.approx((0.5 + 1.0) / 2)

    def test_nothing_in_common(self):
        with pytest.raises(ConfigError, match="no scored example in common"):
            compare_reports(self.report({0: 1.0}), self.report({1: 1.0}))
