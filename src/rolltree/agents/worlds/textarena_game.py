"""`TextArenaWorld`: a game of the `textarena` package, played against fixed opponents.

TextArena's games use Python's global `random`. Here every game has its own random stream, which is
installed while one of its steps runs, so that concurrent games are reproducible.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rolltree.agents.worlds.interface import Adapter, Snapshots
from rolltree.values.errors import ConfigError, did_you_mean, import_extra
from rolltree.values.seeds import MAX_SEED
from rolltree.values.steps import StepOutcome
from rolltree.values.types import Info

Reply = Callable[[str], str]
_RANDOM = threading.Lock()


class TextArenaWorld(Adapter):
    """A TextArena game as player 0 sees it.

    Many games repeat all earlier text; the agent gets only the new part. The game itself judges
    illegal moves. The reward comes at the end.

    Args:
        game: a TextArena id, such as "GuessTheNumber-v0", or a function that returns a new game.
        opponents: for each further player, a function from an observation to an action.
        game_args: arguments of `textarena.make`, or of the function.
        snapshots: "own", or "deepcopy" for games without state outside themselves.
        in_thread: whether its methods block and are called in a thread.

    Raises:
        ConfigError: the package is missing, or does not have this game.
    """

    def __init__(
        self,
        game: str | Callable[..., Any],
        *,
        opponents: Sequence[Reply] = (),
        game_args: dict[str, Any] | None = None,
        snapshots: Snapshots = "own",
        in_thread: bool = True,
    ) -> None:
        super().__init__(
            game_maker(game, game_args or {}), snapshots=snapshots, in_thread=in_thread
        )
        self._opponents = list(opponents)
        self._stream: tuple[Any, ...] = random.Random(0).getstate()
        self._read = ""

    def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Start a game, up to player 0's first turn.

        Raises:
            ConfigError: the game was over before that turn.
        """
        seed = random.randrange(MAX_SEED) if seed is None else seed % MAX_SEED
        self._stream, self._read = random.Random(seed).getstate(), ""
        with self._own_random():
            self.env.reset(num_players=1 + len(self._opponents), seed=seed)
            outcome = self._until_our_turn()
        if outcome.done:
            raise ConfigError(
                f"the game was over before player 0 could move ({outcome.obs}); an opponent ended "
                "it. Pass opponents that play by its rules."
            )
        return outcome.obs, {}

    def step(self, action: str) -> StepOutcome:
        """Play a move, and the opponents' moves after it.

        A text that makes the game raise (a number of 5,000 digits does in some) is an empty move,
        which the game judges by its rules.
        """
        with self._own_random():
            try:
                done, info = self.env.step(action=action)
            except Exception:  # noqa: BLE001  whatever a game does with a text
                done, info = self.env.step(action="")
            return self._ended(info) if done else self._until_our_turn()

    def snapshot(self) -> Any:
        """Return the game's state, with that of its random stream."""
        return super().snapshot(), self._stream, self._read

    def restore(self, saved: Any) -> None:
        """Restore a state."""
        env, self._stream, self._read = saved
        super().restore(env)

    def close(self) -> None:
        """Do nothing: a game closes itself when it ends, and holds no resources."""

    def _until_our_turn(self) -> StepOutcome:
        while True:
            player, observation = self.env.get_observation()
            # Players take turns; the model is player 0, and the opponents move here.
            text = _text(observation)
            if player == 0:
                # The agent has the rest in its history; repeating it would make prompts O(T^2).
                said = text.removeprefix(self._read).strip()
                self._read = text
                return StepOutcome(said)
            done, info = self.env.step(action=self._opponents[player - 1](text))
            if done:
                return self._ended(info)

    def _ended(self, info: Any) -> StepOutcome:
        rewards, notes = self.env.close()
        last = dict((notes or {}).get(0) or {})
        said = str((info or {}).get("reason") or last.get("reason") or "The game is over.")
        return StepOutcome(
            said,
            reward=(rewards or {}).get(0, 0.0),
            terminated=True,
            info={key: value for key, value in last.items() if key != "role"},
        )

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Install the game's random stream as the global `random` inside the block."""
        # One lock for all games, since the stream of the whole process is swapped.
        with _RANDOM:
            before = random.getstate()
            random.setstate(self._stream)
            try:
                yield
            finally:
                # Saved for the game's next step.
                self._stream = random.getstate()
                random.setstate(before)


def game_maker(game: str | Callable[..., Any], args: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a game.

    Raises:
        ConfigError: the package is missing, or does not have this game.
    """
    if not isinstance(game, str):
        return lambda: game(**args)
    textarena = import_extra("textarena", f"playing {game!r}", "rolltree[worlds]")
    known = textarena.envs.registration.ENV_REGISTRY
    if game not in known:
        raise ConfigError(f"TextArena has no game {game!r}.{did_you_mean(game, known)}")
    return lambda: textarena.make(game, **args)


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return "\n".join(str(message) for _, message, *_ in observation)
