"""A Python process inside a sandbox that keeps its variables, seen from outside.

It sends code as JSON lines and reads output up to a mark that changes with every piece. Code could
forge the mark, and would fool nobody but itself: what comes back is text for a model, never a
reward. It knows nothing about isolation.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from rolltree.errors import SandboxError
from rolltree.sandbox.process import SupervisedProcess
from rolltree.sandbox.values import Limits, RunResult

_SOURCE = Path(__file__).with_name("worker.py")
_FLOOD = 256
"""Output beyond the limit is thrown away; this many times the limit kills the process."""


class PythonWorker:
    """A `PythonSession` over a supervised process."""

    def __init__(
        self,
        start: Callable[[str, PythonWorker], SupervisedProcess],
        limits: Limits,
        level: str,
    ) -> None:
        self._start, self._limits, self._level = start, limits, level
        self._process: SupervisedProcess | None = None
        self._turn = asyncio.Lock()
        self._mark: bytes | None = None
        self._marked: asyncio.Future[bool] | None = None
        self._kept, self._pending = bytearray(), bytearray()
        self._num_bytes = 0
        self._closed = False

    async def run(self, code: str) -> RunResult:
        """Run a piece of code and return what it printed, errors and the last value included.

        Pieces run one after another. `exit_code` is 1 when the code raised. A limit, cancellation
        or the end of the process loses the variables; the next piece starts a new one.

        Raises:
            SandboxError: the sandbox is closed, or could not be set up.
        """
        async with self._turn:
            if self._closed:
                raise SandboxError("the Python session is closed. Open another one.")
            began = time.monotonic()
            if self._process is None or self._process.finished.done():
                self._process = self._start(_SOURCE.read_text(), self)
            process = self._process
            self._kept, self._pending, self._num_bytes = bytearray(), bytearray(), 0
            nonce = secrets.token_hex(8)
            self._mark = f"\x1e{nonce}:".encode()
            self._marked = asyncio.get_running_loop().create_future()
            process.begin()
            process.send(json.dumps({"code": code, "nonce": nonce}).encode() + b"\n")
            try:
                await asyncio.wait(
                    (self._marked, process.finished), return_when=asyncio.FIRST_COMPLETED
                )
            except BaseException:
                await self._end()
                raise
            return self._result(process, time.monotonic() - began)

    def feed(self, stream: int, data: bytes) -> bool:
        """Take output; find the mark."""
        self._num_bytes += len(data)
        if self._mark is None or self._marked is None:
            return self._num_bytes <= _FLOOD * self._limits.output_bytes
        self._pending += data
        at = self._pending.find(self._mark)
        if at >= 0 and len(self._pending) > at + len(self._mark):
            self._keep(self._pending[:at])
            failed = self._pending[at + len(self._mark) : at + len(self._mark) + 1] != b"0"
            self._mark = None
            if not self._marked.done():
                self._marked.set_result(failed)
        elif at < 0:
            tail = len(self._mark)
            self._keep(self._pending[:-tail])
            del self._pending[:-tail]
        return self._num_bytes <= _FLOOD * self._limits.output_bytes

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    def _keep(self, data: bytes | bytearray) -> None:
        self._kept += data[: max(0, self._limits.output_bytes - len(self._kept))]

    def _result(self, process: SupervisedProcess, wall_s: float) -> RunResult:
        marked, self._marked, self._mark = self._marked, None, None
        if marked is not None and marked.done():
            process.end()
            return RunResult(
                stdout=self._kept.decode(errors="replace"),
                stderr="",
                ended="exit",
                exit_code=int(marked.result()),
                wall_s=wall_s,
                level=self._level,
            )
        self._process = None
        self._keep(self._pending)
        text = self._kept.decode(errors="replace")
        return RunResult(stdout=text, stderr="", level=self._level, **process.report(text))
