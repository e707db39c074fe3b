"""Reading JSON that a model wrote: how deep it may be."""

import pytest

from rolltree._helpers.untrusted import MAX_DEPTH, read_json


@pytest.mark.parametrize("inside", ["", "1", '"[["', "{}"])
@pytest.mark.parametrize("beside", ["", ", []", ", " + ", ".join(["[]"] * 200)])
def test_depth_counts_lists_and_objects_only(inside, beside):
    """Whatever else is in the text: with few brackets the depth is not computed."""
    most = MAX_DEPTH - (inside == "{}")
    assert read_json("[" * most + inside + "]" * (most - 1) + beside + "]")
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        read_json("[" * (most + 1) + inside + "]" * (most + 1))
