"""The run directory: one SQLite file per run, append-only rollouts, resume, export.

The only package that writes runs. It stores plain values and blobs.
"""

from rolltree.store.codec import Opaque as Opaque
from rolltree.store.codec import dumps as dumps
from rolltree.store.codec import loads as loads
from rolltree.store.codec import to_plain as to_plain
from rolltree.store.listing import PhaseSummary as PhaseSummary
from rolltree.store.listing import RunSummary as RunSummary
from rolltree.store.listing import list_runs as list_runs
from rolltree.store.listing import run_folders as run_folders
from rolltree.store.listing import summarize as summarize
from rolltree.store.rows import Event as Event
from rolltree.store.rows import StepRow as StepRow
from rolltree.store.rows import StoredEvaluation as StoredEvaluation
from rolltree.store.rows import StoredRollout as StoredRollout
from rolltree.store.rows import raised_by_rewards as raised_by_rewards
from rolltree.store.run import Run as Run
from rolltree.store.trained import TrainedRollout as TrainedRollout
