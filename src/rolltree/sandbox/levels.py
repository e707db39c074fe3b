"""The levels of the local sandbox: what they protect with, and what is missing where.

Pure: facts about a machine in, levels out. It leaves out trying them, which `local` does once.

A candidate is a level with or without a user of its own. Best first; the first that works is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltree.errors import ConfigError, SandboxUnavailable, did_you_mean
from rolltree.sandbox.machine import Machine
from rolltree.sandbox.values import SandboxLevel

LEVELS = ("bubblewrap", "landlock", "rlimits")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to confine code on this machine."""

    level: SandboxLevel
    own_user: bool
    landlock_abi: int
    signals_confined: bool
    metadata_confined: bool
    attributes_confined: bool


def candidates(machine: Machine, wanted: str = "auto") -> list[Candidate]:
    """Return what this machine may be able to do, best first.

    Raises:
        ConfigError: there is no such level.
        SandboxUnavailable: nothing of the kind can work here.
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
    users = (True, False) if machine.uids else (False,)
    found = [_candidate(name, own_user, machine) for name in names for own_user in users]
    if not found:
        need = "bubblewrap (bwrap)" if wanted == "bubblewrap" else "Linux 6.2 with Landlock enabled"
        raise SandboxUnavailable(
            f"the sandbox level {wanted!r} needs {need}, which this machine lacks; code would not "
            "be kept from the host's files. Install it, or use level 'auto' or the Docker backend."
        )
    return found


def _candidate(name: str, own_user: bool, machine: Machine) -> Candidate:
    wrapped = name == "bubblewrap"
    abi = machine.landlock_abi if name != "rlimits" else 0
    missing: list[str] = []
    if name == "rlimits":
        missing.append("files")
    elif not wrapped and abi < 3:
        missing.append("truncation")  # Landlock before ABI 3 lets files be cut
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
        if wrapped and machine.kernel >= (5, 14)
        else "kernel count of the host user + polled",
        "memory": "address space per process, resident memory of the tree polled",
        "privileges": "no capabilities, no new privileges",
        "tree": "PID namespace + subreaper" if wrapped else "subreaper",
    }
    return Candidate(
        level=SandboxLevel(name, protections, tuple(missing)),
        own_user=own_user,
        landlock_abi=abi,
        signals_confined=signals_confined,
        metadata_confined=wrapped or own_user,
        attributes_confined=wrapped,
    )
