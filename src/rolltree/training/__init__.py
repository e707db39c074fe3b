"""Training: credit, losses, exact training on token trees, the loop and its checkpoints.

`run_training` is the loop, over the parts that `build_parts` makes; `rolltree.train` calls both.
The room takes rollouts from any source and never imports an environment or the evaluation.
Names are loaded on first use (PEP 562): credit and configs need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.training.coefficients import AGGREGATIONS as AGGREGATIONS
from rolltree.training.coefficients import CORRECTIONS as CORRECTIONS
from rolltree.training.coefficients import coefficients as coefficients

# For type checkers and editors; at run time `_MODULES` is looked up.
if TYPE_CHECKING:
    from rolltree.training.advantages import CreditPolicy as CreditPolicy
    from rolltree.training.advantages import CreditReport as CreditReport
    from rolltree.training.advantages import assign_credit as assign_credit
    from rolltree.training.algorithms import ALGORITHMS as ALGORITHMS
    from rolltree.training.algorithms import Algorithm as Algorithm
    from rolltree.training.algorithms import resolve_algorithm as resolve_algorithm
    from rolltree.training.checkpoint import Checkpoints as Checkpoints
    from rolltree.training.checkpoint import TrainState as TrainState
    from rolltree.training.checkpoint_formats import export_model as export_model
    from rolltree.training.config import MAY_CHANGE as MAY_CHANGE
    from rolltree.training.config import TrainConfig as TrainConfig
    from rolltree.training.config import load_train_config as load_train_config
    from rolltree.training.credit import CREDITS as CREDITS
    from rolltree.training.credit import FLOWS as FLOWS
    from rolltree.training.credit import Flow as Flow
    from rolltree.training.fork import fork_run as fork_run
    from rolltree.training.forward import LogprobModel as LogprobModel
    from rolltree.training.layout import Forest as Forest
    from rolltree.training.layout import collate as collate
    from rolltree.training.loop import Evaluate as Evaluate
    from rolltree.training.loop import run_training as run_training
    from rolltree.training.losses import KLS as KLS
    from rolltree.training.losses import LOSSES as LOSSES
    from rolltree.training.losses import LossInputs as LossInputs
    from rolltree.training.losses import LossTerms as LossTerms
    from rolltree.training.losses import get_loss as get_loss
    from rolltree.training.optim import Optimizer as Optimizer
    from rolltree.training.parts import TrainParts as TrainParts
    from rolltree.training.parts import build_parts as build_parts
    from rolltree.training.parts import open_run as open_run
    from rolltree.training.plan import step_requests as step_requests
    from rolltree.training.plan import task_indices as task_indices
    from rolltree.training.publishing import WeightTarget as WeightTarget
    from rolltree.training.reporter import Reporter as Reporter
    from rolltree.training.reporter import Silent as Silent
    from rolltree.training.reporter import TrainReport as TrainReport
    from rolltree.training.reporter import TrainStart as TrainStart
    from rolltree.training.sections import learning_rate as learning_rate
    from rolltree.training.supervised import supervised_states as supervised_states
    from rolltree.training.trainer import Trainer as Trainer
    from rolltree.training.tree_support import check_tree_support as check_tree_support
    from rolltree.training.tree_support import why_not_tree as why_not_tree

_MODULES: dict[str, str] = {
    "advantages": "CreditPolicy CreditReport assign_credit",
    "algorithms": "ALGORITHMS Algorithm resolve_algorithm",
    "checkpoint": "Checkpoints TrainState",
    "checkpoint_formats": "export_model",
    "config": "MAY_CHANGE TrainConfig load_train_config",
    "credit": "CREDITS FLOWS Flow",
    "fork": "fork_run",
    "forward": "LogprobModel",
    "layout": "Forest collate",
    "loop": "Evaluate run_training",
    "losses": "KLS LOSSES LossInputs LossTerms get_loss",
    "optim": "Optimizer",
    "parts": "TrainParts build_parts open_run",
    "plan": "step_requests task_indices",
    "publishing": "WeightTarget",
    "reporter": "Reporter Silent TrainReport TrainStart",
    "sections": "learning_rate",
    "supervised": "supervised_states",
    "trainer": "Trainer",
    "tree_support": "check_tree_support why_not_tree",
}
# Not on first use: `coefficients` names a function and its module, and would be the module then.
_EAGER = ("AGGREGATIONS", "CORRECTIONS", "coefficients")
__all__ = sorted((*_EAGER, *" ".join(_MODULES.values()).split()))
__getattr__ = loader(__name__, _MODULES)
