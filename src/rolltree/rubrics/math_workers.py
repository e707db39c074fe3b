"""Worker processes with a time limit per question: one that is late is killed and replaced.

It knows pipes, JSON lines and processes. It knows nothing about mathematics; `math_worker` is what
runs. It leaves out sandboxing beyond a memory limit and a scrubbed environment: math-verify reads
answers with a grammar and runs no program.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

START_LIMIT_S = 60.0
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a worker said. `gave_up` when it was killed, or could not make sense of the answer."""

    is_equal: bool
    gave_up: bool = False


class WorkerPool:
    """Up to `num_workers` processes, started when they are needed; safe to use from threads.

    Args:
        num_workers: most processes.
        time_limit_s: most seconds for one comparison; starting a process does not count.
    """

    def __init__(self, num_workers: int = 2, time_limit_s: float = 5.0) -> None:
        self.time_limit_s = time_limit_s
        self.num_killed = 0
        self._slots: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._slots.put(None)

    def compare(self, gold: str, said: str) -> Verdict:
        """Ask whether two answers mean the same. Blocks until a worker is free and has answered.

        Raises:
            ValueError: the reference answer cannot be read.
            RuntimeError: a worker cannot be started.
        """
        worker = self._slots.get()
        try:
            if worker is None or not worker.is_alive():
                worker = _Worker()
            reply = worker.ask({"gold": gold, "said": said}, self.time_limit_s)
            if reply is None:
                worker.end()
                self.num_killed += 1
                return Verdict(False, gave_up=True)
        finally:
            self._slots.put(worker)
        if "error" in reply:
            raise ValueError(reply["error"])
        return Verdict(bool(reply["equal"]), bool(reply.get("gave_up", False)))


class _Worker:
    """One process, and the pipes to it. It ends with the object, or when this process does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rolltree.rubrics.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
        self._rest = b""
        self.end = weakref.finalize(self, _end, self._process)
        if self._read(START_LIMIT_S) is None:
            self.end()
            raise RuntimeError(
                "the process that compares mathematical answers did not start. Run "
                "`python -m rolltree.rubrics.math_worker` to see why; it needs the `math-verify` "
                "package (`pip install rolltree[math]`)."
            )

    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, question: dict[str, str], limit_s: float) -> dict[str, Any] | None:
        """Return the reply, or None when there was none in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(limit_s)

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        until = time.monotonic() + limit_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(0.0, until - time.monotonic())):
                    return None
                read = os.read(self._process.stdout.fileno(), 65536)
                if not read:
                    return None
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not sent is lost with it
                pipe.close()
