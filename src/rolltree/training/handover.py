"""Weights change while generation goes on: only the writing is exclusive with the engine.

Gradients read the weights, and so does the engine; both may run at once. The optimizer writes them
in place, so from its first write until the new version is published no engine step may run: a token
sampled meanwhile would come from weights that never existed, half old and half new. The trainer
runs in a thread of its own; this is how it asks the event loop for the pause. It knows an engine's
`paused` and `publish`. It leaves out what is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Any


class Handover:
    """The pause around one optimizer step. Made in the event loop, opened in the trainer's thread.

    Args:
        paused: returns the context in which the engine runs no step.
        publish: awaited inside it once the weights are written.

    When the block fails, the weights may be half written: nothing is published and the engine stays
    paused until `aclose`, so that whoever cancels the rollouts does it before they go on.
    `paused_s` is how long the engine stood still.
    """

    def __init__(
        self,
        paused: Callable[[], AbstractAsyncContextManager[None]],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._paused, self._publish = paused, publish
        self._loop = asyncio.get_running_loop()
        self._stack = AsyncExitStack()
        self.paused_s = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Open the pause, let the block write, publish, close the pause."""
        self._wait(self._stack.enter_async_context(self._paused()))
        began = time.perf_counter()
        yield
        self._wait(self._publish())
        self._wait(self._stack.aclose())
        self.paused_s = time.perf_counter() - began

    async def aclose(self) -> None:
        """Let the engine go on after a failure."""
        await self._stack.aclose()

    def _wait(self, awaitable: Awaitable[Any]) -> None:
        async def run() -> None:
            await awaitable

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()
