"""Rubrics: compute the reward and metrics of a finished rollout."""

from rolltree.rubrics.functions import RewardFunc, RewardFunction, run_inline
from rolltree.rubrics.groups import PerAgentRubric, RubricGroup
from rolltree.rubrics.judge import JUDGE_PROMPT, JudgeRubric
from rolltree.rubrics.math_rubric import MathRubric
from rolltree.rubrics.rubric import (
    Rubric,
    Scores,
    ToolRubric,
    as_rubric,
    centred_rewards,
    reset_scores,
    write_advantages,
)

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
    "as_rubric",
    "centred_rewards",
    "run_inline",
    "reset_scores",
    "write_advantages",
]
