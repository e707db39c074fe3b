"""Opening and closing a world, whatever happens in between.

It knows that worlds have `close`. It leaves out what is done in a world.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rolltree.worlds import drive


@asynccontextmanager
async def opened(make: Callable[[], Any] | None) -> AsyncIterator[Any]:
    """Make a world, and close it when the block ends, fails or is cancelled; None for no world.

    Making runs in the event loop; what blocks in it belongs into the world's `reset`.
    """
    world = None if make is None else make()
    try:
        yield world
    finally:
        if world is not None:
            await _uninterrupted(drive(world.close))


async def _uninterrupted(work: Any) -> None:
    """Await `work` to its end, also while this task is being cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001  it is raised below, once the task is done
            break
    if cancelled is not None:
        raise cancelled
    task.result()
