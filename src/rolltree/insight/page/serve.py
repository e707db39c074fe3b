"""Serves the page: listens on a port, announces the link, and opens a browser."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

from rolltree.insight.page.app import create_viewer_app
from rolltree.values.errors import ConfigError
from rolltree.web.start import AnnouncingServer, listen, server_config

HOST = "127.0.0.1"


def serve_viewer(
    root: Path, *, port: int = 0, browser: bool = True, on_ready: Callable[[str], None]
) -> None:
    """Serve the page for the runs at and below `root`, to this machine only, until stopped.

    `on_ready(link)` is called when requests can come. The link has the token of this start after
    `#`, which browsers do not send; the browser that is opened here gets it from a private file.

    Raises:
        ConfigError: the folder does not exist, or the port is not available.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder, so there are no runs to show. Name a run directory or a "
            "folder of runs: rolltree view runs."
        )
    # The token is after "#", which browsers do not send, so it is not in logs or referrers.
    token = secrets.token_urlsafe(24)
    listener = listen(HOST, port)
    port = listener.getsockname()[1]
    page = f"http://{HOST}:{port}/"
    redirect = _redirect_file(f"{page}#file={token}") if browser else None
    hosts = (f"{HOST}:{port}", f"localhost:{port}")
    config = server_config(create_viewer_app(root, token, hosts, redirect=redirect))

    def ready() -> None:
        on_ready(f"{page}#token={token}")
        if redirect is not None:
            threading.Thread(target=webbrowser.open, args=(redirect.as_uri(),), daemon=True).start()

    with listener:
        AnnouncingServer(config, ready).run([listener])


def _redirect_file(link: str) -> Path | None:
    """Return a new file that only this user can read, which leads a browser to `link`."""
    # The arguments of a browser are in the list of processes, which every user of the machine can
    # read. So it gets the path of this file instead of the link.
    content = f'<!doctype html><meta http-equiv="refresh" content="0; url={link}">\n'
    for folder in (os.environ.get("XDG_RUNTIME_DIR") or None, None):
        with contextlib.suppress(OSError):
            # `mkstemp` creates it with mode 0600, O_EXCL and O_NOFOLLOW.
            fd, name = tempfile.mkstemp(prefix="rolltree-view-", suffix=".html", dir=folder)
            path = Path(name)
            with open(fd, "w", encoding="ascii") as file:
                file.write(content)
            return path.absolute()
    # The printed link works without it.
    return None
