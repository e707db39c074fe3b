"""One writer per run: an advisory lock that the kernel drops when its holder dies.

`flock` on `run.lock`, so that SIGKILL leaves nothing to clean up. The file's text names the
holder for the error message only; it decides nothing. The module knows nothing about SQLite.
It leaves out network file systems that do not implement `flock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from rolltree.errors import StoreError


class WriterLock:
    """Held from construction to `release`.

    Raises:
        StoreError: another process, or another `Run` object of this one, writes to the run.
    """

    def __init__(self, path: Path) -> None:
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(self._fd)
            os.close(self._fd)
            self._fd = None
            raise StoreError(
                f"{path.parent} is being written by {holder}; two writers would mix two runs. "
                "Wait for it or stop it, choose another run directory, or read this one with "
                'Run.open(path, mode="r").'
            ) from None
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(note).encode(), 0)

    def release(self) -> None:
        """Let another writer in. Doing it twice does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _describe(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {note['pid']} on {note['host']} (since {since})"
    return "another process"
