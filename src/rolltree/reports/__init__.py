"""Reports: evaluations, transcripts, curves and training progress for a terminal, and a PNG.

The functions return rich renderables or text, which the command line prints. Names are loaded on
first use (PEP 562), so `rolltree show` loads no live display.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.wings import exports

# For type checkers and editors; at run time `_MODULES` is looked up.
if TYPE_CHECKING:
    from rolltree.insight.reports.audit import audit_lines as audit_lines
    from rolltree.insight.reports.audit import audit_table as audit_table
    from rolltree.insight.reports.comparison import comparison_markdown as comparison_markdown
    from rolltree.insight.reports.comparison import comparison_parts as comparison_parts
    from rolltree.insight.reports.data import print_columns as print_columns
    from rolltree.insight.reports.data import print_table as print_table
    from rolltree.insight.reports.replay import difference_lines as difference_lines
    from rolltree.insight.reports.replay import replay_lines as replay_lines
    from rolltree.insight.reports.replay import replays_summary as replays_summary
    from rolltree.insight.reports.rescore import rescore_parts as rescore_parts
    from rolltree.reports.curves import Curve as Curve
    from rolltree.reports.curves import CurveView as CurveView
    from rolltree.reports.curves import reward_curve as reward_curve
    from rolltree.reports.curves import save_curve as save_curve
    from rolltree.reports.curves import save_reward_curve as save_reward_curve
    from rolltree.reports.curves import terminal_curve as terminal_curve
    from rolltree.reports.evaluation import evaluation_facts as evaluation_facts
    from rolltree.reports.evaluation import evaluation_table as evaluation_table
    from rolltree.reports.formatting import SafeConsole as SafeConsole
    from rolltree.reports.formatting import only_shows as only_shows
    from rolltree.reports.formatting import say as say
    from rolltree.reports.live import EvalView as EvalView
    from rolltree.reports.live import TrainView as TrainView
    from rolltree.reports.runs import headlines as headlines
    from rolltree.reports.runs import overview_line as overview_line
    from rolltree.reports.runs import phases_table as phases_table
    from rolltree.reports.runs import run_lines as run_lines
    from rolltree.reports.runs import story_lines as story_lines
    from rolltree.reports.runs import transcript as transcript
    from rolltree.reports.training import comparison_table as comparison_table
    from rolltree.reports.training import next_commands as next_commands
    from rolltree.reports.training import print_report as print_report
    from rolltree.reports.training import training_report as training_report

_MODULES = {
    **exports(__name__),
    "curves": "Curve CurveView reward_curve save_curve save_reward_curve terminal_curve",
    "evaluation": "evaluation_facts evaluation_table",
    "formatting": "SafeConsole only_shows say",
    "live": "EvalView TrainView",
    "runs": "headlines overview_line phases_table run_lines story_lines transcript",
    "training": "comparison_table next_commands print_report training_report",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)
