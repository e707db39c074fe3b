"""Confine this process and become the command: `python -I -S -c SOURCE READY_FD COMMAND...`.

It is the last trusted code before untrusted code, and uses only the standard library. It applies,
in this order: a private umask, no inherited descriptors, a separate user id (if started by root),
no capabilities, no way to regain privileges, resource limits, a Landlock ruleset, the system call
filter; then it executes the command. After a failure, which is reported through the ready pipe, the
command is not run. `local` appends a call of `main` with the specification to the source, because
importing a parser would take longer than all else. `supervisor` handles time and process trees,
bubblewrap handles mounts.
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
# Landlock's system calls, which have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
# Execute, write, read, truncate, ioctl: the kernel refuses other rights in a rule for a file.
_FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
# Execute, read files, read folders.
_READ = 1 << 0 | 1 << 2 | 1 << 3
# Character and block devices.
_MAKE_DEVICE = 1 << 6 | 1 << 11
# The rights that each ABI adds: the kernel refuses a ruleset with a right that it does not know,
# and allows a right that the ruleset does not name.
_ALL_SINCE = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def main(spec: dict[str, Any]) -> NoReturn:
    """Apply every protection of the specification and execute the command."""
    ready = int(sys.argv[1])
    try:
        # Files of the code are readable by its own user only, whatever the host's umask is.
        os.umask(0o077)
        # Landlock and mounts are only checked when a file is opened, so an inherited descriptor
        # would bypass both.
        os.closerange(3, ready)
        os.closerange(ready + 1, max(os.sysconf("SC_OPEN_MAX"), ready + 2))
        os.set_inheritable(ready, False)
        # Needs a capability that the change of user gives up.
        drop_bounding_set()
        drop_user(spec["uid"])
        # Root without a separate user would keep all capabilities.
        drop_capabilities(spec["machine"])
        # From here on, set-user-id programs gain no privileges. Otherwise an unprivileged process
        # may load neither Landlock rules nor the filter.
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        # After the change of user, which would clear it.
        _check(libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "parent death signal")
        # After the change of user, too: the kernel counts processes by user, and must count only
        # the sandbox's.
        for name, value in spec["rlimits"].items():
            limit_resource(getattr(resource, name), value)
        # Code can lock its own folder (`chmod 0 .`). If that made the sandbox fail, a model could
        # choose to get no reward (design/0019), so only the command fails. The self-test of a level
        # checks that a fresh folder can be entered.
        locked = change_folder(spec["cwd"])
        # Landlock before the filter, which does not allow the calls that were needed so far.
        if spec["landlock_abi"]:
            restrict_files(
                spec["landlock_abi"],
                spec["read_only"],
                spec["devices"],
                spec["folder"],
                network=spec["landlock_network"],
            )
        install_filter(spec["filter"])
        # Last: a process that could not be confined completely must not count as started.
        os.write(ready, b"1")
    except BaseException as error:  # noqa: BLE001  it is reported, and the command does not run
        os.write(ready, f"E{type(error).__name__}: {error}".encode())
        os._exit(125)
    try:
        # From here on, a failure is the command's, such as a missing program, not the sandbox's.
        if locked:
            raise locked
        prefix, given = spec["env_prefix"], os.environ.items()
        env = {key[len(prefix) :]: value for key, value in given if key.startswith(prefix)}
        os.execve(sys.argv[2], sys.argv[2:], env)
    except OSError as error:
        os.write(2, f"{error.filename or sys.argv[2]}: {error.strerror}\n".encode())
        os._exit(126)


def change_folder(folder: str) -> OSError | None:
    """Enter the work folder, or return the error, which then counts as the command's failure."""
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
    """Become a user that owns only the work folder."""
    if uid is not None:
        # In this order: without root, the process could not drop root's groups any more.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def drop_bounding_set() -> None:
    """Make every capability impossible to gain; only a privileged process can, and needs to."""
    for capability in range(64):
        # The kernel refuses numbers after the last capability that it knows.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break


def drop_capabilities(machine: str) -> None:
    """Give up every capability."""
    # Ambient capabilities, which old kernels lack, would survive `execve` of an ordinary program.
    libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    header = struct.pack("<Ii", 0x20080522, 0)
    _check(libc.syscall(_CAPSET[machine], header, bytes(24)), "drop capabilities")


def limit_resource(kind: int, value: int) -> None:
    """Set a soft and a hard limit, at most the current hard limit."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def restrict_files(
    abi: int, read_only: list[str], devices: list[str], folder: str, *, network: bool
) -> None:
    """Allow reading a few places and writing one folder, and no other files (Landlock).

    With `network`, TCP is refused as well.
    """
    handled = 0
    for since, rights in _ALL_SINCE.items():
        handled |= rights if since <= abi else 0
    net = 3 if abi >= 4 and network else 0
    scoped = 3 if abi >= 6 else 0
    # Rights that no rule grants are refused: TCP, and signals and abstract sockets to the outside.
    # An older kernel takes a shorter structure.
    fields = [handled, net, scoped][: 3 if abi >= 6 else 2 if abi >= 4 else 1]
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = _check(
        libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0),
        "Landlock ruleset",
    )
    for path in read_only:
        add_rule(ruleset, path, _READ & handled)
    for path in devices:
        # Devices may be written and read, but without ioctl.
        add_rule(ruleset, path, (1 << 1 | 1 << 2) & handled)
    # In the work folder everything is allowed except making devices and ioctl on them.
    add_rule(ruleset, folder, handled & ~_MAKE_DEVICE & ~(1 << 15))
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def add_rule(ruleset: int, path: str, rights: int) -> None:
    """Allow some rights beneath a path; a path that does not exist is skipped."""
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
    """Load the system call filter, which also applies to all child processes."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check(libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "system call filter")
