"""Roles: how they are started, where they run, and their environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from rolltree.training.sections import EngineSection

if TYPE_CHECKING:
    from rolltree.training import TrainConfig

CLUSTER_URL = "ROLLTREE_CLUSTER_URL"
"""The variable with the address of the driver's control server."""
CLUSTER_TOKEN = "ROLLTREE_CLUSTER_TOKEN"
"""The variable with the token that every request between roles carries."""
ROLE = "ROLLTREE_ROLE"
"""The variable with the name of the role: `engine-0`, `worker-3`, `trainer`."""
RUN_DIR = "ROLLTREE_RUN"
"""The variable with the run directory."""
HOST = "ROLLTREE_HOST"
"""The variable with the address that the role listens on, and under which others reach it."""
LAUNCH = "ROLLTREE_LAUNCH"
"""The variable that marks the processes that a driver started, and all their children."""

GLOO_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Makes gloo, whose sockets have no token, listen on loopback."""
ON_LOOPBACK = {
    **GLOO_ON_LOOPBACK,
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Makes the libraries of a role that is reached on loopback listen nowhere else."""

LOST = 1000
"""The exit status of a role whose machine is gone, and with it the real status."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How one role is started.

    `cpus` and `gpus` are the numbers that it needs; only
    a launcher that chooses machines reads them. `log` gets standard output and error.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: float
    gpus: float
    log: Path


@dataclass(frozen=True, slots=True)
class RolePlace:
    """Where a role runs; `node_id` is Ray's name of the machine, "" without Ray."""

    host: str
    pid: int
    node_id: str = ""


class Launcher(Protocol):
    """Starts and ends the processes of roles."""

    launch_id: str
    """The value of `ROLLTREE_LAUNCH`."""
    host: str
    """The address of this machine under which roles reach it."""

    async def prepare(self, specs: Sequence[RoleSpec]) -> None:
        """Reserve what the roles of a run need, before any is started."""
        return

    async def start(self, spec: RoleSpec) -> RolePlace | None:
        """Start a role; return where, when its process exists, or None if it was lost at once.

        Raises:
            ClusterError: it cannot be started.
        """

    async def stop(self, name: str, grace_s: float) -> None:
        """End a role with all that it started: SIGTERM, and SIGKILL after `grace_s`."""

    async def alive(self, name: str) -> int | None:
        """Return None while the role runs, else its exit status, negative for a signal."""

    async def aclose(self) -> None:
        """Release the launcher's resources, after the roles have ended."""
        return


def with_engines(config: TrainConfig, urls: list[str]) -> TrainConfig:
    """Return the config of a process that reaches the engines at these addresses."""
    given = config.engine
    # The other settings of the section were used to start the engines.
    kept = ("probe_tolerance", "time_limit_s", "deadline_s", "retries")
    section = EngineSection(
        kind="servers",
        urls=tuple(f"{url}/v1" for url in urls),
        api_key_env=CLUSTER_TOKEN,
        admin_key_env=CLUSTER_TOKEN,
        **{name: getattr(given, name) for name in kept},
    )
    return msgspec.structs.replace(config, engine=section, cluster=None)
