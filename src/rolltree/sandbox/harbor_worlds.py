"""Worlds of Harbor tasks: an agent works in a world, and then the task's tests judge the result.

A world is a sandbox with the task's files, for tasks whose Dockerfile only copies files, or a
Docker container. The tests are added when the agent is done: before that, its processes are ended
and all folders but the task's own are emptied, so a reward that the agent wrote is gone. Tests that
import the agent's code trust it; only the task can change that (docs/harbor.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rolltree._helpers.untrusted import read_json, shorten
from rolltree.sandbox import Limits, LocalBackend, RunResult
from rolltree.sandbox.harbor_tasks import HarborTask, WorldFiles, filled_env
from rolltree.sandbox.local import LocalSandbox
from rolltree.values.errors import ConfigError, SandboxFileError, SandboxUnavailable

if TYPE_CHECKING:
    from rolltree.sandbox.harbor_docker import DockerWorld

HARBOR_LIMITS = Limits(
    wall_s=600.0,
    cpu_s=600.0,
    memory_bytes=2 * 2**30,
    max_processes=128,
    max_open_files=512,
    max_files=16_384,
    disk_bytes=256 * 2**20,
)
"""Resource limits of a world, unless its task sets its own; one command's output is 64 KiB."""
_FOLDERS = ("logs/verifier", "logs/agent", "logs/artifacts", "tests", "solution")
_REWARD_BYTES = 2**16
_OUTPUT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a task's tests."""

    # By name, from reward.json, or {"reward": x} from reward.txt; empty if there is none.
    rewards: Mapping[str, float] = field(default_factory=dict)
    # Why there is no reward. The agent may have caused that, so the reward counts as 0.
    problem: str | None = None
    # How the tests ended, and the end of their output.
    ended: str = ""
    output: str = ""


HarborWorld: TypeAlias = "SandboxWorld | DockerWorld"
"""One task's world."""


async def verdict_on(world: HarborWorld, task: HarborTask) -> Verdict:
    """Run a task's tests in the world that an agent left, and return their verdict.

    Raises:
        SandboxError: the world itself failed.
    """
    left = await world.end_agent()
    if left is not None:
        return Verdict(problem=left)
    try:
        await world.add(task.folder / "tests", "tests")
    # The agent may have filled its folder, which the tests share the space with.
    except SandboxFileError as error:
        return Verdict(problem=str(error))
    env = filled_env({**task.env, **task.verifier_env}, task)
    ran = await world.run(
        "chmod +x /tests/test.sh && exec /tests/test.sh",
        limit_s=task.verifier_limit_s,
        env=env,
        user=task.verifier_user,
    )
    output = ran.text()[-_OUTPUT_CHARS:]
    for path, read in _REWARD_FILES.items():
        data = await world.read(path)
        if data is not None:
            try:
                return Verdict(read(data), None, ran.ended, output)
            except ValueError as error:
                return Verdict({}, f"{path} is not a reward ({error})", ran.ended, output)
    return Verdict({}, "the tests wrote no reward", ran.ended, output)


async def solved(world: HarborWorld, task: HarborTask) -> RunResult:
    """Run a task's oracle solution in its world.

    Raises:
        ConfigError: the task has no solution.
    """
    if task.solution is None:
        raise ConfigError(
            f"the Harbor task {task.folder} has no solution/solve.sh, so its oracle cannot be "
            "played. Add one, or leave the task out of the check."
        )
    await world.add(task.solution, "solution")
    env = filled_env({**task.env, **task.solution_env}, task)
    return await world.run(
        "chmod +x /solution/solve.sh && exec /solution/solve.sh",
        limit_s=task.agent_limit_s,
        env=env,
        user=task.agent_user,
    )


def _number(value: Any) -> float:
    # `math.isfinite` raises OverflowError for an integer that no float can hold.
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{shorten(repr(value), 100)} is not a finite number")
    return float(value)


def _from_json(data: bytes) -> dict[str, float]:
    found = read_json(data.decode())
    found = found if isinstance(found, dict) else {"reward": found}
    return {str(name): _number(value) for name, value in found.items()}


_REWARD_FILES: Mapping[str, Callable[[bytes], dict[str, float]]] = {
    "/logs/verifier/reward.json": _from_json,
    "/logs/verifier/reward.txt": lambda data: {"reward": _number(float(data.decode()))},
}


