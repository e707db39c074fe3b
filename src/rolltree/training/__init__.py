"""Training: credit, losses, exact training on token trees, the loop and its checkpoints.

`run_training` is the loop, over the parts that `build_parts` makes; `rolltree.train` calls both.
The room takes rollouts from any source and never imports an environment or the evaluation.
"""

from rolltree.training.advantages import CreditPolicy, CreditReport, assign_credit
from rolltree.training.algorithms import ALGORITHMS, Algorithm, resolve_algorithm
from rolltree.training.checkpoint import Checkpoints, TrainState
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.coefficients import AGGREGATIONS, CORRECTIONS, coefficients
from rolltree.training.config import MAY_CHANGE, TrainConfig, load_train_config
from rolltree.training.credit import CREDITS, FLOWS, Flow
from rolltree.training.fork import fork_run
from rolltree.training.forward import LogprobModel
from rolltree.training.layout import Forest, collate
from rolltree.training.loop import Evaluate, run_training
from rolltree.training.losses import KLS, LOSSES, LossInputs, LossTerms, get_loss
from rolltree.training.optim import Optimizer, learning_rate
from rolltree.training.parts import TrainParts, build_parts, open_run
from rolltree.training.plan import step_requests, task_indices
from rolltree.training.publishing import WeightTarget
from rolltree.training.reporter import Reporter, Silent, TrainReport, TrainStart
from rolltree.training.supervised import supervised_states
from rolltree.training.trainer import Trainer
from rolltree.training.tree_support import check_tree_support, why_not_tree

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "Algorithm",
    "CORRECTIONS",
    "CREDITS",
    "Checkpoints",
    "CreditPolicy",
    "CreditReport",
    "Evaluate",
    "FLOWS",
    "Flow",
    "Forest",
    "KLS",
    "LOSSES",
    "TrainParts",
    "LogprobModel",
    "LossInputs",
    "LossTerms",
    "MAY_CHANGE",
    "Optimizer",
    "Reporter",
    "Silent",
    "TrainConfig",
    "TrainReport",
    "TrainStart",
    "TrainState",
    "Trainer",
    "WeightTarget",
    "assign_credit",
    "build_parts",
    "check_tree_support",
    "coefficients",
    "collate",
    "export_model",
    "fork_run",
    "get_loss",
    "learning_rate",
    "load_train_config",
    "open_run",
    "resolve_algorithm",
    "run_training",
    "step_requests",
    "supervised_states",
    "task_indices",
    "why_not_tree",
]
