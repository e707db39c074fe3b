"""Reports: evaluations, transcripts, curves and training progress for a terminal, and a PNG.

The room reads the run store, reports and progress values, and imports neither torch nor anything
that runs a model. The command line prints what it returns.
"""

from rolltree.reports.curves import Curve, save_curve, terminal_curve
from rolltree.reports.evaluation import (
    EvalView,
    comparison_table,
    evaluation_facts,
    evaluation_table,
)
from rolltree.reports.formatting import say
from rolltree.reports.runs import phases_table, run_lines
from rolltree.reports.train_view import TrainView
from rolltree.reports.training import (
    next_commands,
    reward_curve,
    save_reward_curve,
    training_report,
)
from rolltree.reports.transcript import transcript

__all__ = [
    "Curve",
    "EvalView",
    "TrainView",
    "comparison_table",
    "evaluation_facts",
    "evaluation_table",
    "next_commands",
    "phases_table",
    "reward_curve",
    "run_lines",
    "save_curve",
    "save_reward_curve",
    "say",
    "terminal_curve",
    "training_report",
    "transcript",
]
