"""docs/compat.md has the rows of `differences.py`, and the plays show each of them."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES
from compare import compare, sides
from differences import DIFFERENCES
from table import PAGE, with_table

from conftest import Played

pytestmark = pytest.mark.timeout(900)


def test_the_page_has_every_difference() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python tests_compat/table.py"


def test_every_row_is_seen(played: Played, surfaces: tuple[Any, Any]) -> None:
    if set(played.ours) != set(CASES):
        pytest.skip("only some of the cases were played")
    found = [(name, item) for name in CASES for item in compare(*sides(played, name))]
    found += [("surface", item) for item in compare(*surfaces)]
    unseen = [
        row.verifiers
        for row in DIFFERENCES
        if not any(row.covers(name, item.path, item.real, item.ours) for name, item in found)
    ]
    assert not unseen, f"nothing shows these differences any more: {unseen}"
