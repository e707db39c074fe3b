"""Rubrics: compute the reward and metrics of a finished rollout.

What only some environments need is loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.environments.rubrics.functions import RewardFunc, RewardFunction, run_inline
from rolltree.environments.rubrics.rubric import (
    Rubric,
    Scores,
    are_equal,
    as_rubric,
    centred_rewards,
    reset_scores,
    reward_rounding,
    settle_rewards,
    write_advantages,
    write_failure,
)

if TYPE_CHECKING:
    from rolltree.environments.rubrics.groups import PerAgentRubric as PerAgentRubric
    from rolltree.environments.rubrics.groups import RubricGroup as RubricGroup
    from rolltree.environments.rubrics.judge import JUDGE_PROMPT as JUDGE_PROMPT
    from rolltree.environments.rubrics.judge import JudgeRubric as JudgeRubric
    from rolltree.environments.rubrics.math_rubric import MathRubric as MathRubric
    from rolltree.environments.rubrics.tool_rubric import ToolRubric as ToolRubric

_MODULES = {
    "groups": "PerAgentRubric RubricGroup",
    "judge": "JUDGE_PROMPT JudgeRubric",
    "math_rubric": "MathRubric",
    "tool_rubric": "ToolRubric",
}
__getattr__ = loader(__name__, _MODULES)

__all__ = [
    "JUDGE_PROMPT",
    "JudgeRubric",
    "MathRubric",
    "PerAgentRubric",
    "RewardFunc",
    "RewardFunction",
    "Rubric",
    "RubricGroup",
    "Scores",
    "ToolRubric",
    "are_equal",
    "as_rubric",
    "centred_rewards",
    "run_inline",
    "reset_scores",
    "reward_rounding",
    "settle_rewards",
    "write_advantages",
    "write_failure",
]
