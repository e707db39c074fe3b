"""Tasks of the `reasoning-gym` package: generated puzzles, each scored by its own function.

The rows are generated from a seed. It is a package because a single module would be named like the
library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import rolltree as rt

Tasks = str | Sequence[str] | Mapping[str, Mapping[str, Any]]


def load_environment(
    tasks: Tasks = ("chain_sum", "spell_backward", "number_sorting"),
    num_train: int = 500,
    num_eval: int = 100,
    seed: int = 0,
) -> rt.Environment:
    """Return the environment of one or several tasks, which may have settings of their own."""
    return rt.ReasoningGymEnv(tasks, num_train=num_train, num_eval=num_eval, seed=seed)
