"""Opening and closing a world, whatever happens in between.

It knows that worlds have `close`. It leaves out what is done in a world.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rolltree.tasks import uninterrupted
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
            await uninterrupted(drive(world.close))
