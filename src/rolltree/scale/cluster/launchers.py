"""Starts roles as processes on this machine, and ends them with all that they started.

A role is the leader of its own session, so Ctrl-C in a terminal reaches only the driver. All
processes that it starts inherit a mark in their environment, by which they are found even if the
root is gone (the trainer's ranks have sessions of their own, and outlive the process that started
them).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from rolltree._helpers.files import open_to_append
from rolltree.scale.cluster.roles import (
    HOST,
    LAUNCH,
    ON_LOOPBACK,
    ROLE,
    Launcher,
    RolePlace,
    RoleSpec,
)
from rolltree.values.errors import ClusterError

_POLL_S = 0.05
_KILL_LIMIT_S = 10.0
_PROC = Path("/proc")


def marked_processes(launch_id: str, name: str | None = None) -> list[int]:
    """Return the ids of this user's processes of a launcher, or of one of its roles."""
    marks = [f"{LAUNCH}={launch_id}".encode(), *([f"{ROLE}={name}".encode()] if name else [])]
    found = []
    for folder in _PROC.glob("[0-9]*"):
        # The process may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if int(folder.name) != os.getpid() and all(mark in variables for mark in marks):
                found.append(int(folder.name))
    return found


def kill_marked(launch_id: str, name: str | None = None) -> int:
    """Kill a launcher's processes, or one role's, on this machine; return how many there were.

    Raises:
        ClusterError: some processes do not end.
    """
    killed: set[int] = set()
    end = time.monotonic() + _KILL_LIMIT_S
    # Repeated until none is left: a process may start another just before it dies.
    while found := marked_processes(launch_id, name):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        if time.monotonic() > end:
            raise ClusterError(
                f"processes of {name or 'an earlier driver'} do not end although they were killed "
                f"({', '.join(map(str, found))}), and a role must not run twice. End them, and "
                "run the command again."
            )
        time.sleep(_POLL_S)
    return len(killed)


class RoleProcess:
    """The process of one role on this machine.

    Raises:
        ClusterError: it cannot be started.
    """

    def __init__(self, spec: RoleSpec, launch_id: str, host: str) -> None:
        self.name, self._launch_id = spec.name, launch_id
        libraries = ON_LOOPBACK if host.startswith("127.") else {}
        named = {ROLE: spec.name, LAUNCH: launch_id, HOST: host}
        env = {**os.environ, **spec.env, **libraries, **named}
        try:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            # Appended, so that the log has all starts of a role.
            with open_to_append(spec.log) as log:
                self._process = subprocess.Popen(
                    spec.argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise ClusterError(
                f"{spec.name} cannot be started ({error}), and the run needs it. Check the log "
                f"folder {spec.log.parent} and the program {spec.argv[0]}."
            ) from error
        self.pid = self._process.pid

    def status(self) -> int | None:
        """Return None while it runs, else its exit status, negative for a signal."""
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """End the process and all that it started; block until they have ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        kill_marked(self._launch_id, self.name)
        self._process.wait()


class LocalLauncher(Launcher):
    """Runs roles as processes on this machine, which outlive a killed driver for a while."""

    def __init__(self) -> None:
        self.launch_id = secrets.token_hex(8)
        self.host = "127.0.0.1"
        self._processes: dict[str, RoleProcess] = {}

    async def start(self, spec: RoleSpec) -> RolePlace:
        """Start the process."""
        process = self._processes[spec.name] = RoleProcess(spec, self.launch_id, self.host)
        return RolePlace(socket.gethostname(), process.pid)

    async def stop(self, name: str, grace_s: float) -> None:
        """End the process with all that it started."""
        process = self._processes.get(name)
        if process is not None:
            await asyncio.to_thread(process.end, grace_s)

    async def alive(self, name: str) -> int | None:
        """Return None while it runs, else its exit status."""
        return self._processes[name].status()
