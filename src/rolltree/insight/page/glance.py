"""What a list shows of a run: the most alarming sentence of its story, and its reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolltree.narrator.detectors import DETECTORS
from rolltree.records.story import run_story
from rolltree.store import Run
from rolltree.store.metric_names import number_of

_MOST_POINTS = 60
REWARD = "reward/mean"


def run_glance(run: Run) -> dict[str, Any]:
    """Return `health` and `curve`; the story of a long run is made from a sample.

    `health` is the first sentence of the story, None if nothing stands out. `curve` is the mean
    reward of each training step, or in a long run of every nth step.

    Raises:
        StoreError: a row is damaged.
    """
    # Stories begin with the most alarming sentence. A kind that never alarms does not stand out.
    told = run_story(run, quick=True)["sentences"]
    health = next((each for each in told if DETECTORS[each["kind"]].severity != "info"), None)
    values = [number_of(row.metrics.get(REWARD)) for row in run.steps()]
    return {"health": health, "curve": _thinned(values)}


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    every = -(-len(values) // _MOST_POINTS) or 1
    # Counted from the end: the last step is the one whose number is shown beside the curve.
    return list(values[::-1][::every][::-1])
