"""The private folder of a sandbox, and sandboxes whose files are in such a folder.

Untrusted code may have put anything into the folder, so no path is followed out of it: every
component is opened without following links, and only regular files are read. A folder is
`BASE/rolltree-sandbox-XXXX/work`, next to a `lock` that its owner holds. Folders with a free lock
were left by a killed process; the next process removes them. A bounded folder has a tmpfs of
limited size mounted over `work` in its own mount namespace (`mount.py`), which exists as long as
its descriptors are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rolltree._helpers.tasks import being_cancelled
from rolltree.sandbox.interface import Limits, RunResult, SandboxLevel
from rolltree.sandbox.process import (
    Feed,
    Launch,
    OutputTail,
    SupervisedProcess,
    SupervisedSession,
    run_to_end,
    tmpfs_options,
)
from rolltree.values.errors import SandboxError, SandboxFileError

PREFIX = "rolltree-sandbox-"
_MOUNT = Path(__file__).with_name("mount.py")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Failures of the machine, which code in the sandbox cannot cause.
_HOST_FAILURES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
# Files in 2,000 nested folders can have paths of 500 MB in all.
_MAX_PATH_CHARACTERS = 2**14


class PrivateFolder:
    """A work folder, owned by `uid` if given; deleted by `remove` or when the process ends.

    With `limits`, the kernel bounds all bytes and files in it, including unlinked ones. Then
    `mount_fd` is a descriptor of the mount namespace in which `path` is the folder; else it is
    None. `fd` is a descriptor of the folder itself.

    Raises:
        SandboxError: this user cannot mount a bounded folder on this machine.
    """

    def __init__(
        self, base: Path | None = None, uid: int | None = None, limits: Limits | None = None
    ) -> None:
        parent = Path(base or tempfile.gettempdir()).resolve()
        if parent not in _swept:
            _swept.add(parent)
            sweep(parent)
        # The kernel frees the lock however this process dies, so a folder with a free lock may be
        # swept.
        self.outer, self._lock_fd = _locked(parent)
        self.uid = uid
        self.path = self.outer / "work"
        self.path.mkdir(mode=0o700)
        if uid is not None:
            os.chown(self.path, uid, uid)
            # The sandbox's user must get through, but must not list the outer folder.
            self.outer.chmod(0o711)
        try:
            self.mount_fd: int | None = None
            if limits is None:
                self.fd = os.open(self.path, _FOLDER_FLAGS)
            else:
                self.mount_fd, self.fd = self._bounded(limits)
        except BaseException:  # Ctrl-C, too
            _remove(self.outer, self._lock_fd)
            raise
        fds = [fd for fd in (self.mount_fd, self.fd) if fd is not None]
        self._finalizer = weakref.finalize(self, _remove, self.outer, self._lock_fd, *fds)

    def _bounded(self, limits: Limits) -> tuple[int, int]:
        owner = self.uid if self.uid is not None else os.geteuid()
        group = self.uid if self.uid is not None else os.getegid()
        options = f"{tmpfs_options(limits)},mode=0700,uid={owner},gid={group}"
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(_MOUNT), str(self.path), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        ) as process:
            assert process.stdout is not None
            reply = os.read(process.stdout.fileno(), 4096).decode()
            if reply != "1":
                raise SandboxError(
                    "the sandbox folder cannot be bounded on this machine, so code could fill its "
                    f"disk ({reply[1:] or 'the program that mounts it died'})."
                )
            with contextlib.ExitStack() as opened:
                try:
                    fds = []
                    # Through /proc, since the mount exists only in that process's namespace. The
                    # two descriptors keep it after `mount.py` has ended, and free it when they
                    # close, even after a `kill -9` (design/0019).
                    for path in ("ns/mnt", f"root{self.path}"):
                        fds.append(
                            os.open(f"/proc/{process.pid}/{path}", os.O_RDONLY | os.O_CLOEXEC)
                        )
                        opened.callback(os.close, fds[-1])
                except OSError as error:
                    raise SandboxError(
                        "the bounded sandbox folder cannot be reached, so code could not run in it "
                        f"({error}). Does /proc hide processes of the same user?"
                    ) from error
                opened.pop_all()
                return fds[0], fds[1]

    def remove(self) -> None:
        """Delete the folder and everything in it. Doing it twice does nothing."""
        self._finalizer()

    def reset(self) -> None:
        """Undo changes by code to the folder itself: `chmod 0 .` locks out all users but root.

        If files are not protected, code may also have moved or deleted it; then it is made again.
        """
        # If this fails, so does the caller's next step, whose error is explained.
        with contextlib.suppress(OSError):
            # At a level that does not protect files, code may have moved or deleted the folder.
            if self.mount_fd is None and not _is_at(self.path, self.fd):
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = os.open(self.path, _FOLDER_FLAGS)
                os.dup2(fd, self.fd, inheritable=False)
                os.close(fd)
                if self.uid is not None:
                    os.fchown(self.fd, self.uid, self.uid)
            os.fchmod(self.fd, 0o700)

    def write(self, name: str, data: bytes) -> None:
        """Write a file, and create the folders on its path.

        Raises:
            SandboxFileError: the path leaves the folder, or goes through a link or a file.
        """
        parts = _parts(name)
        with self._enter(parts[:-1], name, create=True) as parent, _explained(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(parts[-1], dir_fd=parent)
            # Always a new file: an existing one, from code, may be a link, a pipe, or open
            # elsewhere.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, 0o600, dir_fd=parent)
            try:
                with open(fd, "wb") as file:
                    # A default access list that code set on the folder may have removed rights.
                    os.fchmod(fd, 0o600)
                    if self.uid is not None:
                        os.fchown(fd, self.uid, self.uid)
                    file.write(data)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(parts[-1], dir_fd=parent)
                raise

    def discard(self, name: str) -> None:
        """Delete a file at the top of the folder, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return a regular file's bytes.

        Raises:
            SandboxFileError: there is no such regular file inside the folder, or it is too large.
        """
        parts = _parts(name)
        with self._enter(parts[:-1], name, create=False) as parent, _explained(name):
            # Nonblocking, since opening a named pipe would block until it has a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(parts[-1], flags, dir_fd=parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SandboxFileError(
                f"{name!r} in the sandbox is not a regular file; reading it could block or reach "
                "the host. Have the code write a plain file."
            )
        with open(fd, "rb") as file:
            # Not limited by the file's size, which code can change after it is queried.
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxFileError(
                f"{name!r} in the sandbox has more than {max_bytes} bytes; the code may have made "
                "it large on purpose. Pass a larger max_bytes if it is what you want."
            )
        return data

    def names(self) -> list[str]:
        """Return the paths of the regular files, sorted, without links and other entries.

        Also left out are names that are not UTF-8, files in folders that code has locked or moves
        meanwhile, and files below paths of more than 16,384 characters.
        """
        self.reset()
        found: list[str] = []
        # Code that still runs may lock folders during the walk.
        with contextlib.suppress(OSError):
            for way, files in _walk(self.fd):
                found += ["/".join([*way, name]) for name in files]
        return sorted(found)

    @contextmanager
    def _enter(self, parts: list[str], name: str, *, create: bool) -> Iterator[int]:
        """Yield a descriptor of a folder below, opened without following any link."""
        self.reset()
        with _explained(name):
            fd = os.open(".", _FOLDER_FLAGS, dir_fd=self.fd)
        try:
            for part in parts:
                with _explained(name):
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, 0o700, dir_fd=fd)
                            if self.uid is not None:
                                os.chown(part, self.uid, self.uid, dir_fd=fd, follow_symlinks=False)
                    deeper = os.open(part, _FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)


def _walk(top: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the path to each folder (always the same list, changed later) and its files' names."""
    # Each folder is entered from its parent and left by "..": opening from the top took 28 s for
    # 2,000 nested folders, and a descriptor for each would take too many.
    here, way = os.open(".", _FOLDER_FLAGS, dir_fd=top), list[str]()
    try:
        folders, files = _entries(here)
        levels = [(os.fstat(here), folders)]
        yield way, files
        while levels:
            if sum(map(len, way)) > _MAX_PATH_CHARACTERS:
                levels[-1][1].clear()
            if levels[-1][1]:
                way.append(levels[-1][1].pop())
                try:
                    deeper = os.open(way[-1], _FOLDER_FLAGS, dir_fd=here)
                except OSError:
                    # Code has deleted or locked the folder.
                    way.pop()
                    continue
                # ".." of a folder without this right cannot be opened.
                if not os.access(".", os.X_OK, dir_fd=deeper):
                    os.close(deeper)
                    way.pop()
                    continue
                os.close(here)
                here = deeper
                folders, files = _entries(here)
                levels.append((os.fstat(here), folders))
                yield way, files
                continue
            levels.pop()
            if levels:
                way.pop()
                above = os.open("..", _FOLDER_FLAGS, dir_fd=here)
                os.close(here)
                here = above
                if not os.path.samestat(os.fstat(here), levels[-1][0]):
                    # Code moved the folder meanwhile: ".." leads elsewhere.
                    return
    finally:
        os.close(here)


