"""The interface of sandboxes: limits, isolation levels, results and methods.

Names have the units: `_s` seconds, `_bytes` bytes, `num_` and `max_` counts. A backend makes
sandboxes; a sandbox is a private folder in which commands run, each under limits, until it is
closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from rolltree.values.errors import ConfigError

Ended: TypeAlias = Literal[
    "exit", "signal", "wall", "cpu", "memory", "processes", "disk", "output", "closed", "lost"
]
"""Why a run ended: by itself (`exit`, `signal`), at a limit, by `close()`, or by the death of its
supervisor (`lost`)."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of one run, beyond which its whole process tree is killed.

    Raises:
        ConfigError: a limit is not positive.
    """

    wall_s: float = 10.0
    # The sum over all processes.
    cpu_s: float = 10.0
    # It applies twice: each process can map that much address space (more is a `MemoryError` in the
    # code), and all processes together may have that much resident (more kills them).
    memory_bytes: int = 512 * 2**20
    max_processes: int = 32
    max_open_files: int = 128
    # In the work folder.
    max_files: int = 4096
    disk_bytes: int = 64 * 2**20
    # Standard output and error together.
    output_bytes: int = 64 * 2**10

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(
                    f"the sandbox limit {name} is {value!r}; code could not even start. "
                    "Set it above 0."
                )


@dataclass(frozen=True, slots=True)
class SandboxLevel:
    """How well code is isolated, and by which mechanisms."""

    # "bubblewrap", "landlock", "rlimits" or "docker".
    name: str
    # The mechanism that protects files, network, processes, signals, memory and so on.
    protections: Mapping[str, str] = field(default_factory=dict)
    # The protections that are missing; if any is, untrusted code is refused by default.
    missing: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the level as JSON values, as a rollout records it."""
        return {
            "name": self.name,
            "protections": dict(self.protections),
            "missing": list(self.missing),
        }


@dataclass(frozen=True, slots=True)
class RunResult:
    """Output and end of one run."""

    # Together cut at `Limits.output_bytes`; bytes that are not UTF-8 are replaced.
    stdout: str
    stderr: str
    ended: Ended
    # None if a signal or a limit ended it.
    exit_code: int | None
    signal: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    level: str = ""

    @property
    def ok(self) -> bool:
        """Whether it exited with code 0 and was not killed."""
        return self.ended == "exit" and self.exit_code == 0

    def text(self) -> str:
        """Return output, errors and the reason for the end, as a model reads them."""
        parts = [self.stdout, self.stderr, self._ending()]
        return "\n".join(part.rstrip("\n") for part in parts if part)

    def _ending(self) -> str:
        if self.ended == "signal":
            return f"[killed by signal {self.signal}]"
        if self.ended == "exit":
            return f"[exit code {self.exit_code}]" if self.exit_code else ""
        return f"[killed: {_ENDINGS[self.ended]}]"


_ENDINGS: dict[str, str] = {
    "wall": "the time limit is over",
    "cpu": "the CPU time limit is over",
    "memory": "too much memory",
    "processes": "too many processes",
    "disk": "too many or too large files",
    "output": "too much output",
    "closed": "the sandbox was closed",
    "lost": "the sandbox lost its supervisor",
}


class PythonSession(Protocol):
    """A Python process that keeps its variables between pieces of code."""

    async def run(self, code: str) -> RunResult:
        """Run a piece of code and return its output, with errors and the last value.

        A limit kills the process; the next piece starts without variables.
        """
        ...

    async def close(self) -> None:
        """End the process."""
        ...


class Sandbox(Protocol):
    """One private folder and the processes that run in it."""

    @property
    def id(self) -> str:
        """A unique name."""
        ...

    @property
    def level(self) -> SandboxLevel:
        """How well it isolates code."""
        ...

    async def run(
        self, command: Sequence[str], *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run a command in the folder until it ends, with all processes it started."""
        ...

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run Python code as a separate program."""
        ...

    def python_session(self, *, limits: Limits | None = None) -> PythonSession:
        """Return a Python process that keeps its variables; it starts with the first code."""
        ...

    async def write_file(self, name: str, data: str | bytes) -> None:
        """Put a file into the folder."""
        ...

    async def read_file(self, name: str, *, max_bytes: int = 2**20) -> bytes:
        """Return the content of a file of the folder; links are not followed."""
        ...

    async def list_files(self) -> list[str]:
        """Return the paths of all regular files of the folder."""
        ...

    async def close(self) -> None:
        """Kill all processes and delete the folder. Doing it twice does nothing."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    async def create(self, *, limits: Limits | None = None) -> Sandbox:
        """Return a new sandbox; `limits` apply to its runs unless a run has its own.

        Raises:
            SandboxUnavailable: it cannot isolate code on this machine as well as required.
        """
        ...
