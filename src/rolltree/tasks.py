"""Cancellation of asyncio tasks: work that must be finished all the same.

`outlast` and `uninterrupted` wait for what must not be left half done, however often the task is
cancelled. `being_cancelled` tells a cancellation of this task from a `CancelledError` that user
code raised itself, for example by awaiting a task that it cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def being_cancelled() -> bool:
    """Whether the current task has been cancelled and has not ended yet."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def outlast(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `work` is done, however often this task is cancelled; return the cancellation.

    None when there was none. What `work` returned or raised is left to the caller.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns, after its end also where this task is cancelled meanwhile.

    Raises:
        asyncio.CancelledError: this task was cancelled, before or meanwhile; what `work` raised is
            the cause, and does not take the place of the cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled = await outlast(task)
    failure = None if task.cancelled() else task.exception()
    if cancelled is None and failure is not None and being_cancelled():
        cancelled = asyncio.CancelledError()
    if cancelled is not None:
        raise cancelled from failure
    return task.result()


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end: in this thread, or in another when this one has a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="rolltree-sync") as pool:
        return pool.submit(asyncio.run, work).result()
