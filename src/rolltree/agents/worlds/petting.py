"""PettingZoo's worlds for several agents, with observations and actions as text.

`ParallelGame` adapts a `ParallelEnv`, in which all live agents act at once, and `TurnGame` an
`AECEnv`, in which they take turns. The package (1.27 or later) is needed only to make a world by
its id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rolltree.agents.worlds.gym import action_reader, plain_text
from rolltree.agents.worlds.interface import BAD_ACTION, Adapter, bad_action
from rolltree.values.errors import ConfigError, did_you_mean, import_extra
from rolltree.values.seeds import MAX_SEED
from rolltree.values.steps import StepOutcome
from rolltree.values.types import Info

LayerMask: TypeAlias = Callable[[Any, str], str]
"""A function from an observation, and the name of the agent that sees it, to text."""


class _Game(Adapter):
    """The common base of the two kinds of games.

    Args:
        world: a PettingZoo id such as "classic/rps-v2", a world, or a function that returns one.
        to_text: from an observation and its agent to text; without it, observations must be text.
        to_action: from text to an action; by default a reader for the agent's action space.
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `pettingzoo.make`, or of the function.
        settings: those of `Adapter`.

    Raises:
        ConfigError: the id is unknown, or an action space needs `to_action`.
    """

    _kind = ""

    def __init__(
        self,
        world: Any,
        *,
        to_text: LayerMask | None = None,
        to_action: Callable[[str], Any] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(_maker(self._kind, world, world_args or {}), **settings)
        self.possible_agents: list[str] = list(self.env.possible_agents)
        self._to_text, self._to_action = to_text, to_action
        self._readers = {
            agent: to_action or action_reader(self.env.action_space(agent), tuple(action_names))
            for agent in self.possible_agents
        }

    def _seen(self, observation: Any, agent: str) -> str:
        return self._to_text(observation, agent) if self._to_text else plain_text(observation)

    def _action(self, action: Any, agent: str) -> Any:
        return self._readers[agent](action) if isinstance(action, str) else action


class ParallelGame(_Game):
    """A `ParallelEnv`: a `ParallelWorld` over text.

    An agent without an action (its answer held none, or its text is not an action of its space)
    takes `idle_action`. Without one, the game waits until every agent has given an action.

    Args:
        world: a PettingZoo id such as "classic/rps-v2", a world, or a function that returns one.
        idle_action: the action of an agent that gives none, or its text.
        settings: `to_text(observation, agent)`, `to_action(text)`, `action_names`, `world_args`,
            `snapshots` and `in_thread`, as in `GymWorld`.

    Raises:
        ConfigError: the id is unknown, an action space needs `to_action`, or `idle_action` is not
            an action of every agent.
    """

    _kind = "parallel"

    def __init__(self, world: Any, *, idle_action: Any = None, **settings: Any) -> None:
        super().__init__(world, **settings)
        self.needs_all = idle_action is None
        self._idle: dict[str, Any] = {}
        for agent in () if self.needs_all else self.possible_agents:
            self._idle[agent] = self._checked_idle(idle_action, agent)

    @property
    def agents(self) -> list[str]:
        """The agents that still play."""
        return list(self.env.agents)

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """Begin an episode; return each agent's first observation."""
        seen, infos = self.env.reset(seed=None if seed is None else seed % MAX_SEED)
        return {
            agent: (self._seen(observation, agent), dict(infos.get(agent) or {}))
            for agent, observation in seen.items()
        }

    def step(self, actions: Mapping[str, Any]) -> dict[str, StepOutcome]:
        """Take the agents' actions; return the outcome for every agent.

        Without an `idle_action`, nothing changes while an agent has no action: only those without
        one have an outcome, which tells them so.
        """
        # All act at once, so an agent whose text is not an action must not stop the others: it
        # takes the idle action, and is told why.
        problems: dict[str, str] = {}
        done: dict[str, Any] = {}
        for agent in self.agents:
            try:
                done[agent] = self._action(actions.get(agent), agent)
            except ValueError as error:
                problems[agent] = str(error)
                done[agent] = None
            if done[agent] is None:
                done[agent] = self._idle.get(agent)
            if done[agent] is None:
                problems.setdefault(agent, "the game needs an action from every agent")
        if self.needs_all and problems:
            return {agent: bad_action(ValueError(why)) for agent, why in problems.items()}
        seen, rewards, terminated, truncated, infos = self.env.step(done)
        return {
            agent: StepOutcome(
                self._seen(observation, agent),
                rewards[agent],
                bool(terminated[agent]),
                bool(truncated[agent]),
                {
                    **(infos.get(agent) or {}),
                    **({BAD_ACTION: problems[agent]} if agent in problems else {}),
                },
            )
            for agent, observation in seen.items()
        }

    def _checked_idle(self, idle_action: Any, agent: str) -> Any:
        try:
            action = self._action(idle_action, agent)
        except ValueError as error:
            raise ConfigError(f"idle_action {idle_action!r} of {agent!r}: {error}.") from error
        # With a `to_action`, only the game knows its actions.
        if self._to_action is None and not self.env.action_space(agent).contains(action):
            raise ConfigError(
                f"idle_action is {idle_action!r}, which is not in the action space of {agent!r} "
                f"({self.env.action_space(agent)}), so the game could not take it."
            )
        return action


