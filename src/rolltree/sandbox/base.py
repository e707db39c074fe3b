"""What local and Docker sandboxes share: the folder, the runs in it, its end.

It knows the folder and supervised processes. A subclass says how a command is launched.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rolltree.errors import SandboxError
from rolltree.sandbox.folder import PrivateFolder
from rolltree.sandbox.process import Launch, SupervisedProcess, run_to_end
from rolltree.sandbox.session import PythonWorker
from rolltree.sandbox.values import Limits, RunResult, SandboxLevel
from rolltree.tasks import being_cancelled


class FolderSandbox(ABC):
    """A sandbox whose files are a folder of the host."""

    def __init__(self, folder: PrivateFolder, level: SandboxLevel, limits: Limits) -> None:
        self.id = secrets.token_hex(8)
        self.level = level
        self.limits = limits
        self._folder = folder
        self._running: set[asyncio.Task[RunResult]] = set()
        self._sessions: list[PythonWorker] = []
        self._programs = itertools.count(1)
        self._closed = False

    @abstractmethod
    def launch(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return how to run a command."""

    @property
    @abstractmethod
    def python(self) -> str:
        """The interpreter, as a path inside."""

    async def run(
        self, command: Sequence[str], *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run a command in the folder until it ends, with all processes it started.

        Raises:
            SandboxError: the sandbox is closed, or could not be set up.
        """
        self._check_open()
        limits = limits or self.limits
        data = stdin.encode() if isinstance(stdin, str) else stdin
        work = run_to_end(self.launch(command, limits), limits, data)
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and not being_cancelled():
                raise SandboxError("the sandbox was closed while code ran in it.") from None
            raise

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run Python code as a program of its own; files beside it can be imported."""
        name = f".program-{next(self._programs)}.py"
        await self.write_file(name, code)
        return await self.run([self.python, "-s", name], stdin=stdin, limits=limits)

    def python_session(self, *, limits: Limits | None = None) -> PythonWorker:
        """Return a Python process that keeps its variables; it starts with the first code."""
        self._check_open()
        limits = limits or self.limits

        def start(source: str, collector: PythonWorker) -> SupervisedProcess:
            self._check_open()
            command = [self.python, "-s", "-c", source]
            launch = self.launch(command, limits)
            return SupervisedProcess(launch, limits, collector, stdin=None, windowed=True)

        session = PythonWorker(start, limits, self.level.name)
        self._sessions.append(session)
        return session

    async def write_file(self, name: str, data: str | bytes) -> None:
        """Put a file into the folder.

        Raises:
            SandboxError: the path leads out of the folder, or is a link.
        """
        self._check_open()
        raw = data.encode() if isinstance(data, str) else data
        await asyncio.to_thread(self._folder.write, name, raw)

    async def read_file(self, name: str, *, max_bytes: int = 2**20) -> bytes:
        """Return a file of the folder.

        Raises:
            SandboxError: there is no such regular file, or it has more than `max_bytes`.
        """
        self._check_open()
        return await asyncio.to_thread(self._folder.read, name, max_bytes)

    async def list_files(self) -> list[str]:
        """Return the paths of all regular files of the folder."""
        self._check_open()
        return await asyncio.to_thread(self._folder.names)

    async def close(self) -> None:
        """Kill what runs and delete the folder. Doing it twice does nothing."""
        if self._closed:
            return
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for session in self._sessions:
            await session.close()
        await asyncio.to_thread(self._folder.remove)

    async def __aenter__(self) -> FolderSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(
                "the sandbox is closed: its processes and files are gone. Create another one."
            )
