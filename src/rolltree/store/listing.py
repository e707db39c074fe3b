"""The runs below a directory, and a summary of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.errors import StoreError
from rolltree.store.integrity import Totals
from rolltree.store.run import Run


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of a run. `mean_reward` is over scored rows only; None when there are none."""

    phase: str
    num_requests: int
    num_rollouts: int
    num_errors: int
    num_truncated: int
    mean_reward: float | None
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run at a glance. `last_written` is seconds since the epoch."""

    path: Path
    kind: str
    created_at: float
    last_written: float
    env_ids: tuple[str, ...]
    num_steps: int
    phases: tuple[PhaseSummary, ...]
    config: dict[str, Any]


def summarize(run: Run) -> RunSummary:
    """Return what a run holds, from its sums: the rollouts are not read."""
    totals, meta = run.totals(), run.meta
    steps, events = run.steps(), run.events()
    written = [
        meta["created_at"],
        *(item.last_created_at for item in totals),
        *(step.created_at for step in steps),
        *(event.created_at for event in events),
    ]
    phases: dict[str, list[Totals]] = {}
    for item in totals:
        phases.setdefault(item.phase, []).append(item)
    return RunSummary(
        path=run.path,
        kind=meta["kind"],
        created_at=meta["created_at"],
        last_written=max(written),
        env_ids=tuple(sorted({item.env_id for item in totals})),
        num_steps=len(steps),
        phases=tuple(_phase(name, items) for name, items in phases.items()),
        config=meta["config"],
    )


def _phase(name: str, items: Sequence[Totals]) -> PhaseSummary:
    num_scored = sum(item.num_scored for item in items)
    return PhaseSummary(
        phase=name,
        num_requests=sum(item.num_requests for item in items),
        num_rollouts=sum(item.num_rollouts for item in items),
        num_errors=sum(item.num_errors for item in items),
        num_truncated=sum(item.num_truncated for item in items),
        mean_reward=sum(item.sum_reward for item in items) / num_scored if num_scored else None,
        num_prompt_tokens=sum(item.num_prompt_tokens for item in items),
        num_completion_tokens=sum(item.num_completion_tokens for item in items),
    )


def list_runs(root: str | Path, *, max_depth: int = 3) -> list[RunSummary]:
    """Return the runs at and below `root`, newest first; what is not a readable run is skipped."""
    found = []
    for depth in range(max_depth + 1):
        for file in Path(root).glob("/".join(["*"] * depth + ["run.db"])):
            try:
                with Run.open(file.parent, mode="r") as run:
                    found.append(summarize(run))
            except StoreError:
                continue
    return sorted(found, key=lambda run: run.last_written, reverse=True)
