"""The lifecycle of an environment: `@stop`, `@cleanup`, `@teardown`, and failures as data.

Order of marked methods: higher priority first, then base classes before derived ones, and in a
class the order of definition. A method that overrides a marked one is marked too, whether it
repeats the decorator or not; a class that sets the name to None removes it.

Environments with a `@teardown` are closed at exit and on SIGTERM, unless the program handles that
signal itself. Signal handlers can only be set in the main thread: for an environment built in
another thread this happens when the main thread first plays a rollout.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from rolltree._helpers.tasks import Terminated
from rolltree.inference.client import may_follow
from rolltree.values.errors import ModelError, record_error
from rolltree.values.state import OF_ENVIRONMENT
from rolltree.values.types import ErrorRecord, State, TruncationReason

if TYPE_CHECKING:
    from rolltree.environments.environment import Environment

Role: TypeAlias = Literal["stop", "cleanup", "teardown"]
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rolltree_mark__"


@dataclass(frozen=True, slots=True)
class Mark:
    """The mark that a decorator left on a method."""

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
    that a game won on its last turn counts as won.
    """
    return _mark(func, Mark("stop", priority, truncates))


@overload
def cleanup(func: F) -> F: ...
@overload
def cleanup(*, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Mark `method(self, state)` to run once after each rollout.

    It runs before scoring, whether the rollout ended, failed, was cancelled or ran out of time.
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


def mark_of(method: object) -> Mark | None:
    """Return the mark that a decorator left on a method; None if there is none."""
    mark = getattr(method, _MARK, None)
    return mark if isinstance(mark, Mark) else None


@functools.cache
def discover(cls: type) -> dict[Role, tuple[tuple[str, Mark], ...]]:
    """Return the marked methods of a class by role, as (name, mark), in the order to call them."""
    found: dict[str, Mark] = {}
    # Base classes first, so that an override replaces the mark of what it overrides.
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            mark = mark_of(value)
            if mark is not None:
                found[name] = mark
            # `time_limit_reached = None` in a class removes an inherited condition.
            elif value is None:
                found.pop(name, None)
    ordered = sorted(found.items(), key=lambda item: -item[1].priority)
    return {
        role: tuple(item for item in ordered if item[1].role == role)
        for role in ("stop", "cleanup", "teardown")
    }


logger = logging.getLogger("rolltree.environments")


_open: dict[int, Environment] = {}


def register(environment: Environment) -> None:
    """Close `environment` when the process ends, unless it was closed before."""
    # Only with the first environment: importing rolltree must not change anything in a program.
    if not _open:
        atexit.register(close_all)
    _open[id(environment)] = environment
    watch()


def watch() -> None:
    """Handle SIGTERM if an environment is open and no handler is set. Only in the main thread."""
    if not _open or threading.current_thread() is not threading.main_thread():
        return
    # A handler that the program has set must stay.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # By default SIGTERM ends Python without `atexit`; a SystemExit runs `finally` blocks and
        # closes the open environments.
        signal.signal(signal.SIGTERM, _exit_on_signal)


def forget(environment: Environment) -> None:
    """Remove a closed environment."""
    _open.pop(id(environment), None)


def close_all() -> None:
    """Close every registered environment, even if closing one of them fails."""
    # A copy, because closing one removes it.
    for environment in list(_open.values()):
        forget(environment)
        try:
            asyncio.run(environment.aclose())
        except Exception:
            # Logged; the other environments must still be closed.
            logger.exception("the teardown of %s failed", type(environment).__name__)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise Terminated(128 + signum)


Phase: TypeAlias = Literal["setup", "model", "environment"]
_PHASE = "rolltree_phase"


class in_phase:  # noqa: N801  (a context manager that reads as a phrase)
    """`with in_phase("model"):` marks an exception that leaves the block with this phase."""

    __slots__ = ("phase",)

    def __init__(self, phase: Phase) -> None:
        self.phase: Phase = phase

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The mark of the innermost block stays: it is the most precise.
        if error is not None and not hasattr(error, _PHASE):
            setattr(error, _PHASE, self.phase)


def failure_of(error: Exception) -> ErrorRecord:
    """Return an exception as data. Without a mark, its phase is "environment"."""
    if isinstance(error, ModelError):
        return record_error(error, "model")
    phase: Phase = getattr(error, _PHASE, "environment")
    return record_error(error, phase)


def is_scored(error: Exception) -> bool:
    """Whether a rollout that this failure ends after a model call is scored nevertheless."""
    is_model = not isinstance(error, ModelError) and failure_of(error).phase == "model"
    return may_follow(error) and not is_model


def end_raised(state: State, error: Exception) -> None:
    """Mark a rollout as ended by its environment's own code, which raised after an answer."""
    note_raised(state, failure_of(error))
    state.truncated, state.truncation_reason = True, TruncationReason.ENV.value
    state.stop_condition = "environment_raised"


def note_raised(state: State, error: ErrorRecord) -> None:
    """Keep the error of an environment's own code in a state that is scored nevertheless."""
    state["environment_errors"] = {OF_ENVIRONMENT: error.as_dict()}
