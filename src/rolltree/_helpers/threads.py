"""Blocking work in threads, so that the event loop keeps running.

`run_in_thread` gives work its own thread, which ends when the caller no longer waits: if its time
is over or the waiting task is cancelled, `ThreadInterrupt` is raised in the thread, at the next
bytecode of its Python code. Code that hangs inside one C call (a lock, a socket without a timeout,
a long sleep) cannot be stopped from outside: the thread is abandoned, with a warning, and ends when
that call returns. Work that may hang like that belongs in a process (`rolltree._helpers.workers`).
`run_in_pool` is for short work that never needs to be stopped.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_LOGGER = logging.getLogger("rolltree._helpers.threads")
# How long a stopped thread may take to end before it is abandoned.
_GRACE_S = 1.0
_POLL_S = 0.002


class ThreadInterrupt(BaseException):
    """Raised inside a thread whose caller no longer waits. Code should not catch it."""


class _Work(Generic[T]):
    """One function, its thread, and a future in the event loop of its caller."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Held while `ThreadInterrupt` is raised, and while raising it is ruled out for good.
        self._lock = threading.Lock()
        self._is_over = False

    def _run(self) -> None:
        # It may be interrupted while it finishes, and the loop may be closed.
        with suppress(ThreadInterrupt, RuntimeError):
            self._work_and_settle()
        while not self._is_over:
            with suppress(ThreadInterrupt), self._lock:
                self._is_over = True
                # A pending interrupt must not be raised after this, in the thread's own clean-up.
                self._raise_in_thread(None)

    def _work_and_settle(self) -> None:
        try:
            result = self._context.run(self._work)
        except StopIteration as error:
            # A future refuses it, and so its waiter would wait forever.
            lost = RuntimeError("the work raised StopIteration: an iterator had no more items")
            lost.__cause__ = error
            self._settle(self.future.set_exception, lost)
        # Only the main thread gets the user's Ctrl-C, and nobody cancels a thread, so code raised
        # these itself. In the waiting task they would end the program.
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            lost = RuntimeError(f"the code raised {type(error).__name__} itself")
            lost.__cause__ = error
            self._settle(self.future.set_exception, lost)
        except BaseException as error:  # noqa: BLE001  it is raised in the waiting task
            self._settle(self.future.set_exception, error)
        else:
            self._settle(self.future.set_result, result)

    def _settle(self, settle: Callable[[Any], None], value: Any) -> None:
        def set_if_waiting() -> None:
            if not self.future.done():
                settle(value)

        self._loop.call_soon_threadsafe(set_if_waiting)

    def _raise_in_thread(self, kind: type[BaseException] | None) -> None:
        """Have an exception raised in the thread; None cancels a pending one."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self.thread.ident or 0), None if kind is None else ctypes.py_object(kind)
        )

    async def stop(self) -> None:
        """Raise `ThreadInterrupt` in the thread until it ends, or abandon it after a second."""
        until = time.monotonic() + _GRACE_S
        while self.thread.is_alive() and time.monotonic() < until:
            with self._lock:
                if not self._is_over:
                    # Repeatedly, since code may catch it with a bare `except`.
                    self._raise_in_thread(ThreadInterrupt)
            await asyncio.sleep(_POLL_S)
        if self.thread.is_alive():
            _LOGGER.warning(
                "%s hangs in a call that Python cannot interrupt; its thread ends when that call "
                "does. Give the call its own time limit, or run it in a process.",
                self.thread.name,
            )


async def run_in_thread(
    work: Callable[[], T], *, limit_s: float | None = None, name: str = "rolltree-work"
) -> T:
    """Run `work` in a thread with this task's context variables, and return its result.

    Raises:
        TimeoutError: it took longer than `limit_s`; the thread was stopped.
        RuntimeError: it raised StopIteration, which becomes this error in a coroutine, too.
    """
    running = _Work(work, name)
    running.thread.start()
    try:
        async with asyncio.timeout(limit_s):
            return await running.future
    except (TimeoutError, asyncio.CancelledError):
        await running.stop()
        raise


async def run_in_pool(work: Callable[[], T]) -> T:
    """Run `work` in a thread of a shared pool with this task's context, and return its result.

    Cancellation does not stop the work.
    """
    # Not asyncio's pool, where slow functions of users could delay the writing of files.
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_pool(), context.run, work)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    num_threads = min(16, (os.cpu_count() or 1) + 4)
    return ThreadPoolExecutor(num_threads, thread_name_prefix="rolltree-pool")
