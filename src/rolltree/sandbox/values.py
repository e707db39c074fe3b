"""The values of the sandbox room: limits, levels, results.

It knows numbers and names. It knows nothing about processes. Units are in the names: `_s` seconds,
`_bytes` bytes, `num_` and `max_` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from rolltree.errors import ConfigError

Ended: TypeAlias = Literal[
    "exit", "signal", "wall", "cpu", "memory", "processes", "disk", "output", "closed", "lost"
]
"""Why a run is over: it ended by itself (`exit`, `signal`), a limit, `close()`, or its supervisor
died (`lost`)."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one run may use; beyond it the whole process tree is killed.

    `memory_bytes` holds twice: each process can map that much address space (more is a
    `MemoryError` in the code), and all processes together may have that much resident (more kills
    them). `cpu_s` is the sum over all processes. `disk_bytes` and `max_files` are the work folder.
    `output_bytes` is standard output and error together.

    Raises:
        ConfigError: a limit is not positive.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * 2**20
    max_processes: int = 32
    max_open_files: int = 128
    max_files: int = 4096
    disk_bytes: int = 64 * 2**20
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
    """How well code is isolated, and by what.

    Attributes:
        name: "bubblewrap", "landlock", "rlimits" or "docker", strongest first on one machine.
        protections: what each thing is protected by: files, network, processes, signals, memory...
        missing: the protections that this machine lacks; untrusted code is refused unless empty.
    """

    name: str
    protections: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, as it is recorded in a rollout."""
        return {
            "name": self.name,
            "protections": dict(self.protections),
            "missing": list(self.missing),
        }


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run left behind.

    `exit_code` is None when a signal or a limit ended it. `stdout` and `stderr` are cut at
    `Limits.output_bytes` together; bytes that are no UTF-8 are replaced.
    """

    stdout: str
    stderr: str
    ended: Ended
    exit_code: int | None
    signal: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    level: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended == "exit" and self.exit_code == 0

    def text(self) -> str:
        """Return output, errors and what ended the run, as a model is told."""
        parts = [self.stdout, self.stderr, describe_end(self.ended, self.exit_code, self.signal)]
        return "\n".join(part.rstrip("\n") for part in parts if part)


_ENDINGS: dict[str, str] = {
    "wall": "[killed: the time limit is over]",
    "cpu": "[killed: the CPU time limit is over]",
    "memory": "[killed: too much memory]",
    "processes": "[killed: too many processes]",
    "disk": "[killed: too many or too large files]",
    "output": "[killed: too much output]",
    "closed": "[killed: the sandbox was closed]",
    "lost": "[killed: the sandbox lost its supervisor]",
}


def describe_end(ended: Ended, exit_code: int | None, signal: int | None) -> str:
    """Return why a run ended in one bracketed line; empty when it ended well."""
    if ended == "signal":
        return f"[killed by signal {signal}]"
    if ended == "exit":
        return f"[exit code {exit_code}]" if exit_code else ""
    return _ENDINGS[ended]
