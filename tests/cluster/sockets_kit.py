"""Which sockets a process and its descendants listen on, as the kernel says."""

import contextlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket; `command` is that of one process that has it."""

    address: str
    port: int
    command: str

    @property
    def is_loopback(self):
        return ipaddress.ip_address(self.address).is_loopback


def family(root):
    """Return the ids of a process and of all its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
    found, new = {root}, {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def listeners(*roots, but=()):
    """Return the sockets that processes and their descendants listen on, without those of `but`."""
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                sockets[f"socket:[{words[9]}]"] = words[1]
    found = set()
    for pid in set().union(*map(family, roots)) - set(but):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    place = sockets.get(os.readlink(fd))
                    if place is not None:
                        address, _, port = place.partition(":")
                        found.add(Listener(_address(address), int(port, 16), command))
    return found


def _address(text):
    # The kernel writes each 32-bit word in the machine's byte order.
    data = b"".join(
        int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)
    )
    return str(ipaddress.ip_address(data))
