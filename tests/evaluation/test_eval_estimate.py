"""Means and intervals against numbers worked out by hand, and against simulation."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.values.estimate import (
    COUNT,
    SHARE,
    Bounds,
    Estimate,
    episodes_estimate,
    estimate,
    pass_at_k,
    student_t,
)


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


def test_the_interval_between_bounds_by_hand():
    # 8 of 10, and one example at each bound: 9 of 12 = 0.75, s^2 = 9/4/11, t(11) = 2.201
    found = estimate({i: [float(i < 8)] for i in range(10)})
    half = 2.201 * math.sqrt(9 / 4 / 11 / 12)
    assert (found.mean, found.method) == (0.8, "bounded")
    assert (found.low, found.high) == pytest.approx((0.75 - half, min(1, 0.75 + half)), abs=1e-3)
    # The same of partial credit: 0.5, 0.5, 1.0 with 0 and 1: mean 0.6, s^2 = 0.7/4, t(4) = 2.776
    partial = estimate({0: [0.5], 1: [0.5], 2: [1.0]})
    assert partial.low == pytest.approx(0.6 - 2.776 * math.sqrt(0.7 / 4 / 5), abs=1e-3)
    assert partial.high == 1.0


def test_all_right_is_not_exactly_one():
    found = estimate({i: [1.0] for i in range(20)})
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx((21 - 2.080) / 22, abs=1e-3)


def ends(*means, of=estimate):
    found = of(dict(enumerate([mean] for mean in means)))
    return found.low, found.high


@given(
    st.lists(st.floats(-0.5, 1.5), min_size=2, max_size=12),
    st.integers(0, 11),
    st.floats(-1e-4, 1e-4),
)
def test_a_little_change_of_a_value_changes_the_interval_a_little(values, at, change):
    """Also beyond 0 and 1, where a method that is chosen by the values would jump."""
    at %= len(values)
    other = [value + change * (place == at) for place, value in enumerate(values)]
    assert ends(*other) == pytest.approx(ends(*values), abs=0.02)


@pytest.mark.parametrize("of", [estimate, episodes_estimate])
def test_partial_credit_does_not_switch_to_another_interval(of):
    ones = ends(*[1.0] * 4, of=of)
    assert ends(1.0, 1.0, 1.0, 0.999, of=of) == pytest.approx(ones, abs=2e-3)
    # Of 32, one 0.83 made it 0.98 to 1, which is 0.90 to 1 if all are 1.
    almost = ends(*[1.0] * 31, 0.83, of=of)
    assert almost[0] < ends(*[1.0] * 32, of=of)[0] < 0.92


def test_repeats_of_an_example_are_not_new_evidence():
    """Ten copies of the same answer say as much about other examples as one."""
    once = estimate({i: [float(i < 5)] for i in range(10)})
    ten_times = estimate({i: [float(i < 5)] * 10 for i in range(10)})
    assert (once.low, once.high) == pytest.approx((ten_times.low, ten_times.high))
    assert (once.num_values, ten_times.num_values) == (10, 100)


def test_examples_weigh_the_same_however_many_rollouts_survived():
    assert estimate({"a": [0.5] * 9, "b": [1.5]}).mean == 1.0


def test_too_little_data():
    assert estimate({}) is None
    assert estimate({"a": []}) is None
    single = estimate({"a": [3.0, 4.0], "b": []})
    assert (single.method, single.low, single.num_examples) == ("none", None, 1)
    assert str(single) == "3.500"
    one_bit = estimate({"a": [1.0]})
    assert one_bit.low < 0.25  # one success says little, and says so


def test_bounds_that_are_known_decide_and_not_the_values():
    same = estimate({i: [1.0] for i in range(5)}, bounds=COUNT)
    assert (same.method, same.low, same.high) == ("t", 1.0, 1.0)
    few = estimate({0: [0.0], 1: [1.0]}, bounds=COUNT)
    assert few.low == 0.0
    assert few.high > 6  # t(1) = 12.7
    wide = estimate({0: [-1.0], 1: [1.0]}, bounds=Bounds(-1.0, 1.0))
    assert (wide.method, wide.low, wide.high) == ("bounded", -1.0, 1.0)
    share = estimate({i: [0.5] for i in range(8)}, bounds=SHARE)
    assert 0.0 < share.low < 0.5 < share.high < 1.0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_no_size_puts_the_mean_outside(value):
    for size in range(1, 301):
        found = estimate({i: [value] for i in range(size)})
        assert 0.0 <= found.low <= found.mean <= found.high <= 1.0, size


def test_values_between_0_and_1_have_an_interval_there():
    assert estimate({0: [1.0], 1: [0.5], 2: [1.0], 3: [1.0]}).high == 1.0
    assert estimate({0: [2.5], 1: [0.5], 2: [1.0]}).high > 2.5  # these are not shares


@pytest.mark.parametrize("of", [estimate, episodes_estimate])
@pytest.mark.parametrize(
    "values", [[1.5e308] * 2, [1.5e308, -1.5e308], [1e160, -1e160], [1e308, 0]]
)
def test_values_whose_sums_or_squares_no_float_holds_have_a_mean(of, values):
    found = of({0: values, 1: values[:1], 2: [0.0, 1.0]})
    assert math.isfinite(found.mean)
    assert math.copysign(1, values[0]) == math.copysign(1, found.mean)
    assert found.low is None or found.low <= found.mean <= found.high


def test_an_interval_of_an_older_run_is_mended_when_it_is_read():
    found = Estimate(0.0, 1.7e-18, 0.3, "bounded", 6, 6)
    assert found.low == 0.0
    assert Estimate(1.0, 0.7, 1.0 - 1e-16, "bounded", 6, 6).high == 1.0


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


@pytest.mark.parametrize("num", [4, 25])
@pytest.mark.parametrize("kind", ["0 and 1", "rare zeros", "mostly 1", "uniform", "near 0"])
def test_coverage_between_bounds(kind, num):
    """Before, four groups of which 5 % lose it all were covered in 19 % of the cases."""
    rng = random.Random(num)
    draw, true = {
        "0 and 1": (lambda: float(rng.random() < 0.3), 0.3),
        "rare zeros": (lambda: 0.9 * (rng.random() >= 0.05), 0.855),
        "mostly 1": (lambda: rng.random() if rng.random() < 0.1 else 1.0, 0.95),
        "uniform": (rng.random, 0.5),
        "near 0": (lambda: rng.betavariate(0.3, 3), 1 / 11),
    }[kind]
    found = [estimate({i: [draw()] for i in range(num)}) for _ in range(400)]
    assert sum(each.low <= true <= each.high for each in found) >= 0.93 * 400


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
