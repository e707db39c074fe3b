"""Sandboxes on this machine in place of the hosted ones of verifiers 0.1.8.

`SandboxClient` has the methods of the hosted service's client that environments call, on top of
rolltree's Docker and local backends. A hosted sandbox is a machine with a network and a permanent
process; here it is a folder in which commands run one by one, without a network.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from rolltree.sandbox import DockerBackend, Limits, LocalBackend
from rolltree.sandbox.folder import FolderSandbox
from rolltree.values.errors import ConfigError, SandboxError, did_you_mean

DEFAULT_IMAGE = "python:3.11-slim"
DEFAULT_START = "tail -f /dev/null"
_DOCKER_WAIT_S = 30.0
CHOICE = "ROLLTREE_SANDBOX"
_WHERE = (
    f"Set {CHOICE}=hosted and install prime-sandboxes to run it in a hosted sandbox, or pass "
    "sandbox_client=... with your own client"
)


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """The settings of a sandbox; the fields are the hosted service's."""

    name: str = "sandbox-env"
    docker_image: str = DEFAULT_IMAGE
    start_command: str = DEFAULT_START
    cpu_cores: float = 1
    memory_gb: float = 2
    disk_size_gb: float = 5
    gpu_count: int = 0
    timeout_minutes: int = 60
    environment_vars: dict[str, str] | None = None
    team_id: str | None = None
    advanced_configs: Any = None

    def model_copy(self, *, update: dict[str, Any] | None = None) -> SandboxRequest:
        """Return a copy with some fields changed."""
        return replace(self, **(update or {}))

    def model_dump(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Created:
    """A sandbox that was made."""

    id: str


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command's output and exit code."""

    stdout: str
    stderr: str
    exit_code: int


class CommandTimeout(SandboxError):
    """A command took longer than its time limit."""


class SandboxClient:
    """Makes sandboxes on this machine and runs commands in them, like the hosted service's client.

    Args:
        kind: "docker", "local", or "auto": the local sandbox with this machine's Python for the
            default image, and Docker for other images.
        timeout_s: time limit of one command.

    Raises:
        ConfigError: there is no such kind.
    """

    def __init__(self, kind: str = "auto", timeout_s: float = 30.0) -> None:
        kinds = ("auto", "docker", "local")
        if kind not in kinds:
            raise ConfigError(
                f"{CHOICE} is {kind!r}.{did_you_mean(kind, kinds)} It says where sandboxes run."
            )
        self.kind = kind
        self.timeout_s = timeout_s
        self._open: dict[str, FolderSandbox] = {}
        self._backends: dict[str, DockerBackend | LocalBackend] = {}

    def check(self, request: SandboxRequest) -> None:
        """Check that the requested sandbox can be made here.

        Raises:
            ConfigError: it cannot; the message says what to use.
        """
        # Refused at construction: if a setting were ignored, results would differ from verifiers'.
        for name, why in (
            ("gpu_count", "has no GPU"),
            ("team_id", "belongs to no team"),
            ("advanced_configs", "has no advanced settings"),
        ):
            if getattr(request, name):
                value = getattr(request, name)
                raise ConfigError(
                    f"{name} is {value!r}, but a sandbox on this machine {why}. {_WHERE}."
                )
        if request.start_command != DEFAULT_START:
            raise ConfigError(
                f"start_command is {request.start_command!r}, but a sandbox on this machine has no "
                f"process that runs all the time. {_WHERE}, or run the command in setup_state."
            )
        if self.kind_for(request) == "docker":
            _check_docker(request.docker_image)
        elif request.docker_image != DEFAULT_IMAGE:
            raise ConfigError(
                f"docker_image is {request.docker_image!r}, but {CHOICE} is 'local', which runs "
                f"this machine's Python. Unset {CHOICE} to use Docker. {_WHERE}."
            )

    def kind_for(self, request: SandboxRequest) -> str:
        """Return the kind of backend that makes the requested sandbox."""
        if self.kind != "auto":
            return self.kind
        # The default image is plain Python, which this machine has; another was chosen on purpose.
        return "local" if request.docker_image == DEFAULT_IMAGE else "docker"

    def _backend(self, request: SandboxRequest) -> DockerBackend | LocalBackend:
        env, cpus = request.environment_vars or {}, float(request.cpu_cores)
        key = repr((self.kind_for(request), request.docker_image, env, cpus))
        if key not in self._backends:
            if self.kind_for(request) == "docker":
                self._backends[key] = DockerBackend(
                    request.docker_image, cpus=cpus, env=env, allow_weaker=["disk"]
                )
            else:
                # Models expect numpy, scipy and sympy, which the hosted image installs.
                packages = _packages()
                self._backends[key] = LocalBackend(
                    env={"PYTHONPATH": packages, **env}, read_only=[packages]
                )
        return self._backends[key]

    def _limits(self, request: SandboxRequest) -> Limits:
        return Limits(
            wall_s=self.timeout_s,
            cpu_s=self.timeout_s * max(request.cpu_cores, 1),
            memory_bytes=int(request.memory_gb * 2**30),
            disk_bytes=int(request.disk_size_gb * 2**30),
            max_processes=128,
            output_bytes=2**20,
        )

    async def create(self, request: SandboxRequest) -> Created:
        """Make a sandbox.

        Raises:
            ConfigError: the requested sandbox cannot be made here.
            SandboxUnavailable: this machine cannot isolate code well enough.
        """
        self.check(request)
        sandbox = await self._backend(request).create(limits=self._limits(request))
        self._open[sandbox.id] = sandbox
        return Created(sandbox.id)

    async def wait_for_creation(self, sandbox_id: str, *args: Any, **settings: Any) -> None:
        """Return at once: a sandbox on this machine is ready when it is made."""
        self.sandbox(sandbox_id)

    def sandbox(self, sandbox_id: str) -> FolderSandbox:
        """Return an open sandbox.

        Raises:
            SandboxError: there is no sandbox of that name, or it has been deleted.
        """
        if sandbox_id not in self._open:
            raise SandboxError(
                f"there is no open sandbox {sandbox_id!r}; it may have been deleted."
            )
        return self._open[sandbox_id]

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a shell command to its end; `timeout` replaces the client's for this one.

        Raises:
            CommandTimeout: it took too long and was killed.
            SandboxError: the sandbox is gone.
        """
        sandbox = self.sandbox(sandbox_id)
        line = f"cd -- {shlex.quote(working_dir)} || exit\n{command}" if working_dir else command
        limits = sandbox.limits
        if timeout is not None:
            cpu_s = timeout * limits.cpu_s / limits.wall_s
            limits = msgspec.structs.replace(limits, wall_s=timeout, cpu_s=cpu_s)
        # By the program `env`, because all commands share the sandbox's own environment.
        named = [f"{key}={value}" for key, value in (env or {}).items()]
        words = [*(["env", *named] if named else []), "sh", "-c", line]
        result = await sandbox.run(words, limits=limits)
        if result.ended == "wall":
            raise CommandTimeout(f"Command timed out after {limits.wall_s:g}s")
        if result.ended in ("closed", "lost"):
            raise SandboxError(f"sandbox {sandbox_id} was lost while a command ran in it.")
        # A command killed by a signal has no exit code, and the hosted client's field is an int.
        return CommandResult(
            result.stdout, result.stderr, -1 if result.exit_code is None else result.exit_code
        )

    async def upload_file(
        self,
        sandbox_id: str,
        file_path: str,
        local_file_path: str,
        timeout: float | None = None,
    ) -> None:
        """Copy a file from this machine into a sandbox; raises TimeoutError after `timeout`."""
        async with asyncio.timeout(timeout):
            data = await asyncio.to_thread(Path(local_file_path).read_bytes)
            # Absolute paths mean the hosted machine's root; here everything is inside one folder.
            await self.sandbox(sandbox_id).write_file(file_path.lstrip("/"), data)

    async def download_file(
        self,
        sandbox_id: str,
        file_path: str,
        local_file_path: str,
        timeout: float | None = None,
    ) -> None:
        """Copy a file from a sandbox to this machine; raises TimeoutError after `timeout`."""
        async with asyncio.timeout(timeout):
            data = await self.sandbox(sandbox_id).read_file(file_path.lstrip("/"), max_bytes=2**26)
            await asyncio.to_thread(Path(local_file_path).write_bytes, data)

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox; a missing one has been deleted already."""
        sandbox = self._open.pop(sandbox_id, None)
        if sandbox is not None:
            await sandbox.close()

    async def bulk_delete(self, sandbox_ids: Sequence[str]) -> None:
        """Delete several sandboxes."""
        for sandbox_id in list(sandbox_ids):
            await self.delete(sandbox_id)


def hosted_is_wanted() -> bool:
    """Whether to use hosted sandboxes: by default, if their client is installed."""
    choice = os.environ.get(CHOICE, "")
    # A choice overrides what is installed, so that a laptop with the client can stay offline.
    if choice:
        return choice == "hosted"
    return importlib.util.find_spec("prime_sandboxes") is not None


def _packages() -> str:
    """Return the folder of the packages that code may import, such as numpy."""
    found = importlib.util.find_spec("numpy")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).resolve().parents[1])


@functools.cache
def _check_docker(image: str) -> None:
    """Raise `ConfigError` unless there is an engine that has the image."""
    docker = shutil.which("docker")
    use = (
        f"docker_image={image!r} needs Docker. {_WHERE}, or leave docker_image away for the local "
        "sandbox"
    )
    if docker is None:
        raise ConfigError(f"there is no docker client on this machine's PATH, and {use}.")
    line = [docker, "image", "inspect", "--format", "{{.Id}}", image]
    try:
        asked = subprocess.run(
            line, capture_output=True, text=True, timeout=_DOCKER_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"no Docker engine answers (it was asked for {_DOCKER_WAIT_S:g} s), and {use}."
        ) from None
    if asked.returncode == 0:
        return
    said = asked.stderr.strip().splitlines()[-1:] or ["no answer"]
    if "No such image" in asked.stderr or "no such image" in asked.stderr:
        raise ConfigError(f"Docker has no image {image!r}. Fetch it with `docker pull {image}`.")
    raise ConfigError(f"no Docker engine answers ({said[0]}), and {use}.")


class AdvancedConfigs(SimpleNamespace):
    """Settings that only the hosted service has: a sandbox on this machine refuses them."""
