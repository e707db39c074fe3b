"""Names rollouts that make no progress: which ones, for how long, and what they wait for.

What a rollout waits for is read from its coroutines, and only once it has waited for long.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rolltree.rollouts.progress_watch import InFlight
from rolltree.values.types import RolloutRequest

_MODEL = "an answer of the model"
_PHASES = {
    "setup_state": "setup_state",
    "env_response": "env_response",
    "call_tool": "a tool",
    "_Watch.wait_for": "the agent's program",
    "score_episode": "a reward function",
    "score_group": "a reward function",
}
"""What is waited for, by the name or qualified name of a coroutine; the innermost one counts."""
_NUM_NAMED = 3
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class Stalls:
    """What a `ProgressWatch` knows of the rollouts that it has looked at."""

    def __init__(
        self, notify: Callable[[str], None], stall_s: float, rollouts: Collection[InFlight]
    ) -> None:
        self.notify, self.stall_s, self._rollouts = notify, stall_s, rollouts
        self._longest_s: defaultdict[str, float] = defaultdict(float)
        self._quiet_until_s: defaultdict[str, float] = defaultdict(float)
        self._blocked_warned_s = 0.0

    def look(self, now_s: float, blocked_s: float, loop_thread: int) -> None:
        """Look at all rollouts; the event loop of `loop_thread` last ran `blocked_s` ago."""
        if blocked_s > self.stall_s / 2:
            self.forgive(self.stall_s / 4)
            self._warn_blocked(blocked_s, loop_thread)
            return
        self._blocked_warned_s = 0.0
        waiting = defaultdict[tuple[str, str, str], list[InFlight]](list)
        for flight in list(self._rollouts):
            self._update(flight, now_s)
            waited_s = now_s - flight.since_s
            if flight.wait is None or waited_s < max(2 * flight.warned_s, self.stall_s):
                continue
            if waited_s >= 2 * self._longest_s[flight.wait[0]]:
                waiting[(_part(flight.request), *flight.wait)].append(flight)
        for (part, what, where), flights in waiting.items():
            if now_s >= self._quiet_until_s[what]:
                self._warn(part, what, where, flights, now_s)

    def _update(self, flight: InFlight, now_s: float) -> None:
        """Note what a rollout waits for, and since when."""
        clock = flight.clock
        mark = None if clock is None else (id(clock), clock.num_calls, clock.is_calling)
        waited_s, before = now_s - flight.since_s, flight.wait
        if mark == flight.mark:
            if waited_s < self.stall_s / 2:
                return
            is_calling = clock is not None and clock.is_calling
            flight.wait = (_MODEL, "") if is_calling else _awaited(flight.task)
            if before is None or before[0] == flight.wait[0]:
                return
        if before is not None:
            self._longest_s[before[0]] = max(self._longest_s[before[0]], waited_s)
        flight.mark, flight.since_s, flight.wait, flight.warned_s = mark, now_s, None, 0.0

    def _warn(
        self, part: str, what: str, where: str, flights: list[InFlight], now_s: float
    ) -> None:
        longest_s = max(now_s - flight.since_s for flight in flights)
        for flight in flights:
            flight.warned_s = now_s - flight.since_s
        self._quiet_until_s[what] = now_s + longest_s
        one = len(flights) == 1
        self.notify(
            f"{len(flights)} {'rollout' if one else 'rollouts'} of {part} "
            f"{'has' if one else 'have'} been waiting {longest_s:.0f} s for {what}{where}: "
            f"{_names(flights)}. They are left alone; time limits are set with time_limit_s and "
            "deadline_s."
        )

    def _warn_blocked(self, blocked_s: float, loop_thread: int) -> None:
        if blocked_s < max(self.stall_s, 2 * self._blocked_warned_s):
            return
        where = _blocking(sys._current_frames().get(loop_thread))
        if where is None:
            return
        self._blocked_warned_s = blocked_s
        flights = list(self._rollouts)
        held_up = (
            "the only rollout in flight does not go on"
            if len(flights) == 1
            else f"none of {len(flights)} rollouts in flight goes on"
        )
        self.notify(
            f"{where} has not returned for {blocked_s:.0f} s and blocks the event loop, so "
            f"{held_up} ({_names(flights)}). Make it asynchronous, or call it in a thread."
        )

    def forgive(self, gap_s: float) -> None:
        """Do not count a time in which nothing could run."""
        for flight in list(self._rollouts):
            flight.since_s += gap_s


def _names(flights: list[InFlight]) -> str:
    ids = [flight.request.request_id for flight in flights]
    more = f" and {len(ids) - _NUM_NAMED} more" if len(ids) > _NUM_NAMED else ""
    return f"{', '.join(ids[:_NUM_NAMED])}{more}"


def _part(request: RolloutRequest) -> str:
    step = request.train_step
    return request.phase if step is None else f"step {step}"


def _awaited(task: asyncio.Task[Any] | None) -> tuple[str, str]:
    """Return what a task waits for, and where in the user's code, if it is there."""
    what, where, last = "", "", "something"
    for code, line in _chain(task):
        name = code.co_name
        what = _PHASES.get(name) or _PHASES.get(code.co_qualname) or what
        if _is_users(code.co_filename):
            where = f" ({code.co_qualname}, {Path(code.co_filename).name}:{line})"
        if code.co_filename.startswith(_OWN):
            last = code.co_qualname
    return what or last, where


def _chain(task: asyncio.Task[Any] | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of the coroutines of a task, and of the tasks that it waits for."""
    for _ in range(20):  # tasks could wait for each other
        if task is None:
            return
        coroutine: Any = task.get_coro()
        while coroutine is not None:
            for kind, inner in (("cr", "await"), ("gi", "yieldfrom"), ("ag", "await")):
                code = getattr(coroutine, f"{kind}_code", None)
                if code is not None:
                    frame = getattr(coroutine, f"{kind}_frame")
                    yield code, 0 if frame is None else frame.f_lineno or 0
                    coroutine = getattr(coroutine, f"{kind}_{inner}")
                    break
            else:
                coroutine = None
        waiter: Any = getattr(task, "_fut_waiter", None)
        # `gather` keeps its tasks in a private list; without it, the chain ends there.
        children = getattr(waiter, "_children", None) or [waiter]
        open_tasks = (c for c in children if isinstance(c, asyncio.Task) and not c.done())
        task = next(open_tasks, None)


def _blocking(frame: FrameType | None) -> str | None:
    """Return the user's function in which the event loop is; None if it is elsewhere."""
    found = None
    while frame is not None and frame.f_code.co_qualname != "Handle._run":
        file = frame.f_code.co_filename
        if file.startswith(f"{_OWN}/training"):
            return None  # a step of the optimizer, which may take long
        if found is None and _is_users(file):
            found = f"{frame.f_code.co_qualname} ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return found


def _is_users(file: str) -> bool:
    return not file.startswith((_OWN, "<", *_LIBRARIES))
