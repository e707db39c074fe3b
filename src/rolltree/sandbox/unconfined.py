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
from rolltree.sandbox.process import Launch
from rolltree.sandbox.warm import Zygote, split_command

UNCONFINED = SandboxLevel(
    "unconfined",
    {"tree": "subreaper" if sys.platform == "linux" else "process group"},
    ("files", "network", "signals", "processes", "memory", "cpu", "disk", "privileges"),
)


class UnconfinedBackend:
    """Makes folders in which commands run as this user.

    Of the limits, only that on output applies.

    Args:
        base: the parent of the private folders; the system's temporary folder if None.
    """

    def __init__(self, *, base: str | Path | None = None) -> None:
        self.base = None if base is None else Path(base)

    async def create(self, *, limits: Limits | None = None) -> UnconfinedSandbox:
        """Return a new folder."""
        return await asyncio.to_thread(UnconfinedSandbox, self, limits or Limits())


class UnconfinedSandbox(FolderSandbox):
    """A folder in which commands run as this user. `UnconfinedBackend.create` makes it."""

    def __init__(self, backend: UnconfinedBackend, limits: Limits) -> None:
        super().__init__(PrivateFolder(backend.base), UNCONFINED, limits)
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
        folder = self.inside
        program = () if self.zygote is None else split_command(command)[1]
        return Launch(
            command=list(command),
            env={"LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder, **self.env},
            cwd=folder,
            folder=folder,
            level=self.level.name,
            is_limited=False,
            can_be_killed=True,
            zygote=self.zygote,
            program=program,
        )
