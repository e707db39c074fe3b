"""Evaluation: run, aggregate, compare. It never imports training.

`evaluate` runs a source and stores every rollout, `EvalReport` holds the aggregates, and
`compare_reports` pairs two reports. Reading reports does not import the code that runs rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.evaluation.reducers import REDUCERS, EpisodeOutcome, Reducer, Settings, outcomes
from rolltree.evaluation.report import EvalReport, build_report, stored_report
from rolltree.values.estimate import Estimate, estimate, pass_at_k, pass_hat_k

if TYPE_CHECKING:
    from rolltree.evaluation.comparison import (
        Comparison,
        compare_environments,
        compare_reports,
    )
    from rolltree.evaluation.result_files import write_results
    from rolltree.evaluation.runner import EvalProgress, evaluate, evaluate_async

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
    "compare_environments",
    "compare_reports",
    "estimate",
    "evaluate",
    "evaluate_async",
    "outcomes",
    "pass_at_k",
    "pass_hat_k",
    "stored_report",
    "write_results",
]
__getattr__ = loader(
    __name__,
    {
        "comparison": "Comparison compare_environments compare_reports",
        "result_files": "write_results",
        "runner": "EvalProgress evaluate evaluate_async",
    },
)
