"""Supervised process trees in the event loop: their pipes, limits on output, and their end.

A `SupervisedProcess` starts `supervisor.py` and reads its pipes. A `SupervisedSession` is such a
process that keeps its Python variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from rolltree._helpers.tasks import wait_shielded
from rolltree.sandbox.interface import Ended, Limits, RunResult
from rolltree.sandbox.warm import Forked, Zygote
from rolltree.values.errors import SandboxError

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_REPL = Path(__file__).with_name("repl.py")
# Output of a session beyond its limit is dropped; this many times the limit kills the session.
_FLOOD = 256
# How long pipes may stay open after the supervisor has ended.
_GIVE_UP_S = 1.0
# The longest secret that is always cut out whole, without leaving its second half.
_SECRET_BYTES = 8192
_SHARED = (
    *("cwd", "folder", "trusted_processes", "ready_at", "mount_fd", "folder_fd", "cgroup"),
    *("is_limited", "has_network", "can_be_killed"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command with everything its isolation needs."""

    command: Sequence[str]
    # The environment of the launcher, not of the code.
    env: Mapping[str, str]
    cwd: str
    folder: str
    level: str
    # The number of the launcher's own processes, which do not count towards the limit.
    trusted_processes: int = 0
    # Index in `command` where the supervisor puts the number of the pipe through which `confine`
    # reports; None if no such program runs.
    ready_at: int | None = None
    # Commands that end what is outside the tree, such as a container.
    after: Sequence[Sequence[str]] = ()
    # The launcher reports a death by signal N as exit code 128 + N, as shells do.
    signals_as_codes: bool = False
    # The descriptors of a `PrivateFolder`: the command starts in that mount namespace.
    mount_fd: int | None = None
    folder_fd: int | None = None
    # The cgroup in which the run gets its own.
    cgroup: str | None = None
    # If False, code of the same user runs concurrently, and may kill this run before it starts.
    alone: bool = True
    # If False, only its owner limits it, in output and time.
    is_limited: bool = True
    # Whether it has a network namespace in which it may use TCP.
    has_network: bool = False
    # Whether its code can send signals to its supervisor.
    can_be_killed: bool = False
    # The interpreter that is forked in place of starting the command, and what it runs.
    zygote: Zygote | None = None
    program: Sequence[str] = ()


Feed: TypeAlias = Callable[[int, bytes], bool]
"""Takes bytes of stream 1 or 2; returns False if they are too many and the tree must die."""


class BoundedOutput:
    """Keeps the first `limit_bytes` of both streams together."""

    def __init__(self, limit_bytes: int) -> None:
        self.kept = {1: bytearray(), 2: bytearray()}
        self._left = limit_bytes

    def feed(self, stream: int, data: bytes) -> bool:
        """Keep what fits."""
        self.kept[stream] += data[: self._left]
        self._left -= len(data)
        if self._left < 0:
            self._left = 0
            return False
        return True


class OutputTail:
    """Keeps the last `tail_bytes` of each stream; more than `limit_bytes` in all are too many."""

    def __init__(self, tail_bytes: int, limit_bytes: int) -> None:
        self._kept = {1: bytearray(), 2: bytearray()}
        self._tail, self._left = tail_bytes, limit_bytes

    def feed(self, stream: int, data: bytes) -> bool:
        """Keep the end of what was written so far."""
        kept = self._kept[stream]
        kept += data
        # Not at every write, since moving the rest takes longer than appending.
        if len(kept) > 2 * self._tail + _SECRET_BYTES:
            del kept[: -self._tail - _SECRET_BYTES]
        self._left -= len(data)
        return self._left >= 0

    def text(self, stream: int, clean: Callable[[str], str] = str) -> str:
        """Return the end of a stream, after `clean` has taken out secrets."""
        # Cleaned before it is cut, since half a secret would not be recognised.
        cleaned = clean(bytes(self._kept[stream]).decode(errors="replace"))
        return cleaned.encode()[-self._tail :].decode(errors="replace")


def tmpfs_options(limits: Limits) -> str:
    """Return the mount options that bound a folder."""
    # The folder itself needs an inode, too.
    return f"size={limits.disk_bytes},nr_inodes={limits.max_files + 1}"


