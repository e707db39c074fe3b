"""Our own environments and probes: what the published ones do not use, on both sides."""

from __future__ import annotations

import pytest
from cases import CASES
from compare import check

from conftest import Played

pytestmark = pytest.mark.timeout(900)  # the first test waits for both sides

NAMES = [name for name, case in CASES.items() if not case.is_published]


@pytest.mark.parametrize("name", NAMES)
def test_probe(played: Played, name: str) -> None:
    check(played, name)
