"""Arguments for bubblewrap: namespaces and a file tree with next to nothing in it.

It builds an argument list. It leaves out limits, users, Landlock and the filter, which `confine`
applies inside. There is no /proc, no /dev but five devices, no writable place but the work folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

WORK = "/sandbox"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
TRUSTED_PROCESSES = 2
"""bwrap's monitor and its process 1."""


def bwrap_arguments(
    bwrap: str, folder: str, read_only: Sequence[str], *, as_root: bool, own_user: bool
) -> list[str]:
    """Return the command in front of the confining program.

    Started by root it makes no user namespace, so that `confine` can become a user whose processes
    the kernel counts.
    """
    arguments = [bwrap, "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net"]
    arguments += ["--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    arguments += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    if not as_root:
        arguments.append("--unshare-user")
    if as_root and own_user:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            arguments += ["--cap-add", capability]
    parents = {str(parent) for place in (*read_only, *DEVICES) for parent in Path(place).parents}
    for parent in sorted(parents - {"/"}):  # what bwrap makes by itself only its owner may enter
        arguments += ["--perms", "0755", "--dir", parent]
    for place in read_only:
        arguments += _shown(place)
    for device in DEVICES:
        arguments += ["--dev-bind-try", device, device]
    arguments += ["--bind", folder, WORK]
    if "/tmp" not in parents and "/tmp" not in read_only:
        arguments += ["--symlink", WORK, "/tmp"]
    return [*arguments, "--remount-ro", "/", "--"]


def _shown(place: str) -> list[str]:
    if os.path.islink(place):
        return ["--symlink", os.readlink(place), place]
    return ["--ro-bind-try", place, place]
