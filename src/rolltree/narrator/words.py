"""How the narrator writes: steps, shares, intervals, names that a run wrote, and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rolltree._helpers.untrusted import visible
from rolltree.narrator.facts import StoryRollout

Cases = Iterator[dict[str, Any]]
NAME_LENGTH = 60


def steps_of(first: int, last: int) -> str:
    """Return `steps 3 to 7`, or `step 3`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def interval_text(mean: float | None, low: float | None, high: float | None) -> str:
    """Return a mean with its interval if there is one: `0.5 [0.4, 0.6]`."""
    return f"{mean:.3g}" if low is None or high is None else f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def percent(share: float) -> str:
    """Return a share as `38 %`."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.2g} %"


def decimals(number: float, digits: int) -> str:
    """Return a number with so many decimals, or with its power of ten if it is large."""
    return f"{number:.{digits}f}" if abs(number) < 1e6 else f"{number:.3g}"


def short(text: str | None, limit: int = NAME_LENGTH) -> str:
    """Return a text that a run wrote, in one line, cut if it is long."""
    said = " ".join(visible(str(text)).split())
    return said if len(said) <= limit else said[: limit - 1] + "…"


def equals(column: str, text: str | None) -> str:
    """Return the condition that a column is this text, for `where`.

    A text with both kinds of quotes cannot be written there; the condition then accepts any text.
    """
    quote = next((each for each in "\"'" if each not in str(text)), None)
    return f"{column} != none" if quote is None else f"{column} = {quote}{text}{quote}"


def shown_rollouts(rollouts: Sequence[StoryRollout]) -> dict[str, Any]:
    """Return the first of some rollouts as evidence, with the names of the first ten."""
    return {
        "request_id": rollouts[0].request_id,
        "trajectory_index": rollouts[0].trajectory_index,
        "rollouts": [[each.request_id, each.trajectory_index] for each in rollouts[:10]],
    }
