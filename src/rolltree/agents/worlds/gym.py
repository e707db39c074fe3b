"""`GymWorld`: any `gymnasium.Env` as text, and readers that turn text into an action.

Spaces are recognized by the names of their classes, so the `gymnasium` package is needed only to
make a world by its id. Vector environments and images are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from rolltree.agents.worlds.interface import Adapter, Snapshots, bad_action
from rolltree.values.errors import ConfigError, did_you_mean, import_extra
from rolltree.values.seeds import MAX_SEED
from rolltree.values.steps import StepOutcome
from rolltree.values.types import Info

ActionReader: TypeAlias = Callable[[str], Any]

_MAX_DIGITS = 300
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def action_reader(space: Any, names: tuple[str, ...] = ()) -> ActionReader:
    """Return a function that maps text to an action.

    A `Text` space gets the text itself; `Discrete` the last of `names` in the text, or the last
    integer if there are no names; `MultiDiscrete` and `Box` the last numbers, in order.

    Raises:
        ConfigError: there is no reader for this kind of space.
    """
    kind = type(space).__name__
    make = _READERS.get(kind)
    if make is None:
        raise ConfigError(
            f"rolltree has no text reader for this world's {kind} action space. Pass "
            "to_action=..., a function from text to an action."
        )
    if names and kind != "Discrete":
        raise ConfigError(
            f"action_names are for a Discrete space, but this world has a {kind} space, so "
            "the names would do nothing. Leave them out."
        )
    return make(space, names)


def _text(space: Any, names: tuple[str, ...]) -> ActionReader:
    def read(text: str) -> str:
        if text not in space:
            raise ValueError(
                f"it must have {space.min_length} to {space.max_length} characters of the world's "
                "character set"
            )
        return text

    return read


def _discrete(space: Any, names: tuple[str, ...]) -> ActionReader:
    if names and len(names) != int(space.n):
        raise ConfigError(
            f"there are {len(names)} action names and {space.n} actions, so names would be "
            "assigned to the wrong actions. Pass one name per action, in order."
        )
    # The model's numbers are those of the space, which need not begin at 0.
    first = int(space.start)
    numbers = {name.lower(): first + number for number, name in enumerate(names)}
    longest = sorted(numbers, key=len, reverse=True)
    # Whole words only; not by \b, which fails at the end of a name like "+1" or "up!".
    pattern = re.compile(
        "|".join(rf"(?!\B\w){re.escape(name)}(?<!\w\B)" for name in longest) or r"-?\d+"
    )

    def read(text: str) -> int:
        found = pattern.findall(text.lower())
        if not found:
            what = f"one of: {', '.join(names)}" if names else "an integer"
            raise ValueError(f"say {what}")
        # `int` raises for more than 4,300 digits, which a model could write.
        if len(found[-1]) > _MAX_DIGITS:
            raise ValueError(f"actions are {first} to {first + int(space.n) - 1}")
        action = numbers[found[-1]] if names else int(found[-1])
        if action not in range(first, first + int(space.n)):
            raise ValueError(f"actions are {first} to {first + int(space.n) - 1}")
        return action

    return read


def _box(space: Any, names: tuple[str, ...]) -> ActionReader:
    shape = space.shape
    is_whole = np.issubdtype(space.dtype, np.integer)
    limits = np.iinfo(space.dtype) if is_whole else np.finfo(space.dtype)
    # The largest value that can be cast without overflow.
    most = np.nextafter(float(limits.max), 0.0)
    low, high = np.maximum(space.low, -most), np.minimum(space.high, most)

    def read(text: str) -> Any:
        numbers = _last_numbers(text, int(np.prod(shape)))
        values = np.array(numbers, np.float64).reshape(shape)
        bad = (values < low) | (values > high)
        if bad.any():
            at = int(np.flatnonzero(bad.ravel())[0])
            raise ValueError(
                f"number {at + 1} must be from {low.ravel()[at]:g} to {high.ravel()[at]:g}"
            )
        if is_whole and not np.array_equal(values, np.round(values)):
            raise ValueError("the numbers must be whole")
        return values.astype(space.dtype)

    return read


def _multi_discrete(space: Any, names: tuple[str, ...]) -> ActionReader:
    first = np.asarray(getattr(space, "start", 0))

    def read(text: str) -> Any:
        numbers = _last_numbers(text, int(np.prod(space.shape)))
        # Casting a float beyond the integer's range is undefined.
        small = np.clip(np.array(numbers, np.float64), -(2.0**31), 2.0**31)
        action = small.reshape(space.shape).astype(space.dtype)
        if action not in space or not np.array_equal(action.ravel(), numbers):
            highest = (first + space.nvec - 1).ravel().tolist()
            raise ValueError(f"the numbers must be whole, at most {highest}")
        return action

    return read


def _last_numbers(text: str, count: int) -> list[float]:
    found = [float(number) for number in _NUMBER.findall(text)]
    if len(found) < count:
        plural = "numbers" if count > 1 else "number"
        raise ValueError(f"say {count} {plural}")
    # The last ones, since a model thinks aloud before it names its action.
    return found[len(found) - count :]


_READERS: dict[str, Callable[[Any, tuple[str, ...]], ActionReader]] = {
    "Text": _text,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "Box": _box,
}


_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


class GymWorld(Adapter):
    """A Gymnasium world for one agent.

    `to_action`, by default a reader for the action space (`action_reader`), converts a text action;
    if it raises ValueError, the model is told why and the world does not change. An action that
    the agent's parser already converted is passed on unchanged. `to_text` converts an observation;
    without it, only strings are allowed.

    Args:
        world: a Gymnasium id, a world, or a function that returns one.
        to_action: maps text to an action.
        to_text: maps an observation to text; or "render": the world's "ansi" rendering, with
            highlighted cells in brackets (the world needs `render_mode="ansi"`).
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        snapshots: "own", or "deepcopy" for worlds without state outside themselves.
        in_thread: whether its methods block and are called in a thread.

    Raises:
        ConfigError: the id is unknown, or the action space needs `to_action`.
    """

    def __init__(
        self,
        world: Any,
        *,
        to_action: Callable[[str], Any] | None = None,
        to_text: Callable[[Any], str] | Literal["render"] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        snapshots: Snapshots = "own",
        in_thread: bool = True,
    ) -> None:
        super().__init__(
            gym_maker(world, world_args or {}), snapshots=snapshots, in_thread=in_thread
        )
        self._to_action = to_action or action_reader(self.env.action_space, tuple(action_names))
        self._to_text = self._render if to_text == "render" else to_text or plain_text

    def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Begin an episode with `seed` modulo 2**31."""
        observation, info = self.env.reset(seed=None if seed is None else seed % MAX_SEED)
        return self._to_text(observation), info

    def step(self, action: Any) -> StepOutcome:
        """Step the world, or return why the text is not an action."""
        if isinstance(action, str):
            try:
                action = self._to_action(action)
            except ValueError as error:
                return bad_action(error)
        observation, reward, terminated, truncated, info = self.env.step(action)
        return StepOutcome(
            self._to_text(observation), reward, bool(terminated), bool(truncated), info
        )

    def _render(self, observation: Any) -> str:
        text = self.env.render()
        if not isinstance(text, str):
            raise ConfigError(
                f"the world renders as {type(text).__name__}, not as text. Make it with "
                'render_mode="ansi" (world_args={"render_mode": "ansi"}), or pass a function as '
                "to_text."
            )
        return plain_ansi(text)


