"""The Docker backend: each run is its own container on the sandbox's folder.

The same supervisor as in the local backend runs the `docker run` command, and removes the container
in every case. The engine must see this machine's file system, because the folder is bind-mounted;
for the same reason, only polling bounds what code writes there. It is tested against a stand-in for
the `docker` command, not against an engine.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolltree.sandbox.folder import FolderSandbox, PrivateFolder
from rolltree.sandbox.interface import Limits, SandboxLevel
from rolltree.sandbox.machine import dispensable_protections
from rolltree.sandbox.process import Launch
from rolltree.values.errors import ConfigError, SandboxUnavailable

WORK = "/sandbox"
_CLIENT_ENV = (
    *("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"),
    *("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY"),
)
# Variables of the code that would change the client itself.
_READ_BY_CLIENT = re.compile(
    r"PATH|HOME|TMPDIR|GODEBUG|(DOCKER|XDG|LD|SSL|SSH|OTEL)_.*|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE
)
_PROTECTIONS = {
    "files": "container, read-only image",
    "network": "none",
    "signals": "PID namespace",
    "processes": "pids cgroup",
    "memory": "memory cgroup, no swap",
    "privileges": "no capabilities, no new privileges, engine's system call filter",
    "tree": "container removed at the end",
    "disk": "polled",
}
_LEVEL = SandboxLevel("docker", _PROTECTIONS, ("disk",))


class DockerBackend:
    """Makes sandboxes whose runs are containers.

    Args:
        image: the image, which has `sh` and, for Python code, the interpreter `python`.
        python: the Python interpreter inside the image.
        runtime: an OCI runtime such as "runsc" (gVisor); the engine's default when None.
        cpus: how many CPUs a run may use at once.
        env: environment variables of the code.
        docker: the client's path.
        base: the parent of the private folders.
        allow_weaker: run untrusted code although disk use is not bounded: True or `["disk"]`.

    Raises:
        SandboxUnavailable: there is no docker client.
        ConfigError: the image's name looks like an option, or `allow_weaker` has an unknown name.
    """

    def __init__(
        self,
        image: str = "python:3.11-slim",
        *,
        python: str = "python3",
        runtime: str | None = None,
        cpus: float = 1.0,
        env: Mapping[str, str] | None = None,
        docker: str | None = None,
        base: str | Path | None = None,
        allow_weaker: bool | Sequence[str] = False,
    ) -> None:
        found = docker or shutil.which("docker")
        if found is None:
            raise SandboxUnavailable(
                "there is no docker client on this machine's PATH, so no container can be made. "
                "Install Docker or use the local backend."
            )
        if image.startswith("-"):
            raise ConfigError(f"{image!r} is not an image name: docker would read it as an option.")
        self.docker, self.image, self.python, self.runtime = found, image, python, runtime
        self.cpus, self.env = cpus, dict(env or {})
        self.base = None if base is None else Path(base)
        self.dispensable = dispensable_protections(allow_weaker)

    async def create(self, *, limits: Limits | None = None) -> DockerSandbox:
        """Return a new sandbox. Its containers are made by its runs.

        Raises:
            SandboxUnavailable: `allow_weaker` does not name "disk".
        """
        if not set(_LEVEL.missing) <= set(self.dispensable):
            raise SandboxUnavailable(
                "the Docker backend does not bound disk use: code could fill the host's disk with "
                "unlinked files before it is killed. Accept that with "
                "DockerBackend(allow_weaker=['disk']), or use the local backend."
            )
        return DockerSandbox(self, limits or Limits())


class DockerSandbox(FolderSandbox):
    """A folder in which each run is a container. `DockerBackend.create` makes it."""

    def __init__(self, backend: DockerBackend, limits: Limits) -> None:
        uid = 65534 if os.geteuid() == 0 else None
        super().__init__(PrivateFolder(backend.base, uid), _LEVEL, limits)
        self._backend = backend
        self._user = uid if uid is not None else os.getuid()

    @property
    def inside(self) -> str:
        """The folder as code sees it."""
        return WORK

    @property
    def python(self) -> str:
        """The interpreter inside the image."""
        return self._backend.python

    def launch(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return the `docker run` of a command, and the command that removes its container."""
        backend = self._backend
        name = f"rolltree-{self.id}-{secrets.token_hex(4)}"
        line = [backend.docker, "run", "--name", name, "--rm", "--interactive", "--init"]
        # No log, since the daemon would write all output to its own disk, and no pull, since
        # images from a registry need a network.
        line += ["--network", "none", "--read-only", "--cap-drop", "ALL"]
        line += ["--security-opt", "no-new-privileges", "--ipc", "none", "--log-driver", "none"]
        line += ["--user", f"{self._user}:{self._user}", "--pull", "never"]
        line += ["--pids-limit", str(limits.max_processes), "--cpus", str(backend.cpus)]
        # The limit on memory and swap together equals that on memory, so there is no swap.
        line += ["--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)]
        line += ["--ulimit", f"nofile={limits.max_open_files}", "--ulimit", "core=0"]
        line += ["--ulimit", f"fsize={limits.disk_bytes}"]
        line += ["--ulimit", f"cpu={max(1, round(limits.cpu_s))}"]
        line += ["--mount", f"type=bind,source={self._folder.path},target={WORK}"]
        line += ["--workdir", WORK, "--label", f"rolltree.sandbox={self.id}"]
        environment = {"HOME": WORK, "TMPDIR": WORK, "PYTHONUNBUFFERED": "1", **backend.env}
        environment |= self.env
        # The client needs its connection; the host's other variables hold secrets.
        client = {key: os.environ[key] for key in _CLIENT_ENV if key in os.environ}
        for key, value in environment.items():
            # Without a value, the client passes its own on: every user can read arguments.
            is_own = _READ_BY_CLIENT.fullmatch(key)
            line += ["--env", f"{key}={value}" if is_own else key]
            if not is_own:
                client[key] = value
        if backend.runtime:
            line += ["--runtime", backend.runtime]
        return Launch(
            command=[*line, backend.image, *command],
            env=client,
            cwd="/",
            folder=str(self._folder.path),
            level=self.level.name,
            # The client's threads do not count as the code's.
            trusted_processes=64 + limits.max_processes,
            signals_as_codes=True,
            after=[[backend.docker, "rm", "--force", name]],
        )
