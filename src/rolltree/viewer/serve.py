"""The process of the page: where it listens, its link, and the browser that it opens."""

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

    `on_ready(link)` is called when the first request can come. The link carries the token of this
    start after `#`, which browsers keep to themselves; the browser that is opened here gets a code
    that works once.

    Raises:
        ConfigError: there is no such folder, or the port cannot be listened on.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder, so there are no runs to show. Name a run directory or a "
            "folder of runs: rolltree view runs."
        )
    # The token is after "#", which browsers do not send: it is in no log and no referrer.
    token, code = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if browser else None
    listener = listen(HOST, port)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_viewer_app(root, token, (f"{HOST}:{port}", f"localhost:{port}"), code=code),
        http=protocol_with_head_timeout(_READ_TIMEOUT_S),
        log_level="warning",
        access_log=False,
        server_header=False,
        # A header must not say whose connection it is: `user_of` looks the address up.
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
