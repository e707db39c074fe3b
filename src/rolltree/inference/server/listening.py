"""Where a server listens: its socket, whether others can reach it, and when it is ready."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from rolltree.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AnnouncingServer(uvicorn.Server):
    """A server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets)
        self._on_ready()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error}). Another server may "
            "run there: choose another --port, or 0 for a free one."
        ) from error
    return listener
