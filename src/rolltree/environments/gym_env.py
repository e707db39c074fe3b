"""`GymEnv`: any `gymnasium.Env` that can be played by text.

It knows Gymnasium's interface: `reset(seed=)`, five values from `step`, spaces. It leaves out
vector environments and rendering. Needs the `gymnasium` package only to make a world by its id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rolltree.environments.worlds import WorldEnv, WorldStep
from rolltree.errors import ConfigError, did_you_mean
from rolltree.types import State

BAD_ACTION = "bad_action"


class GymEnv(WorldEnv):
    """Play a Gymnasium world.

    What the model says becomes an action by `to_action(text)`; a `ValueError` from it is told to
    the model, costs a turn and changes nothing in the world. Without `to_action`, a `Text` space is
    given the text itself, and a `Discrete` space the number of the last of `action_names` in the
    text, or the last integer when there are no names.

    An observation becomes text by `to_text(observation)`; without it, strings stay as they are and
    everything else is an error.

    Args:
        world: a Gymnasium id, or a function that returns a new `gymnasium.Env`.
        to_action: from text to an action.
        to_text: from an observation to text.
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        settings: `WorldEnv`'s.

    Raises:
        ConfigError: there is no such id, or the action space needs `to_action`.
    """

    def __init__(
        self,
        world: str | Callable[..., Any],
        *,
        to_action: Callable[[str], Any] | None = None,
        to_text: Callable[[Any], str] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._make = _maker(world, world_args or {})
        probe = self._make()
        try:
            space = probe.action_space
        finally:
            probe.close()
        self._to_action = to_action or _default_action(space, tuple(action_names))
        self._to_text = to_text or _plain
        if isinstance(world, str):
            settings.setdefault("env_id", world)
        super().__init__(**settings)

    def open_world(self, state: State) -> tuple[Any, str]:
        """Make and reset a world; Gymnasium seeds are 31 bits."""
        world = self._make()
        observation, _ = world.reset(seed=state["seed"] % 2**31)
        return world, self._to_text(observation)

    def step_world(self, world: Any, text: str, state: State) -> WorldStep:
        """Step the world, or tell the model why its text is no action."""
        try:
            action = self._to_action(text)
        except ValueError as error:
            return WorldStep(f"That is no action: {error}", info={BAD_ACTION: str(error)})
        observation, reward, terminated, truncated, info = world.step(action)
        return WorldStep(
            self._to_text(observation), float(reward), bool(terminated), bool(truncated), info
        )

    def close_world(self, world: Any) -> None:
        """Close the world."""
        world.close()


def _maker(world: str | Callable[..., Any], args: dict[str, Any]) -> Callable[[], Any]:
    if not isinstance(world, str):
        return lambda: world(**args)
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"making {world!r} by its id needs the `gymnasium` package. Install it with "
            "`pip install rolltree[envs]`."
        ) from error
    if ":" not in world and world not in gymnasium.registry:
        raise ConfigError(
            f"Gymnasium has no world {world!r}.{_nearest(world, gymnasium.registry)} Import the "
            "package that registers it first, or write 'package:id'."
        )
    return lambda: gymnasium.make(world, **args)


def _nearest(name: str, known: Any) -> str:
    hint = did_you_mean(name, known)
    return hint if "Did you mean" in hint else ""


def _default_action(space: Any, names: tuple[str, ...]) -> Callable[[str], Any]:
    kind = type(space).__name__
    make = _ACTIONS.get(kind)
    if make is None:
        raise ConfigError(
            f"the actions of this world are a {kind}, and how text becomes one is not known. Pass "
            "to_action=..., a function from text to an action."
        )
    return make(space, names)


def _text_action(space: Any, names: tuple[str, ...]) -> Callable[[str], str]:
    def to_action(text: str) -> str:
        if text not in space:
            raise ValueError(
                f"it must have {space.min_length} to {space.max_length} characters of the world's "
                "character set"
            )
        return text

    return to_action


def _discrete_action(space: Any, names: tuple[str, ...]) -> Callable[[str], int]:
    if names and len(names) != int(space.n):
        raise ConfigError(
            f"there are {len(names)} action names and {space.n} actions; an action would have "
            "another's name. Pass one name per action, in order."
        )
    first = int(space.start)
    numbers = {name.lower(): first + number for number, name in enumerate(names)}
    pattern = re.compile(
        "|".join(rf"\b{re.escape(name)}\b" for name in sorted(numbers, key=len, reverse=True))
        or r"-?\d+"
    )

    def to_action(text: str) -> int:
        found = pattern.findall(text.lower())
        if not found:
            what = ", ".join(names) if names else "an integer"
            raise ValueError(f"say one of: {what}" if names else f"say {what}")
        action = numbers[found[-1]] if names else int(found[-1])
        if action not in range(first, first + int(space.n)):
            raise ValueError(f"actions are {first} to {first + int(space.n) - 1}")
        return action

    return to_action


_ACTIONS: dict[str, Callable[[Any, tuple[str, ...]], Callable[[str], Any]]] = {
    "Text": _text_action,
    "Discrete": _discrete_action,
}


def _plain(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    raise ConfigError(
        f"the world's observation is a {type(observation).__name__}, not text. Pass to_text=..., a "
        "function from an observation to the text that the model reads."
    )
