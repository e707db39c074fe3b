import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_kit import Call, records_of

from rolltree.training.coefficients import CORRECTIONS, get_correction
from rolltree.values.errors import ConfigError, UnknownName

LN2, LN3 = math.log(2), math.log(3)


def records(*sizes):
    """(tokens of a call, its rollout) -> records."""
    entries = [
        (0, i, Call([1], [2] * count, rollout, call))
        for call, (count, rollout) in enumerate(sizes)
        for i in range(count)
    ]
    return records_of(entries)


THREE = records((2, 0), (1, 1), (1, 0))
"""Rollout 0 has records 0, 1 and 3 (two calls), rollout 1 has record 2."""


def factors(name, log_ratio, **bounds):
    row = get_correction(name)
    given_bounds = {f"correction_{key}": value for key, value in bounds.items()}
    return row.fn(
        THREE, np.array(log_ratio, np.float32), row.parameters(given_bounds, name)
    ).tolist()


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [
        # k is 3, 1/2, 1, 2; over rollout 0 the product is 3 and the geometric mean 3^(1/3) = 1.44
        ("token_tis", {}, [2.0, 0.5, 1.0, 2.0]),
        ("token_tis", {"high": 2.5}, [2.5, 0.5, 1.0, 2.0]),
        ("token_mis", {}, [0.0, 0.5, 1.0, 2.0]),
        ("token_mis", {"low": 0.6, "high": 9.0}, [3.0, 0.0, 1.0, 2.0]),
        ("icepop", {}, [3.0, 0.5, 1.0, 2.0]),
        ("icepop", {"low": 0.75, "high": 2.5}, [0.0, 0.0, 1.0, 2.0]),
        ("sequence_tis", {}, [2.0, 2.0, 1.0, 2.0]),
        ("sequence_tis", {"high": 4.0}, [3.0, 3.0, 1.0, 3.0]),
        ("sequence_mis", {}, [0.0, 0.0, 1.0, 0.0]),
        ("sequence_mis", {"high": 4.0}, [3.0, 3.0, 1.0, 3.0]),
        ("sequence_mis", {"low": 2.0, "high": 4.0}, [3.0, 3.0, 0.0, 3.0]),
        ("geometric_mask", {}, [0.0, 0.0, 1.0, 0.0]),
        ("geometric_mask", {"high": 1.45}, [1.0, 1.0, 1.0, 1.0]),
        ("geometric_mask", {"high": 1.44}, [0.0, 0.0, 1.0, 0.0]),
    ],
)
def test_by_hand(name, bounds, expected):
    assert factors(name, [LN3, -LN2, 0.0, LN2], **bounds) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_an_engine_that_agrees_is_not_corrected(name):
    assert factors(name, [0.0] * 4) == [1.0] * 4


@given(st.lists(st.floats(-3e4, 3e4), min_size=4, max_size=4), st.sampled_from(sorted(CORRECTIONS)))
def test_factors_are_finite_and_bounded(log_ratio, name):
    found = factors(name, log_ratio)
    assert all(0 <= value <= 5.0 for value in found)
    if CORRECTIONS[name].over_rollout:  # never per row or call
        assert found[0] == found[1] == found[3]


def test_mistakes_are_named():
    with pytest.raises(UnknownName, match="Did you mean 'icepop'"):
        get_correction("icepops")
    with pytest.raises(ConfigError, match=r"'token_tis' does not read correction_low"):
        factors("token_tis", [0.0] * 4, low=0.5)
    with pytest.raises(ConfigError, match="no token would train"):
        factors("icepop", [0.0] * 4, low=6.0)
    with pytest.raises(ConfigError, match=r"must be 0 or more"):
        factors("icepop", [0.0] * 4, low=-1.0)