class SandboxWorld:
    """A task's files in a sandbox of this machine, at the paths that the task names."""

    def __init__(self, sandbox: LocalSandbox, files: WorldFiles) -> None:
        self.sandbox, self._files = sandbox, files
        self.id, self.level = sandbox.id, sandbox.level

    async def run(
        self, script: str, *, limit_s: float | None, env: Mapping[str, str], user: str | None = None
    ) -> RunResult:
        """Run a shell script in the task's folder; the processes that it started end with it."""
        assert user is None, "read_task gives such tasks to Docker"
        sandbox = self.sandbox
        # The agent and the tests have different variables, and never run at the same time.
        sandbox.env = {**self._files.env, **env}
        limits = sandbox.limits
        if limit_s is not None:
            limits = msgspec.structs.replace(limits, wall_s=limit_s, cpu_s=limit_s)
        # The agent may have deleted the folder.
        enter = 'cd "$0" 2>/dev/null || cd /sandbox; exec sh -c "$1"'
        return await sandbox.run(["sh", "-c", enter, self._files.workdir, script], limits=limits)

    async def prepare(self) -> None:
        """Put the task's files where its Dockerfile copies them."""
        await self.sandbox.run(["mkdir", "-p", self._files.workdir.lstrip("/"), *_FOLDERS])
        await self._add({path.lstrip("/"): file for path, file in self._files.files})

    async def add(self, folder: Path, name: str) -> None:
        """Copy a folder of the task to `/name`."""
        await self._add(await asyncio.to_thread(_files_below, folder, name))

    async def _add(self, files: Mapping[str, Path]) -> None:
        for name, file in files.items():
            await self.sandbox.write_file(name, await asyncio.to_thread(file.read_bytes))
        programs = [name for name, file in files.items() if file.stat().st_mode & stat.S_IXUSR]
        if programs:
            await self.sandbox.run(["chmod", "+x", "--", *programs])

    async def end_agent(self) -> str | None:
        """Empty all folders but the task's; the agent's processes have already ended."""
        kept = self._files.top_folders
        # `chmod` restores permissions that the agent has removed. The programs used here are this
        # machine's, which the agent cannot change.
        others = " ".join(f"! -name {shlex.quote(name)}" for name in kept)
        find = f"find /sandbox -mindepth 1 -maxdepth 1 {others}"
        empty = f"{find} -exec chmod -R u+rwX {{}} + ; {find} -exec rm -rf {{}} +"
        await self.sandbox.run(["sh", "-c", f"{empty}; mkdir -p {' '.join(_FOLDERS)}"])
        left = [n for n in await self.sandbox.list_files() if n.partition("/")[0] not in kept]
        if left:
            return f"what the agent left cannot be removed: {left[0]}"
        return None

    async def read(self, path: str) -> bytes | None:
        """Return a file's content; None if there is no regular file of that name."""
        with contextlib.suppress(SandboxFileError):
            return await self.sandbox.read_file(path.lstrip("/"), max_bytes=_REWARD_BYTES)
        return None

    async def close(self) -> None:
        """Delete the sandbox."""
        await self.sandbox.close()


async def sandbox_world(
    task: HarborTask, backend: LocalBackend, limits: Limits = HARBOR_LIMITS
) -> SandboxWorld:
    """Return a task's world in a sandbox.

    Raises:
        ConfigError: the task needs Docker.
        SandboxUnavailable: this machine lacks bubblewrap, or the sandbox needs a folder of the
            task's for this machine's programs.
    """
    files = task.world
    if files is None:
        raise ConfigError(
            f"the Harbor task {task.name} cannot be played in the sandbox. It needs Docker for: "
            f"{'; '.join(task.needs_docker)}. Start a Docker engine, or leave the task out."
        )
    shared = sorted({*files.top_folders} & backend.root_names)
    if shared:
        raise SandboxUnavailable(
            f"the Harbor task {task.name} uses /{shared[0]}, where the sandbox shows programs of "
            "this machine, so its files cannot be there. Use Docker, or a different folder in the "
            "task's Dockerfile."
        )
    changed = {"memory_bytes": task.memory_bytes, "disk_bytes": task.disk_bytes}
    own = {name: value for name, value in changed.items() if value is not None}
    sandbox = await backend.create(limits=msgspec.structs.replace(limits, **own))
    try:
        if sandbox.level.name != "bubblewrap":
            raise SandboxUnavailable(
                f"the Harbor task {task.name} names paths such as {files.workdir} and /tests, "
                f"which the sandbox level {sandbox.level.name!r} cannot give it. Install it: "
                "pip install 'rolltree[sandbox]'."
            )
        sandbox.at_root = (*files.top_folders, "tests", "solution", "logs")
        world = SandboxWorld(sandbox, files)
        await world.prepare()
    except BaseException:  # including a cancellation
        await sandbox.close()
        raise
    return world


def _files_below(folder: Path, name: str) -> dict[str, Path]:
    """Return the files of a folder by their paths in the sandbox, below `name`."""
    return {
        f"{name}/{file.relative_to(folder).as_posix()}": file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
