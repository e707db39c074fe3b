"""Runs with a planted fault, and healthy runs of every shape, for what must tell them apart.

`written` writes stores in milliseconds, with numbers drawn at random around a course; `trained`
really trains the tiny model, for seconds each. The story's benchmark and its test share both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ALARMS = ("error", "warning")


def kinds_of_alarms(sentences: Iterable[dict[str, Any]]) -> set[str]:
    """Return the kinds of the sentences that alarm."""
    return {each["kind"] for each in sentences if each["severity"] in ALARMS}
