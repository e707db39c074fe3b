"""A few numbers are written without numpy, as the same bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolltree.tokens.serialize import Writer


@given(st.lists(st.integers(-(2**31), 2**32 - 1) | st.integers(-300, 300), min_size=1, max_size=16))
def test_a_few_numbers_are_the_bytes_that_numpy_gives(values):
    few, many = Writer(), Writer()
    few.ints(values)
    many.ints(np.array(values, np.int64))
    assert few.chunk() == many.chunk()
