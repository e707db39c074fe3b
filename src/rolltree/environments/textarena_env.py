"""`TextArenaEnv`: games of the `textarena` package as an environment, one game per rollout.

It joins `rolltree.worlds.TextArenaWorld` and `WorldEnv`. It leaves out self-play and training
several players at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rolltree.environments.worlds import WorldEnv
from rolltree.steps import StepOutcome
from rolltree.types import State
from rolltree.worlds import TextArenaWorld
from rolltree.worlds.textarena_game import game_maker


class TextArenaEnv(WorldEnv):
    """Play a TextArena game as player 0.

    The rollout's reward is what the game gives player 0 at its end. An illegal move is the game's
    to judge. What the game says about its end is in `state["world_info"]`.

    Args:
        game: a TextArena id, such as "GuessTheNumber-v0", or a function that returns a new game.
        opponents: one function from an observation to an action per further player.
        game_args: arguments of `textarena.make`, or of the function.
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
        **settings: Any,
    ) -> None:
        self._make = game_maker(game, game_args or {})
        self._opponents = list(opponents)
        if isinstance(game, str):
            settings.setdefault("env_id", game)
        super().__init__(**settings)

    def open_world(self, state: State) -> tuple[Any, str]:
        """Start a game with this rollout's seed, up to player 0's first turn."""
        world = TextArenaWorld(self._make, opponents=self._opponents)
        return world, world.reset(seed=state["seed"])[0]

    def step_world(self, world: Any, text: str, state: State) -> StepOutcome:
        """Play a move, and the opponents' moves after it."""
        outcome: StepOutcome = world.step(text)
        return outcome
