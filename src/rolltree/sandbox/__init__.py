"""Sandboxes, which run untrusted code behind one interface.

There are two backends, "local" and "docker". For virtual machines and remote sandboxes, any object
with `create` can be a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolltree.sandbox.docker import DockerBackend
from rolltree.sandbox.interface import (
    Ended,
    Limits,
    PythonSession,
    RunResult,
    Sandbox,
    SandboxBackend,
    SandboxLevel,
)
from rolltree.sandbox.local import LocalBackend
from rolltree.values.errors import look_up

_BACKENDS: Mapping[str, Callable[..., SandboxBackend]] = {
    "local": LocalBackend,
    "docker": DockerBackend,
}


def backend_of(backend: str | SandboxBackend = "local", **settings: Any) -> SandboxBackend:
    """Return a backend by name, made with `settings`; a backend object is returned as it is.

    Raises:
        UnknownName: no backend has that name.
        TypeError: the backend has no such setting, or settings came with a backend object.
    """
    if not isinstance(backend, str):
        if settings:
            raise TypeError("a backend object takes no settings; pass them to its constructor.")
        return backend
    return look_up("sandbox backend", backend, _BACKENDS)(**settings)


__all__ = [
    "DockerBackend",
    "Ended",
    "Limits",
    "LocalBackend",
    "PythonSession",
    "RunResult",
    "Sandbox",
    "SandboxBackend",
    "SandboxLevel",
    "backend_of",
]
