"""From text to an action of a Gymnasium space, one reader per kind of space.

It knows spaces by the name of their class, so that it works without the package. A reader raises
`ValueError` with what to say instead; that is told to the model. It leaves out observations: how
numbers become text is a world's own matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from rolltree.errors import ConfigError

ActionReader: TypeAlias = Callable[[str], Any]

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def action_reader(space: Any, names: tuple[str, ...] = ()) -> ActionReader:
    """Return the function from text to an action of `space`.

    A `Text` space is given the text itself; `Discrete` the last of `names` in the text, or the last
    integer when there are no names; `MultiDiscrete` and `Box` their last numbers, in order.

    Raises:
        ConfigError: how text becomes an action of such a space is not known.
    """
    kind = type(space).__name__
    make = _READERS.get(kind)
    if make is None:
        raise ConfigError(
            f"the actions of this world are a {kind}, and how text becomes one is not known. Pass "
            "to_action=..., a function from text to an action."
        )
    if names and kind != "Discrete":
        raise ConfigError(
            f"action_names are for a Discrete space and the actions of this world are a {kind}, so "
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
            f"there are {len(names)} action names and {space.n} actions; an action would have "
            "another's name. Pass one name per action, in order."
        )
    first = int(space.start)
    numbers = {name.lower(): first + number for number, name in enumerate(names)}
    pattern = re.compile(
        "|".join(rf"\b{re.escape(name)}\b" for name in sorted(numbers, key=len, reverse=True))
        or r"-?\d+"
    )

    def read(text: str) -> int:
        found = pattern.findall(text.lower())
        if not found:
            what = f"one of: {', '.join(names)}" if names else "an integer"
            raise ValueError(f"say {what}")
        action = numbers[found[-1]] if names else int(found[-1])
        if action not in range(first, first + int(space.n)):
            raise ValueError(f"actions are {first} to {first + int(space.n) - 1}")
        return action

    return read


def _box(space: Any, names: tuple[str, ...]) -> ActionReader:
    shape = space.shape
    is_whole = np.issubdtype(space.dtype, np.integer)

    def read(text: str) -> Any:
        numbers = _last_numbers(text, int(np.prod(shape)))
        values = np.array(numbers, np.float64).reshape(shape)
        bad = (values < space.low) | (values > space.high)
        if bad.any():
            at = int(np.flatnonzero(bad.ravel())[0])
            low, high = space.low.ravel()[at], space.high.ravel()[at]
            raise ValueError(f"number {at + 1} must be from {low:g} to {high:g}")
        if is_whole and not np.array_equal(values, np.round(values)):
            raise ValueError("the numbers must be whole")
        return values.astype(space.dtype)

    return read


def _multi_discrete(space: Any, names: tuple[str, ...]) -> ActionReader:
    first = np.asarray(getattr(space, "start", 0))

    def read(text: str) -> Any:
        numbers = _last_numbers(text, int(np.prod(space.shape)))
        action = np.array(numbers, np.float64).reshape(space.shape).astype(space.dtype)
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
    return found[len(found) - count :]


_READERS: dict[str, Callable[[Any, tuple[str, ...]], ActionReader]] = {
    "Text": _text,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "Box": _box,
}
