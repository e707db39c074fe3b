"""`tests/long.txt` names tests that exist."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LINES = [line for line in (TESTS / "long.txt").read_text().splitlines() if line[0] != "#"]


@pytest.mark.parametrize("line", LINES)
def test_each_line_is_a_test(line):
    path, *names = line.split("::")
    text = (TESTS.parent / path).read_text()
    for name in names:
        name = name.partition("[")[0]
        assert any(f"{kind} {name}" in text for kind in ("def", "class")), name


def test_no_line_hides_another():
    assert sorted(set(LINES)) == LINES