def gym_maker(world: Any, args: dict[str, Any]) -> Any:
    """Return a function that makes the world; a given world is returned as it is.

    Raises:
        ConfigError: the package is missing, or the id is unknown.
    """
    if not isinstance(world, str):
        return (lambda: world(**args)) if args else world
    gymnasium = import_extra("gymnasium", f"making {world!r} by its id", "rolltree[envs]")
    # For an id with a package, `make` imports that package, which registers the id.
    if ":" not in world and world not in gymnasium.registry:
        raise ConfigError(
            f"Gymnasium has no world {world!r}.{_nearest(world, gymnasium.registry)} Import the "
            "package that registers it first, or write 'package:id'."
        )
    return lambda: gymnasium.make(world, **args)


def plain_text(observation: Any) -> str:
    """Return an observation that is already text.

    Raises:
        ConfigError: it is not text.
    """
    if isinstance(observation, str):
        return observation
    raise ConfigError(
        f"the world's observation is a {type(observation).__name__}, not text. Pass to_text=..., a "
        "function from an observation to the text that the model reads."
    )


def plain_ansi(text: str) -> str:
    r"""Return ANSI text without colour codes, with coloured parts in brackets.

    >>> plain_ansi("\x1b[41mS\x1b[0mFF")
    '[S]FF'
    """
    last_reset = max(text.rfind("\x1b[m"), text.rfind("\x1b[0m"))
    is_open = False

    def mark(code: re.Match[str]) -> str:
        nonlocal is_open
        if code[1] in ("", "0"):
            was_open, is_open = is_open, False
            return "]" if was_open else ""
        # Highlights that are never reset are ignored, since a bracket that never closes would
        # confuse the model.
        if is_open or code[1][0] in "0;" or code.start() > last_reset:
            return ""
        is_open = True
        return "["

    return _ESCAPE.sub(mark, text).strip("\n")


def _nearest(name: str, known: Any) -> str:
    hint = did_you_mean(name, known)
    return hint if "Did you mean" in hint else ""
