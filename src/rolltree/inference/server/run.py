"""Running the server: an address to listen on, a token, uvicorn.

By default only this machine can reach it. It knows sockets and uvicorn. It knows nothing about
models; the application is handed in.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from rolltree.errors import ConfigError
from rolltree.inference.server.app import create_app
from rolltree.inference.server.served import ServedModel


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and what to ask for.

    `port` 0 takes a free one. `token` None generates one, which only a loopback address allows;
    any other `host` needs `allow_remote` as well as a token.

    Raises:
        ConfigError: the host is not loopback, and `allow_remote` or the token is missing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    allow_remote: bool = False

    def __post_init__(self) -> None:
        if is_loopback(self.host):
            return
        if not self.allow_remote:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and whoever reaches it "
                "with the token can use the model and replace its weights. Connections are not "
                "encrypted. If that is meant, add --allow-remote."
            )
        if self.token is None:
            raise ConfigError(
                "a server that other machines can reach needs a token of your own. Put one into "
                "an environment variable and name it: --api-key-env ROLLTREE_SERVE_TOKEN."
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    served: ServedModel, options: ServerOptions, *, on_ready: Callable[[str, str], None]
) -> None:
    """Serve until the process is told to stop (SIGINT, SIGTERM).

    `on_ready(url, token)` is called when the first request can come; `url` ends in `/v1`.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    token = options.token or secrets.token_urlsafe(24)
    listener = _listen(options)
    port = listener.getsockname()[1]
    name = f"[{options.host}]" if ":" in options.host else options.host
    config = uvicorn.Config(
        create_app(served, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        ws="none",
    )
    with listener:
        _Announcing(config, lambda: on_ready(f"http://{name}:{port}/v1", token)).run([listener])


class _Announcing(uvicorn.Server):
    """A server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets)
        self._on_ready()


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{options.host}:{options.port} cannot be listened on ({error}). Another server may "
            "run there: choose another --port, or 0 for a free one."
        ) from error
    return listener
