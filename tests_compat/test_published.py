"""The 18 environments of verifiers' own tree, unchanged, on the real package and on rolltree."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES
from compare import check

from conftest import Played

pytestmark = pytest.mark.timeout(900)  # the first test waits for both sides

NAMES = [name for name, case in CASES.items() if case.is_published]


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", NAMES)
def test_plays_as_on_the_real_package(played: Played, name: str) -> None:
    check(played, name)


def test_every_published_environment_is_played(published: Path) -> None:
    folders = {path.name for path in published.iterdir() if path.is_dir()}
    assert folders == {case.environment for case in CASES.values() if case.is_published}
