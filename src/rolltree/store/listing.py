"""The runs below a directory, and a summary of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.errors import StoreError
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


_PHASES = """
SELECT phase, count(DISTINCT request_id), count(*), sum(status = 'error'), sum(truncated),
       avg(reward), sum(num_prompt_tokens), sum(num_completion_tokens)
FROM rollouts GROUP BY phase ORDER BY min(id)
"""


def summarize(run: Run) -> RunSummary:
    """Return what a run holds."""
    phases = [tuple(row.values()) for row in run.query(_PHASES)]
    env_ids = run.query("SELECT DISTINCT env_id FROM rollouts ORDER BY env_id")
    last = run.query(
        "SELECT max(at) AS at FROM (SELECT max(created_at) AS at FROM rollouts "
        "UNION ALL SELECT max(created_at) FROM steps UNION ALL SELECT max(created_at) FROM events)"
    )[0]["at"]
    meta = run.meta
    return RunSummary(
        path=run.path,
        kind=meta["kind"],
        created_at=meta["created_at"],
        last_written=last or meta["created_at"],
        env_ids=tuple(row["env_id"] for row in env_ids),
        num_steps=len(run.steps()),
        phases=tuple(PhaseSummary(*row) for row in phases),
        config=meta["config"],
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
