"""Rubrics made of other rubrics: `RubricGroup` adds them up, `PerAgentRubric` has one per agent.

Rubrics have no weights; weight their functions instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rolltree._helpers.tasks import contained
from rolltree.environments.parsers import Parser
from rolltree.environments.rubrics.functions import RewardFunc, RewardFunction
from rolltree.environments.rubrics.rubric import Rubric, Scores, failed_scores, settle_rewards
from rolltree.store.weights import ScoredPart
from rolltree.values.errors import ConfigError
from rolltree.values.types import State, TrajectoryStep


class CompositeRubric(Rubric):
    """A rubric made of others, which `parts` returns."""

    def parts(self) -> Sequence[Rubric]:
        """Return the rubrics that this one is made of."""
        raise NotImplementedError

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions of all parts; if several have the same name, the first of them."""
        named: dict[str, RewardFunction] = {}
        for rubric in self.parts():
            for function in rubric.functions:
                named.setdefault(function.name, function)
        return tuple(named.values())

    @property
    def has_group_rewards(self) -> bool:
        """Whether some part needs the whole group."""
        return any(rubric.has_group_rewards for rubric in self.parts())

    def add_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, run_inline: bool = False
    ) -> None:
        """Add a function to the first part."""
        self._check_new(func)
        self.parts()[0].add_reward_func(func, weight, run_inline=run_inline)

    def add_step_reward_func(
        self, func: RewardFunc, weight: float = 1.0, *, run_inline: bool = False
    ) -> None:
        """Add a step function to the first part."""
        self._check_new(func)
        self.parts()[0].add_step_reward_func(func, weight, run_inline=run_inline)

    def _check_new(self, func: RewardFunc) -> None:
        """Raise if the parts already have a function of this name; by default, never."""


