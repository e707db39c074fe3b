"""`stop`, `cleanup` and `teardown` as verifiers 0.1.8 has them, and the methods they mark.

A method is marked itself: one that overrides a marked method is not, unless it repeats the
decorator. Higher priority comes first, then the alphabet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rolltree.environments import lifecycle
from rolltree.environments.lifecycle import Role

Method = Callable[..., Any]


def stop(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self, state) -> bool` as a stop condition."""
    return _marked(func, "stop", priority)


def cleanup(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self, state)` to run after each rollout."""
    return _marked(func, "cleanup", priority)


def teardown(func: Method | None = None, *, priority: int = 0) -> Any:
    """Mark `method(self)` to run when the process ends."""
    return _marked(func, "teardown", priority)


def _marked(func: Method | None, role: Role, priority: int) -> Any:
    def decorate(target: Method) -> Any:
        setattr(target, role, True)
        setattr(target, f"{role}_priority", priority)
        return target

    return decorate if func is None else decorate(func)


def marked_methods(environment: object, role: Role) -> list[Method]:
    """Return an environment's methods of one role, in the order in which they are called."""
    found: list[tuple[int, str, Method]] = []
    for _, method in inspect.getmembers(environment, inspect.ismethod):
        mark = lifecycle.mark_of(method)
        if hasattr(method, role):  # also what was marked by hand
            found.append((-getattr(method, f"{role}_priority", 0), method.__name__, method))
        elif mark is not None and mark.role == role:
            found.append((-mark.priority, method.__name__, method))
    return [method for _, _, method in sorted(found, key=lambda item: item[:2])]
