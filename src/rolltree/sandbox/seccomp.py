"""The system call filter of a sandbox, as a classic BPF program.

It builds bytes; `confine` loads them. It is a list of what is allowed, so a call that a later
kernel adds is refused. A refused call fails with EPERM, an unlisted one with ENOSYS, which C
libraries know how to handle; a call in a foreign calling convention (32-bit on x86_64) kills the
process. It leaves out files, which are Landlock's or the mount namespace's matter.
"""

from __future__ import annotations

import errno
import struct

from rolltree.errors import SandboxUnavailable
from rolltree.sandbox.syscalls import ATTRIBUTES, AUDIT_ARCH, METADATA, NUMBERS, SIGNALS

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW: NS, CGROUP, UTS, IPC, USER, PID, NET
_AF_UNIX, _TIOCSTI, _TIOCLINUX = 1, 0x5412, 0x541C
_PRCTL_ALLOWED = (1, 2, 3, 15, 16, 38, 39, 0x53564D41)
"""PDEATHSIG (set, get), GET_DUMPABLE, NAME (set, get), NO_NEW_PRIVS (set, get), SET_VMA."""

_PLAINLY_REFUSED = {  # socket, unshare, setns, mount, chroot, ptrace, bpf: EPERM tells more
    "x86_64": (41, 272, 308, 165, 161, 101, 321),
    "aarch64": (198, 97, 268, 40, 51, 117, 280),
}


def build_filter(machine: str, *, signals: bool, metadata: bool, attributes: bool) -> bytes:
    """Return the program for a machine (`platform.machine()`).

    Args:
        machine: "x86_64" or "aarch64".
        signals: allow `kill` and its kin; something else must confine them.
        metadata: allow `chmod` and its kin; something else must confine them.
        attributes: allow extended attributes; something else must confine them.

    Raises:
        SandboxUnavailable: another machine.
    """
    if machine not in NUMBERS:
        raise SandboxUnavailable(
            f"the local sandbox has no system call table for {machine!r}; untrusted code would run "
            "unfiltered. Use the Docker backend on this machine."
        )
    numbers = NUMBERS[machine]
    groups = ((signals, SIGNALS), (metadata, METADATA), (attributes, ATTRIBUTES))
    refused = {name for allowed, names in groups if not allowed for name in names}
    lines = [_load(4), _jump(_EQUAL, AUDIT_ARCH[machine], 1, 0), _return(_KILL), _load(0)]
    if machine == "x86_64":
        lines += [_jump(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    checks = _checks()
    for name, check in checks.items():
        lines += [_jump(_EQUAL, numbers[name], 0, len(check)), *check]
    for name, number in numbers.items():
        if name not in checks:
            code = errno.EOPNOTSUPP if name in ATTRIBUTES else errno.EPERM
            verdict = _refuse(code) if name in refused else _return(_ALLOW)
            lines += [_jump(_EQUAL, number, 0, 1), verdict]
    for number in _PLAINLY_REFUSED[machine]:
        lines += [_jump(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    return b"".join([*lines, _refuse(errno.ENOSYS)])


def _checks() -> dict[str, list[bytes]]:
    """Calls that are allowed with some arguments only; each block ends with a verdict."""
    allow, refuse = _return(_ALLOW), _refuse(errno.EPERM)
    return {
        "clone": [_argument(0), _jump(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, allow],
        "socketpair": [_argument(0), _jump(_EQUAL, _AF_UNIX, 1, 0), refuse, allow],
        "prlimit64": [_argument(0), _jump(_EQUAL, 0, 1, 0), refuse, allow],
        "ioctl": [
            _argument(1),
            _jump(_EQUAL, _TIOCSTI, 1, 0),
            _jump(_EQUAL, _TIOCLINUX, 0, 1),
            refuse,
            allow,
        ],
        "prctl": [
            _argument(0),
            *(
                _jump(_EQUAL, option, len(_PRCTL_ALLOWED) - index, 0)
                for index, option in enumerate(_PRCTL_ALLOWED)
            ),
            refuse,
            allow,
        ],
    }


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _argument(index: int) -> bytes:
    return _load(16 + 8 * index)  # the low half: these arguments are 32-bit in the kernel


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", test, if_true, if_false, value)


def _return(action: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, action)


def _refuse(number: int) -> bytes:
    return _return(_ERRNO | number)
