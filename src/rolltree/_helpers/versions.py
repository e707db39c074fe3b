"""The releases of other packages that the tests ran with, and pairs that do not work together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TESTED_ON = "2026-11-28"
"""The date of the newest releases in `TESTED`."""

TESTED: dict[str, tuple[str, str, str]] = {
    "aiohttp": ("3.12.0", "3.14.5", "3.14.5"),
    "msgspec": ("0.21.0", "0.22.0", "0.22.0"),
    "numpy": ("1.26.0", "2.4.6", "2.4.6"),
    "torch": ("2.9.0", "2.13.0", "2.13.0"),
    "transformers": ("5.16.1", "5.23.0", "5.24.0"),
    "peft": ("0.18.0", "0.21.2", "0.21.2"),
    "openai": ("2.14.0", "3.52.0", "3.57.0"),
    "starlette": ("0.45.0", "1.10.0", "1.10.0"),
    "uvicorn": ("0.43.0", "0.54.0", "0.54.0"),
}
"""Package to its oldest, pinned and newest release with which the tests pass."""


@dataclass(frozen=True, slots=True)
class BadPair:
    """Releases `first <= package < fixed` do not work beside releases of `beside` below `below`."""

    package: str
    first: str
    fixed: str
    beside: str
    below: str
    why: str


BAD_PAIRS = (
    BadPair(
        *("transformers", "5.24.0", "5.24.1", "peft", "0.22.0"),
        "transformers then refuses every adapter that it handles itself (those of rolltree go "
        "through peft, and work)",
    ),
    BadPair(
        *("transformers", "5.0.0", "6.0.0", "peft", "0.18.0"),
        "peft then imports a class that transformers no longer has, so nothing trains adapters",
    ),
)
"""Pairs that pip accepts, or accepted, and that fail."""


def version_problems(installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each release outside the tested ones, and for each known bad pair.

    `installed` maps packages to versions; packages that are not in it are not installed.

    >>> version_problems({"peft": "0.99.0"})[0].partition(":")[0]
    'peft 0.99.0 is newer than the newest tested release, 0.21.2'
    """
    problems = []
    for package, (oldest, _, newest) in TESTED.items():
        version = installed.get(package)
        if version is None:
            continue
        if _key(version) > _key(newest):
            problems.append(
                f"{package} {version} is newer than the newest tested release, {newest}: if "
                f"something fails, pip install '{package}=={newest}' first"
            )
        elif _key(version) < _key(oldest):
            problems.append(
                f"{package} {version} is older than the oldest release that works, {oldest}: "
                f"pip install --upgrade '{package}>={oldest}'"
            )
    for pair in BAD_PAIRS:
        one, other = installed.get(pair.package), installed.get(pair.beside)
        if one is None or other is None:
            continue
        if _key(pair.first) <= _key(one) < _key(pair.fixed) and _key(other) < _key(pair.below):
            problems.append(f"{pair.package} {one} does not fit {pair.beside} {other}: {pair.why}")
    return problems


def _key(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers: (2, 13, 0) of `2.13.0+cpu`."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    # 0.22 and 0.22.0 are one release.
    return (*parts, *[0] * (4 - len(parts)))
