"""Serves the page: listens on a port, announces the link, and opens a browser."""

from __future__ import annotations

import secrets
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn

from rolltree.errors import ConfigError
from rolltree.inference.server.http import AnnouncingServer, listen, protocol_with_head_timeout
from rolltree.viewer.app import create_viewer_app

HOST = "127.0.0.1"
_READ_TIMEOUT_S = 30.0


def serve_viewer(
    root: Path, *, port: int = 0, browser: bool = True, on_ready: Callable[[str], None]
) -> None:
    """Serve the page for the runs at and below `root`, to this machine only, until stopped.

    `on_ready(link)` is called when requests can come. The link has the token of this start after
    `#`, which browsers do not send; the browser that is opened here gets a code that works once.

    Raises:
        ConfigError: the folder does not exist, or the port is not available.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder, so there are no runs to show. Name a run directory or a "
            "folder of runs: rolltree view runs."
        )
    # The token is after "#", which browsers do not send, so it is not in logs or referrers.
    token, code = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if browser else None
    listener = listen(HOST, port)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_viewer_app(root, token, (f"{HOST}:{port}", f"localhost:{port}"), code=code),
        http=protocol_with_head_timeout(_READ_TIMEOUT_S),
        log_level="warning",
        access_log=False,
        server_header=False,
        # A header must not override the client's address, which `user_of` looks up.
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    page = f"http://{HOST}:{port}/"

    def ready() -> None:
        on_ready(f"{page}#token={token}")
        if code is not None:
            link = f"{page}#code={code}"
            threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()

    with listener:
        AnnouncingServer(config, ready).run([listener])
