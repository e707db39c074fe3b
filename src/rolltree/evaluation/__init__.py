"""Evaluation: run, aggregate, compare. It never imports training.

`evaluate` runs a source and stores every rollout, `EvalReport` holds the aggregates, and `compare`
pairs two reports.
"""

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
