"""docs/compat.md has the rows of `differences.py`."""

from table import PAGE, with_table


def test_the_page_has_every_difference() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python tests_compat/table.py"
