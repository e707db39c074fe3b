"""Rubrics: compute the reward and metrics of a finished rollout."""

from rolltree.rubrics.functions import RewardFunc as RewardFunc
from rolltree.rubrics.functions import RewardFunction as RewardFunction
from rolltree.rubrics.functions import run_inline as run_inline
from rolltree.rubrics.groups import PerAgentRubric as PerAgentRubric
from rolltree.rubrics.groups import RubricGroup as RubricGroup
from rolltree.rubrics.judge import JUDGE_PROMPT as JUDGE_PROMPT
from rolltree.rubrics.judge import JudgeRubric as JudgeRubric
from rolltree.rubrics.math_rubric import MathRubric as MathRubric
from rolltree.rubrics.rubric import Rubric as Rubric
from rolltree.rubrics.rubric import Scores as Scores
from rolltree.rubrics.rubric import ToolRubric as ToolRubric
from rolltree.rubrics.rubric import as_rubric as as_rubric
from rolltree.rubrics.rubric import centred_rewards as centred_rewards
from rolltree.rubrics.rubric import reset_scores as reset_scores
from rolltree.rubrics.rubric import write_advantages as write_advantages
