"""Mount a tmpfs of limited size in a new namespace: `python -I -S mount.py PATH OPTIONS`.

It makes a mount namespace (and, unless it is root, a user namespace, which allows that), mounts the
file system over PATH, writes "1" and waits for the end of standard input. By then its parent holds
descriptors of the namespace, so it may end (design/0019). An error is written after an "E".
"""

from __future__ import annotations

import ctypes
import os
import sys

# Importing `typing` takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_NEW_NAMESPACE, _NEW_USER = 0x20000, 0x10000000
_NO_SUID, _NO_DEVICES, _BIND = 1 << 1, 1 << 2, 1 << 12
_RECURSIVE, _SLAVE = 1 << 14, 1 << 19

libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Mount the file system, report it, and wait."""
    path, options = sys.argv[1].encode(), sys.argv[2].encode()
    try:
        if os.geteuid() == 0:
            _check(libc.unshare(_NEW_NAMESPACE), "mount namespace")
        else:
            make_user_namespace()
        # The host's mounts are not affected; what the host unmounts later is unmounted here, too.
        _check(libc.mount(None, b"/", None, _RECURSIVE | _SLAVE, None), "mount propagation")
        flags = _NO_SUID | _NO_DEVICES
        # A shared mapping of /dev/zero is memory that no limit sees; /dev/full reads the same.
        _check(libc.mount(b"/dev/full", b"/dev/zero", None, _BIND, None), "/dev/zero")
        # The options bound size and inodes: the kernel refuses what exceeds them, while polling
        # would only see files with a name, and too late.
        _check(libc.mount(b"tmpfs", path, b"tmpfs", flags, options), "mount")
    except OSError as error:
        os.write(1, f"E{error.strerror}".encode())
    else:
        os.write(1, b"1")
        # Until its parent has opened the descriptors, only this process keeps the namespace.
        os.read(0, 1)
    # A regular exit of the interpreter takes longer.
    os._exit(0)


def make_user_namespace() -> None:
    """Enter a new user namespace in which the same user may mount."""
    uid, gid = os.geteuid(), os.getegid()
    _check(libc.unshare(_NEW_USER | _NEW_NAMESPACE), "user namespace")
    # The kernel takes an unprivileged `gid_map` only after `setgroups` is denied.
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _check(result: int, what: str) -> None:
    """Raise OSError for a failed system call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
