"""Means and intervals against numbers worked out by hand, and against simulation."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.estimate import Estimate, estimate, pass_at_k, student_t, wilson


@pytest.mark.parametrize(
    ("degrees", "table"),  # two-sided 95 % column of a printed t table
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042),
     (120, 1.980), (100000, 1.960)],
)  # fmt: skip
def test_student_t_table(degrees, table):
    assert student_t(degrees) == pytest.approx(table, rel=1.5e-3)


def test_student_t_other_confidences():
    assert student_t(4, 0.9) == pytest.approx(2.132, rel=1e-3)
    assert student_t(10, 0.99) == pytest.approx(3.169, rel=1e-3)


def test_t_interval_by_hand():
    # values 1, 2, 3: mean 2, s = 1, half width 4.303 / sqrt(3) = 2.484
    found = estimate({"a": [1.0], "b": [2.0], "c": [3.0]})
    assert found.method == "t"
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - 2.484, abs=1e-3)
    assert found.high == pytest.approx(2 + 2.484, abs=1e-3)


def test_wilson_by_hand():
    # 8 of 10, z = 1.95996: (0.8 + 0.19207 +- 1.95996 sqrt(0.016 + 0.0096036)) / 1.38415
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)
    assert wilson(1.0, 20) == (pytest.approx(20 / (20 + 1.95996**2), abs=1e-4), 1.0)


def test_one_rollout_each_uses_nearly_the_plain_wilson_interval():
    # s^2 = p(1-p) n/(n-1), so the effective size is n - 1
    found = estimate({i: [float(i < 8)] for i in range(10)})
    assert found.method == "wilson"
    assert (found.low, found.high) == pytest.approx(wilson(0.8, 9))


def test_all_right_is_not_exactly_one():
    found = estimate({i: [1.0] for i in range(20)})
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.839, abs=1e-3)


def test_repeats_of_an_example_are_not_new_evidence():
    """Ten copies of the same answer say as much about other examples as one."""
    once = estimate({i: [float(i < 5)] for i in range(10)})
    ten_times = estimate({i: [float(i < 5)] * 10 for i in range(10)})
    assert (once.low, once.high) == pytest.approx((ten_times.low, ten_times.high))
    assert (once.num_values, ten_times.num_values) == (10, 100)


def test_independent_repeats_are_new_evidence_up_to_their_number():
    clusters = {i: [1.0, 0.0, 1.0, 0.0] for i in range(10)}  # examples do not differ at all
    found = estimate(clusters)
    assert (found.low, found.high) == pytest.approx(wilson(0.5, 10))
    clusters[10] = [1.0, 1.0, 1.0, 0.0]  # a hair of spread: at most 44 trials' worth
    assert estimate(clusters).low >= wilson(estimate(clusters).mean, 44)[0] - 1e-12


def test_examples_weigh_the_same_however_many_rollouts_survived():
    assert estimate({"a": [0.5] * 9, "b": [1.5]}).mean == 1.0


def test_too_little_data():
    assert estimate({}) is None
    assert estimate({"a": []}) is None
    single = estimate({"a": [0.3, 0.4], "b": []})
    assert (single.method, single.low, single.num_examples) == ("none", None, 1)
    assert str(single) == "0.350"
    one_bit = estimate({"a": [1.0]})
    assert one_bit.low < 0.25  # one success says little, and says so


def test_differences_are_no_shares():
    same = estimate({i: [0.0] for i in range(5)}, are_shares=False)
    assert (same.method, same.low, same.high) == ("t", 0.0, 0.0)


def test_fractions_that_are_shares_stay_inside_their_bounds():
    values = {i: [0.5 if i == 0 else 0.0] for i in range(8)}  # pass@1 of 1 in 2, once in 8 examples
    loose, bounded = estimate(values), estimate(values, are_shares=True)
    assert (loose.method, bounded.method) == ("t", "wilson")
    assert loose.low == 0.0 < bounded.low < bounded.mean == loose.mean == 0.0625
    # p(1-p)/SE^2 with s = .5 sqrt(1/8), SE^2 = s^2/8 = 1/256: 15 trials, capped at the 8 values
    assert (bounded.low, bounded.high) == pytest.approx(wilson(0.0625, 8.0))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_size_puts_the_mean_outside_by_a_rounding(value):
    """In floats Wilson's bound lies beyond a mean of 0 or 1 for 54 and 94 of these sizes."""
    for size in range(1, 301):
        low, high = wilson(value, size)
        assert low <= value <= high, size
        found = estimate({i: [value] for i in range(size)})
        assert 0.0 <= found.low <= found.mean <= found.high <= 1.0, size


def test_values_between_0_and_1_have_an_interval_there():
    partial = estimate({0: [1.0], 1: [0.5], 2: [1.0], 3: [1.0]})
    assert (partial.method, partial.high) == ("t", 1.0)
    assert partial.low == pytest.approx(0.875 - 3.182 * 0.125, abs=1e-3)
    assert estimate({0: [1.5], 1: [0.5], 2: [1.0]}).high > 1.5  # these are not shares
    assert estimate({0: [1.0], 1: [0.5]}, are_shares=False).high > 1.0  # nor are these, it says


def test_an_interval_of_an_older_run_is_mended_when_it_is_read():
    found = Estimate(0.0, 1.7e-18, 0.3, "wilson", 6, 6)
    assert found.low == 0.0
    assert Estimate(1.0, 0.7, 1.0 - 1e-16, "wilson", 6, 6).high == 1.0


@given(
    st.dictionaries(
        st.integers(), st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), min_size=1
    )
)
def test_the_mean_lies_in_its_interval(clusters):
    found = estimate(clusters)
    if found.low is not None:
        assert found.low <= found.mean <= found.high
        assert estimate(clusters, confidence=0.99).low <= found.low + 1e-9


def test_coverage_with_correlated_rollouts():
    """Examples of different difficulty, four rollouts each: about 95 of 100 intervals hold."""
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        clusters = {}
        for example in range(25):
            difficulty = rng.betavariate(0.5, 0.5)  # mean 0.5
            clusters[example] = [float(rng.random() < difficulty) for _ in range(4)]
        found = estimate(clusters)
        hits += found.low <= 0.5 <= found.high
    assert 0.92 <= hits / 400 <= 0.985


class TestPassAtK:
    def test_by_hand(self):
        assert pass_at_k(4, 1, 1) == 0.25
        assert pass_at_k(4, 1, 2) == 0.5
        assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
        assert pass_at_k(4, 4, 4) == 1.0
        assert pass_at_k(4, 0, 4) == 0.0

    @given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
    def test_equals_the_average_over_all_subsets(self, sizes, data):
        num, passed = sizes
        k = data.draw(st.integers(1, num))
        results = [True] * passed + [False] * (num - passed)
        subsets = list(itertools.combinations(results, k))
        assert pass_at_k(num, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))

    @pytest.mark.parametrize("arguments", [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
    def test_refuses_nonsense(self, arguments):
        with pytest.raises(ValueError, match="cannot be estimated"):
            pass_at_k(*arguments)

    def test_large_numbers_do_not_overflow(self):
        assert math.isclose(pass_at_k(10_000, 5_000, 1), 0.5)
