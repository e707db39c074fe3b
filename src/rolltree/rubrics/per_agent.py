"""`PerAgentRubric`: each rollout is scored by the rubric of the agent that made it.

It knows `state["agent"]` and `state["parent_rollout"]`. It knows nothing about protocols, and
leaves out how credit moves between agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltree.errors import ConfigError
from rolltree.rubrics.functions import RewardFunction
from rolltree.rubrics.rubric import Rubric, Scores
from rolltree.types import State


class PerAgentRubric(Rubric):
    """Score an episode's own rollouts by `default`, others by their agents' rubrics.

    A delegated rollout of an agent without a rubric keeps the reward that it earned in its world
    and by its form. What a rubric gives beyond the sum of the steps' rewards is the last step's, so
    that they add up to the rollout's.

    Args:
        default: for rollouts that nobody delegated, of agents that are not in `rubrics`.
        rubrics: agent name to rubric.
    """

    def __init__(self, default: Rubric, rubrics: Mapping[str, Rubric]) -> None:
        super().__init__()
        self.default = default
        self.rubrics = dict(rubrics)
        self.parser = default.parser

    def of(self, state: State) -> Rubric:
        """Return the rubric that scores this rollout."""
        found = self.rubrics.get(str(state.get("agent") or ""))
        if found is not None:
            return found
        return self.default if state.get("parent_rollout") is None else _NOTHING

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions of all rubrics, of each name the first."""
        named: dict[str, RewardFunction] = {}
        for rubric in (self.default, *self.rubrics.values()):
            for function in rubric.functions:
                named.setdefault(function.name, function)
        return tuple(named.values())

    @property
    def has_group_rewards(self) -> bool:
        """Whether some rubric needs whole groups."""
        return any(r.has_group_rewards for r in (self.default, *self.rubrics.values()))

    def adopt_parser(self, parser: Any) -> None:
        """Hand the environment's parser to the default rubric."""
        self.default.adopt_parser(parser)
        self.parser = self.default.parser

    def add_reward_func(self, func: Any, weight: float = 1.0, *, cheap: bool = False) -> None:
        """Add a function for the episode's own rollouts."""
        self.default.add_reward_func(func, weight, cheap=cheap)

    def add_step_reward_func(self, func: Any, weight: float = 1.0, *, cheap: bool = False) -> None:
        """Add a step function for the episode's own rollouts."""
        self.default.add_step_reward_func(func, weight, cheap=cheap)

    async def score_rollout(self, state: State, score_sem: object = None) -> None:
        """Score one rollout by its agent's rubric."""
        await self.of(state).score_rollout(state)
        _add_up(state)

    async def score_group(self, states: Sequence[State], score_sem: object = None) -> None:
        """Score the rollouts of one group: an agent's rollouts are compared with each other.

        Raises:
            ConfigError: a group function would compare delegated rollouts, which were asked
                different things.
        """
        members: dict[tuple[str, int], list[State]] = {}
        for state in states:
            rubric = self.of(state)
            if rubric.has_group_rewards and state.get("parent_rollout") is not None:
                raise ConfigError(
                    f"the rubric of {state.get('agent')!r} compares the members of a group, but "
                    "delegated rollouts were asked different things. Score each on its own; "
                    "comparing them is credit's part."
                )
            members.setdefault((str(state.get("agent") or ""), id(rubric)), []).append(state)
        for group in members.values():
            rubric = self.of(group[0])
            if rubric.has_group_rewards:
                await rubric.score_group(group)
                for state in group:
                    _add_up(state)
            else:
                for state in group:
                    await self.score_rollout(state)

    async def evaluate(self, states: Sequence[State]) -> list[Scores]:
        """Return the scores without writing them, each rollout alone."""
        return [(await self.of(state).evaluate([state]))[0] for state in states]


_NOTHING = Rubric()


def _add_up(state: State) -> None:
    """Let the steps' rewards add up to the rollout's, the last step taking the difference."""
    steps, reward = state["trajectory"], state["reward"]
    if steps and reward is not None:
        rest = reward - sum(step["reward"] or 0.0 for step in steps)
        steps[-1]["reward"] = (steps[-1]["reward"] or 0.0) + rest
