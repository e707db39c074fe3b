"""Rubrics: compute the reward and metrics of a finished rollout.

Names are loaded on first use (PEP 562): the worker processes of `MathRubric` need none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader

if TYPE_CHECKING:
    from rolltree.environments.rubrics.functions import RewardFunc as RewardFunc
    from rolltree.environments.rubrics.functions import RewardFunction as RewardFunction
    from rolltree.environments.rubrics.functions import run_inline as run_inline
    from rolltree.environments.rubrics.groups import PerAgentRubric as PerAgentRubric
    from rolltree.environments.rubrics.groups import RubricGroup as RubricGroup
    from rolltree.environments.rubrics.judge import JUDGE_PROMPT as JUDGE_PROMPT
    from rolltree.environments.rubrics.judge import JudgeRubric as JudgeRubric
    from rolltree.environments.rubrics.math_rubric import MathRubric as MathRubric
    from rolltree.environments.rubrics.rubric import Rubric as Rubric
    from rolltree.environments.rubrics.rubric import Scores as Scores
    from rolltree.environments.rubrics.rubric import are_equal as are_equal
    from rolltree.environments.rubrics.rubric import as_rubric as as_rubric
    from rolltree.environments.rubrics.rubric import centred_rewards as centred_rewards
    from rolltree.environments.rubrics.rubric import reset_scores as reset_scores
    from rolltree.environments.rubrics.rubric import reward_rounding as reward_rounding
    from rolltree.environments.rubrics.rubric import settle_rewards as settle_rewards
    from rolltree.environments.rubrics.rubric import write_advantages as write_advantages
    from rolltree.environments.rubrics.rubric import write_failure as write_failure
    from rolltree.environments.rubrics.tool_rubric import ToolRubric as ToolRubric

_MODULES = {
    "functions": "RewardFunc RewardFunction run_inline",
    "groups": "PerAgentRubric RubricGroup",
    "judge": "JUDGE_PROMPT JudgeRubric",
    "math_rubric": "MathRubric",
    "rubric": "Rubric Scores are_equal as_rubric centred_rewards reset_scores reward_rounding "
    "settle_rewards write_advantages write_failure",
    "tool_rubric": "ToolRubric",
}
__getattr__ = loader(__name__, _MODULES)
__all__ = sorted(" ".join(_MODULES.values()).split())
