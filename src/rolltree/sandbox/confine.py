"""Confine this process and become the command: `python -I -S -c SOURCE READY_FD COMMAND...`.

It is the last trusted code before untrusted code, and uses the standard library only. In order: a
private umask, no inherited descriptors, an own user id (when started by root), no capabilities, no
way to regain privileges, resource limits, a Landlock ruleset, the system call filter, the command.
Failures are reported through the ready pipe, and the command is not run. `local` appends the call
of `main` with the specification to the source: importing a parser would take longer than the rest.
Time and process trees are `supervisor`'s matter, mounts are bubblewrap's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

# Importing `typing` takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT = 24, 47
# Landlock's calls, which have the same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
# Execute, write, read, truncate, ioctl: the kernel refuses a rule for a file that has others.
_FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
# Execute, read files, read folders.
_READ = 1 << 0 | 1 << 2 | 1 << 3
# Character and block devices.
_MAKE_DEVICE = 1 << 6 | 1 << 11
# By ABI: a right that the kernel does not know makes it refuse the ruleset, and one that the
# ruleset does not name stays allowed.
_ALL_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def main(spec: dict[str, Any]) -> NoReturn:
    """Apply every protection of the specification and execute the command."""
    ready = int(sys.argv[1])
    try:
        # What the code writes is readable by its own user only, whatever the host's umask is.
        os.umask(0o077)
        # Landlock and mounts are checked when a file is opened: an inherited descriptor passes
        # both.
        os.closerange(3, ready)
        os.closerange(ready + 1, max(os.sysconf("SC_OPEN_MAX"), ready + 2))
        os.set_inheritable(ready, False)
        # This takes a capability that the change of user gives up.
        drop_bounding_set()
        drop_user(spec["uid"])
        # Root without its own user would keep them all.
        drop_capabilities(spec["machine"])
        # Set-user-id programs gain nothing from here on. Without this, an unprivileged process may
        # load neither Landlock rules nor the filter.
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        # After the change of user, which clears it.
        _check(libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "parent death signal")
        # After it too: the kernel counts processes by user, and the count has to be the sandbox's
        # own.
        for name, value in spec["rlimits"].items():
            limit_resource(getattr(resource, name), value)
        # Code can lock its own folder (`chmod 0 .`). If that made the sandbox fail, a model could
        # choose to get no reward (design/0019); so only the command fails. The self-test of a level
        # finds out if a fresh folder can be entered.
        locked = change_folder(spec["cwd"])
        # Landlock before the filter, whose list has none of the calls that were needed so far.
        if spec["landlock_abi"]:
            restrict_files(
                spec["landlock_abi"],
                spec["read_only"],
                spec["devices"],
                spec["folder"],
                network=spec["landlock_network"],
            )
        install_filter(spec["filter"])
        # Last: what could not be confined completely must not count as started.
        os.write(ready, b"1")
    except BaseException as error:  # noqa: BLE001  it is reported, and the command does not run
        os.write(ready, f"E{type(error).__name__}: {error}".encode())
        os._exit(125)
    try:
        # From here on a failure is the command's: the program is missing, not the sandbox broken.
        if locked:
            raise locked
        os.execve(sys.argv[2], sys.argv[2:], spec["env"])
    except OSError as error:
        os.write(2, f"{error.filename or sys.argv[2]}: {error.strerror}\n".encode())
        os._exit(126)


def change_folder(folder: str) -> OSError | None:
    """Enter the work folder, or return the error, which is then the command's failure."""
    try:
        os.chdir(folder)
    except OSError as error:
        return error
    return None


def _check(result: int, what: str) -> int:
    """Raise OSError for a failed system call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def drop_user(uid: int | None) -> None:
    """Become a user that owns nothing but the work folder."""
    if uid is not None:
        # In this order: giving up the user first would leave no right to drop root's groups.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def drop_bounding_set() -> None:
    """Make every capability impossible to gain; only a privileged process may and needs to."""
    for capability in range(64):
        # The kernel refuses the number after the last capability that it knows.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break


def drop_capabilities(machine: str) -> None:
    """Give up every capability."""
    # Ambient capabilities would survive `execve` of an ordinary program. Old kernels have none.
    libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = struct.pack("<Ii", 0x20080522, 0)
    _check(libc.syscall(_CAPSET[machine], header, bytes(24)), "drop capabilities")


def limit_resource(kind: int, value: int) -> None:
    """Set a soft and hard limit, no higher than the hard one that holds already."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def restrict_files(
    abi: int, read_only: list[str], devices: list[str], folder: str, *, network: bool
) -> None:
    """Allow reading a few places, writing one folder, and no other file (Landlock).

    With `network` TCP is refused as well.
    """
    handled = 0
    for since, rights in _ALL_SINCE.items():
        handled |= rights if since <= abi else 0
    net = 3 if abi >= 4 and network else 0
    scoped = 3 if abi >= 6 else 0
    # What no rule grants is refused: TCP, and signals and abstract sockets to the outside. An older
    # kernel takes a shorter structure.
    fields = [handled, net, scoped][: 3 if abi >= 6 else 2 if abi >= 4 else 1]
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = _check(
        libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "Landlock ruleset",
    )
    for path in read_only:
        add_rule(ruleset, path, _READ & handled)
    for path in devices:
        # To a device, writing and reading only: no ioctl.
        add_rule(ruleset, path, (1 << 1 | 1 << 2) & handled)
    # In the work folder everything but making devices and driving them.
    add_rule(ruleset, folder, handled & ~_MAKE_DEVICE & ~(1 << 15))
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def add_rule(ruleset: int, path: str, rights: int) -> None:
    """Allow some rights beneath a path; a path that does not exist needs none."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= _FILE_RIGHTS
    rule = struct.pack("<Qi", rights, fd)
    _check(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
    os.close(fd)


def install_filter(program: bytes) -> None:
    """Load the system call filter; it holds for every later process of the tree."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check(libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "system call filter")
