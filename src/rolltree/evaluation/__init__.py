"""Evaluation: run, aggregate, compare. It never imports training.

`evaluate` runs a source and stores every rollout, `EvalReport` holds the aggregates, and `compare`
pairs two reports. Who only reads reports does not load what runs rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rolltree.evaluation.estimate import Estimate, estimate, pass_at_k
from rolltree.evaluation.reducers import REDUCERS, EpisodeOutcome, Reducer, Settings, outcomes
from rolltree.evaluation.report import (
    Comparison,
    EvalReport,
    build_report,
    compare,
    stored_report,
    write_results,
)

if TYPE_CHECKING:
    from rolltree.evaluation.runner import EvalProgress, evaluate

__all__ = [
    "Comparison",
    "Estimate",
    "EvalProgress",
    "EvalReport",
    "EpisodeOutcome",
    "REDUCERS",
    "Reducer",
    "Settings",
    "build_report",
    "compare",
    "estimate",
    "evaluate",
    "outcomes",
    "pass_at_k",
    "stored_report",
    "write_results",
]


def __getattr__(name: str) -> Any:
    if name not in ("EvalProgress", "evaluate"):
        raise AttributeError(f"module 'rolltree.evaluation' has no attribute {name!r}")
    from rolltree.evaluation import runner

    value = getattr(runner, name)
    globals()[name] = value
    return value
