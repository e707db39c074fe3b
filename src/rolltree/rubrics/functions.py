"""Reward functions: what they ask for by argument name, and how they are called.

They have no time limit: a function that never returns keeps its rollout waiting.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from rolltree.errors import ConfigError, did_you_mean, record_error
from rolltree.threads import run_in_pool
from rolltree.types import ErrorRecord, State

RewardFunc: TypeAlias = Callable[..., Any]
Kind: TypeAlias = Literal["rollout", "step", "group"]
F = TypeVar("F", bound=RewardFunc)
T = TypeVar("T")

_PLURALS: dict[str, str] = {
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "tasks": "task",
    "infos": "info",
    "example_ids": "example_id",
}
_EMPTY: dict[str, Any] = {"answer": "", "info": {}, "task": "default", "completion": None}


def run_inline(func: F) -> F:
    """Mark a synchronous reward function as quick enough for the event loop.

    Without the mark it runs in a thread, so that a slow one does not hold up every other rollout.
    Use it for functions that take well under a tenth of a millisecond and wait for nothing.
    """
    func.__rolltree_run_inline__ = True  # type: ignore[attr-defined]
    return func


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of a rubric, with its signature read once.

    `names` are the arguments it can be given by name, `optional` those with a default, and
    `takes_all` says that it has `**kwargs`.
    """

    func: RewardFunc
    name: str
    weight: float
    kind: Kind
    names: tuple[str, ...]
    optional: frozenset[str]
    takes_all: bool
    is_async: bool
    runs_inline: bool

    @classmethod
    def of(
        cls, func: RewardFunc, weight: float, *, kind: Kind | None = None, runs_inline: bool = False
    ) -> RewardFunction:
        """Read `func`. Without a `kind` it is a group function iff it asks for plurals.

        Raises:
            ConfigError: an argument can only be given by position, or the weight is not finite.
        """
        plain = inspect.unwrap(func)
        while isinstance(plain, functools.partial):
            plain = plain.func
        name = str(getattr(func, "__name__", getattr(plain, "__name__", type(func).__name__)))
        if not math.isfinite(weight):
            raise ConfigError(f"the weight of {name!r} is {weight}; it must be finite.")
        parameters = inspect.signature(func).parameters.values()
        bad = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if bad:
            raise ConfigError(
                f"reward function {name!r} takes {bad[0]!r} by position only; a rubric passes "
                "arguments by name. Remove the `/` from its signature."
            )
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = tuple(p.name for p in by_name)
        if kind is None:
            kind = "group" if _asks_for_group(func, names) else "rollout"
        target = plain if inspect.isroutine(plain) else getattr(plain, "__call__", plain)  # noqa: B004
        return cls(
            func=func,
            name=name,
            weight=float(weight),
            kind=kind,
            names=names,
            optional=frozenset(p.name for p in by_name if p.default is not p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
            is_async=inspect.iscoroutinefunction(target),
            runs_inline=runs_inline or getattr(func, "__rolltree_run_inline__", False),
        )

    def arguments(self, known: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to call with: from `known`, then from the state's keys.

        Raises:
            ConfigError: an argument without a default is in neither.
        """
        arguments: dict[str, Any] = {}
        for name in self.names:
            if name in known:
                arguments[name] = known[name]
            elif name in state:
                arguments[name] = state[name]
            elif name not in self.optional:
                raise ConfigError(
                    f"reward function {self.name!r} asks for {name!r}, which neither the rollout "
                    f"nor the rubric has.{did_you_mean(name, {*known, *state})}"
                )
        return {**known, **arguments} if self.takes_all else arguments


def rollout_arguments(state: State, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rollout's reward functions can ask for, beside the state's own keys."""
    known = dict(objects)
    known["prompt"] = state["prompt"]
    known["state"] = state
    known["example_id"] = state["example_id"]
    for name, empty in _EMPTY.items():
        value = state.get(name)
        known[name] = empty if value is None else value
    return known


def group_arguments(states: Sequence[State], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group's reward functions can ask for: one list entry per rollout."""
    known: dict[str, Any] = {**objects, "states": list(states)}
    rows = [rollout_arguments(state, {}) for state in states]
    for plural, singular in _PLURALS.items():
        known[plural] = [row[singular] for row in rows]
    return known


def without_semaphore(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scoring method that can be called without `score_sem`, for any arguments.

    Rubrics written for verifiers 0.1.8 override `score_rollout(self, state, score_sem)` and enter
    the semaphore; they get one without a limit.
    """
    parameter = inspect.signature(method).parameters.get("score_sem")
    if parameter is None or not inspect.iscoroutinefunction(method):
        return method

    @functools.wraps(method)
    async def scored(self: Any, *given: Any, **named: Any) -> Any:
        if len(given) > 1:
            given, named["score_sem"] = given[:1], given[1]
        named["score_sem"] = named.get("score_sem") or nullcontext()
        return await method(self, *given, **named)

    return scored


FunctionCall: TypeAlias = tuple[RewardFunction, Mapping[str, Any], Mapping[str, Any]]
"""A function, the arguments known by name, and the state to look up the rest in."""
RawScore: TypeAlias = "Any | ErrorRecord"


async def call_all(calls: Sequence[FunctionCall]) -> list[RawScore]:
    """Call the functions; each outcome is what one returned, or an `ErrorRecord`.

    Asynchronous functions run side by side, those marked `run_inline` in this task, and the other
    synchronous ones one after another in a thread.
    """
    outcomes: list[RawScore] = [None] * len(calls)
    waiting: list[tuple[int, Awaitable[RawScore]]] = []
    blocking: list[int] = []
    for index, call in enumerate(calls):
        function = call[0]
        if function.is_async:
            waiting.append((index, _call_async(call)))
        elif function.runs_inline:
            outcomes[index] = await _settle(_call(call))
        else:
            blocking.append(index)
    if blocking:
        results = await run_in_pool(lambda: [_call(calls[index]) for index in blocking])
        for index, outcome in zip(blocking, results, strict=True):
            outcomes[index] = await _settle(outcome)
    if waiting:
        for (index, _), outcome in zip(
            waiting, await asyncio.gather(*(task for _, task in waiting)), strict=True
        ):
            outcomes[index] = outcome
    return outcomes


def as_number(value: Any) -> float:
    """Return a score as a float.

    Raises:
        ValueError: it is not a finite number. A function that returns None has scored nothing.
    """
    if isinstance(value, str) or value is None:
        raise ValueError(f"a reward function returned {value!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("a reward function returned an integer beyond all floats") from None
    if not math.isfinite(number):
        raise ValueError(f"a reward function returned {number}; rewards must be finite")
    return number


def _call(call: FunctionCall) -> RawScore:
    function, known, state = call
    try:
        return function.func(**function.arguments(known, state))
    except Exception as error:  # noqa: BLE001  a failed score is data
        return record_error(error, "scoring")


async def _call_async(call: FunctionCall) -> RawScore:
    return await _settle(_call(call))


async def _settle(outcome: RawScore) -> RawScore:
    """Await what a plain function returned when it is awaitable (a lambda around a coroutine)."""
    if not inspect.isawaitable(outcome):
        return outcome
    try:
        return await outcome
    except Exception as error:  # noqa: BLE001  a failed score is data
        return record_error(error, "scoring")


def _asks_for_group(func: RewardFunc, names: Iterable[str]) -> bool:
    if any(name in _PLURALS or name == "states" for name in names):
        return True
    returned = getattr(func, "__annotations__", {}).get("return")
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", str(returned))
    return text.partition("[")[0].rpartition(".")[2] in ("list", "List")
