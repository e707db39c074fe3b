"""Worlds of Harbor tasks in Docker: one container per rollout, from the task's own image.

The container stays until the rollout is over, so packages that the agent installs stay, too. Tested
with a stand-in for the `docker` command, not with a Docker engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolltree._helpers.tasks import run_shielded
from rolltree.sandbox import Limits, RunResult, SandboxLevel
from rolltree.sandbox.harbor_tasks import HarborTask
from rolltree.values.errors import SandboxError, SandboxUnavailable

_LEVEL = SandboxLevel(
    "docker",
    {
        "files": "container",
        "network": "none, or Docker's own if the task asks for one",
        "processes": "pids cgroup",
        "memory": "memory cgroup",
        "disk": "the engine's",
    },
    ("disk",),
)
_CLIENT_LIMIT_S = 60.0
_PART_BYTES = 2**16


async def docker_reason() -> str:
    """Return why no container can be started on this machine; "" if one can."""
    found = shutil.which("docker")
    if found is None:
        return "there is no docker client"
    try:
        code, _, said = await _call([found, "info", "--format", "{{.ServerVersion}}"], 10.0)
    except SandboxError as error:
        return str(error)
    return "" if code == 0 else said.strip()[-300:] or f"docker info ended with {code}"


async def docker_world(task: HarborTask, limits: Limits) -> DockerWorld:
    """Return a task's world in a new container.

    Raises:
        SandboxUnavailable: the image cannot be built, or the container cannot be started.
    """
    client = shutil.which("docker") or "docker"
    image = task.docker_image or await _built(client, task)
    name = f"rolltree-harbor-{secrets.token_hex(8)}"
    line = [client, "run", "--detach", "--init", "--name", name, "--label", "rolltree.harbor"]
    # By default, Harbor tasks have a network; only a task that says so gets none.
    if task.network is False:
        line += ["--network", "none"]
    if task.cpus is not None:
        line += ["--cpus", str(task.cpus)]
    line += ["--memory", str(task.memory_bytes or limits.memory_bytes)]
    line += ["--pids-limit", str(limits.max_processes)]
    line += ["--entrypoint", "sh", image, "-c", "while :; do sleep 3600; done"]
    world = DockerWorld(client, name, task, limits)
    try:
        code, _, said = await _call(line, task.build_limit_s)
        if code != 0:
            raise SandboxUnavailable(
                f"the container of the Harbor task {task.name} cannot be started: "
                f"{said.strip()[-300:]}"
            )
        await world.make_folders()
    except BaseException:  # including a cancellation
        await run_shielded(world.close())
        raise
    return world


async def _built(docker: str, task: HarborTask) -> str:
    folder = task.folder / "environment"
    # The tag is a hash of the content: rollouts share an image until the task changes.
    content = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content.update(f"{file.relative_to(folder)}\0{os.stat(file).st_mode}\0".encode())
        content.update(await asyncio.to_thread(file.read_bytes))
    tag = f"rolltree-harbor:{content.hexdigest()[:24]}"
    code, _, _ = await _call([docker, "image", "inspect", tag], _CLIENT_LIMIT_S)
    if code != 0:
        line = [docker, "build", "--quiet", "--tag", tag, str(folder)]
        code, _, said = await _call(line, task.build_limit_s)
        if code != 0:
            raise SandboxUnavailable(
                f"the image of the Harbor task {task.name} cannot be built from {folder}: "
                f"{said.strip()[-600:]}"
            )
    return tag


class DockerWorld:
    """One container. `docker_world` makes it."""

    level = _LEVEL

    def __init__(self, docker: str, name: str, task: HarborTask, limits: Limits) -> None:
        self.id, self._docker, self._task, self._limits = name, docker, task, limits

    async def run(
        self, script: str, *, limit_s: float | None, env: Mapping[str, str], user: str | None = None
    ) -> RunResult:
        """Run a shell script in the task's folder; after `limit_s`, all processes are ended."""
        began = time.monotonic()
        line = [self._docker, "exec"]
        for option, value in (("--user", user), ("--workdir", self._task.workdir)):
            line += [option, value] if value is not None else []
        for name, value in env.items():
            line += ["--env", f"{name}={value}"]
        line += [self.id, "sh", "-c", script]
        try:
            code, stdout, stderr = await _call(line, limit_s, self._limits.output_bytes)
        except TimeoutError:
            # Killing the client does not end what it started; restarting the container does.
            await self._restart()
            spent = time.monotonic() - began
            return RunResult("", "", "wall", None, wall_s=spent, level=self.level.name)
        spent = time.monotonic() - began
        return RunResult(stdout, stderr, "exit", code, wall_s=spent, level=self.level.name)

    async def make_folders(self) -> None:
        """Make the folders that Harbor promises."""
        await self._do("exec", "--user", "0", self.id, "sh", "-c", _FOLDERS)

    async def add(self, folder: Path, name: str) -> None:
        """Copy a folder of the task to `/name`."""
        await self._do("cp", f"{folder}/.", f"{self.id}:/{name}")

    async def end_agent(self) -> str | None:
        """End all processes, and empty the folders of tests, logs and solution."""
        await self._restart()
        code, _, said = await _call(
            [self._docker, "exec", "--user", "0", self.id, "sh", "-c", f"{_EMPTY} && {_FOLDERS}"],
            _CLIENT_LIMIT_S,
        )
        return None if code == 0 else f"what the agent left cannot be removed: {said[-300:]}"

    async def read(self, path: str) -> bytes | None:
        """Return a file's content; None if there is no regular file of that name."""
        # Copied as an archive, because the agent may have changed the programs in the container.
        line = [self._docker, "cp", f"{self.id}:{path}", "-"]
        code, packed, _ = await _call_bytes(line, _CLIENT_LIMIT_S, 2**20)
        with contextlib.suppress(tarfile.TarError):
            if code == 0:
                with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                    for member in archive:
                        file = archive.extractfile(member) if member.isreg() else None
                        if file is not None:
                            return file.read(_PART_BYTES)
        return None

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        await _call([self._docker, "rm", "--force", self.id], _CLIENT_LIMIT_S)

    async def _restart(self) -> None:
        await self._do("restart", "--time", "0", self.id)

    async def _do(self, *words: str) -> None:
        code, _, said = await _call([self._docker, *words], _CLIENT_LIMIT_S)
        if code != 0:
            raise SandboxError(
                f"docker {words[0]} failed for the Harbor task {self._task.name}, so its world "
                f"cannot be used: {said.strip()[-300:]}"
            )


_FOLDERS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts /tests /solution"
_EMPTY = "rm -rf /logs /tests /solution"


async def _call(
    line: Sequence[str], limit_s: float | None, max_bytes: int = 2**16
) -> tuple[int, str, str]:
    code, stdout, stderr = await _call_bytes(line, limit_s, max_bytes)
    return code, stdout.decode(errors="replace"), stderr.decode(errors="replace")


async def _call_bytes(
    line: Sequence[str], limit_s: float | None, max_bytes: int
) -> tuple[int, bytes, bytes]:
    """Return the exit status, and the first `max_bytes` of stdout and of stderr.

    Raises:
        TimeoutError: it took longer than `limit_s`.
        SandboxUnavailable: the program cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SandboxUnavailable(f"{line[0]} cannot be started ({error}).") from error
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(limit_s):
            outputs = await asyncio.gather(
                _beginning(process.stdout, max_bytes), _beginning(process.stderr, max_bytes)
            )
            return await process.wait(), *outputs
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await run_shielded(process.wait())


async def _beginning(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Read a stream to its end, so that nothing blocks, and keep the beginning."""
    kept = bytearray()
    while part := await stream.read(_PART_BYTES):
        kept += part[: max_bytes - len(kept)]
    return bytes(kept)
