"""Short blocking work in a shared pool of threads, so that the event loop keeps running."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


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