class TurnGame(_Game):
    """An `AECEnv`: a `TurnWorld` over text. Agents that are out of the game are skipped.

    A text that is not an action of the space changes nothing, and the turn stays. The game itself
    judges illegal moves.

    Args:
        world: a PettingZoo id such as "classic/tictactoe-v3", a world, or a function.
        settings: as in `ParallelGame`.

    Raises:
        ConfigError: the id is unknown, or an action space needs `to_action`.
    """

    _kind = "aec"

    @property
    def current(self) -> str | None:
        """The agent whose turn it is; None if the episode is over."""
        return self.env.agent_selection if self.env.agents else None

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        self.env.reset(seed=None if seed is None else seed % MAX_SEED)
        self._skip_finished_agents()

    def observe(self, agent: str) -> str:
        """Return what an agent sees now."""
        return self._seen(self.env.observe(agent), agent)

    def step(self, action: Any) -> dict[str, StepOutcome]:
        """Take the current agent's action; return the outcome for every agent in play."""
        agent = self.env.agent_selection
        try:
            action = self._action(action, agent)
        except ValueError as error:
            return {agent: bad_action(error)}
        # Noted before the step, since agents for which it ends the game have outcomes, too.
        playing = list(self.env.agents)
        self.env.step(action)
        outcomes = {
            name: StepOutcome(
                self.observe(name),
                self.env.rewards.get(name, 0.0),
                bool(self.env.terminations.get(name, False)),
                bool(self.env.truncations.get(name, False)),
                dict(self.env.infos.get(name) or {}),
            )
            for name in playing
        }
        self._skip_finished_agents()
        return outcomes

    def _skip_finished_agents(self) -> None:
        env = self.env
        while env.agents and (
            env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
        ):
            # PettingZoo needs a step with None for each agent that is out.
            env.step(None)


def _maker(kind: str, world: Any, args: dict[str, Any]) -> Any:
    if not isinstance(world, str):
        return (lambda: world(**args)) if args else world
    pettingzoo = import_extra("pettingzoo", f"playing {world!r}", "rolltree[worlds]")
    known = {"aec": pettingzoo.aec_registry, "parallel": pettingzoo.parallel_registry}[kind]
    if world not in known:
        raise ConfigError(
            f"PettingZoo has no {kind} world {world!r}.{did_you_mean(world, known)} Import the "
            "package that registers it first."
        )
    return lambda: pettingzoo.make(kind, world, **args)


def board_text(number: Callable[[int, int], int] | None = None) -> LayerMask:
    """Return a `to_text` for boards given as two planes, mine and theirs, `[rows, columns, 2]`.

    `number(row, column)` is the action that takes a cell, shown in free cells; without it, free
    cells are dots. The moves that `action_mask` allows are listed.

    Example: tic-tac-toe is `board_text(lambda row, column: 3 * row + column)`, connect four is
    `board_text()`.
    """

    def to_text(observation: Any, agent: str) -> str:
        mine, theirs = np.moveaxis(np.asarray(observation["observation"]), -1, 0)[:2]
        rows = [
            " ".join(
                "X"
                if mine[row, column]
                else "O"
                if theirs[row, column]
                else "."
                if number is None
                else str(number(row, column))
                for column in range(mine.shape[1])
            )
            for row in range(mine.shape[0])
        ]
        legal = ", ".join(map(str, np.flatnonzero(observation["action_mask"])))
        board = "\n".join(rows)
        return f"You are X.\n{board}\nLegal moves: {legal or 'none'}"

    return to_text
