"""Sandboxes whose files are a private folder of this machine, and the runs in it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from rolltree.errors import SandboxError, SandboxFileError
from rolltree.sandbox.interface import Limits, RunResult, SandboxLevel
from rolltree.sandbox.private_folder import FULL, PrivateFolder
from rolltree.sandbox.process import Feed, Launch, SupervisedProcess, SupervisedSession, run_to_end
from rolltree.tasks import being_cancelled


class FolderSandbox(ABC):
    """A sandbox whose files are a folder of the host."""

    def __init__(self, folder: PrivateFolder, level: SandboxLevel, limits: Limits) -> None:
        self.id = secrets.token_hex(8)
        self.level = level
        self.limits = limits
        self._folder = folder
        self._running: set[asyncio.Task[RunResult]] = set()
        self._sessions: list[SupervisedSession] = []
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

        A command that no system could start (a NUL character, too long) ends with exit code 126.

        Raises:
            SandboxError: the sandbox is closed, or could not be set up.
        """
        self._check_open()
        limits = limits or self.limits
        command = [_bytes_of(part).decode() for part in command]
        if any("\0" in part for part in command):
            return self._not_started("a command must not contain NUL characters")
        work = run_to_end(self._prepared(command, limits), limits, _bytes_of(stdin))
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            return self._not_started("the command is too long; write it to a file")
        except asyncio.CancelledError:
            if self._closed and not being_cancelled():
                raise SandboxError("the sandbox was closed while code ran in it.") from None
            raise

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run Python code as a program of its own; files beside it can be imported.

        The program's file is gone afterwards. Without space for it the run is over with "disk";
        where code has put something else in its place, with exit code 126.
        """
        name = f".program-{next(self._programs)}.py"
        try:
            await self.write_file(name, code)
        except SandboxFileError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL:
                return self._not_started(str(error))  # say, code made a folder of that name
            said = "the folder is full; delete files in it first\n"
            return RunResult("", said, "disk", None, level=self.level.name)
        try:
            return await self.run([self.python, "-s", name], stdin=stdin, limits=limits)
        finally:
            if not self._closed:
                self._folder.discard(name)

    def python_session(self, *, limits: Limits | None = None) -> SupervisedSession:
        """Return a Python process that keeps its variables; it starts with the first code."""
        self._check_open()
        limits = limits or self.limits

        def start(source: str, feed: Feed) -> SupervisedProcess:
            self._check_open()
            launch = self._prepared([self.python, "-s", "-c", source], limits)
            return SupervisedProcess(launch, limits, feed, stdin=None, windowed=True)

        session = SupervisedSession(start, limits, self.level.name)
        self._sessions.append(session)
        return session

    async def write_file(self, name: str, data: str | bytes) -> None:
        """Put a file into the folder.

        Raises:
            SandboxFileError: the path leads out of the folder, or is a link.
        """
        self._check_open()
        await asyncio.to_thread(self._folder.write, name, _bytes_of(data))

    async def read_file(self, name: str, *, max_bytes: int = 2**20) -> bytes:
        """Return a file of the folder.

        Raises:
            SandboxFileError: there is no such regular file, or it has more than `max_bytes`.
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

    def _prepared(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return how to run a command in a folder that can be entered."""
        self._folder.reset()
        alone = not self._running and not any(session.is_alive for session in self._sessions)
        return replace(self.launch(command, limits), alone=alone)

    def _not_started(self, why: str) -> RunResult:
        """Return what a shell would say: the model wrote the command, so the failure is its own."""
        return RunResult("", f"{why}\n", "exit", 126, level=self.level.name)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(
                "the sandbox is closed: its processes and files are gone. Create another one."
            )


def _bytes_of(text: str | bytes) -> bytes:
    """Return UTF-8; a lone surrogate, which JSON of a model can have, becomes a question mark."""
    return text.encode(errors="replace") if isinstance(text, str) else text