def _entries(fd: int) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the regular files in a folder."""
    folders, files = list[str](), list[str]()
    with contextlib.suppress(OSError), os.scandir(fd) as entries:
        for entry in entries:
            if not _is_text(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_file(follow_symlinks=False):
                files.append(entry.name)
    return folders, files


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


_swept: set[Path] = set()


def _locked(parent: Path) -> tuple[Path, int]:
    """Make a folder in `parent`, and return it with a descriptor that holds its lock."""
    while True:
        outer = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Another process that starts may sweep the folder before it is locked. Then its lock is
        # taken, or deleted; that process removes the rest.
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(outer / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return outer, fd
            os.close(fd)


def sweep(parent: Path) -> int:
    """Remove the folders in `parent` whose owner is dead; return their number."""
    removed = 0
    for outer in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            # Another user may have made a folder of that name in a shared temporary folder.
            if outer.is_symlink() or outer.stat().st_uid != os.getuid():
                continue
            fd = os.open(outer / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                continue
            _remove(outer, fd)
            removed += 1
    return removed


def _remove(outer: Path, lock_fd: int, *fds: int) -> None:
    """Delete a folder of any depth and any modes, then release its lock."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    with contextlib.suppress(OSError):
        # If files are not protected, code may have put a link to elsewhere in its place.
        outer.unlink()
    _empty(outer)
    shutil.rmtree(outer, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock_fd)


