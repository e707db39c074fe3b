"""Asyncio tasks: work that must be finished despite cancellation, and fairness among many tasks.

`wait_shielded` and `run_shielded` wait for work that must not be left half done, however often the
task is cancelled. `being_cancelled` tells a cancellation of this task from a `CancelledError` that
user code raised itself, for example by awaiting a task that it cancelled; `Terminated` tells
SIGTERM from an `exit()` of user code, and `contained` makes that a failure like any other.
`yield_fairly` keeps thousands of tasks that become ready at once from blocking the event loop, and
`ShortCollections` keeps the garbage collector from blocking it. `allow_open_files` raises the limit
on open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import opcode
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from traceback import walk_tb
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from rolltree.values.errors import Escaped

T = TypeVar("T")
ROUND_S = 0.006
"""How long a round of turns may hold an event loop, and so about how long other work waits."""
_YOUNG_BEFORE = (700, 2000)
"""Python's default thresholds of young objects: up to 3.12, and since."""


def being_cancelled() -> bool:
    """Whether the current task has been cancelled and has not ended yet."""
    # A CancelledError alone proves nothing: awaiting a cancelled task raises one, too.
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    own = _OWN.get()
    if own is not None and own.task is task:
        return own.is_cancelled
    return task is not None and task.cancelling() > 0


class OwnTask(Generic[T]):
    """Work in a task of its own, which only who waits for it can cancel.

    What other people's code cancels in it (`current_task().cancel()`, a scope of anyio that it
    opened in one hook and closes in another) is that code's failure: `being_cancelled` is false
    there. With plain tasks it could not be told from the end of the run.
    """

    again_s: ClassVar = 30.0
    """After so many seconds the work is cancelled again, as a loop with a bare `except:` may need.

    What ends the work in `finally` may take as long.
    """

    __slots__ = ("_is_held", "_num_finishing", "is_cancelled", "task")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.is_cancelled = self._is_held = False
        self._num_finishing = 0
        token = _OWN.set(self)
        self.task = asyncio.Task(_all_contained(work), loop=asyncio.get_running_loop())
        _OWN.reset(token)

    async def wait(self) -> T:
        """Wait for the result; a cancellation goes on to the work, and waits for its end.

        Raises:
            asyncio.CancelledError: this task was cancelled meanwhile, or the work cancelled itself.
        """
        cancelled: asyncio.CancelledError | None = None
        loop = asyncio.get_running_loop()
        again: asyncio.TimerHandle | None = None
        while not self.task.done():
            # Not the task itself, which a cancellation would reach at once.
            ended = loop.create_future()
            self.task.add_done_callback(partial(_resolve, ended))
            if cancelled is not None:
                again = loop.call_later(self.again_s, _resolve, ended, None)
            try:
                await ended
                cancels = cancelled is not None
            except asyncio.CancelledError as error:
                cancelled, self.is_cancelled = error, True
                cancels = True
            if again is not None:
                again.cancel()
            if cancels and self._num_finishing:
                self._is_held = True
            elif cancels:
                self.task.cancel()
        if cancelled is not None:
            failure = None if self.task.cancelled() else self.task.exception()
            raise cancelled from failure
        return self.task.result()

    def __enter__(self) -> None:
        """Hold cancellations back until the block ends."""
        self._num_finishing += 1

    def __exit__(self, *_: object) -> None:
        self._num_finishing -= 1
        if self._is_held and not self._num_finishing:
            self._is_held = False
            self.task.cancel()


