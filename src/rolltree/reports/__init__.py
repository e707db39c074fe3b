"""Reports: evaluations, transcripts, curves and training progress for a terminal, and a PNG.

The functions return rich renderables or text, which the command line prints.
"""

from rolltree.reports.curves import Curve, save_curve, terminal_curve
from rolltree.reports.evaluation import (
    EvalView,
    comparison_table,
    evaluation_facts,
    evaluation_table,
)
from rolltree.reports.formatting import SafeConsole, say
from rolltree.reports.runs import phases_table, run_lines, transcript
from rolltree.reports.training import (
    TrainView,
    next_commands,
    reward_curve,
    save_reward_curve,
    training_report,
)

__all__ = [
    "Curve",
    "EvalView",
    "SafeConsole",
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
