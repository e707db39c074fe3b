"""Calling tools: in the event loop, in a thread or in a process, each with a time limit.

Asynchronous tools run concurrently in the event loop. Synchronous ones run in a thread, in the
order of the calls; `run_inline` keeps a quick one in the loop, and `in_process` moves one that may
hang to a worker process. When the time of a call is over, or the task that waits for
it is cancelled, its task, thread or process ends (`rolltree._helpers.threads` says which threads
cannot).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import msgspec

from rolltree._helpers.tasks import contained, wait_shielded
from rolltree._helpers.threads import run_in_thread
from rolltree._helpers.workers import WorkerCallError, WorkerDied, WorkerPool
from rolltree.environments.tools.tool import Tool, ToolUnavailable, result_text, text_for_model
from rolltree.values.errors import ConfigError, Escaped, message_of, record_error
from rolltree.values.steps import ToolAnswer, ToolRequest
from rolltree.values.types import ErrorRecord

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")
_GRACE_S = 1.0


class ToolTimeLimit(Exception):
    """A tool exceeded its time limit; the model is shown the message."""


class ToolProcessError(Exception):
    """A tool in a process raised, or its process died; the model is shown the message."""


class ToolQuit(Exception):
    """A tool tried to end the program, or cancelled itself; the model is shown the message."""


def is_plain(tool: Tool) -> bool:
    """Whether calls of the tool in one message run one after another: it is synchronous."""
    return not (tool.is_async or _has_process(tool))


def _has_process(tool: Tool) -> bool:
    return getattr(tool.func, "__rolltree_process__", False)


async def call_function(
    tool: Tool, arguments: Mapping[str, Any], *, limit_s: float | None = None
) -> Any:
    """Return what the tool's function returns.

    Raises:
        ToolTimeLimit: it took longer than `limit_s` and was stopped.
        ToolQuit: it called `exit()`, or cancelled itself.
        Exception: whatever the function raises.
    """

    def work() -> Any:
        with _quits(tool):
            return tool.func(**arguments)

    began = time.monotonic()
    if _has_process(tool):
        result: Any = call_in_process(tool.func, arguments)
    elif tool.is_async or getattr(tool.func, "__rolltree_run_inline__", False):
        result = work()
    else:
        try:
            result = await run_in_thread(work, limit_s=limit_s, name=f"rolltree-tool-{tool.name}")
        except TimeoutError as error:
            if limit_s is None or time.monotonic() - began < limit_s:
                # A timeout inside the tool.
                raise
            raise _late(tool, limit_s) from error
    if not inspect.isawaitable(result):
        return result
    # A plain function may return something to await; both parts share one limit.
    left_s = None if limit_s is None else max(limit_s - (time.monotonic() - began), 0.0)
    return await _limited(tool, result, limit_s, left_s)


async def answer_of(
    request: ToolRequest,
    result: Awaitable[Any],
    error_formatter: Callable[[Exception], str] = str,
) -> ToolAnswer:
    """Return the answer of a call: the result as text, or the error as text for the model.

    A result that is a `ToolAnswer` is kept; its duration is filled in.

    Raises:
        ToolUnavailable: the tool cannot be called at all.
    """
    began = time.monotonic()
    error: ErrorRecord | None = None
    try:
        with contained():
            value = await result
        text = "" if isinstance(value, ToolAnswer) else text_for_model(result_text(value))
    except ToolUnavailable:
        raise
    except Exception as raised:  # noqa: BLE001  the model is told; the trace is kept
        told = raised
        if isinstance(raised, Escaped):
            is_exit = isinstance(raised.raised, SystemExit)
            told = ToolQuit(f"{request.name} {'called exit()' if is_exit else f'raised {raised}'}.")
        value, error = None, record_error(told, "environment")
        # `str` of some errors raises.
        text = message_of(told) if error_formatter is str else error_formatter(told)
        text = text_for_model(text)
    duration_s = time.monotonic() - began
    if isinstance(value, ToolAnswer):
        return replace(value, text=text_for_model(value.text), duration_s=duration_s)
    return ToolAnswer(request.call_id, request.name, text, error, duration_s)


async def run_all(
    items: Sequence[T],
    in_order: Callable[[T], bool],
    run: Callable[[T], Awaitable[R]],
) -> list[R]:
    """Return `run(item)` for each item: concurrently, and then in order for those that need it.

    The first error cancels the others and is raised.
    """
    # Synchronous tools may share state, so they keep the order of the model's calls.
    free = [index for index, item in enumerate(items) if not in_order(item)]
    found = await side_by_side([run(items[index]) for index in free])
    done = dict(zip(free, found, strict=True))
    for index, item in enumerate(items):
        if index not in done:
            done[index] = await run(item)
    return [done[index] for index in range(len(items))]


async def side_by_side(jobs: Sequence[Awaitable[R]]) -> list[R]:
    """Return each job's result, in order; the first failure cancels the others and is raised."""
    # Not a TaskGroup: after a failure, Python 3.11's leaves the calling task marked as cancelled,
    # and a worker of the rollout engine would end the run.
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        cancelled = await wait_shielded(asyncio.gather(*tasks, return_exceptions=True))
        if cancelled is not None:
            raise cancelled from None
        raise