async def run_each(works: Iterable[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
    """Run other people's code, each in an `OwnTask`; return what each returned or raised.

    Raises:
        asyncio.CancelledError: this task was cancelled; so were they, and they have ended.
    """
    tasks = [OwnTask(work).task for work in works]
    return [
        Escaped(outcome) if isinstance(outcome, asyncio.CancelledError) else outcome
        for outcome in await asyncio.gather(*tasks, return_exceptions=True)
    ]


async def undo_own_cancellation() -> bool:
    """Take back a cancellation of the current `OwnTask` by code in it; whether there was one.

    Call it after other people's code, which may have returned without noticing what it did.
    """
    task, own = asyncio.current_task(), _OWN.get()
    if task is None or not task.cancelling() or own is None or own.task is not task:
        return False
    if own.is_cancelled:
        return False
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)  # where it arrives
    except asyncio.CancelledError:
        if own.is_cancelled:
            raise
    return True


_OWN: ContextVar[OwnTask[Any] | None] = ContextVar("rolltree_own_task", default=None)


async def _all_contained(work: Coroutine[Any, Any, T]) -> T:
    with contained():
        return await work


def _resolve(ended: asyncio.Future[None], _: object) -> None:
    if not ended.done():
        ended.set_result(None)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if this task is cancelled meanwhile.

    In an `OwnTask` it runs in the same task as what it ends, as scopes of anyio demand.
    """
    own = _OWN.get()
    if own is None or own.task is not asyncio.current_task():
        return await run_shielded(work)
    with own:
        return await work


class Terminated(SystemExit):
    """SIGTERM ends the process. A plain SystemExit of an environment's code is a failure."""


class contained:  # noqa: N801  (a context manager that reads as an adjective)
    """`with contained():` turns what other people's code raises into an `Exception` (`Escaped`).

    `exit()`, `raise KeyboardInterrupt` and classes of the author's own would end every rollout. The
    end of this task or of the program passes: its cancellation, SIGTERM and the user's Ctrl-C.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception) and not _must_pass(error):
            raise Escaped(error) from error


def _must_pass(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(
            not isinstance(part, Exception) and _must_pass(part) for part in error.exceptions
        )
    if isinstance(error, KeyboardInterrupt):
        return _is_of_user(error)
    if isinstance(error, GeneratorExit):
        return not _was_raised(error)  # Python throws it into a coroutine that is closed
    if type(error) is asyncio.CancelledError:
        # Code that awaits a task that it cancelled itself has failed.
        return being_cancelled()
    return isinstance(error, Terminated | asyncio.CancelledError)


def _is_of_user(error: KeyboardInterrupt) -> bool:
    """Whether Ctrl-C raised it, which reaches the main thread only, and not a `raise` of code."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, partial):
        handler = handler.func
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if not frames:
        return False  # code made it, say for a group, and nothing raised it
    # asyncio's handler raises it with a statement, too.
    if any(frame.f_code is getattr(handler, "__code__", None) for frame in frames):
        return True
    # Python's own handler is written in C: what ran when the signal came looks as if it had raised.
    return not _was_raised(error)


def _was_raised(error: BaseException) -> bool:
    """Whether a `raise` statement raised it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


_RAISE = opcode.opmap["RAISE_VARARGS"]


def contain_tasks() -> None:
    """From now on, contain what tasks raise that begin in this loop inside of an `OwnTask`.

    asyncio hands a SystemExit not only to who waits for the task but to the whole loop, so `exit()`
    in what an author passes to `gather` or `wait_for` would end every rollout.
    """
    loop = asyncio.get_running_loop()
    before: Any = loop.get_task_factory()
    if hasattr(before, _CONTAINS):
        return

    def make(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> Any:
        if _OWN.get() is not None and asyncio.iscoroutine(work):
            work = _Contained(work)
        if before is None:
            return asyncio.Task(work, loop=loop, **settings)
        return before(loop, work, **settings)

    setattr(make, _CONTAINS, True)
    loop.set_task_factory(make)


_CONTAINS = "__rolltree_contains__"


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine of which every step is `contained`."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any) -> Any:
        with contained():
            return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        with contained():
            return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return (yield from self._work.__await__())

    def __getattr__(self, name: str) -> Any:  # its frame and its names, for asyncio's messages
        return getattr(self._work, name)


async def wait_shielded(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `work` is done, however often this task is cancelled; return the cancellation.

    None if it was not cancelled. The result or error of `work` is left to the caller.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if this task is cancelled meanwhile, and return its result.

    Raises:
        asyncio.CancelledError: this task was cancelled, before or meanwhile; an error of `work` is
            its cause, and does not replace the cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled = await wait_shielded(task)
    failure = None if task.cancelled() else task.exception()
    if cancelled is None and failure is not None and being_cancelled():
        cancelled = asyncio.CancelledError()
    if cancelled is not None:
        raise cancelled from failure
    return task.result()


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread, or in another one if this one runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="rolltree-sync") as pool:
        return pool.submit(asyncio.run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Do what `asyncio.run` does; Ctrl-C after the last step of `work` raises KeyboardInterrupt.

    At that moment asyncio's own clean-up would fail on the loop that Ctrl-C stopped.
    """
    try:
        return asyncio.run(work)
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


async def yield_fairly() -> None:
    """Give other tasks their turn: return at once, unless the time of this round is used up.

    Await it before work that many tasks may begin together, such as handling an answer or starting
    an episode. Tasks continue in the order in which they came, as many in a round of the event loop
    as take about `ROUND_S`, and everything else in the loop has its turn between two rounds.
    """
    loop = asyncio.get_running_loop()
    rounds = _ROUNDS.get(loop)
    if rounds is None:
        rounds = _ROUNDS[loop] = _Rounds()
    if not rounds.has_room(loop):
        await rounds.wait(loop)


class _Rounds:
    """The turns of one event loop: the waiting tasks, and how many were woken for this round."""

    __slots__ = ("__weakref__", "_began", "_is_open", "_num_woken", "_size", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_open = False
        self._began = 0.0
        self._num_woken = 0
        self._size = 8

    def has_room(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether no task waits and the round has time left."""
        if not self._is_open:
            self._is_open, self._began, self._num_woken = True, loop.time(), 0
            loop.call_soon(self._next, loop)
        return not self._waiting and loop.time() - self._began < ROUND_S

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a later round."""
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake as many tasks as take about `ROUND_S`, judging by the last round, and run again."""
        now = loop.time()
        took, self._began = now - self._began, now
        if self._num_woken:
            fitting = int(self._num_woken * ROUND_S / max(took, 1e-6))
            self._size = max(1, min(fitting, 2 * self._num_woken + 8))
        self._num_woken = 0
        self._is_open = bool(self._waiting)
        while self._waiting and self._num_woken < self._size:
            turn = self._waiting.popleft()
            if not turn.done():  # it may have been cancelled
                turn.set_result(None)
                self._num_woken += 1
        if self._is_open:
            loop.call_soon(self._next, loop)


_ROUNDS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Rounds] = WeakKeyDictionary()


_MOST_OPEN_FILES = 65_536


def allow_open_files() -> None:
    """Raise this process's soft limit on open files as far as its user may, to 65,536 at most.

    Shells set 1,024 (256 on macOS) for programs that call `select`, which rolltree does not.
    Hundreds of concurrent calls, or of programs with five pipes each, need more. Sandboxed code has
    its own limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than its own maximum, which is not the hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def peak_rss_bytes() -> int:
    """Return the largest resident memory this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes; Linux, KiB.
    return peak if sys.platform == "darwin" else peak * 1024


class ShortCollections:
    """`with ShortCollections(num):` keeps each garbage collection in the block short.

    Python collects young objects when allocations exceed deallocations by a threshold. A turn frees
    about as many objects as it leaves, so with thousands of rollouts in flight, tens of thousands
    of young objects pile up, and a collection that traverses them holds the loop for 100 ms. Here
    young objects are collected every `YOUNG_S`, and survivors of one collection every other time.

    A full collection traverses every object, and Python repeats it as their number grows. Here it
    runs only when ten times `num` rollouts (at least 10,000) have ended, which `ended` counts, or
    the process has grown by `GROWTH_BYTES`; it finds the garbage in cycles that lived longer than a
    moment. Objects that exist at the start are excluded until the end (`gc.freeze`).

    It does nothing for fewer than `FEW` rollouts at a time, if the program has frozen objects or
    set thresholds itself, and if another one is active. It needs a running loop.
    """

    FEW: ClassVar[int] = 32
    YOUNG_S: ClassVar[float] = 0.010
    THRESHOLDS: ClassVar[tuple[int, int, int]] = (3000, 1, 1_000_000)
    GROWTH_BYTES: ClassVar[int] = 1024**3
    _is_used: ClassVar[bool] = False

    def __init__(self, num: int) -> None:
        self._num = num
        self._pause = 10 * max(num, 1000)
        self._num_ended = 0
        self._generation = 0
        self._peak_bytes = 0
        self._is_active = False

    def __enter__(self) -> ShortCollections:
        self._thresholds = gc.get_threshold()
        is_usual = self._thresholds[0] in _YOUNG_BEFORE and not gc.get_freeze_count()
        is_free = not ShortCollections._is_used and is_usual
        if self._num >= self.FEW and is_free:
            self._is_active = ShortCollections._is_used = True
            gc.set_threshold(*self.THRESHOLDS)
            gc.freeze()
            self._peak_bytes = peak_rss_bytes()
            self._collect(asyncio.get_running_loop())
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_active:
            self._timer.cancel()
            gc.freeze()  # sets Python's counts to zero: else a full collection comes at once
            gc.set_threshold(*self._thresholds)
            gc.unfreeze()
            self._is_active = ShortCollections._is_used = False

    def ended(self, num: int) -> None:
        """Count rollouts that have ended."""
        self._num_ended += num
        if self._is_active and self._num_ended >= self._pause:
            gc.collect()
            self._num_ended = 0

    def _collect(self, loop: asyncio.AbstractEventLoop) -> None:
        peak_bytes = peak_rss_bytes()
        if peak_bytes - self._peak_bytes > self.GROWTH_BYTES:
            gc.collect()
            self._peak_bytes = peak_bytes
        else:
            gc.collect(self._generation)
            self._generation = 1 - self._generation
        self._timer = loop.call_later(self.YOUNG_S, self._collect, loop)
