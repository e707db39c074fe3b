"""The runs below a directory, and a summary of each: its contents, its progress and its end."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rolltree.store.database import WriterLock
from rolltree.store.integrity import Totals, report_key
from rolltree.store.reading import StoredRun
from rolltree.store.rows import Event
from rolltree.store.run import Run
from rolltree.values.errors import StoreError

RunState: TypeAlias = Literal["running", "done", "stopped", "failed", "killed", "unknown"]
"""`running`: a process is writing it. `done`: everything planned is stored. `stopped`: its last
start was stopped by a signal. `failed`: it ended with an error. `killed`: it ended without storing
why. `unknown`: the run has no plan, so it cannot be known to be done."""


_ENDS: dict[Any, RunState] = {"stopped": "stopped", "failed": "failed"}
"""The state of a run, by the state in the event with which its last start ended."""


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of a run.

    Means exclude rollouts that another rollout delegated.
    """

    phase: str
    num_requests: int
    num_rollouts: int
    num_errors: int
    num_truncated: int
    # The mean over examples in the phase's report, with `low` and `high` as its 95 % interval.
    # Without a report, the mean over scored rollouts, without an interval; None without scores.
    mean_reward: float | None
    num_prompt_tokens: int
    num_completion_tokens: int
    # The planned number of an evaluation's requests; None if unknown.
    num_planned: int | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run at a glance."""

    path: Path
    kind: str
    created_at: float
    last_written: float  # seconds since the epoch
    env_ids: tuple[str, ...]
    num_steps: int
    phases: tuple[PhaseSummary, ...]
    config: dict[str, Any]
    state: RunState = "unknown"
    num_planned_steps: int | None = None
    # The process that writes it now, and the error of the last start if that failed.
    writer: str | None = None
    error: str | None = None


def summarize(run: StoredRun) -> RunSummary:
    """Return the summary of a run from its stored sums, without reading metrics or rollouts.

    Raises:
        StoreError: the run is damaged, or has values that rolltree does not write.
    """
    with run._database.naming():
        return _summarize(run)


def _summarize(run: StoredRun) -> RunSummary:
    totals, meta = run.totals(), run.meta
    events = run.events()
    num_steps, last_step_at = run.last_step()
    written = [
        meta["created_at"],
        last_step_at,
        *(item.last_created_at for item in totals),
        *(event.created_at for event in events),
    ]
    planned = meta.get("planned") or {}
    by_phase: dict[str, list[Totals]] = {}
    for item in totals:
        by_phase.setdefault(item.phase, []).append(item)
    phases = [
        _phase(name, items, planned.get(f"phase/{name}"), _reward(meta, name, items))
        for name, items in by_phase.items()
    ]
    wanted = planned.get("steps") or _setting(meta, "train", "num_steps")
    num_planned = wanted if isinstance(wanted, int) and wanted > 0 else None
    writer = WriterLock.holder(run.path / "run.lock")
    is_done = _is_done(meta, phases, events, num_steps, num_planned)
    ended = _last_end(events)
    # A start that ends stores an event; one that was killed could not, and has not met its plan.
    state: RunState = "killed" if is_done is False else "unknown"
    if is_done or (ended and ended.kind == "finished"):
        state = "done"
    elif ended:
        state = _ENDS.get(ended.data.get("state"), "unknown")
    if writer is not None:
        state = "running"
    error = None
    if state == "failed" and ended is not None:
        error = f"{ended.data.get('error')}: {ended.data.get('message')}"
    return RunSummary(
        path=run.path,
        kind=meta["kind"],
        created_at=meta["created_at"],
        last_written=max(written),
        env_ids=tuple(sorted({item.env_id for item in totals})),
        num_steps=num_steps,
        phases=tuple(phases),
        config=meta["config"],
        state=state,
        num_planned_steps=num_planned,
        writer=writer,
        error=error,
    )


def _last_end(events: Sequence[Event]) -> Event | None:
    """Return the event with which the last start ended; None if it stored none.

    A start that `finished` did all of its own work, which may be less than an earlier start's.
    """
    marks = [event for event in events if event.kind in ("resumed", "ended", "finished")]
    return marks[-1] if marks and marks[-1].kind != "resumed" else None


def _setting(meta: Mapping[str, Any], section: str, key: str) -> Any:
    """Return a setting of a run, which need not be one of a training; None if it is not set."""
    settings = meta["config"].get(section)
    return settings.get(key) if isinstance(settings, Mapping) else None


def _is_done(
    meta: Mapping[str, Any],
    phases: Sequence[PhaseSummary],
    events: Sequence[Event],
    num_steps: int,
    num_planned: int | None,
) -> bool | None:
    """Return whether everything that was planned is stored; None if nothing was planned."""
    if meta["kind"] == "train" and num_planned is not None:
        if num_steps < num_planned:
            return False
        evaluated = [e.step or 0 for e in events if e.kind.startswith("evaluation")]
        is_last_wanted = _setting(meta, "eval", "after")
        begun = {e.data.get("phase") for e in events if e.kind == "evaluation_begun"}
        ended = {e.data.get("phase") for e in events if e.kind == "evaluation"}
        return begun <= ended and not (is_last_wanted and evaluated and max(evaluated) < num_steps)
    known = [phase for phase in phases if phase.num_planned is not None]
    if known:
        return all(phase.num_requests >= (phase.num_planned or 0) for phase in known)
    return True if any(report_key(phase.phase) in meta for phase in phases) else None


def _reward(meta: Mapping[str, Any], phase: str, items: Sequence[Totals]) -> Sequence[float | None]:
    """Return the mean reward of a phase, and the bounds of its interval if one is stored."""
    report = meta.get(report_key(phase))
    kept = report.get("results") if isinstance(report, Mapping) else None
    reward = kept.get("reward") if isinstance(kept, Mapping) else None
    if isinstance(reward, list) and len(reward) >= 3:
        return reward[:3]
    num_scored, total = sum(each.num_scored for each in items), sum(e.sum_reward for e in items)
    return total / num_scored if num_scored else None, None, None


def _phase(
    name: str,
    items: Sequence[Totals],
    num_planned: int | None,
    reward: Sequence[float | None],
) -> PhaseSummary:
    mean, low, high = reward
    sums = {each: sum(getattr(item, each) for item in items) for each in _SUMS}
    return PhaseSummary(
        phase=name, mean_reward=mean, low=low, high=high, num_planned=num_planned, **sums
    )


_SUMS = (
    *("num_requests", "num_rollouts", "num_errors", "num_truncated"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
"""What a phase's summary adds up over its environments."""


def list_runs(root: str | Path, *, max_depth: int = 3) -> list[RunSummary]:
    """Return the runs at and below `root`, newest first; unreadable runs are skipped."""
    summaries = []
    for folder in run_folders(root, max_depth=max_depth):
        try:
            with Run.open(folder, mode="r") as run:
                summaries.append(summarize(run))
        except StoreError:
            continue
    return sorted(summaries, key=lambda run: run.last_written, reverse=True)


def run_folders(root: str | Path, *, max_depth: int = 3) -> Iterator[Path]:
    """Yield the folders at and below `root` that may be runs, the higher ones first.

    A run to which several paths lead, through links, is yielded once.
    """
    seen: set[tuple[int, int]] = set()
    for depth in range(max_depth + 1):
        for file in sorted(Path(root).glob("/".join(["*"] * depth + ["run.db"]))):
            try:
                status = file.stat()
            # The file is a dangling link, or was deleted.
            except OSError:
                continue
            known = (status.st_dev, status.st_ino)
            if stat.S_ISREG(status.st_mode) and known not in seen:
                seen.add(known)
                yield file.parent
