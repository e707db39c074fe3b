"""Rubrics: from a finished rollout to a reward and metrics.

The room knows states, parsers and functions. It knows nothing about models, engines or training.
It leaves out normalised advantages, which are credit's.
"""

from rolltree.rubrics.functions import RewardFunc, RewardFunction, cheap
from rolltree.rubrics.group import RubricGroup
from rolltree.rubrics.rubric import Rubric, Scores, write_advantages

__all__ = [
    "RewardFunc",
    "RewardFunction",
    "Rubric",
    "RubricGroup",
    "Scores",
    "cheap",
    "write_advantages",
]
