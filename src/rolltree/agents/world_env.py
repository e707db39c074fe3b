"""`WorldEnv` and its adapters: one agent that plays a world by text, one world per rollout.

A `WorldEnv` is a `ProtocolEnvironment` with one agent. For worlds with several model-driven players
and for agents with tools, use a `ProtocolEnvironment` with a different protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from rolltree._helpers.threads import run_in_thread
from rolltree.agents import Agent
from rolltree.agents.protocol_env import MakeWorld, ProtocolEnvironment
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.agents.worlds import (
    GymWorld,
    OpenEnvWorld,
    TextArenaWorld,
    action_reader,
)
from rolltree.agents.worlds.gym import gym_maker
from rolltree.agents.worlds.interface import Adapter
from rolltree.agents.worlds.open_env import ToAction, ToText, observation_text
from rolltree.agents.worlds.textarena_game import game_maker
from rolltree.environments.parsers.actions import ActionParser, as_text
from rolltree.values.errors import ConfigError
from rolltree.values.types import RolloutInput

_NO_LIMIT = 2**31


class WorldEnv(ProtocolEnvironment):
    """The model plays a world: each of its answers is the next action.

    The last turn counts, and no model call follows the end of the game. The first observation ends
    the prompt, the last one the completion. A step's reward is the world's; the rollout's reward is
    their sum, unless a rubric with functions scores it. `state["world_info"]` is the `info` of the
    world's last step.

    Args:
        world: returns a new `rolltree.agents.worlds.World` for a row; it is seeded with
            `state["seed"]` and closed after the rollout.
        max_turns: maximum number of model calls; a rollout that reaches it unfinished is truncated
            for "max_steps". -1: no limit.
        action_parser: reads the action from an answer; by default the answer is the action.
        settings: `ProtocolEnvironment`'s.
    """

    def __init__(
        self,
        world: MakeWorld,
        *,
        max_turns: int = -1,
        action_parser: ActionParser = as_text,
        **settings: Any,
    ) -> None:
        if max_turns == 0:
            raise ConfigError(
                "max_turns is 0; the model would never be called. Use -1 for no limit."
            )
        self.max_turns = max_turns
        protocol = SingleAgentProtocol(
            # A new agent per episode, since many run at once. An answer that was cut off still goes
            # to the world: the parser decides whether it is a move.
            lambda: Agent(parser=action_parser, reject_incomplete_completions=False),
            max_steps=max_turns if max_turns > 0 else _NO_LIMIT,
        )
        super().__init__(protocol, world, **settings)


class GymEnv(WorldEnv):
    """Play a `gymnasium.Env` by text, through `rolltree.agents.worlds.GymWorld`.

    If an answer is not an action, the model is told; this costs a turn and does not change the
    world.

    Args:
        world: a Gymnasium id, or a function that returns a new `gymnasium.Env`.
        to_action: turns text into an action.
        to_text: turns an observation into text, or "render".
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        in_thread: run the world in a thread, so that a slow one does not block other rollouts.
            False for quick worlds, and for worlds that are bound to one thread.
        settings: `WorldEnv`'s.

    Raises:
        ConfigError: there is no such id, or the action space needs `to_action`.
    """

    def __init__(
        self,
        world: str | Callable[..., Any],
        *,
        to_action: Callable[[str], Any] | None = None,
        to_text: Callable[[Any], str] | Literal["render"] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        in_thread: bool = True,
        **settings: Any,
    ) -> None:
        make = gym_maker(world, world_args or {})
        # Made once here, so that a world that does not exist, or whose actions text cannot express,
        # fails now instead of in every rollout.
        probe = make()
        try:
            reader = to_action or action_reader(probe.action_space, tuple(action_names))
        finally:
            probe.close()
        if isinstance(world, str):
            settings.setdefault("env_id", world)
        self.to_action = reader
        super().__init__(
            _maker(in_thread, lambda: GymWorld(make, to_action=reader, to_text=to_text)), **settings
        )


class TextArenaEnv(WorldEnv):
    """Play a game of the `textarena` package as player 0.

    The rollout's reward is player 0's reward at the end of the game. The game itself deals with
    illegal moves.

    Args:
        game: a TextArena id, such as "GuessTheNumber-v0", or a function that returns a new game.
        opponents: for each further player, a function from an observation to an action.
        game_args: arguments of `textarena.make`, or of the function.
        in_thread: run the game in a thread.
        settings: `WorldEnv`'s.

    Raises:
        ConfigError: the package is missing, or has no such game.
    """

    def __init__(
        self,
        game: str | Callable[..., Any],
        *,
        opponents: Sequence[Callable[[str], str]] = (),
        game_args: dict[str, Any] | None = None,
        in_thread: bool = True,
        **settings: Any,
    ) -> None:
        make = game_maker(game, game_args or {})
        if isinstance(game, str):
            settings.setdefault("env_id", game)
        super().__init__(
            _maker(in_thread, lambda: TextArenaWorld(make, opponents=opponents)), **settings
        )


class OpenEnv(WorldEnv):
    """Play the environment of an OpenEnv server; each rollout has its own session.

    If the server's action schema has a single field, which is text, the model's answer is its
    value; otherwise the answer must be a JSON object of the action's fields. If the server rejects
    an action, the model is told. An action that never ends truncates the rollout. If the server
    dies, the rollout fails with `WorldUnavailable`.

    Args:
        url: the server's address, with http or https.
        max_sessions: how many sessions the server allows; further rollouts wait. None: no limit.
        to_action: turns text into the action's fields; raises ValueError if it holds no action.
        to_text: turns an observation's fields into text; by default the only one, or all as JSON.
        reset_args: arguments of `reset` in addition to the seed; a row's `info["reset"]` adds more.
        headers: sent with every request, such as {"Authorization": "Bearer ..."}; never stored.
        message_limit_s: time limit for one answer of the server.
        settings: `WorldEnv`'s.
    """

    def __init__(
        self,
        url: str,
        *,
        max_sessions: int | None = None,
        to_action: ToAction | None = None,
        to_text: ToText = observation_text,
        reset_args: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        message_limit_s: float = 60.0,
        **settings: Any,
    ) -> None:
        if max_sessions is not None and max_sessions < 1:
            raise ConfigError(
                f"max_sessions is {max_sessions}; no episode could begin. Use 1 or more."
            )

        def make(row: Mapping[str, Any], slot: asyncio.Semaphore | None = None) -> OpenEnvWorld:
            info = row.get("info")
            own = (info.get("reset") if isinstance(info, Mapping) else None) or {}
            return OpenEnvWorld(
                url,
                to_action=to_action,
                to_text=to_text,
                reset_args={**(reset_args or {}), **own},
                headers=headers,
                message_limit_s=message_limit_s,
                slot=slot,
            )

        # A wrong address must raise now instead of in every rollout.
        make({})
        self.max_sessions = max_sessions
        # A semaphore belongs to one event loop.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        settings.setdefault("env_id", "openenv")
        super().__init__(lambda row: make(row, self._slot()), **settings)

    def _slot(self) -> asyncio.Semaphore | None:
        if self.max_sessions is None:
            return None
        loop = asyncio.get_running_loop()
        return self._slots.setdefault(loop, asyncio.Semaphore(self.max_sessions))


def _maker(in_thread: bool, make: Callable[[], Adapter]) -> MakeWorld:
    """Return the function from a row to a world, made and played in threads if `in_thread`."""

    async def make_world(row: RolloutInput) -> Adapter:
        world = await run_in_thread(make, name="rolltree-world") if in_thread else make()
        world.in_thread = in_thread
        return world

    return make_world
