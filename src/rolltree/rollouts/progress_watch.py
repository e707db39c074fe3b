"""Watches for rollouts that make no progress, which `stalls.py` names.

It only reports. A thread looks at the rollouts in flight a few times a minute, so that it sees also
an event loop that is blocked, and turns cost nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rolltree.inference.deadline import Clock
from rolltree.values.types import RolloutRequest

if TYPE_CHECKING:
    from rolltree.rollouts.stalls import Stalls

STALL_S = 60.0
"""Seconds without progress after which rollouts are named."""
_LINGER_S = 0.2
"""How long the thread stays when no rollout is left, as between rollouts that follow each other."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A rollout in flight; `clock` is that of its current attempt."""

    request: RolloutRequest
    task: asyncio.Task[Any] | None
    since_s: float
    clock: Clock | None = None
    mark: object = None
    wait: tuple[str, str] | None = None
    warned_s: float = 0.0


class ProgressWatch:
    """Watches the rollouts of one engine.

    Args:
        notify: gets the notices, in a thread.
        stall_s: seconds without progress. More if rollouts of this engine went on after longer.
    """

    def __init__(self, notify: Callable[[str], None], stall_s: float = STALL_S) -> None:
        self.notify, self.stall_s = notify, stall_s
        self._rollouts: dict[InFlight, None] = {}
        self._lock = threading.Lock()  # guards the thread's start and end
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._looped_s = 0.0

    @contextmanager
    def over(self, request: RolloutRequest) -> Iterator[InFlight]:
        """Watch a rollout of the current task until the block ends."""
        flight = InFlight(request, asyncio.current_task(), time.monotonic())
        self._rollouts[flight] = None
        loop = asyncio.get_running_loop()
        if self._thread is None or loop is not self._loop:
            self._start(loop)
        try:
            yield flight
        finally:
            del self._rollouts[flight]
            if not self._rollouts:
                self._idle.set()

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loop, self._loop_thread = loop, threading.get_ident()
            self._looped()
            if self._thread is None:
                watching = threading.Thread(target=self._run, name="rolltree-watch", daemon=True)
                self._thread = watching
                watching.start()

    def _looped(self) -> None:
        self._looped_s = time.monotonic()

    def _run(self) -> None:
        pause_s = self.stall_s / 4
        while True:
            began_s = time.monotonic()
            was_idle = self._idle.wait(pause_s)
            if was_idle:
                time.sleep(_LINGER_S)
            with self._lock:
                # In this order, since a rollout may begin at any time: it starts a thread if it
                # finds none.
                self._thread = None
                if not self._rollouts:
                    return
                self._thread = threading.current_thread()
                self._idle.clear()
            if was_idle:  # the event loop ran, and those in flight have just begun
                self._looped()
                continue
            now_s = time.monotonic()
            gap_s = now_s - began_s - pause_s
            # Whatever it is, a notice is not worth the end of the watch.
            with suppress(Exception):
                if gap_s > pause_s:  # this process was stopped, or the machine slept
                    self._looped_s += gap_s
                    self._stalls.forgive(gap_s)
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        assert self._loop is not None
        blocked_s = now_s - self._looped_s
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._looped)
        self._stalls.look(now_s, blocked_s, self._loop_thread)

    @cached_property
    def _stalls(self) -> Stalls:
        from rolltree.rollouts.stalls import Stalls

        return Stalls(self.notify, self.stall_s, self._rollouts)
