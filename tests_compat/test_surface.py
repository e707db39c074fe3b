"""Every public name of the real package is here: signatures, fields and imports as there."""

from __future__ import annotations

from typing import Any

from compare import report, undocumented


def test_every_public_name(surfaces: tuple[Any, Any]) -> None:
    real, ours = surfaces
    assert len(real) > 45
    found = undocumented("surface", real, ours)
    assert not found, report(found, limit=40)
