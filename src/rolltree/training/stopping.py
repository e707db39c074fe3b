"""SIGTERM as a request: finish what writes weights, save, and end with a status of its own.

It knows asyncio tasks and the signal. It leaves out what is saved, which is the loop's, and
SIGKILL, after which the last checkpoint and the stored rollouts are what there is.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rolltree.errors import Stopped
from rolltree.tasks import outlast

ResultT = TypeVar("ResultT")


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM cancel the current task inside this block, which then raises `Stopped`.

    Use it in the main thread, around `train_async`, which saves when it is cancelled.

    Raises:
        Stopped: SIGTERM came.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    asked: list[int] = []

    def ask() -> None:
        if not asked:  # a second one would interrupt the saving
            asked.append(signal.SIGTERM)
            task.cancel()

    loop.add_signal_handler(signal.SIGTERM, ask)
    try:
        yield
    except asyncio.CancelledError:
        if not asked:
            raise
        task.uncancel()
        raise Stopped(
            "stopped by SIGTERM; what was done is saved. The same command continues the run."
        ) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def to_the_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine to its end, also when the awaiting task is cancelled meanwhile.

    The cancellation is raised afterwards; an error of the coroutine goes first.
    """
    task = asyncio.ensure_future(work)
    cancelled = await outlast(task)
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
