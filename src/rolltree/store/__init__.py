"""The run directory: one SQLite file per run, append-only rollouts, resume, export.

The only package that writes runs. It stores plain values and blobs.
"""

from rolltree.store.codec import Opaque, dumps, loads, to_plain
from rolltree.store.listing import PhaseSummary, RunSummary, list_runs, run_folders, summarize
from rolltree.store.rows import (
    Event,
    StepRow,
    StoredEvaluation,
    StoredRollout,
    is_lost,
    projection,
    raised_by_rewards,
)
from rolltree.store.run import Run
from rolltree.store.trained import TrainedRollout

__all__ = [
    "Event",
    "Opaque",
    "PhaseSummary",
    "Run",
    "RunSummary",
    "StepRow",
    "StoredEvaluation",
    "StoredRollout",
    "TrainedRollout",
    "dumps",
    "is_lost",
    "list_runs",
    "loads",
    "projection",
    "run_folders",
    "raised_by_rewards",
    "summarize",
    "to_plain",
]
