"""Reward functions: the arguments they ask for by name, and how they are called.

They have no time limit: a function that never returns keeps its rollout waiting.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, TypeAlias, TypeVar

from rolltree._helpers.tasks import contained, run_each, undo_own_cancellation
from rolltree._helpers.threads import run_in_pool
from rolltree.values.errors import ConfigError, Escaped, did_you_mean, record_error
from rolltree.values.types import ErrorRecord, State

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
_EMPTY: dict[str, Any] = {"info": {}, "task": "default", "completion": None}


def run_inline(func: F) -> F:
    """Mark a synchronous reward function as quick enough for the event loop.

    Without the mark it runs in a thread, so that a slow one does not hold up every other rollout.
    Use it for functions that take well under a tenth of a millisecond and never block.
    """
    func.__rolltree_run_inline__ = True  # type: ignore[attr-defined]
    return func


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of a rubric, with its signature read once."""

    func: RewardFunc
    name: str
    weight: float
    kind: Kind
    # The parameters that can be passed by name, and those that have a default.
    names: tuple[str, ...]
    optional: frozenset[str]
    # Whether it has `**kwargs`.
    takes_all: bool
    is_async: bool
    # Whether it runs in the event loop instead of in a thread.
    runs_inline: bool

    @classmethod
    def of(
        cls, func: RewardFunc, weight: float, *, kind: Kind | None = None, runs_inline: bool = False
    ) -> RewardFunction:
        """Read `func`; without a `kind`, asking for plurals or returning a list means a group.

        Raises:
            ConfigError: an argument is positional-only, or the weight is not finite.
        """
        name, plain = function_name(func), _unwrapped(func)
        # A NaN would turn every reward into NaN, long after the mistake.
        try:
            is_finite = math.isfinite(weight)
        except (TypeError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ConfigError(f"the weight of {name!r} is {weight!r}; it must be a finite number.")
        parameters = inspect.signature(func).parameters.values()
        bad = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
        if bad:
            raise ConfigError(
                f"reward function {name!r} has the positional-only argument {bad[0]!r}; a rubric "
                "passes arguments by name. Remove the `/` from its signature."
            )
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        names = tuple(p.name for p in by_name)
        if kind is None:
            kind = "group" if _asks_for_group(func, names) else "rollout"
        # A callable object is asynchronous if its `__call__` is.
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
        """Return the arguments of a call: from `known`, else from the state's keys.

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
                raise self._missing(name, known, state)
        return {**known, **arguments} if self.takes_all else arguments

    def _missing(
        self, name: str, known: Mapping[str, Any], state: Mapping[str, Any]
    ) -> ConfigError:
        # Without the function's name, which `scoring_error` puts in front.
        asked = f"it asks for {name!r}"
        if name in ("answer", "answers") and not {"answer", "answers"} & known.keys():
            row = known["state"] if "state" in known else known["states"][0]
            columns = ", ".join(map(repr, row.get("input") or row))
            return ConfigError(
                f"{asked}, but the row has no column 'answer', so there is nothing to compare "
                f"with. The columns are {columns}: name the right one (answer_key=...), or ask for "
                "one of them by name. A default (answer=None) makes the argument optional."
            )
        error = ConfigError(
            f"{asked}, which neither the rollout nor the rubric has."
            f"{did_you_mean(name, {*known, *state})}"
        )
        # The environment may write it into the state only after some answers.
        error.kind = "episode"
        return error


def function_name(func: RewardFunc) -> str:
    """Return a function's name; for a partial without one, that of the function it wraps."""
    called = getattr(_unwrapped(func), "__name__", type(func).__name__)
    return str(getattr(func, "__name__", called))


def scoring_error(func: RewardFunc, name: str, error: BaseException) -> ErrorRecord:
    """Return the record of a reward function's error; its message names function, file and line."""
    error = error.raised if isinstance(error, Escaped) else error
    record = record_error(error, "scoring")
    # In front, because long messages are cut at the end.
    where = f"reward function {name!r}{_place(func, error)}"
    return replace(record, message=f"{where}: {record.message}")


def _place(func: RewardFunc, error: BaseException) -> str:
    """Return the file and line where a function raised, or else where it begins."""
    plain = _unwrapped(func)
    code = getattr(plain, "__code__", getattr(type(plain).__call__, "__code__", None))
    if code is None:
        return ""
    # The function's own line, not that of a library it called: the author has to look there.
    lines = [at for frame, at in walk_tb(error.__traceback__) if frame.f_code is code]
    path = Path(code.co_filename)
    # A file outside the working directory keeps its absolute path.
    with suppress(OSError, ValueError):
        path = path.relative_to(Path.cwd())
    return f", {path}:{(lines or [code.co_firstlineno])[-1]}"


def _unwrapped(func: Any) -> Any:
    plain = inspect.unwrap(func)
    while isinstance(plain, functools.partial):
        plain = plain.func
    return plain


def rollout_arguments(state: State, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a rollout's reward functions can ask for, besides the state's keys.

    The row's columns are among them, unless the state has a key of that name. If the row has no
    answer, there is no argument `answer`.
    """
    known = {k: v for k, v in state.columns.items() if not dict.__contains__(state, k)}
    # Later ones win: the row's columns, then the rubric's objects, then what every rollout has.
    known.update(objects)
    known["prompt"] = state.prompt
    known["state"] = state
    known["example_id"] = state.example_id
    for name, empty in _EMPTY.items():
        value = state.get(name)
        known[name] = empty if value is None else value
    # Left out instead of None, so that a function that asks for a missing answer fails and does
    # not compare with None.
    if state.get("answer") is not None:
        known["answer"] = state["answer"]
    return known


def group_arguments(states: Sequence[State], objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group's reward functions can ask for: one list entry per rollout.

    A column keeps its name, and a row without it has None there.
    """
    rows = [rollout_arguments(state, {}) for state in states]
    columns = {name for state in states for name in state.columns} & {k for r in rows for k in r}
    known: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
    known |= {**objects, "states": list(states)}
    for plural, singular in _PLURALS.items():
        if all(singular in row for row in rows):
            known[plural] = [row[singular] for row in rows]
    return known


def without_semaphore(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scoring method that can be called with or without `score_sem`.

    Rubrics written for verifiers 0.1.8 override `score_rollout(self, state, score_sem)` and enter
    the semaphore; they get a `nullcontext`.
    """
    parameter = inspect.signature(method).parameters.get("score_sem")
    # Only overrides with verifiers' signature need it.
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

    Asynchronous functions run concurrently, those marked `run_inline` in this task, and the other
    synchronous ones one after another in a thread.
    """
    outcomes: list[RawScore] = [None] * len(calls)
    waiting: list[tuple[int, Coroutine[Any, Any, RawScore]]] = []
    blocking: list[int] = []
    for index, call in enumerate(calls):
        function = call[0]
        if function.is_async:
            waiting.append((index, _settle(_call(call), call)))
        elif function.runs_inline:
            outcomes[index] = _call(call)
        else:
            blocking.append(index)
    # All of them in one thread, one after another: a thread per function would cost more than most
    # functions do, and they may share objects that are not thread-safe.
    if blocking:
        results = await run_in_pool(lambda: [_call(calls[index]) for index in blocking])
        for index, outcome in zip(blocking, results, strict=True):
            outcomes[index] = outcome
    # A plain function may return an awaitable (a lambda around a coroutine).
    waiting += [
        (index, _settle(outcome, calls[index]))
        for index, outcome in enumerate(outcomes)
        if inspect.isawaitable(outcome)
    ]
    # Each in a task of its own, so that one that cancels its task costs itself only.
    found = await run_each(work for _, work in waiting) if waiting else ()
    for (index, _), outcome in zip(waiting, found, strict=True):
        if isinstance(outcome, Exception):
            outcome = _failure(outcome, calls[index])
        outcomes[index] = outcome
    await undo_own_cancellation()
    return outcomes


def _call(call: FunctionCall) -> RawScore:
    function, known, state = call
    try:
        with contained():
            return function.func(**function.arguments(known, state))
    except Exception as error:  # noqa: BLE001  a failed score is data
        return _failure(error, call)


def _failure(error: Exception, call: FunctionCall) -> ErrorRecord:
    """Return a function's error; if a rollout has no model call, the error says so."""
    function, known, _ = call
    record = scoring_error(function.func, function.name, error)
    states = known["states"] if "states" in known else [known["state"]]
    empty = next((state for state in states if not state.get("trajectory")), None)
    # A function that indexes an empty completion raises an IndexError that says nothing about
    # the cause.
    if empty is None or isinstance(error, ConfigError):
        return record
    kind, why = record.type, f"ended before its first model call ({empty.get('stop_condition')})"
    is_long = empty.get("prompt_too_long")
    if is_long:
        kind, why = "PromptTooLong", "does not fit the model's context window"
        if empty.get("overlong_prompt"):
            why += f" ({empty['overlong_prompt']})"
    subject, hint = ("the prompt", ", or shorten the prompt") if is_long else ("the rollout", "")
    return replace(
        record,
        type=kind,
        message=f"{subject} of example {empty.get('example_id')} {why}, so the model never "
        f"answered and there is no completion: {record.type}: {record.message}. Let the function "
        f"score an empty completion{hint}.",
    )


async def _settle(outcome: RawScore, call: FunctionCall) -> RawScore:
    """Await what a function returned, if it is awaitable."""
    if not inspect.isawaitable(outcome):
        return outcome
    try:
        with contained():
            return await outcome
    except Exception as error:  # noqa: BLE001  a failed score is data
        return _failure(error, call)


def _asks_for_group(func: RewardFunc, names: Iterable[str]) -> bool:
    if any(name in _PLURALS or name == "states" for name in names):
        return True
    returned = getattr(func, "__annotations__", {}).get("return")
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", str(returned))
    return text.partition("[")[0].rpartition(".")[2] in ("list", "List")
