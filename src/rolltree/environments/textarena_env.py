"""`TextArenaEnv`: games of the `textarena` package, played by the model against fixed opponents.

It knows TextArena's interface: players, observations as lists of messages, rewards at the end. It
leaves out self-play and training several players at once.

TextArena's games draw from Python's global `random`. Here every game has its own stream, put in
place while one of its steps runs, so that rollouts side by side are reproducible.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rolltree.environments.worlds import WorldEnv, WorldStep
from rolltree.errors import ConfigError, did_you_mean
from rolltree.types import State

Opponent = Callable[[str], str]
_RANDOM = threading.Lock()


@dataclass(slots=True)
class _Game:
    """One game: the library's object, its stream of random numbers, what player 0 has read.

    Many games restate all that was said; the model has read it, so it is told what is new.
    """

    env: Any
    stream: tuple[Any, ...]
    read: str = ""


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
        opponents: Sequence[Opponent] = (),
        game_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._make = _maker(game, game_args or {})
        self._opponents = list(opponents)
        if isinstance(game, str):
            settings.setdefault("env_id", game)
        super().__init__(**settings)

    def open_world(self, state: State) -> tuple[Any, str]:
        """Start a game with this rollout's seed, up to player 0's first turn."""
        seed = state["seed"] % 2**31
        env = self._make()
        game = _Game(env, random.Random(seed).getstate())
        num_players = 1 + len(self._opponents)
        with _own_random(game):
            env.reset(num_players=num_players, seed=seed)
            step = self._until_our_turn(game)
        return game, step.observation

    def step_world(self, world: Any, text: str, state: State) -> WorldStep:
        """Play a move, and the opponents' moves after it."""
        with _own_random(world):
            done, info = world.env.step(action=text)
            return self._ended(world, info) if done else self._until_our_turn(world)

    def _until_our_turn(self, game: _Game) -> WorldStep:
        while True:
            player, observation = game.env.get_observation()
            text = _text(observation)
            if player == 0:
                said = text.removeprefix(game.read).strip()
                game.read = text
                return WorldStep(said)
            done, info = game.env.step(action=self._opponents[player - 1](text))
            if done:
                return self._ended(game, info)

    def _ended(self, game: _Game, info: Any) -> WorldStep:
        rewards, notes = game.env.close()
        last = dict((notes or {}).get(0) or {})
        said = str((info or {}).get("reason") or last.get("reason") or "The game is over.")
        return WorldStep(
            said,
            reward=float((rewards or {}).get(0, 0.0)),
            terminated=True,
            info={key: value for key, value in last.items() if key != "role"},
        )


class _own_random:  # noqa: N801  (a context manager that reads as a phrase)
    """`with _own_random(game):` lets the global `random` be the game's own stream."""

    def __init__(self, game: _Game) -> None:
        self._game = game

    def __enter__(self) -> None:
        _RANDOM.acquire()
        self._before = random.getstate()
        random.setstate(self._game.stream)

    def __exit__(self, *exc: object) -> None:
        self._game.stream = random.getstate()
        random.setstate(self._before)
        _RANDOM.release()


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message) for _, message, *_ in observation)


def _maker(game: str | Callable[..., Any], args: dict[str, Any]) -> Callable[[], Any]:
    if not isinstance(game, str):
        return lambda: game(**args)
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            f"playing {game!r} needs the `textarena` package. Install it with "
            "`pip install rolltree[worlds]`."
        ) from error
    if game not in ENV_REGISTRY:
        raise ConfigError(f"TextArena has no game {game!r}.{did_you_mean(game, ENV_REGISTRY)}")
    return lambda: textarena.make(game, **args)
