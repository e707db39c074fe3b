"""Worker processes that can be killed: every call has a time limit, every process a memory limit.

A `WorkerPool` calls one function, named "package.module:function", in processes that are started
on demand and reused. Arguments and results are JSON values in length-prefixed frames; nothing is
pickled. A process that exceeds a limit, dies or loses its caller is killed with its whole process
group, and the next call gets a new one. This protects the program from work that hangs or uses too
much memory; it is not a sandbox (`rolltree.sandbox` is).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import IO, Any, Literal

from rolltree._helpers.tasks import wait_shielded
from rolltree._helpers.threads import run_in_thread

START_LIMIT_S = 60.0
# A process writes stdout and stderr to a temporary file, which is emptied beyond this size.
MAX_OUTPUT_BYTES = 2**20
_POLL_S = 0.2
_STARVED = 10
HEADER = 4
_PASSED = (
    *("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR"),
    *("LANG", "LC_ALL", "TZ"),
)
_BOOT = (
    "import sys; sys.path[:] = sys.argv[4:]; from rolltree._helpers import worker_process; "
    "worker_process.serve_requests()"
)


class WorkerDied(Exception):
    """The process was killed at a limit, or ended by itself, before it replied.

    `why` is "time", "memory" or "exit"; `status` is the exit status (negative: a signal's number),
    and `output` the end of its standard output and error.
    """

    def __init__(self, why: Literal["time", "memory", "exit"], status: int | None, output: str):
        super().__init__(
            f"the worker process ended ({why}, exit status {status}). {output}".strip()
        )
        self.why, self.status, self.output = why, status, output


class WorkerCallError(Exception):
    """The function raised: `kind` is the exception's class name, `traceback` the worker's."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.kind, self.traceback = kind, trace


class WorkerPool:
    """Processes that call one function; safe to use from threads and event loops.

    Args:
        target: the function, as "package.module:function". Importing its module is part of starting
            a process and does not count towards the limits.
        limit_s: the most seconds for one call; None for no limit.
        counts_cpu: the limit is on CPU time, so that calls that only compute do not fail on a busy
            machine. A call that uses no CPU ends after ten times the limit in wall time.
        memory_bytes: the most address space of one process (`MemoryError` beyond it).
        max_workers: the most processes at once, for which further calls wait; None for no bound.
        max_idle: how many processes are kept for later calls.
        inherit_env: pass this process's environment on to the processes; by default they get only
            what Python needs to start, and so no secrets.
    """

    def __init__(
        self,
        target: str,
        *,
        limit_s: float | None = None,
        counts_cpu: bool = False,
        memory_bytes: int | None = None,
        max_workers: int | None = None,
        max_idle: int = 1,
        inherit_env: bool = False,
    ) -> None:
        self.target, self.limit_s, self.memory_bytes = target, limit_s, memory_bytes
        self.max_idle, self.inherit_env, self.counts_cpu = max_idle, inherit_env, counts_cpu
        self._idle: deque[_Worker] = deque()
        self._free: AbstractContextManager[Any] = contextlib.nullcontext()
        if max_workers is not None:
            self._free = threading.Semaphore(max_workers)

    def call(self, value: Any, *, limit_s: float | None = None) -> Any:
        """Call the function with a JSON value and return its result; blocks meanwhile.

        Raises:
            WorkerCallError: the function raised.
            WorkerDied: a limit was reached, or the process ended.
            RuntimeError: no process can be started.
        """
        return self._call(encode_frame(value), self._limit(limit_s), _Call())

    async def call_async(self, value: Any) -> Any:
        """Like `call`, without blocking the event loop; cancellation kills the process."""
        data, limit = encode_frame(value), self._limit(None)
        call = _Call()
        work = run_in_thread(lambda: self._call(data, limit, call), name="rolltree-worker-call")
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.cancel()
            await wait_shielded(task)
            if not task.cancelled():
                # asyncio would log an exception that is never retrieved.
                task.exception()
            raise

    def _limit(self, limit_s: float | None) -> _Limit | None:
        limit_s = self.limit_s if limit_s is None else limit_s
        return None if limit_s is None else _Limit(limit_s, self.counts_cpu)

    def _call(self, data: bytes, limit: _Limit | None, call: _Call) -> Any:
        with self._free:
            worker = self._take()
            try:
                call.begin(worker)
                reply = worker.ask(data, limit)
            except BaseException:  # Ctrl-C, too
                call.end()
                worker.end()
                raise
            call.end()
            # Threads or processes of a finished call would keep running during the next one.
            if reply["reusable"] and len(self._idle) < self.max_idle:
                self._idle.append(worker)
            else:
                worker.end()
        if "error" in reply:
            raise WorkerCallError(**reply["error"])
        return reply["value"]

    def _take(self) -> _Worker:
        with contextlib.suppress(IndexError):
            while True:
                worker = self._idle.pop()
                if worker.is_usable():
                    return worker
                worker.end()
        return _Worker(self.target, self.memory_bytes, self.inherit_env)


class _Limit:
    """The time limit of one call, counted from `begin`."""

    def __init__(self, limit_s: float, counts_cpu: bool = False) -> None:
        self._limit_s, self._counts_cpu = limit_s, counts_cpu

    def begin(self, pid: int) -> None:
        """Start the clock for the process `pid`."""
        self._pid, began = pid, time.monotonic()
        self._until = began + self._limit_s
        self._cpu_before_s = _cpu_s(pid) if self._counts_cpu else None
        self._last = began + _STARVED * self._limit_s

    def left_s(self) -> float:
        """Return the seconds until the next check; 0 or less if the limit is reached."""
        now = time.monotonic()
        # Without /proc the CPU time of another process is unknown, and wall time counts.
        if now >= self._until and self._cpu_before_s is not None and now < self._last:
            cpu_s = _cpu_s(self._pid)
            if cpu_s is not None:
                left_s = self._limit_s - (cpu_s - self._cpu_before_s)
                self._until = min(now + left_s, self._last)
        return self._until - now


class _Call:
    """The process that works on a call, so that another thread can kill it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._is_cancelled = False

    def begin(self, worker: _Worker) -> None:
        with self._lock:
            self._worker = worker
            # It was cancelled before it had a process.
            if self._is_cancelled:
                worker.kill()

    def end(self) -> None:
        with self._lock:
            self._worker = None

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._worker is not None:
                self._worker.kill()


class _Worker:
    """One process and the pipes to it; used by one thread at a time, except for `kill`.

    The process has the reading end of a pipe, the lifeline, whose other end only this process has:
    the kernel notifies the worker when this process is gone, however it died.
    """

    def __init__(self, target: str, memory_bytes: int | None, inherit_env: bool) -> None:
        lifeline, held = os.pipe()
        # A file, not a pipe: nothing reads it during the call, and a full pipe would block it.
        output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process is
        # The worker gets this process's `sys.path`, in which "" means the working directory.
        path = [folder or os.getcwd() for folder in sys.path]
        arguments = [target, str(lifeline), str(memory_bytes or 0), *path]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=(lifeline,),
                env=None if inherit_env else _scrubbed(),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:  # Ctrl-C, too
            os.close(held)
            output.close()
            raise
        finally:
            os.close(lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        # Otherwise a worker that reads nothing could block the caller beyond its limit.
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._output_fd, self._output_start = output.fileno(), 0
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._from, select.POLLIN)
        self._writable.register(self._to, select.POLLOUT)
        self._owner = os.getpid()
        self.end = weakref.finalize(self, _end, self._process, held, output, self._owner)
        try:
            start = _Limit(START_LIMIT_S)
            start.begin(self._process.pid)
            self._receive(start)
        except WorkerDied as error:
            self.end()
            raise RuntimeError(
                f"the worker process for {target} did not start (exit status {error.status}), so "
                f"nothing can be called in it: {error.output or 'it printed nothing'}"
            ) from None

    def is_usable(self) -> bool:
        """Whether it can take a call: it is alive, and was not inherited through a fork."""
        return self._owner == os.getpid() and self._process.poll() is None

    def kill(self) -> None:
        """Kill the process group; a call that waits for a reply gets `WorkerDied`."""
        _kill(self._process)

    def ask(self, data: bytes, limit: _Limit | None) -> dict[str, Any]:
        """Send a request and return the reply."""
        if limit is not None:
            limit.begin(self._process.pid)
        # Both processes share the file position, so this is the end of the worker's output so far.
        self._output_start = os.lseek(self._output_fd, 0, os.SEEK_CUR)
        if self._output_start > MAX_OUTPUT_BYTES:
            os.ftruncate(self._output_fd, 0)
            self._output_start = os.lseek(self._output_fd, 0, os.SEEK_SET)
        self._send(memoryview(data), limit)
        reply: dict[str, Any] = json.loads(self._receive(limit))
        if reply.get("out_of_memory"):
            raise WorkerDied("memory", None, "")
        return reply

    def _send(self, data: memoryview, limit: _Limit | None) -> None:
        while data:
            try:
                data = data[os.write(self._to, data) :]
            except BlockingIOError:
                self._wait(self._writable, limit)
            except BrokenPipeError:
                raise self._death() from None

    def _receive(self, limit: _Limit | None) -> bytes:
        data, size = bytearray(), HEADER
        while len(data) < size:
            self._wait(self._readable, limit)
            read = os.read(self._from, max(65536, size - len(data)))
            if not read:
                raise self._death()
            data += read
            if size == HEADER and len(data) >= HEADER:
                size += int.from_bytes(data[:HEADER], "big")
        return bytes(data[HEADER:])

    def _wait(self, ready: select.poll, limit: _Limit | None) -> None:
        while True:
            left_s = _POLL_S if limit is None else limit.left_s()
            if ready.poll(min(_POLL_S, max(0.0, left_s)) * 1000):
                return
            # Polled, since a process that the worker left behind may keep the pipe open.
            if self._process.poll() is not None:
                raise self._death()
            if left_s <= 0:
                self.kill()
                raise WorkerDied("time", None, self._output())

    def _death(self) -> WorkerDied:
        return WorkerDied("exit", self._process.wait(), self._output())

    def _output(self) -> str:
        end = os.lseek(self._output_fd, 0, os.SEEK_END)
        output = os.pread(self._output_fd, 2000, max(self._output_start, end - 2000))
        return output.decode(errors="replace").strip()[-500:]


def _cpu_s(pid: int) -> float | None:
    """Return the CPU seconds that a process has used, or None without /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _scrubbed() -> dict[str, str]:
    """Return the variables that Python needs, and a limit of one thread for numerical libraries."""
    kept = {name: os.environ[name] for name in _PASSED if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def encode_frame(value: Any) -> bytes:
    """Return a JSON value as a length-prefixed frame."""
    # ASCII, since text of models can have lone surrogates, which UTF-8 cannot encode.
    data = json.dumps(value).encode()
    return len(data).to_bytes(HEADER, "big") + data


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], held: int, output: IO[bytes], owner: int) -> None:
    if owner == os.getpid():
        _kill(process)
        process.wait()
    os.close(held)
    for file in (process.stdin, process.stdout, output):
        if file is not None:
            file.close()
