"""One evaluation to read: its numbers with intervals, its failures, and its worst examples."""

from __future__ import annotations

from typing import Any

from rolltree.evaluation import EvalReport, stored_report
from rolltree.evaluation.reducers import columns
from rolltree.insight.page.pages import row_previews
from rolltree.store import Run, to_plain
from rolltree.values.errors import UnknownName, did_you_mean
from rolltree.values.estimate import mean

MAX_WORST = 20


def evaluation_view(run: Run, phase: str) -> dict[str, Any]:
    """Return the report of a phase, its worst examples, and the run's other phases, JSON-ready.

    Raises:
        UnknownName: the run has no such phase.
        StoreError: a row is damaged.
    """
    phases = run.phases()
    if phase not in phases:
        raise UnknownName(f"{run.path} has no phase {phase!r}.{did_you_mean(phase, phases)}")
    report = stored_report(run, phase)
    held_out = {done.phase: done.step for done in run.evaluations()}
    return {
        # As `rolltree show --json` has it.
        "report": {**report.as_dict(), "run": run.path.resolve().name},
        # Held-out evaluations with the step before them, else None.
        "phases": [{"phase": each, "step": held_out.get(each)} for each in phases],
        "worst": _worst(run, report),
    }


def _worst(run: Run, report: EvalReport) -> list[dict[str, Any]]:
    """Return the examples with the lowest mean reward, each with its worst rollout."""
    names = ("request_id", "example", "reward")
    found: dict[Any, list[tuple[float, str]]] = {}
    for request_id, example, reward in columns(report.outcomes, *names):
        if reward is not None:
            found.setdefault(example, []).append((reward, request_id))
    means = {example: mean(reward for reward, _ in each) for example, each in found.items()}
    worst = sorted(found, key=lambda example: means[example])[:MAX_WORST]
    shown = [(min(found[example])[1], 0) for example in worst]
    return [
        {
            "example": dict(zip(("env_id", "task", "example_id"), to_plain(example), strict=True)),
            "reward": means[example],
            "num_rollouts": len(found[example]),
            **preview,
        }
        for example, preview in zip(worst, row_previews(run, shown), strict=True)
    ]