class SupervisedProcess:
    """A running tree. It must be made in a running event loop.

    Args:
        launch: the command, and how it is isolated.
        limits: the limits of the tree.
        feed: is called with its output.
        stdin: its standard input; None leaves the pipe open for `send`.
        windowed: `wall_s` and `cpu_s` count from `begin` to `end`, not from the start.
    """

    def __init__(
        self,
        launch: Launch,
        limits: Limits,
        feed: Feed,
        *,
        stdin: bytes | None = b"",
        windowed: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._launch, self._feed = launch, feed
        self._override: Ended | None = None
        self._report = bytearray()
        self._unsent = bytearray(stdin or b"")
        self._close_stdin = stdin is not None
        self._open: set[int] = set()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        # From here to the end of the constructor nothing awaits: a cancellation finds either no
        # process or a complete one (design/0005).
        control_read, self._control = os.pipe()
        try:
            status_read, status_write = os.pipe()
        except BaseException:  # Ctrl-C, too
            os.close(control_read)
            os.close(self._control)
            raise
        spec = {
            **{name: getattr(launch, name) for name in _SHARED},
            "command": list(launch.command),
            "after": [list(command) for command in launch.after],
            # Every user of the machine can read arguments, so they have only the names.
            "env": list(launch.env),
            "limits": msgspec.to_builtins(limits),
            "tmpfs": tmpfs_options(limits),
            "windowed": windowed,
            "control_fd": control_read,
            "status_fd": status_write,
        }
        held = [fd for fd in (launch.mount_fd, launch.folder_fd) if fd is not None]
        try:
            self._popen: subprocess.Popen[bytes] | Forked
            if launch.zygote is not None:
                spec |= {"program": list(launch.program), "variables": dict(launch.env)}
                self._popen = launch.zygote.fork(spec, control=control_read, status=status_write)
            else:
                self._popen = self._started(spec, (control_read, status_write, *held))
        except BaseException:  # Ctrl-C, too
            os.close(self._control)
            os.close(status_read)
            raise
        finally:
            # Only the supervisor has the other ends, so each process notices the other's death.
            os.close(control_read)
            os.close(status_write)
        stdin_pipe, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert stdin_pipe is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin = stdin_pipe.fileno()
        os.set_blocking(self._stdin, False)
        self._watch(stdout.fileno(), lambda data: self._take_output(1, data))
        self._watch(stderr.fileno(), lambda data: self._take_output(2, data))
        self._watch(status_read, self._report.extend)
        self._status_fd = status_read
        self._push()

    def _started(self, spec: Mapping[str, Any], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # Isolated: neither the environment nor a folder can put modules into the supervisor.
            [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env=dict(self._launch.env),
            cwd="/",
            # Ctrl-C at the terminal must reach only this process, which then ends the tree.
            start_new_session=True,
            bufsize=0,
        )

    def send(self, data: bytes) -> None:
        """Write to its standard input, now or when the pipe has room."""
        self._unsent += data
        self._push()

    def begin(self) -> None:
        """Begin a limited stretch of time."""
        self._command(b"b")

    def end(self) -> None:
        """End the limited stretch."""
        self._command(b"e")

    def kill(self, why: Ended = "closed") -> None:
        """Have the whole tree killed; `finished` is done when it is dead."""
        if self._override is None:
            self._override = why
        self._command(b"k")

    async def stop(self) -> None:
        """Kill the tree and wait for its end, even if the caller is being cancelled."""
        self.kill()
        cancelled = await wait_shielded(self.finished)
        if cancelled is not None:
            raise cancelled

    async def wait(self) -> None:
        """Wait until no process of the tree is left."""
        await asyncio.shield(self.finished)

    def report(self, output: str) -> dict[str, Any]:
        """Return the supervisor's report, in which `ended` also has the reasons known only here.

        `output` goes into the message if the isolation failed: then it is not from the code.

        Raises:
            SandboxError: the isolation could not be set up, so the code did not run.
        """
        try:
            report: dict[str, Any] = json.loads(self._report)
        except ValueError:
            # The supervisor was killed, which does not mean that the set-up failed: it is not a
            # `SandboxError`.
            report = {"ended": "lost", "exit_code": None, "signal": None, "setup": "1"}
        # Output is counted here; the supervisor only got the kill command.
        if self._override == "output" or (self._override and report["ended"] == "closed"):
            report.update(ended=self._override, exit_code=None, signal=None)
        code = report["exit_code"]
        if self._launch.signals_as_codes and code is not None and 128 < code <= 192:
            report.update(ended="signal", exit_code=None, signal=code - 128)
        setup = report.pop("setup")
        # Code of the same sandbox can kill a run before it starts. That is the model's fault, and
        # must not make the rollout fail without a reward (design/0019).
        failures = ("exit", "signal") if self._launch.alone else ("exit",)
        if self._launch.ready_at is not None and setup != "1" and report["ended"] in failures:
            raise SandboxError(
                f"the sandbox could not be set up at level {self._launch.level!r}, so nothing was "
                f"run: {setup[1:]} {output.strip()}. Another level may work here."
            )
        return report

    def _command(self, command: bytes) -> None:
        if self._control >= 0:
            with contextlib.suppress(OSError):
                os.write(self._control, command)

    def _take_output(self, stream: int, data: bytes) -> None:
        if not self._feed(stream, data):
            self.kill("output")

    def _watch(self, fd: int, take: Callable[[bytes], object]) -> None:
        os.set_blocking(fd, False)
        self._open.add(fd)
        self._loop.add_reader(fd, self._read, fd, take)

    def _read(self, fd: int, take: Callable[[bytes], object]) -> None:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if data:
            take(data)
            return
        self._loop.remove_reader(fd)
        self._open.discard(fd)
        if fd == self._status_fd:
            os.close(fd)
            if self._launch.can_be_killed and not self._report:
                kill_strays(self._launch.folder)
            # A process that escaped may hold the other pipes open.
            self._loop.call_later(_GIVE_UP_S, self._abandon)
        if not self._open and not self.finished.done():
            self._finish()

    def _abandon(self) -> None:
        """Stop waiting for pipes that a process holds open although the supervisor is dead."""
        for fd in self._open:
            self._loop.remove_reader(fd)
        self._open.clear()
        if not self.finished.done():
            self._finish()

    def _push(self) -> None:
        if self._stdin < 0:
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._stdin, self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._push)
            return
        except OSError:
            # The other end is closed.
            self._unsent.clear()
        self._loop.remove_writer(self._stdin)
        if self._close_stdin:
            self._shut_stdin()

    def _shut_stdin(self) -> None:
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            self._stdin = -1
            if self._popen.stdin:
                self._popen.stdin.close()

    def _finish(self) -> None:
        """Clean up, when all pipes are closed and the supervisor is ending."""
        self._shut_stdin()
        os.close(self._control)
        self._control = -1
        self._popen.wait()
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe:
                pipe.close()
        if not self.finished.done():
            self.finished.set_result(None)


def kill_strays(folder: str) -> None:
    """Kill the processes that have a path in a private folder in their environment.

    For programs whose supervisor, and its guard, were killed. Their daemons have no known parent,
    but the variables with which they were started; one that has emptied them is not found.
    """
    if not Path("/proc/self/environ").exists():
        return
    until, found = time.monotonic() + _GIVE_UP_S, True
    while found and time.monotonic() < until:  # again, for what they have forked meanwhile
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            # Processes of other users cannot be read.
            with contextlib.suppress(OSError):
                found |= int(entry.name) != os.getpid() and _kill_if_named(entry, folder)


def _kill_if_named(entry: Path, folder: str) -> bool:
    # Opened first: the number may come to mean another process.
    process = os.pidfd_open(int(entry.name))
    try:
        variables = (entry / "environ").read_bytes()
        is_named = os.fsencode(folder) in variables
        if is_named:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return is_named
    finally:
        os.close(process)


async def run_to_end(
    launch: Launch, limits: Limits, stdin: bytes, tail: OutputTail | None = None
) -> RunResult:
    """Run a command to its end, a limit or cancellation; in any case, no process of it is left.

    With `tail`, the output goes there and not into the result.

    Raises:
        SandboxError: the isolation could not be set up.
    """
    output = BoundedOutput(limits.output_bytes)
    feed = output.feed if tail is None else tail.feed
    process = SupervisedProcess(launch, limits, feed, stdin=stdin)
    try:
        await process.wait()
    finally:
        if not process.finished.done():
            await process.stop()
    stdout, stderr = (bytes(output.kept[stream]).decode(errors="replace") for stream in (1, 2))
    return RunResult(stdout, stderr, level=launch.level, **process.report(stderr))


class SupervisedSession:
    """A `PythonSession` over a supervised process that runs `repl.py`.

    Code is sent as JSON lines, and output is read up to a mark that changes with every piece. Code
    that forges the mark gains nothing: the output is text for a model, never a reward.
    """

    def __init__(
        self,
        start: Callable[[str, Feed], SupervisedProcess],
        limits: Limits,
        level: str,
    ) -> None:
        self._start, self._limits, self._level = start, limits, level
        self._process: SupervisedProcess | None = None
        self._turn = asyncio.Lock()
        self._mark: bytes | None = None
        self._marked: asyncio.Future[bool] | None = None
        self._kept, self._pending = bytearray(), bytearray()
        self._num_bytes = 0
        self._closed = False

    async def run(self, code: str) -> RunResult:
        """Run a piece of code and return its output, with errors and the last value.

        Pieces run one after another. `exit_code` is 1 if the code raised. After a limit,
        cancellation or the end of the process, the variables are lost; the next piece starts a new
        process.

        Raises:
            SandboxError: the sandbox is closed, or could not be set up.
        """
        async with self._turn:
            if self._closed:
                raise SandboxError("the Python session is closed. Open another one.")
            began = time.monotonic()
            if self._process is None or not self.is_alive:
                self._process = self._start(_REPL.read_text(), self._feed)
            process = self._process
            self._kept, self._pending, self._num_bytes = bytearray(), bytearray(), 0
            # A new mark for each piece: code cannot print the next one in advance.
            nonce = secrets.token_hex(8)
            self._mark = f"\x1e{nonce}:".encode()
            self._marked = asyncio.get_running_loop().create_future()
            process.begin()
            process.send(json.dumps({"code": code, "nonce": nonce}).encode() + b"\n")
            try:
                await asyncio.wait(
                    (self._marked, process.finished), return_when=asyncio.FIRST_COMPLETED
                )
            except BaseException:  # a cancellation, too
                await self._end()
                raise
            return self._result(process, time.monotonic() - began)

    def _feed(self, stream: int, data: bytes) -> bool:
        """Take output, and look for the mark in it."""
        self._num_bytes += len(data)
        if self._mark is None or self._marked is None:
            return self._num_bytes <= _FLOOD * self._limits.output_bytes
        self._pending += data
        at = self._pending.find(self._mark)
        if at >= 0 and len(self._pending) > at + len(self._mark):
            self._keep(self._pending[:at])
            # The byte after the mark tells whether the code raised.
            failed = self._pending[at + len(self._mark) : at + len(self._mark) + 1] != b"0"
            self._mark = None
            if not self._marked.done():
                self._marked.set_result(failed)
        elif at < 0:
            # The mark may arrive in two parts, so as many bytes as it has are held back.
            tail = len(self._mark)
            self._keep(self._pending[:-tail])
            del self._pending[:-tail]
        return self._num_bytes <= _FLOOD * self._limits.output_bytes

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and not self._process.finished.done()

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    def _keep(self, data: bytes | bytearray) -> None:
        self._kept += data[: max(0, self._limits.output_bytes - len(self._kept))]

    def _result(self, process: SupervisedProcess, wall_s: float) -> RunResult:
        marked, self._marked, self._mark = self._marked, None, None
        if marked is not None and marked.done():
            process.end()
            return RunResult(
                stdout=self._kept.decode(errors="replace"),
                stderr="",
                ended="exit",
                exit_code=int(marked.result()),
                wall_s=wall_s,
                level=self._level,
            )
        self._process = None
        self._keep(self._pending)
        text = self._kept.decode(errors="replace")
        return RunResult(stdout=text, stderr="", level=self._level, **process.report(text))
