"""Starts roles on the machines of a Ray cluster, which places them and notices lost machines.

Each role is one named actor that starts the role's command as a process on its machine, with the
GPUs that Ray gave the actor; the actor does nothing else. Ray pickles what passes between driver
and actors (the fields of a `RoleSpec`); work, results and weights never pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolltree.scale.cluster.launchers import RoleProcess
from rolltree.scale.cluster.roles import LOST, Launcher, RolePlace, RoleSpec
from rolltree.values.errors import ClusterError

_START_LIMIT_S = 60.0
_CONNECT_S = 10.0
_LOOK_S = 5.0
# Makes the kernel end the process when its actor is gone, and then runs the role in its place.
_WITH_ACTOR = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
)


class RoleActor:
    """The actor of one role: the process, on the machine that Ray chose."""

    _process: RoleProcess

    def start(self, spec: RoleSpec, launch_id: str, host: str) -> RolePlace:
        """Start the process."""
        import ray

        host = host or ray.util.get_node_ip_address()
        # Ray raises the niceness of its workers, which may not be allowed to lower it again.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        # The driver's interpreter may have a different path on this machine.
        own = [sys.executable, *spec.argv[1:]]
        command = (sys.executable, "-c", _WITH_ACTOR, *own)
        self._process = RoleProcess(replace(spec, argv=command), launch_id, host)
        return RolePlace(host, self._process.pid, ray.get_runtime_context().get_node_id())

    def status(self) -> int | None:
        """Return None while the process runs, else its exit status."""
        return self._process.status()

    def end(self, grace_s: float) -> None:
        """End the process with all that it started."""
        self._process.end(grace_s)


class RayLauncher(Launcher):
    """Runs roles as processes on the machines of a Ray cluster.

    Args:
        address: the cluster to join, such as `auto`; "" starts one on this machine.

    Raises:
        ClusterError: Ray is not installed, or the cluster cannot be joined.
    """

    def __init__(self, address: str = "") -> None:
        self._ray = _import_ray()
        self.launch_id = secrets.token_hex(8)
        self._is_joined = bool(address)
        own: dict[str, Any] = {}
        if not address:
            own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            _check_reachable(address)
            on_sigterm = signal.getsignal(signal.SIGTERM)
            self._ray.init(
                address=address or "local",
                namespace=f"rolltree-{self.launch_id}",
                logging_level=logging.ERROR,
                log_to_driver=False,
                **own,
            )
            if threading.current_thread() is threading.main_thread():
                # Ray's own handler would print native stacks and end this process unsaved.
                signal.signal(signal.SIGTERM, on_sigterm)
                signal.siginterrupt(signal.SIGTERM, False)  # as asyncio sets it
        except Exception as error:  # Ray raises built-in exceptions here, too
            self._ray.shutdown()
            raise ClusterError(
                f"the Ray cluster {address or 'of this machine'} cannot be joined ({error}). Check "
                "cluster.address, and that `ray status` shows it."
            ) from error
        self.host = self._ray.util.get_node_ip_address() if address else "127.0.0.1"
        self._actors: dict[str, Any] = {}
        self._places: dict[str, RolePlace] = {}
        self._group: Any = None
        self._bundles: dict[str, int] = {}

    async def prepare(self, specs: Sequence[RoleSpec]) -> None:
        """Reserve the GPUs of engines and trainer together, so that never only some start."""
        needy = [spec for spec in specs if spec.gpus]
        if not needy:
            return
        bundles = [{"CPU": spec.cpus, "GPU": spec.gpus} for spec in needy]
        self._group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        self._bundles = {spec.name: index for index, spec in enumerate(needy)}

    async def start(self, spec: RoleSpec) -> RolePlace | None:
        """Start an actor on a machine with room, for which it waits, and the process in it."""
        # The last actor of this name is removed first: Ray refuses a second one.
        await self._drop(spec.name)
        self._places.pop(spec.name, None)
        options: dict[str, Any] = {
            "name": spec.name,
            # On a cluster that was started here, roles share the CPUs, as without Ray.
            "num_cpus": spec.cpus if self._is_joined else 0,
            "num_gpus": spec.gpus,
            "max_restarts": 0,
            "scheduling_strategy": self._strategy(spec.name),
        }
        actor = self._ray.remote(RoleActor).options(**options).remote()
        self._actors[spec.name] = actor
        host = "" if self._is_joined else self.host
        try:
            place = await self._while_alive(actor.start.remote(spec, self.launch_id, host))
        except self._ray.exceptions.RayTaskError as error:
            raise ClusterError(f"{spec.name} cannot be started: {error.cause}") from None
        except self._ray.exceptions.RayError:
            # Treated like a process that was lost at once: the driver tries again.
            return None
        self._places[spec.name] = place
        return place

    async def _while_alive(self, reference: Any) -> RolePlace:
        """Return the value of a reference, which never comes if no machine is left.

        Raises:
            ClusterError: no machine of the cluster is alive.
        """
        waiting = asyncio.ensure_future(_result(reference))
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                nodes = await asyncio.to_thread(self._ray.nodes)
                if not any(node["Alive"] for node in nodes):
                    raise ClusterError(
                        "no machine of the Ray cluster is alive: its daemon (raylet) has ended, so "
                        "no role can be started. Start Ray again if you started it (`ray status` "
                        "shows its machines); the same command continues the run."
                    )
            place: RolePlace = waiting.result()
            return place
        finally:
            waiting.cancel()

    def _strategy(self, name: str) -> Any:
        if name not in self._bundles:
            return "SPREAD"
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundles[name]
        )

    async def stop(self, name: str, grace_s: float) -> None:
        """End the process, and the actor."""
        actor = self._actors.get(name)
        if actor is None:
            return
        # An actor that waits for a machine would not answer.
        if name in self._places:
            with contextlib.suppress(self._ray.exceptions.RayError, asyncio.TimeoutError):
                # Its machine may have disappeared, so that nothing answers.
                await asyncio.wait_for(_result(actor.end.remote(grace_s)), grace_s + _START_LIMIT_S)
        await self._drop(name)

    async def _drop(self, name: str) -> None:
        actor = self._actors.pop(name, None)
        if actor is not None:
            self._ray.kill(actor)
            await asyncio.to_thread(self._until_free, name)

    def _until_free(self, name: str) -> None:
        """Wait until Ray has forgotten an actor's name."""
        end = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end:
            try:
                self._ray.get_actor(name)
            except ValueError:
                return
            time.sleep(0.05)

    async def alive(self, name: str) -> int | None:
        """Return None while the process runs, else its exit status; `LOST` if the actor is gone."""
        actor = self._actors.get(name)
        if actor is None or name not in self._places:
            return LOST
        try:
            status: int | None = await _result(actor.status.remote())
        # Not only `RayActorError`: Ray kills actors of a machine whose memory is full.
        except self._ray.exceptions.RayError:
            return LOST
        return status

    async def aclose(self) -> None:
        """Leave the cluster; a cluster that was started here ends."""
        for name in list(self._actors):
            await self._drop(name)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        await asyncio.to_thread(self._ray.shutdown)


def _check_reachable(address: str) -> None:
    """Check that a cluster answers, since Ray itself would try for minutes.

    Raises:
        OSError: nothing answers at `host:port`.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


async def _result(reference: Any) -> Any:
    return await reference


def _import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError:
        raise ClusterError(
            "cluster.launcher is 'ray', but Ray is not installed. Install it (pip install "
            "'rolltree[ray]'), or use cluster.launcher = 'local' on one machine."
        ) from None
    return ray
