"""`RubricGroup`: several rubrics as one.

It knows rubrics and how their scores add up. It knows nothing about functions. It leaves out
weights between rubrics: weigh the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rolltree.errors import ConfigError
from rolltree.parsers import Parser
from rolltree.rubrics.functions import RewardFunc, RewardFunction
from rolltree.rubrics.rubric import Rubric, Scores
from rolltree.types import State, TrajectoryStep


class RubricGroup(Rubric):
    """The sum of its rubrics: rewards and step rewards add up, metrics are joined.

    A rubric that overrides `score_rollout` is asked through that method, on a copy of the state.

    Raises:
        ConfigError: there is no rubric, or two functions have one name.
    """

    def __init__(self, rubrics: Sequence[Rubric], parser: Parser | None = None) -> None:
        if not rubrics:
            raise ConfigError("a RubricGroup needs at least one rubric; it would score nothing.")
        super().__init__(parser=parser or rubrics[0].parser)
        self.rubrics = list(rubrics)
        names = self.get_reward_func_names()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"several rubrics of a group have a function named {twice[0]!r}; one metric would "
                "overwrite the other. Rename one."
            )

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions of all rubrics, in the rubrics' order."""
        return tuple(f for rubric in self.rubrics for f in rubric.functions)

    @property
    def has_group_rewards(self) -> bool:
        """Whether some rubric needs the whole group."""
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    def adopt_parser(self, parser: Parser) -> None:
        """Hand the environment's parser to every rubric that has none of its own."""
        for rubric in self.rubrics:
            rubric.adopt_parser(parser)
        self.parser = self.rubrics[0].parser

    def add_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, cheap: bool = False
    ) -> None:
        """Add a function to the first rubric of the group."""
        self._refuse_twice(func)
        self.rubrics[0].add_reward_func(func, weight, cheap=cheap)

    def add_step_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, cheap: bool = False
    ) -> None:
        """Add a step function to the first rubric of the group."""
        self._refuse_twice(func)
        self.rubrics[0].add_step_reward_func(func, weight, cheap=cheap)

    def _refuse_twice(self, func: RewardFunc) -> None:
        name = RewardFunction.of(func, 1.0).name
        if name in self.get_reward_func_names():
            raise ConfigError(
                f"the rubric group already has a function named {name!r}; one metric would "
                "overwrite the other. Rename it."
            )

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the added scores of all rubrics."""
        totals = [Scores() for _ in states]
        for rubric in self.rubrics:
            for total, part in zip(totals, await _scores_of(rubric, states), strict=True):
                _add(total, part)
        return totals


async def _scores_of(rubric: Rubric, states: Sequence[State]) -> list[Scores]:
    kind = type(rubric)
    if kind.score_rollout is Rubric.score_rollout and kind.score_group is Rubric.score_group:
        return await rubric.evaluate(states)
    copies = [_copy(state) for state in states]
    if kind.score_group is not Rubric.score_group:
        await rubric.score_group(copies)
    else:
        for copy in copies:
            await rubric.score_rollout(copy)
    return [_read(copy) for copy in copies]


def _copy(state: State) -> State:
    copy = state.copy()
    copy["trajectory"] = [
        cast(TrajectoryStep, dict(step, reward=None, advantage=None))
        for step in state["trajectory"]
    ]
    copy["reward"], copy["metrics"], copy["error"] = None, None, None
    copy["scoring_errors"] = {}
    return copy


def _read(state: State) -> Scores:
    step_rewards: list[Any] | None = None
    if state.get("has_step_rewards"):
        step_rewards = [step["reward"] or 0.0 for step in state["trajectory"]]
    return Scores(
        reward=state["reward"],
        metrics=dict(state["metrics"] or {}),
        step_rewards=step_rewards,
        failed=state["error"],
        scored=state["reward"] is not None or state["error"] is not None,
    )


def _add(total: Scores, part: Scores) -> None:
    total.metrics.update(part.metrics)
    total.errors.update(part.errors)
    total.failed = total.failed or part.failed
    if part.step_rewards is not None:
        before = total.step_rewards or [0.0] * len(part.step_rewards)
        total.step_rewards = [a + b for a, b in zip(before, part.step_rewards, strict=True)]
    if part.scored:
        total.scored = True
        both = total.reward is not None and part.reward is not None
        total.reward = total.reward + part.reward if both else None  # type: ignore[operator]
