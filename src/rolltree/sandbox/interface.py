"""What every sandbox can do, whatever isolates it.

It knows signatures. A backend makes sandboxes; a sandbox is one private folder in which commands
run, each under limits, until it is closed. A session is one Python process that keeps its variables
between pieces of code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rolltree.sandbox.values import Limits, RunResult, SandboxLevel


class PythonSession(Protocol):
    """A Python process that remembers."""

    async def run(self, code: str) -> RunResult:
        """Run a piece of code and return what it printed, errors and the last value included.

        A limit kills the process; the next piece begins with no variables.
        """
        ...

    async def close(self) -> None:
        """End the process."""
        ...


class Sandbox(Protocol):
    """One private folder and the processes that run in it."""

    @property
    def id(self) -> str:
        """A name that no other sandbox has."""
        ...

    @property
    def level(self) -> SandboxLevel:
        """How well it isolates."""
        ...

    async def run(
        self, command: Sequence[str], *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run a command in the folder until it ends, with all processes it started."""
        ...

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run Python code as a program of its own."""
        ...

    def python_session(self, *, limits: Limits | None = None) -> PythonSession:
        """Return a Python process that keeps its variables; it starts with the first code."""
        ...

    async def write_file(self, name: str, data: str | bytes) -> None:
        """Put a file into the folder."""
        ...

    async def read_file(self, name: str, *, max_bytes: int = 2**20) -> bytes:
        """Return a file of the folder; no link is followed."""
        ...

    async def list_files(self) -> list[str]:
        """Return the paths of all regular files of the folder."""
        ...

    async def close(self) -> None:
        """Kill what runs and delete the folder. Doing it twice does nothing."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    async def create(self, *, limits: Limits | None = None) -> Sandbox:
        """Return a new sandbox; `limits` are the ones its runs have unless they name others.

        Raises:
            SandboxUnavailable: it cannot isolate code here as well as was asked for.
        """
        ...
