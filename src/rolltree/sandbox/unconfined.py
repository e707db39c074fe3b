"""Runs trusted commands in a private folder and ends all their processes, without isolation.

It has the interface of a sandbox without being one: commands see the files and the network of the
user that runs them. `backend_of` does not know it, so no name leads untrusted code here.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rolltree.sandbox.folder import FolderSandbox, PrivateFolder
from rolltree.sandbox.interface import Limits, SandboxLevel
from rolltree.sandbox.machine import this_machine
from rolltree.sandbox.process import Launch
from rolltree.sandbox.supervisor import HAS_PROC
from rolltree.sandbox.warm import Zygote, split_command
from rolltree.values.errors import SandboxUnavailable

_POLLED = ("processes", "memory", "cpu", "disk")


def level_of(is_limited: bool) -> SandboxLevel:
    """Return the level of an unconfined command: what holds it, and what does not."""
    tree = {"tree": "subreaper" if sys.platform == "linux" else "process group"}
    missing = ("files", "network", "signals", *_POLLED, "privileges")
    if not is_limited:
        return SandboxLevel("unconfined", tree, missing)
    cgroup = this_machine().cgroup
    held = dict.fromkeys(_POLLED, "polled")
    if cgroup is not None:
        held |= {"cpu": "polled, counted by a cgroup"}
        if cgroup.bounds_memory:
            held |= {"memory": "polled; all kernel memory by a cgroup, files included"}
    left = tuple(name for name in missing if name not in _POLLED)
    return SandboxLevel("unconfined", {**held, **tree}, left)


class UnconfinedBackend:
    """Makes folders in which commands run as this user.

    Args:
        base: the parent of the private folders; the system's temporary folder if None.
        is_limited: whether the limits on time, memory, processes and the folder apply. The
            supervisor looks at them every few milliseconds, and a cgroup bounds memory where this
            process may make one. Otherwise only the limit on output applies.
    """

    def __init__(self, *, base: str | Path | None = None, is_limited: bool = False) -> None:
        self.base = None if base is None else Path(base)
        self.is_limited = is_limited

    async def create(self, *, limits: Limits | None = None) -> UnconfinedSandbox:
        """Return a new folder.

        Raises:
            SandboxUnavailable: limits apply, and this system does not show a tree's processes.
        """
        if self.is_limited and not HAS_PROC:
            raise SandboxUnavailable(
                "limits on memory, CPU time and files need Linux's /proc, which this machine does "
                "not have. Leave sandbox_limits out, or run on Linux."
            )
        return await asyncio.to_thread(UnconfinedSandbox, self, limits or Limits())


class UnconfinedSandbox(FolderSandbox):
    """A folder in which commands run as this user. `UnconfinedBackend.create` makes it."""

    def __init__(self, backend: UnconfinedBackend, limits: Limits) -> None:
        super().__init__(PrivateFolder(backend.base), level_of(backend.is_limited), limits)
        self._is_limited = backend.is_limited
        self.zygote: Zygote | None = None
        """The interpreter that is forked for its commands, which begin with the same words."""

    @property
    def inside(self) -> str:
        """The folder as commands see it."""
        return str(self._folder.path)

    @property
    def python(self) -> str:
        """The interpreter."""
        return sys.executable

    def launch(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return the command unchanged; it starts in the folder."""
        folder, cgroup = self.inside, this_machine().cgroup if self._is_limited else None
        program = () if self.zygote is None else split_command(command)[1]
        return Launch(
            command=list(command),
            env={"LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder, **self.env},
            cwd=folder,
            folder=folder,
            level=self.level.name,
            is_limited=self._is_limited,
            cgroup=cgroup.path if cgroup else None,
            can_be_killed=True,
            zygote=self.zygote,
            program=program,
        )
