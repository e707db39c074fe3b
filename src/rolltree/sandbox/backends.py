"""The table of sandbox backends: a name in a setting becomes an object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolltree.errors import UnknownName, did_you_mean
from rolltree.sandbox.docker import DockerBackend
from rolltree.sandbox.interface import SandboxBackend
from rolltree.sandbox.local import LocalBackend

_BACKENDS: Mapping[str, Callable[..., SandboxBackend]] = {
    "local": LocalBackend,
    "docker": DockerBackend,
}


def known_backends() -> tuple[str, ...]:
    """Return the names that `backend_of` takes."""
    return tuple(_BACKENDS)


def backend_of(backend: str | SandboxBackend = "local", **settings: Any) -> SandboxBackend:
    """Return a backend by name, made with `settings`; an object that is one passes through.

    Raises:
        UnknownName: no backend has that name.
        TypeError: it takes no such setting, or settings came with a finished object.
    """
    if not isinstance(backend, str):
        if settings:
            raise TypeError("settings go to the backend's own constructor when it is given.")
        return backend
    if backend not in _BACKENDS:
        raise UnknownName(
            f"there is no sandbox backend {backend!r}.{did_you_mean(backend, _BACKENDS)}"
        )
    return _BACKENDS[backend](**settings)
