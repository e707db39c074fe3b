"""Paired differences: intervals hold in simulation, noise is called so, flips come first."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.evaluation import Settings, build_report, compare_reports, pass_at_k, pass_hat_k
from rolltree.evaluation.comparison import compare_values, example_changes, measure_names
from rolltree.evaluation.paired import paired_difference
from rolltree.store import StoredRollout
from rolltree.values.errors import ConfigError


def row(example, index=0, reward=None, **fields):
    return StoredRollout(
        request_id=f"eval/e/{example}/{index}", env_id="e", example_id=example,
        index_in_group=index, reward=reward, **{"task": "t", **fields},
    )  # fmt: skip


def report(rewards, **options):
    """Return the report of one evaluation: the rewards of each example's rollouts."""
    rows = [row(e, i, reward=r) for e, each in rewards.items() for i, r in enumerate(each)]
    return build_report(rows, **options)


def covered(draw, true, num=200):
    """Return the share of intervals that contain the true difference."""
    found = (paired_difference(*draw()) for _ in range(num))
    return sum(each.low <= true <= each.high for each in found) / num


class TestInterval:
    @pytest.mark.parametrize("num", [8, 25, 60])
    @pytest.mark.parametrize("num_rollouts", [1, 4])
    def test_coverage(self, num, num_rollouts):
        """Examples of different difficulty; B solves a fifth of what A misses."""
        random = np.random.default_rng(num)

        def draw():
            chance = random.beta(0.5, 0.5, num)  # mean 0.5
            return [
                random.binomial(num_rollouts, p, num)[None] / num_rollouts
                for p in (chance, chance + 0.2 * (1 - chance))
            ]

        assert covered(draw, 0.1) >= 0.92

    @pytest.mark.parametrize("size", [1.0, 0.8])
    @pytest.mark.parametrize("num", [10, 25])
    def test_coverage_of_rare_changes(self, num, size):
        """7 of 100 examples change; in 25 often none does, and the interval still says so."""
        random = np.random.default_rng(num)

        def draw():
            change = random.choice([1.0, -1.0, 0.0], (1, num), p=[0.05, 0.02, 0.93])
            return size * (change < 0), size * (change > 0)

        assert covered(draw, 0.03 * size) >= 0.93

    @pytest.mark.parametrize("spread", [0.0, 0.3])
    def test_coverage_over_runs(self, spread):
        """Three seeds an arm that differ by `spread` in the mean, 50 examples of one rollout."""
        random = np.random.default_rng(0)

        def draw():
            base = random.normal(0, 1, 50)
            return [
                base + gain + random.normal(0, spread, (3, 1)) + random.normal(0, 1, (3, 50))
                for gain in (0.0, 0.5)
            ]

        assert covered(draw, 0.5) >= 0.92

    def test_runs_of_one_recipe_are_no_new_examples(self):
        """Pooled, six seeds look like a sure thing; as the runs they are, they do not."""
        random = np.random.default_rng(1)
        examples = random.normal(0, 0.1, (3, 100))
        a = examples + np.array([[0.0], [0.4], [0.8]])
        b = examples + np.array([[0.5], [0.9], [1.1]])
        pooled = paired_difference(a.mean(axis=0)[None], b.mean(axis=0)[None])
        assert pooled.low > 0
        found = paired_difference(a, b)
        assert found.low < 0 < found.high
        assert found.mean == pytest.approx(pooled.mean)

    def test_the_same_runs_are_paired(self):
        """Each run gains 0.2 to 0.3, while runs differ by far more than that."""
        a = np.array([[0.0], [1.0], [2.0]]) + np.linspace(0, 0.1, 20)
        b = a + np.array([[0.2], [0.25], [0.3]])
        assert paired_difference(a, b).low < 0
        assert paired_difference(a, b, same_runs=True).low > 0

    def test_nothing_changed_is_not_nothing_can_change(self):
        found = paired_difference(np.ones((1, 20)), np.ones((1, 20)))
        assert found.mean == 0.0
        assert found.low == -found.high
        assert 0.07 < found.high < 0.11

    def test_it_is_the_same_every_time(self):
        random = np.random.default_rng(2)
        a, b = random.random((1, 50)), random.random((1, 50))
        assert paired_difference(a, b) == paired_difference(a, b)
        assert paired_difference(a, b).method == "bootstrap"

    @given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=2, max_size=15))
    def test_the_mean_lies_in_it(self, pairs):
        a, b = np.array(pairs).T
        found = paired_difference(a[None], b[None])
        assert found.low <= found.mean <= found.high

    @pytest.mark.parametrize("num_runs", [1, 3])
    def test_shares_stay_in_their_bounds(self, num_runs):
        """Of few examples, a t interval of shares would leave [0, 1], and of changes [-1, 1]."""
        a = [{i: [float(i == run)] for i in range(4)} for run in range(num_runs)]
        b = [{i: [1.0 - (i == run) / 2] for i in range(4)} for run in range(num_runs)]
        found = compare_values(a, b)
        for arm in (found.before, found.after):
            assert 0.0 <= arm.low <= arm.mean <= arm.high <= 1.0
        gain = found.difference
        assert -1.0 <= gain.low <= gain.mean <= gain.high <= 1.0
        large = compare_values([{i: [9.0 * i] for i in range(4)}], [{i: [0.0] for i in range(4)}])
        assert large.difference.low < -9