def _empty(outer: Path) -> None:
    """Empty a folder without recursion: nested folders are first moved to the top."""
    pending = [outer]
    while pending:
        folder = pending.pop()
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        # 2,000 nested folders exceed the recursion limit and the longest path.
                        moved = outer / f"old-{secrets.token_hex(8)}"
                        os.chmod(entry.path, 0o700)
                        os.rename(entry.path, moved)
                        pending.append(moved)
                    # The lock stays until the end: without it, another process would clean up, too.
                    elif folder != outer:
                        os.unlink(entry.path)
            if folder != outer:
                folder.rmdir()


def _is_text(name: str) -> bool:
    """Whether a name can be encoded as UTF-8; Python decodes other bytes to surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or name.startswith("/") or "\0" in name or not _is_text(name):
        raise SandboxFileError(
            f"{name!r} is not a path inside a sandbox. Use a relative path without '..', like "
            "'data/input.txt'."
        )
    return parts


def _host_failure(what: str, error: OSError) -> SandboxError:
    return SandboxError(
        f"{what} ({error.strerror}): this process or machine has run out of something. Raise its "
        "limits (`ulimit -n`, `ulimit -u`), or play fewer episodes at once (max_concurrent)."
    )


@contextmanager
def _starting(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Here, EAGAIN is the limit on processes. For a file, it may be a lease that code holds.
        if error.errno not in (*_HOST_FAILURES, errno.EAGAIN):
            raise
        raise _host_failure(f"{what} could not be started", error) from error


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SandboxFileError(
            f"there is no file {name!r} in the sandbox. List what there is with list_files()."
        ) from error
    except OSError as error:
        if error.errno in _HOST_FAILURES:
            raise _host_failure(f"{name!r} in the sandbox could not be opened", error) from error
        if error.errno in _FULL:
            raise SandboxFileError(
                f"{name!r} does not fit into the sandbox: its folder is bounded by "
                "Limits.disk_bytes and max_files, and code may have filled it. Delete files in "
                "it or raise the limits."
            ) from error
        raise SandboxFileError(
            f"{name!r} in the sandbox cannot be opened ({error.strerror}): it is a link, or a part "
            "of its path is not a folder. Links are not followed, because they may lead outside."
        ) from error


class FolderSandbox(ABC):
    """A sandbox whose files are a folder of the host."""

    def __init__(self, folder: PrivateFolder, level: SandboxLevel, limits: Limits) -> None:
        self.id = secrets.token_hex(8)
        self.level = level
        self.limits = limits
        self.env: dict[str, str] = {}
        """Environment variables of its commands, in addition to the backend's."""
        self._folder = folder
        self._running: set[asyncio.Task[RunResult]] = set()
        self._sessions: list[SupervisedSession] = []
        self._programs = itertools.count(1)
        self._closed = False

    @property
    def path(self) -> Path:
        """The folder's path on the host; a bounded folder is in its own mount namespace."""
        return self._folder.path

    @property
    @abstractmethod
    def inside(self) -> str:
        """The folder as code sees it."""

    @abstractmethod
    def launch(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return the command wrapped in everything that isolates it."""

    @property
    @abstractmethod
    def python(self) -> str:
        """The interpreter, as a path inside."""

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = "",
        limits: Limits | None = None,
        tail: OutputTail | None = None,
    ) -> RunResult:
        """Run a command in the folder until it ends, with all processes it started.

        With `tail`, the output goes there and not into the result, even if the run is cancelled.
        A command that no system could start (with a NUL character, or too long) has exit code 126.

        Raises:
            SandboxError: the sandbox is closed, or could not be set up.
        """
        self._check_open()
        limits = limits or self.limits
        command = [_bytes_of(part).decode() for part in command]
        if any("\0" in part for part in command):
            return self._not_started("a command must not contain NUL characters")
        try:
            with _starting("a program in the sandbox"):
                launch = self._prepared(command, limits)
                task = asyncio.create_task(run_to_end(launch, limits, _bytes_of(stdin), tail))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                return await task
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            return self._not_started("the command is too long; write it to a file")
        except asyncio.CancelledError:
            # `close` cancelled the run; a cancellation by the caller passes through.
            if self._closed and not being_cancelled():
                raise SandboxError("the sandbox was closed while code ran in it.") from None
            raise

    async def run_python(
        self, code: str, *, stdin: str | bytes = "", limits: Limits | None = None
    ) -> RunResult:
        """Run Python code as a separate program; files next to it can be imported.

        The program's file is deleted afterwards. If there is no space for it, the run ends with
        "disk"; if code has put something else in its place, with exit code 126.
        """
        name = f".program-{next(self._programs)}.py"
        try:
            await self.write_file(name, code)
        except SandboxFileError as error:
            # Neither counts as a failure of the sandbox: a failed rollout has no reward, so a model
            # could learn to fail by filling its folder or taking the name (design/0019).
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
                return self._not_started(str(error))
            message = "the folder is full; delete files in it first\n"
            return RunResult("", message, "disk", None, level=self.level.name)
        try:
            return await self.run([self.python, "-s", name], stdin=stdin, limits=limits)
        finally:
            if not self._closed:
                self._folder.discard(name)

    def python_session(self, *, limits: Limits | None = None) -> SupervisedSession:
        """Return a Python process that keeps its variables; it starts with the first code."""
        self._check_open()
        limits = limits or self.limits

        def start(source: str, feed: Feed) -> SupervisedProcess:
            self._check_open()
            with _starting("Python in the sandbox"):
                launch = self._prepared([self.python, "-s", "-c", source], limits)
                return SupervisedProcess(launch, limits, feed, stdin=None, windowed=True)

        session = SupervisedSession(start, limits, self.level.name)
        self._sessions.append(session)
        return session

    async def write_file(self, name: str, data: str | bytes) -> None:
        """Put a file into the folder.

        Raises:
            SandboxFileError: the path leads out of the folder, or is a link.
        """
        self._check_open()
        await asyncio.to_thread(self._folder.write, name, _bytes_of(data))

    async def read_file(self, name: str, *, max_bytes: int = 2**20) -> bytes:
        """Return a file of the folder.

        Raises:
            SandboxFileError: there is no such regular file, or it has more than `max_bytes`.
        """
        self._check_open()
        return await asyncio.to_thread(self._folder.read, name, max_bytes)

    async def list_files(self) -> list[str]:
        """Return the paths of all regular files of the folder."""
        self._check_open()
        return await asyncio.to_thread(self._folder.names)

    async def close(self) -> None:
        """Kill all processes and delete the folder. Doing it twice does nothing."""
        if self._closed:
            return
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for session in self._sessions:
            await session.close()
        await asyncio.to_thread(self._folder.remove)

    async def __aenter__(self) -> FolderSandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _prepared(self, command: Sequence[str], limits: Limits) -> Launch:
        """Wrap a command, and restore the folder's rights."""
        self._folder.reset()
        # Another run of this sandbox could kill this one before it is confined.
        alone = not self._running and not any(session.is_alive for session in self._sessions)
        return replace(self.launch(command, limits), alone=alone)

    def _not_started(self, why: str) -> RunResult:
        # As in a shell: the model wrote the command, so the failure is its own.
        return RunResult("", f"{why}\n", "exit", 126, level=self.level.name)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(
                "the sandbox is closed: its processes and files are gone. Create another one."
            )


def _bytes_of(text: str | bytes) -> bytes:
    """Return UTF-8; a lone surrogate, as in a model's JSON, becomes a question mark."""
    return text.encode(errors="replace") if isinstance(text, str) else text
