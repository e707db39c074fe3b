"""The comparison of two plays, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from differences import DIFFERENCES

from conftest import Played

MISSING = "<missing>"
RUNNER_ONLY = ("trace",)


@dataclass(frozen=True)
class Found:
    """One field that is not the same on both sides."""

    path: str
    real: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.path}\n    verifiers: {short(self.real)}\n    rolltree:  {short(self.ours)}"


def compare(real: Any, ours: Any, path: str = "") -> Iterator[Found]:
    """Yield every field that differs, leaves first."""
    if isinstance(real, dict) and isinstance(ours, dict):
        for key in sorted({*real, *ours}):
            if key not in RUNNER_ONLY:
                where = f"{path}.{key}" if path else key
                yield from compare(real.get(key, MISSING), ours.get(key, MISSING), where)
    elif isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours):
        for index, (one, other) in enumerate(zip(real, ours, strict=True)):
            yield from compare(one, other, f"{path}[{index}]")
    elif real != ours or type(real) is not type(ours):
        yield Found(path, real, ours)


def undocumented(case: str, real: Any, ours: Any) -> list[Found]:
    """Return the fields that differ and are in no row of the table of differences."""
    return [
        found
        for found in compare(real, ours)
        if not any(row.covers(case, found.path, found.real, found.ours) for row in DIFFERENCES)
    ]


def check(played: Played, name: str) -> None:
    """Fail unless a case played the same, and saw the same requests, on both sides."""
    found = found_in(played, name)
    if found:
        pytest.fail(f"{name}: {len(found)} differences\n{report(found)}", pytrace=False)


def found_in(played: Played, name: str) -> list[Found]:
    """Return what differs in a case and is in no row of the table."""
    return undocumented(name, *sides(played, name))


def sides(played: Played, name: str) -> tuple[Any, Any]:
    """Return what the two sides did in a case, requests included."""
    not_played = "not played: see runs/compat/*.log"
    real = {
        "result": played.real.get(name, not_played),
        "requests": requests(played.real_requests.get(name, [])),
    }
    ours = {
        "result": played.ours.get(name, not_played),
        "requests": requests(played.our_requests.get(name, [])),
    }
    assert real["result"] != not_played
    return real, ours


def report(found: list[Found], limit: int = 12) -> str:
    """Return the first differences as text."""
    lines = [str(item) for item in found[:limit]]
    if len(found) > limit:
        lines.append(f"... and {len(found) - limit} more (runs/compat/real.json, ours.json)")
    return "\n".join(lines)


def requests(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests a server saw in an order that does not depend on which came first."""
    return sorted(bodies, key=lambda body: json.dumps(body, sort_keys=True))


def short(value: Any) -> str:
    """Return a value as text of at most 400 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else text[:400] + " ..."
