"""`@stop`, `@cleanup`, `@teardown`: how an environment declares its lifecycle.

It knows marks on methods and their order. It knows nothing about rollouts; `Environment` calls what
`discover` finds. It leaves out registration with the interpreter's exit (`closing`).

Order: higher priority first; then base classes before derived ones, and in a class the order of
definition. A method that overrides a marked one is marked too, whether it repeats the decorator or
not; a class that sets the name to None removes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, overload

from rolltree.types import TruncationReason

Role: TypeAlias = Literal["stop", "cleanup", "teardown"]
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rolltree_mark__"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a decorator wrote on a method."""

    role: Role
    priority: int = 0
    truncates: TruncationReason | None = None


@overload
def stop(func: F) -> F: ...
@overload
def stop(*, priority: int = 0, truncates: TruncationReason | None = None) -> Callable[[F], F]: ...
def stop(
    func: F | None = None, *, priority: int = 0, truncates: TruncationReason | None = None
) -> F | Callable[[F], F]:
    """Mark `method(self, state) -> bool` as a stop condition.

    The first condition that is true ends the rollout, which is then `terminated`. With `truncates`
    it is `truncated` instead, for that reason: use it for limits, with a negative priority, so
    that a game won on its last turn is won.
    """
    return _mark(func, Mark("stop", priority, truncates))


@overload
def cleanup(func: F) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark `method(self, state)` to run once after each rollout.

    It runs when the rollout ended, failed, was cancelled or ran out of time; before scoring.
    """
    return _mark(func, Mark("cleanup", priority))


@overload
def teardown(func: F) -> F: ...
@overload
def teardown(*, priority: int = 0) -> Callable[[F], F]: ...
def teardown(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark `method(self)` to run once when the environment is closed or the process ends."""
    return _mark(func, Mark("teardown", priority))


def _mark(func: F | None, mark: Mark) -> F | Callable[[F], F]:
    def decorate(target: F) -> F:
        setattr(target, _MARK, mark)
        return target

    return decorate if func is None else decorate(func)


@functools.cache
def discover(cls: type) -> dict[Role, tuple[tuple[str, Mark], ...]]:
    """Return the marked methods of a class by role, as (name, mark), in the order to call them."""
    found: dict[str, Mark] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            mark = getattr(value, _MARK, None)
            if isinstance(mark, Mark):
                found[name] = mark
            elif value is None:
                found.pop(name, None)
    ordered = sorted(found.items(), key=lambda item: -item[1].priority)
    return {
        role: tuple(item for item in ordered if item[1].role == role)
        for role in ("stop", "cleanup", "teardown")
    }
