"""`Zygote`: a Python interpreter that has imported modules and forks for each program.

It saves the imports of every rollout. A forked program is supervised and ended as any other is
(`zygote.py`, design/0027).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rolltree.values.errors import ConfigError

_PROGRAM = Path(__file__).with_name("zygote.py")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# Room for a folder's path in the environment that the system shows of a process.
_MARK = {"ROLLTREE_FOLDER": "." * 512}
# Flags of Python that stand alone; others change what follows them.
_FLAGS = "bBEIOPqRsSu"


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return interpreter and flags of a command, and its program with the arguments.

    The program is `-c CODE`, `-m MODULE` or `-f FILE`.

    Raises:
        ConfigError: the command is not Python with a program.
    """
    at, is_python = 1, Path(command[0]).name.startswith("python")
    while is_python and at + 1 < len(command) and command[at] not in ("-c", "-m"):
        if not command[at].startswith("-") or not set(command[at][1:]) <= set(_FLAGS):
            break
        at += 1
    if (
        not is_python
        or at >= len(command)
        or (
            command[at].startswith("-")
            and (command[at] not in ("-c", "-m") or at + 1 == len(command))
        )
    ):
        raise ConfigError(
            f"preload is for programs in Python, but the command is {list(command[: at + 1])}. "
            "Write it as [python, flags without values, 'agent.py' or -m MODULE or -c CODE, ...]."
        )
    has_flag = command[at] in ("-c", "-m")
    return list(command[:at]), [*([] if has_flag else ["-f"]), *command[at:]]


class Forked:
    """The pipes of a forked program, as `subprocess.Popen` has them; nobody waits for it."""

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def wait(self) -> None:
        """Do nothing: the zygote reaps what it forks."""


class Zygote:
    """An interpreter with modules; it starts when it is needed, and again if it was killed.

    Args:
        python: the interpreter and its flags.
        modules: what it imports.
    """

    def __init__(self, python: Sequence[str], modules: Sequence[str]) -> None:
        self.python, self.modules = list(python), list(modules)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def start(self, env: Mapping[str, str]) -> None:
        """Start it with these variables, unless it runs.

        Raises:
            ConfigError: a module cannot be imported, or starts threads.
        """
        if not self._is_running():
            await asyncio.to_thread(self._ensure, env)

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ensure(self, env: Mapping[str, str]) -> None:
        with self._lock:  # others wait for the same start, in whatever event loop
            if not self._is_running():
                self.close()
                self._start(env)

    def _start(self, env: Mapping[str, str]) -> None:
        own, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [*self.python, str(_PROGRAM), str(other.fileno()), str(_SUPERVISOR), *self.modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                env={**env, **_MARK},
                cwd="/",
                start_new_session=True,
            )
        reply = own.recv(65536)
        if reply != b"ready":
            own.close()
            process.wait()
            why = reply.decode(errors="replace") or f"it ended with status {process.returncode}"
            raise ConfigError(
                f"the process of preload = {self.modules} could not start: {why}. Correct the list "
                "of modules, or leave preload out."
            )
        self._process, self._socket = process, own

    def fork(self, spec: Mapping[str, Any], *, control: int, status: int) -> Forked:
        """Fork a program; `control` and `status` are the supervisor's ends of its pipes.

        Raises:
            OSError: the process was killed, or there is no room for pipes.
        """
        assert self._socket is not None
        about = os.memfd_create("rolltree-spec")
        ours, theirs = list[int](), list[int]()
        try:
            os.write(about, json.dumps(spec).encode())
            os.lseek(about, 0, os.SEEK_SET)
            for is_read in (True, False, False):
                ends = os.pipe()
                theirs.append(ends[not is_read])
                ours.append(ends[is_read])
            fds = array.array("i", [*theirs, control, status, about])
            self._socket.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except BaseException:  # Ctrl-C, too
            for each in ours:
                os.close(each)
            raise
        finally:
            for each in (*theirs, about):
                os.close(each)
        stdin, stdout, stderr = (
            os.fdopen(each, mode, buffering=0)
            for each, mode in zip(ours, ("wb", "rb", "rb"), strict=True)
        )
        return Forked(stdin, stdout, stderr)  # type: ignore[arg-type]  # raw files

    def close(self) -> None:
        """End it; programs that it has forked go on."""
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def check_platform() -> None:
    """Raise `ConfigError` where preload has no effect."""
    if sys.platform != "linux":
        raise ConfigError(
            "preload needs Linux, since the forked programs are supervised through /proc. Leave "
            "it out."
        )