async def _limited(
    tool: Tool, result: Awaitable[Any], limit_s: float | None, left_s: float | None
) -> Any:
    """Await `result` in its own task, which is cancelled when the caller stops waiting."""
    # In its own task, because a tool may catch the cancellation: the caller goes on anyway.
    task = asyncio.ensure_future(_guarded(tool, result))
    try:
        await asyncio.wait({task}, timeout=left_s)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if task.cancelled():
        raise ToolQuit(f"{tool.name} cancelled itself.")
    if task.done():
        return task.result()
    await _cancel(task)
    assert limit_s is not None
    raise _late(tool, limit_s)


async def _guarded(tool: Tool, result: Awaitable[Any]) -> Any:
    with _quits(tool):
        return await result


@contextmanager
def _quits(tool: Tool) -> Iterator[None]:
    """Raise `ToolQuit` for what a tool raises to get past `except Exception`."""
    try:
        with contained():
            yield
    except Escaped as error:
        is_exit = isinstance(error.raised, SystemExit)
        what = "tried to end the program" if is_exit else f"raised {error}"
        raise ToolQuit(f"{tool.name} {what}.") from error.raised


async def _cancel(task: asyncio.Future[Any]) -> None:
    # The task gets a second to end; one that does not is left behind, since waiting longer would
    # cost the episode's time.
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)
    if task.done() and not task.cancelled():
        # It was late anyway; asyncio must not report its exception as never retrieved.
        task.exception()


def _late(tool: Tool, limit_s: float) -> ToolTimeLimit:
    return ToolTimeLimit(f"{tool.name} took longer than {limit_s:g} s and was stopped.")


# Tools in worker processes


_pool = WorkerPool(
    "rolltree.environments.tools.run:_call_by_name", max_idle=os.cpu_count() or 1, inherit_env=True
)


def in_process(func: F) -> F:
    """Mark a tool to be called in a worker process, which is killed when its time is over.

    The process inherits the environment and is used for later calls, unless a call leaves threads
    or processes behind. It protects the run from a tool that hangs, not the machine from the tool
    (`rolltree.sandbox` does). Arguments are sent as JSON, and the result comes back as text.

    Raises:
        ConfigError: another process could not import the function.
    """
    module, name = getattr(func, "__module__", ""), getattr(func, "__qualname__", "")
    if module in ("", "__main__") or "<" in name:
        raise ConfigError(
            f"tool {name!r} cannot be called in another process: it is defined in "
            f"{module or 'no module'}, where that process would not find it. Define it at the top "
            "of a module that can be imported."
        )
    func.__rolltree_process__ = True  # type: ignore[attr-defined]
    return func


async def call_in_process(func: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return the text of what `func(**arguments)` returns in a worker process.

    When the waiting task is cancelled, the process and all its children are killed.

    Raises:
        ToolProcessError: the function raised, or the process died.
    """
    order = {
        "path": sys.path,
        "module": func.__module__,
        "name": func.__qualname__,
        "arguments": msgspec.to_builtins(dict(arguments), enc_hook=_builtins),
    }
    try:
        return str(await _pool.call_async(order))
    except WorkerDied as error:
        what = f"{func.__name__} ended its process (exit status {error.status}). {error.output}"
        raise ToolProcessError(what.strip()) from None
    except WorkerCallError as error:
        raised = ToolProcessError(str(error))
        raised.add_note(error.traceback)
        raise raised from None


def _call_by_name(order: dict[str, Any]) -> str:
    """Make one call, in the worker process."""
    # The worker may have started with a different path.
    sys.path[:] = order["path"]
    module = importlib.import_module(order["module"])
    func: Any = reduce(getattr, order["name"].split("."), module)
    result = func(**Tool.of(func).read_arguments(order["arguments"]))

    async def settled() -> Any:
        return await result

    return result_text(asyncio.run(settled()) if inspect.isawaitable(result) else result)


def _builtins(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{value!r} has no JSON form")