class RubricGroup(CompositeRubric):
    """The sum of its rubrics: rewards and step rewards add up, metrics are joined.

    If a rubric overrides `score_rollout` or `score_group`, that method is called, on copies of the
    states.

    Raises:
        ConfigError: there is no rubric, or two functions have the same name.
    """

    def __init__(self, rubrics: Sequence[Rubric], parser: Parser | None = None) -> None:
        if not rubrics:
            raise ConfigError("a RubricGroup needs at least one rubric; it would score nothing.")
        super().__init__(parser=parser or rubrics[0].parser)
        self.rubrics = list(rubrics)
        names = [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"several rubrics of a group have a function named {twice[0]!r}; one metric would "
                "overwrite the other. Rename one."
            )

    def parts(self) -> Sequence[Rubric]:
        """Return the rubrics."""
        return self.rubrics

    def adopt_parser(self, parser: Parser) -> None:
        """Pass the environment's parser to every rubric that was created without one."""
        for rubric in self.rubrics:
            rubric.adopt_parser(parser)
        self.parser = self.rubrics[0].parser

    def _check_new(self, func: RewardFunc) -> None:
        name = RewardFunction.of(func, 1.0).name
        if name in self.get_reward_func_names():
            raise ConfigError(
                f"the rubric group already has a function named {name!r}; one metric would "
                "overwrite the other. Rename it."
            )

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the sum of the scores of all rubrics."""
        totals = [Scores() for _ in states]
        for rubric in self.rubrics:
            try:
                with contained():
                    parts = await _scores_of(rubric, states)
            except Exception as error:  # noqa: BLE001  an override that raises counts alone
                parts = failed_scores(states, rubric, error)
            for total, part in zip(totals, parts, strict=True):
                _add(total, part)
        return totals


async def _scores_of(rubric: Rubric, states: Sequence[State]) -> list[Scores]:
    kind = type(rubric)
    if kind.score_rollout is Rubric.score_rollout and kind.score_group is Rubric.score_group:
        return await rubric.evaluate(states)
    # An override writes its scores into the state; on copies, the scores of several rubrics do not
    # overwrite each other.
    copies = [_copy(state) for state in states]
    if kind.score_group is not Rubric.score_group:
        await rubric.score_group(copies)
    else:
        for copy in copies:
            await rubric.score_rollout(copy)
    for copy in copies:
        settle_rewards(copy, rubric)
    return [_read(state, copy) for state, copy in zip(states, copies, strict=True)]


def _copy(state: State) -> State:
    # Without rewards, so that those found afterwards come from this rubric.
    copy = state.copy()
    copy.trajectory = [
        cast(TrajectoryStep, dict(step, reward=None, advantage=None)) for step in state.trajectory
    ]
    copy.reward = copy.metrics = copy.error = copy.has_step_rewards = None
    copy["scoring_errors"] = {}
    return copy


# The keys that a copy does not share with its state.
_SCORES = frozenset(
    [
        *("input", "trajectory", "reward", "advantage", "metrics", "error"),
        *("has_step_rewards", "scoring_errors"),
    ]
)


def _read(state: State, copy: State) -> Scores:
    """Return the scores in a copy, and give the state the other keys that were written there."""
    for key, value in dict.items(copy):
        if key not in _SCORES and (key not in state or state[key] is not value):
            state[key] = value
    step_rewards: list[Any] | None = None
    own, rewards = copy.has_step_rewards, [step["reward"] for step in copy.trajectory]
    # Rewards that an override wrote itself have no flag.
    if own or (own is None and any(reward is not None for reward in rewards)):
        step_rewards = [reward or 0.0 for reward in rewards]
    return Scores(
        reward=copy.reward,
        metrics=dict(copy.metrics or {}),
        step_rewards=step_rewards,
        errors=dict(copy.get("scoring_errors") or {}),
        failed=copy.error,
        scored=copy.reward is not None or copy.error is not None,
    )


def _add(total: Scores, part: Scores) -> None:
    total.metrics.update(part.metrics)
    total.errors.update(part.errors)
    # The first failure explains the missing reward.
    total.failed = total.failed or part.failed
    if part.step_rewards is not None:
        before = total.step_rewards or [0.0] * len(part.step_rewards)
        total.step_rewards = [a + b for a, b in zip(before, part.step_rewards, strict=True)]
    if part.scored:
        total.scored = True
        # If a part is unknown, so is the sum.
        both = total.reward is not None and part.reward is not None
        total.reward = total.reward + part.reward if both else None  # type: ignore[operator]


class PerAgentRubric(CompositeRubric):
    """Score each rollout by its agent's rubric, or an episode's own agents by `default`.

    A delegated rollout of an agent without a rubric keeps its rewards from its world and its
    parser. The difference between a rubric's reward and the sum of the steps' rewards is added to
    the last step, so that the steps add up to the rollout's reward.

    Args:
        default: for the episode's own agents that are not in `rubrics`.
        rubrics: agent name to rubric.
    """

    def __init__(self, default: Rubric, rubrics: Mapping[str, Rubric]) -> None:
        super().__init__()
        self.default = default
        self.rubrics = dict(rubrics)
        self.parser = default.parser

    def of(self, state: State) -> Rubric:
        """Return the rubric that scores this rollout."""
        found = self.rubrics.get(str(state.agent or ""))
        if found is not None:
            return found
        return self.default if state.parent_rollout is None else _NOTHING

    def parts(self) -> Sequence[Rubric]:
        """Return the default rubric and those of the agents."""
        return (self.default, *self.rubrics.values())

    def scored_parts(self) -> list[ScoredPart]:
        """Return the default rubric's functions, and those of each agent."""
        own = [
            replace(part, agent=agent)
            for agent, rubric in self.rubrics.items()
            for part in rubric.scored_parts()
        ]
        return [*self.default.scored_parts(), *own]

    def adopt_parser(self, parser: Any) -> None:
        """Pass the environment's parser to the default rubric."""
        self.default.adopt_parser(parser)
        self.parser = self.default.parser

    async def score_rollout(self, state: State, score_sem: object = None) -> None:
        """Score one rollout by its agent's rubric."""
        await self.of(state).score_rollout(state)
        settle_rewards(state, self.of(state))
        _add_up(state)

    async def score_group(self, states: Sequence[State], score_sem: object = None) -> None:
        """Score the rollouts of one group; each agent's rollouts are compared with each other.

        Raises:
            ConfigError: a group function would compare delegated rollouts, whose prompts differ.
        """
        members: dict[tuple[str, int], list[State]] = {}
        for state in states:
            rubric = self.of(state)
            if rubric.has_group_rewards and state.parent_rollout is not None:
                raise ConfigError(
                    f"the rubric of {state.get('agent')!r} compares the members of a group, but "
                    "delegated rollouts have different prompts. Score each rollout on its own; "
                    "the advantage compares them later."
                )
            # Agents with the same rubric are not compared with each other: their roles differ.
            members.setdefault((str(state.agent or ""), id(rubric)), []).append(state)
        for group in members.values():
            rubric = self.of(group[0])
            if rubric.has_group_rewards:
                await rubric.score_group(group)
                for state in group:
                    settle_rewards(state, rubric)
                    _add_up(state)
            else:
                for state in group:
                    await self.score_rollout(state)

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the scores without writing them, each rollout scored on its own."""
        return [(await self.of(state).evaluate([state]))[0] for state in states]


_NOTHING = Rubric()


def _add_up(state: State) -> None:
    """Add to the last step's reward what the sum of the steps lacks to the rollout's reward."""
    steps, reward = state.trajectory, state.reward
    if steps and reward is not None:
        rest = reward - sum(step["reward"] or 0.0 for step in steps)
        steps[-1]["reward"] = (steps[-1]["reward"] or 0.0) + rest
