"""Which optimizer step trained each group of rollouts: not always the one it was played for.

A step trains whole groups. Asynchronous runs store which groups each step takes, and dynamic
sampling shows in the trained tokens; in all other runs a step trains what was played for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from rolltree.store import Run

LEDGER = "batch"
"""The kind of event that notes which groups a step of asynchronous training takes."""

_KNOWN: weakref.WeakKeyDictionary[Run, tuple[int, dict[str, int]]] = weakref.WeakKeyDictionary()
"""The steps of a run's groups, and the number of commits when they were read."""


def trained_steps(run: Run) -> Mapping[str, int]:
    """Return the step that trained each group; groups that no step has trained are absent.

    Raises:
        StoreError: the file is damaged.
    """
    commits = run.num_commits
    known = _KNOWN.get(run)
    if known is None or known[0] != commits:
        known = _KNOWN[run] = commits, _read(run)
    return known[1]


def trained_groups(run: Run, step: int) -> list[str]:
    """Return the groups that a step trained.

    Raises:
        StoreError: the file is damaged.
    """
    return [group for group, at in trained_steps(run).items() if at == step]


def _read(run: Run) -> dict[str, int]:
    done = {row["step"] for row in run.query("SELECT step FROM steps")}
    taken = {
        group: event.step
        for event in run.events(LEDGER)
        if event.step is not None and event.step in done and isinstance(event.data, Mapping)
        for group in event.data.get("groups") or ()
        if isinstance(group, str)
    }
    if taken:
        return taken
    algorithm = run.config.get("algorithm")
    sql = "SELECT DISTINCT group_id, train_step AS step FROM rollouts WHERE phase = 'train'"
    if isinstance(algorithm, Mapping) and algorithm.get("dynamic_sampling_max"):
        # Replaced groups were played for the step, but not trained.
        sql = (
            "SELECT DISTINCT group_id, step FROM trained "
            "JOIN rollouts USING (request_id, trajectory_index)"
        )
    found = {row["group_id"]: row["step"] for row in run.query(sql)}
    return {group: step for group, step in found.items() if group and step in done}
