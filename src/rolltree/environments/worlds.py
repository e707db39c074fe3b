"""`WorldEnv` and its adapters: one agent that plays a world by text, one world per rollout.

A `WorldEnv` is a `ProtocolEnvironment` with one agent. Use other protocols for worlds with several
model-driven players and for agents with tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rolltree.agents import Agent
from rolltree.environments.protocol_env import MakeWorld, ProtocolEnvironment
from rolltree.errors import ConfigError
from rolltree.parsers.actions import ActionParser, as_text
from rolltree.protocols import SingleAgentProtocol
from rolltree.threads import run_in_thread
from rolltree.types import RolloutInput
from rolltree.worlds import GymWorld, TextArenaWorld, action_reader
from rolltree.worlds.gym import gym_maker
from rolltree.worlds.interface import Adapter
from rolltree.worlds.textarena_game import game_maker

_NO_LIMIT = 2**31


class WorldEnv(ProtocolEnvironment):
    """The model plays a world: what it says is the next action, at once.

    The last turn counts, and the end of the game costs no further call. The first observation ends
    the prompt, the last one the completion. A step's reward is the world's; the rollout's reward is
    their sum, unless a rubric with functions says otherwise. `state["world_info"]` is what the
    world's last step said.

    Args:
        world: from a row to a new `rolltree.worlds.World`, seeded with `state["seed"]` and closed
            after the rollout.
        max_turns: most model calls; a rollout that reaches it without an end is truncated for
            "max_steps". -1: no limit.
        action_parser: from an answer to the action; the answer itself when left out.
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
            # A new agent per episode, since many run at once. A cut answer still goes to the world:
            # whether it is a move is the parser's to say.
            lambda: Agent(parser=action_parser, reject_incomplete_completions=False),
            max_steps=max_turns if max_turns > 0 else _NO_LIMIT,
        )
        super().__init__(protocol, world, **settings)


class GymEnv(WorldEnv):
    """Play any `gymnasium.Env` that can be played by text, as `rolltree.worlds.GymWorld` reads it.

    A text that is not an action is told to the model, costs a turn and changes nothing in the
    world.

    Args:
        world: a Gymnasium id, or a function that returns a new `gymnasium.Env`.
        to_action: from text to an action.
        to_text: from an observation to text, or "render".
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        in_thread: run the world in a thread, so that a slow one does not block other rollouts.
            False for quick ones, and for those that are bound to one thread.
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
        # Made once here, because a world that does not exist, or whose actions text cannot express,
        # should fail now and not in every rollout.
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

    The rollout's reward is what the game gives player 0 at its end. An illegal move is the game's
    to judge.

    Args:
        game: a TextArena id, such as "GuessTheNumber-v0", or a function that returns a new game.
        opponents: one function from an observation to an action per further player.
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


def _maker(in_thread: bool, make: Callable[[], Adapter]) -> MakeWorld:
    """Return the function from a row to a world; a slow one is made and played in threads."""

    async def make_world(row: RolloutInput) -> Adapter:
        world = await run_in_thread(make, name="rolltree-world") if in_thread else make()
        world.in_thread = in_thread
        return world

    return make_world