class TestVerdict:
    def test_noise_says_what_it_would_take(self):
        a = report({i: [float(i % 2)] for i in range(50)})
        b = report({i: [float(i % 2)] if i else [1.0] for i in range(50)})
        found = compare_reports(a, b)
        assert found.verdict == "noise"
        said = found.sentence("old", "new")
        assert said.startswith("The reward of new differs from that of old by +0.020 [")
        assert "over 50 examples: noise, the interval contains 0." in said
        assert "takes about" in said

    def test_a_difference(self):
        a = report({i: [0.0] for i in range(50)})
        b = report({i: [float(i < 30)] for i in range(50)})
        found = compare_reports(a, b)
        assert found.verdict == "higher"
        assert found.sentence("old", "new").endswith("over 50 examples: not noise.")
        assert compare_reports(b, a).verdict == "lower"

    @pytest.mark.parametrize(("num", "verdict"), [(1, "too few"), (5, "too few"), (6, "higher")])
    def test_five_of_five_may_be_chance(self, num, verdict):
        """Five differences of one sign come by chance in 1 of 16 cases, six in 1 of 32."""
        a, b = ({i: [x + i / 100] for i in range(num)} for x in (0.0, 5.0))
        found = compare_reports(report(a), report(b))
        assert found.verdict.startswith(verdict)
        assert ("not noise" in found.sentence()) == (verdict == "higher")

    def test_as_dict_is_json(self):
        found = compare_reports(report({0: [1.0], 1: [0.0]}), report({0: [1.0], 1: [1.0]}))
        data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
        assert data["difference"]["mean"] == 0.5
        assert data["verdict"] == "too few examples"


class TestMeasures:
    def test_pass_at_k_and_pass_hat_k_by_hand(self):
        # A passes 1 of 4 and 4 of 4, B 2 of 4 and 4 of 4
        a = report({0: [1.0, 0.0, 0.0, 0.0], 1: [1.0] * 4})
        b = report({0: [1.0, 1.0, 0.0, 0.0], 1: [1.0] * 4})
        found = {name: compare_reports(a, b, measure=name) for name in measure_names((a, b))}
        assert found["pass@2"].before.mean == pytest.approx((1 / 2 + 1) / 2)
        assert found["pass@2"].after.mean == pytest.approx((5 / 6 + 1) / 2)
        assert found["pass^2"].before.mean == pytest.approx((0 + 1) / 2)
        assert found["pass^2"].after.mean == pytest.approx((1 / 6 + 1) / 2)
        assert found["pass^4"].difference.mean == 0.0

    def test_both_passes_are_chances(self):
        for k in (1, 2, 5):
            assert pass_hat_k(5, 5, k) == pass_at_k(5, 5, k) == 1.0
            assert pass_hat_k(5, 0, k) == pass_at_k(5, 0, k) == 0.0
            assert pass_hat_k(5, 3, k) <= 3 / 5 <= pass_at_k(5, 3, k)
        with pytest.raises(ValueError, match=r"pass\^3 cannot be estimated"):
            pass_hat_k(2, 1, 3)

    def test_failures_tokens_and_metrics(self):
        a = build_report(
            [
                row(0, 0, 1.0, num_completion_tokens=10, metrics={"m": 1.0, "only_a": 1.0}),
                row(0, 1, status="error", error_type="ServerError"),
                row(1, 0, 0.0, num_completion_tokens=20, metrics={"m": 3.0}, truncated=True),
            ]
        )
        b = build_report(
            [
                row(0, 0, 1.0, num_completion_tokens=14, metrics={"m": 2.0}),
                row(1, 0, 0.0, num_completion_tokens=24, metrics={"m": 3.0}),
            ]
        )
        names = measure_names((a, b))
        assert "metric/m" in names
        assert "metric/only_a" not in names
        found = {name: compare_reports(a, b, measure=name).difference.mean for name in names}
        assert found["failed"] == -0.25
        assert found["truncated"] == -0.5
        assert found["num_completion_tokens"] == pytest.approx((14 - 5 + 4) / 2)
        assert found["metric/m"] == 0.5

    def test_an_unknown_measure_names_the_nearest(self):
        one = report({0: [1.0]})
        with pytest.raises(ConfigError, match=r"no measure 'pass@3'.*'pass@1'"):
            compare_reports(one, one, measure="pass@3")

    def test_a_common_example_is_one_of_all_runs(self):
        a = [report({0: [0.0], 1: [1.0], 2: [1.0]}), report({0: [1.0], 1: [1.0], 3: [0.0]})]
        b = [report({0: [1.0], 1: [1.0], 2: [1.0]})]
        found = compare_reports(a, b)
        assert (found.difference.num_examples, found.num_runs) == (2, (2, 1))
        assert (found.before.mean, found.after.mean) == (0.75, 1.0)
        assert (found.num_only_a, found.num_only_b) == (2, 1)


def test_flipped_examples_come_first():
    a = report({0: [0.9] * 3, 1: [1.0] * 3, 2: [0.0] * 3, 3: [1.0] * 3, 4: [1.0, 0.0, 1.0]})
    b = report({0: [0.0] * 3, 1: [0.0, 1.0, 0.0], 2: [1.0] * 3, 3: [1.0] * 3, 4: [0.0] * 3})
    found = example_changes(a, b)
    assert [(each.example[2], each.flip) for each in found] == [
        (1, "lost"), (4, "lost"), (2, "won"), (0, ""),
    ]  # fmt: skip
    lenient = report({0: [0.9]}, settings=Settings(pass_threshold=0.5))
    assert example_changes(lenient, report({0: [0.0]}))[0].flip == "lost"
