"""The local backend: code on this machine, without Docker and without root.

A command runs inside `confine`, which runs inside bubblewrap if that is installed. The level is
chosen once per process by a test: a small program must run, and must fail to read `/etc/passwd` and
to open a socket.
"""

from __future__ import annotations

import asyncio
import copy
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rolltree.sandbox.folder import FolderSandbox, PrivateFolder
from rolltree.sandbox.interface import Limits
from rolltree.sandbox.machine import (
    Candidate,
    Machine,
    PythonRuntime,
    acquire_uid,
    candidates,
    dispensable_protections,
    is_world_reachable,
    num_tasks_of_user,
    release_uid,
    system_folders,
    this_machine,
)
from rolltree.sandbox.process import Launch
from rolltree.sandbox.seccomp import build_filter
from rolltree.values.errors import ConfigError, SandboxError, SandboxUnavailable

# The work folder as the code sees it under bubblewrap.
WORK = "/sandbox"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# For levels without a mount namespace: shared mappings of /dev/zero are memory that no limit sees.
_NO_ZERO = tuple(device for device in DEVICES if device != "/dev/zero")
# bwrap's monitor and its process 1.
TRUSTED_PROCESSES = 2
_CONFINE = Path(__file__).with_name("confine.py")
_FORWARD = Path(__file__).with_name("forward.py")
# The path of the socket that code may reach, as code sees it, and the address that leads there.
_SOCKET = "/reachable.sock"
REACHED_AT = ("127.0.0.1", 9917)
# A kernel version or an installed file does not show whether a container's policy allows a
# namespace, so each level is tested (design/0005).
_SELF_TEST = """
import socket
def refused(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return True
    return False
open("probe", "w").close()
files = refused(open, "/etc/passwd")
print("files" * files, "network" * refused(socket.socket))
"""
# 192.0.2.1 is reserved; if there is a network, connecting there fails later and differently.
_REACH_TEST = f"""
import errno, socket
socket.create_connection({REACHED_AT}, 10).close()
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    print("alone" * (error.errno == errno.ENETUNREACH))
"""
_FOR_CODE: Mapping[str, str] = MappingProxyType(
    {
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        # Threads count as processes, and a numerical library starts one per core.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
)
# The code's variables on their way to `confine`: in arguments every user could read them, and under
# their own names they would change the launcher.
_ENV_PREFIX = "ROLLTREE_CODE_"
_FOR_LAUNCHER: Mapping[str, str] = MappingProxyType({"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})


class LocalBackend:
    """Makes sandboxes on this machine.

    Args:
        level: "auto" for the best that works, or "bubblewrap", "landlock", "rlimits".
        allow_weaker: run untrusted code even if a protection is missing: True for any, or the
            names of those that may be missing (`["disk"]`).
        read_only: additional files and folders that code may read.
        env: environment variables of the code, which gets none of this process's own.
        python: the interpreter; if None, the base interpreter of this process.
        base: the parent of the private folders; the system's temporary folder if None.
        reach: the one thing that code can reach, by TCP at `REACHED_AT`: a Unix socket of this
            machine. Only for the level "bubblewrap", since the others have no network namespace.

    Raises:
        ConfigError: a path of `read_only` does not exist or is the whole file system, or
            `allow_weaker` has an unknown name.
    """

    def __init__(
        self,
        level: str = "auto",
        *,
        allow_weaker: bool | Sequence[str] = False,
        read_only: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        python: str | None = None,
        base: str | Path | None = None,
        reach: str | Path | None = None,
    ) -> None:
        self.wanted, self.dispensable = level, dispensable_protections(allow_weaker)
        self.machine = this_machine()
        self.runtime = PythonRuntime.of(python)
        shown = tuple(str(Path(path).resolve()) for path in read_only)
        for path in shown:
            if path == "/" or not Path(path).exists():
                raise ConfigError(
                    f"read_only has {path!r}, which is missing (code would find nothing) or '/' "
                    "(code would see the whole machine). Name the folders that code needs."
                )
        self.read_only = system_folders(self.runtime, shown)
        self.env = dict(env or {})
        self.base = None if base is None else Path(base)
        self.reach = None if reach is None else Path(reach)
        self._chosen: Candidate | None = None
        self._choosing = asyncio.Lock()

    def reaching(self, socket: Path) -> LocalBackend:
        """Return a copy of this backend with a socket that code reaches."""
        other = copy.copy(self)
        other.reach, other._chosen, other._choosing = socket, None, asyncio.Lock()
        return other

    @property
    def root_names(self) -> frozenset[str]:
        """The names in `/` that every sandbox already has; its own folders cannot use them."""
        return frozenset(Path(place).parts[1] for place in (*self.read_only, *DEVICES, WORK))

    async def create(self, *, limits: Limits | None = None) -> LocalSandbox:
        """Return a new sandbox; the first one in a process tests which level works.

        Raises:
            SandboxUnavailable: no level works with the required protections.
        """
        if self._chosen is None:
            async with self._choosing:
                self._chosen = self._chosen or await self._choose()
        return await asyncio.to_thread(LocalSandbox, self, self._chosen, limits or Limits())

    async def _choose(self) -> Candidate:
        reasons: list[str] = []
        for candidate in candidates(self.machine, self.wanted):
            name = f"{candidate.level.name}{' with its own user' if candidate.own_user else ''}"
            name += " and a bounded folder" * candidate.bounded
            missing = [what for what in candidate.level.missing if what not in self.dispensable]
            if missing:
                reasons.append(
                    f"{name}: does not {' or '.join(_DOES_NOT[what] for what in missing)}"
                )
                continue
            if self.reach is not None and candidate.level.name != "bubblewrap":
                reasons.append(f"{name}: cannot let code reach one socket and nothing else")
                continue
            key = (name, self.reach is None, self.runtime, tuple(self.read_only), self.base)
            if key not in _tried:
                _tried[key] = self._unusable_reason(candidate) or await self._try(candidate)
            if not _tried[key]:
                return candidate
            reasons.append(f"{name}: {_tried[key]}")
        raise SandboxUnavailable(
            "this machine cannot isolate untrusted code well enough, so it is not run. Install "
            "bubblewrap (`pip install 'rolltree[sandbox]'`), use the Docker backend, or name what "
            "may be missing (LocalBackend(allow_weaker=['disk']); allow_weaker=True for anything). "
            "Tried: " + "; ".join(reasons)
        )

    def _unusable_reason(self, candidate: Candidate) -> str:
        if candidate.level.name == "bubblewrap" or not candidate.own_user:
            return ""
        hidden = [
            p for p in (self.runtime.executable, *self.read_only) if not is_world_reachable(p)
        ]
        return f"its user could not reach {hidden[0]}" if hidden else ""

    async def _try(self, candidate: Candidate) -> str:
        """Return the reason why a candidate cannot work, or an empty string."""
        try:
            sandbox = await asyncio.to_thread(LocalSandbox, self, candidate, Limits(wall_s=20.0))
        except SandboxError as error:
            return str(error)
        try:
            result = await sandbox.run_python(_SELF_TEST if self.reach is None else _REACH_TEST)
        except SandboxError as error:
            return str(error)
        finally:
            await sandbox.close()
        protects = [name for name in ("files", "network") if name not in candidate.level.missing]
        if self.reach is not None:
            protects = ["alone"]
        if result.ok and all(name in result.stdout for name in protects):
            return ""
        return f"its self-test gave {result.text().strip()!r}"


_DOES_NOT = {
    "files": "protect files",
    "truncation": "protect files from truncation",
    "processes": "bound processes",
    "disk": "bound disk use",
}
# For the whole process, since the result does not change, and a test costs a start of Python.
_tried: dict[tuple[object, ...], str] = {}


class LocalSandbox(FolderSandbox):
    """A sandbox on this machine. `LocalBackend.create` makes it."""

    def __init__(self, backend: LocalBackend, candidate: Candidate, limits: Limits) -> None:
        self._backend, self._candidate = backend, candidate
        self._uid = acquire_uid(backend.machine.uids) if candidate.own_user else None
        if self._uid is not None:
            # Even if the sandbox is dropped without `close`.
            self._let_uid_go = weakref.finalize(self, release_uid, self._uid)
        bounds = limits if candidate.bounded else None
        super().__init__(PrivateFolder(backend.base, self._uid, bounds), candidate.level, limits)
        self._is_wrapped = candidate.level.name == "bubblewrap"
        self.at_root: tuple[str, ...] = ()
        """Its folders that code also finds in `/`; only at the level "bubblewrap"."""

    @property
    def inside(self) -> str:
        """The folder as code sees it."""
        return WORK if self._is_wrapped else str(self._folder.path)

    @property
    def python(self) -> str:
        """The interpreter."""
        return self._backend.runtime.executable

    def launch(self, command: Sequence[str], limits: Limits) -> Launch:
        """Return the command in `confine` and, if the level has it, in bubblewrap."""
        backend, machine = self._backend, self._backend.machine
        resolved = [_find(command[0], self._bin_folder), *command[1:]]
        line: list[str] = []
        if self._is_wrapped and machine.bwrap:
            line = bwrap_arguments(
                machine.bwrap,
                str(self._folder.path),
                backend.read_only,
                as_root=machine.is_root,
                own_user=self._uid is not None,
                reach=backend.reach,
                at_root=self.at_root,
            )
        if backend.reach is not None:
            # `forward` listens, then executes the command.
            source = f"{_FORWARD.read_text()}\nmain({_SOCKET!r}, {REACHED_AT[1]}, {resolved!r})\n"
            resolved = [backend.runtime.executable, "-I", "-S", "-c", source]
        # The source is passed as an argument, since the interpreter inside may not see the
        # installed package.
        source = f"{_CONFINE.read_text()}\nmain({self._confinement(limits)!r})\n"
        line += [backend.runtime.executable, "-I", "-S", "-c", source, "READY_FD"]
        return Launch(
            command=[*line, *resolved],
            env={**_FOR_LAUNCHER, **{_ENV_PREFIX + k: v for k, v in self._environment().items()}},
            cwd="/",
            folder=str(self._folder.path),
            level=self.level.name,
            ready_at=len(line) - 1,
            trusted_processes=(TRUSTED_PROCESSES if self._is_wrapped else 0)
            + (backend.reach is not None),
            has_network=backend.reach is not None,
            signals_as_codes=self._is_wrapped,
            mount_fd=self._folder.mount_fd,
            folder_fd=self._folder.fd if self._candidate.bounded else None,
            cgroup=machine.cgroup.path if machine.cgroup else None,
        )

    def _confinement(self, limits: Limits) -> dict[str, object]:
        """Return the specification for `confine`, whose values `repr` writes as literals."""
        backend, candidate, machine = self._backend, self._candidate, self._backend.machine
        program = build_filter(
            machine.machine,
            signals=candidate.signals_confined,
            metadata=candidate.metadata_confined,
            attributes=candidate.attributes_confined,
            connections=backend.reach is not None,
        )
        return {
            "machine": machine.machine,
            "uid": self._uid,
            "cwd": self.inside,
            "folder": self.inside,
            "read_only": backend.read_only,
            "devices": DEVICES if candidate.bounded or self._is_wrapped else _NO_ZERO,
            "landlock_abi": candidate.landlock_abi,
            "landlock_network": backend.reach is None,
            "filter": program,
            "rlimits": self._rlimits(limits, machine),
            "env_prefix": _ENV_PREFIX,
        }

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": ":".join(dict.fromkeys([self._bin_folder, "/usr/bin", "/bin"])),
            "HOME": self.inside,
            "TMPDIR": self.inside,
            **_FOR_CODE,
            **self._backend.env,
            **self.env,
        }

    @property
    def _bin_folder(self) -> str:
        return str(Path(self._backend.runtime.executable).parent)

    def _rlimits(self, limits: Limits, machine: Machine) -> dict[str, int]:
        rlimits = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_NOFILE": limits.max_open_files,
            # No core dumps: the host writes them, perhaps outside the folder. No locked memory: it
            # cannot be swapped. No message queues: kernel memory, which no limit above counts.
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        if self._uid is not None:
            rlimits["RLIMIT_NPROC"] = limits.max_processes
        elif not machine.is_root:
            # If the kernel counts all processes of the user, those that run already are added.
            own_count = self._is_wrapped or self._candidate.bounded
            # bwrap's monitor is in the parent namespace, where it counts, too.
            trusted = 1 if self._is_wrapped else 0
            others = trusted if own_count and machine.kernel >= (5, 14) else num_tasks_of_user()
            rlimits["RLIMIT_NPROC"] = limits.max_processes + others
        return rlimits

    async def close(self) -> None:
        """Kill all processes, delete the folder, and release the user id."""
        await super().close()
        if self._uid is not None:
            self._let_uid_go()


def bwrap_arguments(
    bwrap: str,
    folder: str,
    read_only: Sequence[str],
    *,
    as_root: bool,
    own_user: bool,
    reach: Path | None = None,
    at_root: Sequence[str] = (),
) -> list[str]:
    """Return the bubblewrap command that goes in front of the confining program.

    The code sees no /proc, only five devices in /dev, and no writable place except the work folder.
    """
    # A new session, because code could type into a shared terminal (TIOCSTI).
    arguments = [bwrap, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net"]
    arguments += ["--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    # Root gets no user namespace, so that `confine` can become a user whose processes the kernel
    # counts.
    if not as_root:
        arguments.append("--unshare-user")
    if as_root and own_user:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            arguments += ["--cap-add", capability]
    parents = {str(parent) for place in (*read_only, *DEVICES) for parent in Path(place).parents}
    # Folders that bwrap makes are private to its user, but the code may have a different user.
    for parent in sorted(parents - {"/"}):
        arguments += ["--perms", "0755", "--dir", parent]
    for place in read_only:
        arguments += _shown(place)
    for device in DEVICES:
        # See `_NO_ZERO`; /dev/full reads the same, and cannot be mapped.
        shown = "/dev/full" if device == "/dev/zero" else device
        arguments += ["--dev-bind-try", shown, device]
    arguments += ["--bind", folder, WORK]
    if reach is not None:
        arguments += ["--ro-bind", str(reach), _SOCKET]
    if "/tmp" not in parents and "/tmp" not in read_only:
        arguments += ["--symlink", WORK, "/tmp"]
    # Links, not mounts: code may replace a folder by a link, which bwrap would follow outside.
    for name in at_root:
        arguments += ["--symlink", f"{WORK}/{name}", f"/{name}"]
    # Last, because all the mount points above are created in this root.
    return [*arguments, "--remount-ro", "/", "--"]


def _shown(place: str) -> list[str]:
    # With merged /usr, /bin is a link to /usr/bin, and must not become a separate folder.
    if os.path.islink(place):
        return ["--symlink", os.readlink(place), place]
    return ["--ro-bind-try", place, place]


def _find(program: str, bin_folder: str) -> str:
    """Return a program's path inside; a name is looked up in the default PATH."""
    if "/" in program:
        return program
    for folder in (bin_folder, "/usr/bin", "/bin"):
        if os.path.exists(f"{folder}/{program}"):
            return f"{folder}/{program}"
    return f"/usr/bin/{program}"
