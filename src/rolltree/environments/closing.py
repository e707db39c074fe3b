"""Teardown at the end of the process: which environments still want to be closed.

It knows `atexit` and SIGTERM. It knows nothing about environments beyond their `aclose`. It leaves
out SIGKILL, after which nothing runs.

SIGTERM would end the interpreter without running `atexit`. Where nobody else handles it, it is
turned into `SystemExit(143)`: running rollouts are cancelled, their cleanups run, then this. The
handler can only be set in the main thread: for an environment built elsewhere that is when the
main thread first plays a rollout. A program whose main thread never does is closed at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
import threading
from types import FrameType
from typing import Protocol

logger = logging.getLogger("rolltree.environments")


class Closable(Protocol):
    """Something with a teardown."""

    async def aclose(self) -> None:
        """Run the teardown once."""
        ...


_open: dict[int, Closable] = {}


def register(environment: Closable) -> None:
    """Close `environment` when the process ends, unless it was closed before."""
    if not _open:
        atexit.register(close_all)
    _open[id(environment)] = environment
    watch()


def watch() -> None:
    """Handle SIGTERM, when this is the main thread, something is open and nobody else does."""
    if not _open or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)


def forget(environment: Closable) -> None:
    """Remove a closed environment."""
    _open.pop(id(environment), None)


def close_all() -> None:
    """Close every registered environment; one that fails does not keep the others open."""
    for environment in list(_open.values()):
        forget(environment)
        try:
            asyncio.run(environment.aclose())
        except Exception:  # told; the other environments must be closed
            logger.exception("the teardown of %s failed", type(environment).__name__)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
