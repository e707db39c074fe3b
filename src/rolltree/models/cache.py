"""Where made models live, and how one is made exactly once.

A model folder is built beside its place and renamed into it, so a folder that exists is complete,
whoever was killed while making it. It knows nothing about what is built. It leaves out eviction:
delete the folder to have it made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger(__name__)

Builder = Callable[[Path], None]
"""Fills the empty folder it is given."""


def cache_root() -> Path:
    """Return the folder of made models: `$ROLLTREE_HOME/models` or `~/.cache/rolltree/models`."""
    home = os.environ.get("ROLLTREE_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "rolltree") / "models"


def made_once(key: str, build: Builder) -> Path:
    """Return the folder `cache_root() / key`, built by `build` when it is missing.

    A lock lets one process build while others wait; the lock dies with its process. What a killed
    builder left behind is removed by the next one. Whatever `build` raises passes through and
    leaves no folder.
    """
    final = cache_root() / key
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = final.with_name(f".{key}.unfinished")
    with open(final.with_name(f".{key}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        try:
            _log.info("making %s, once", final)
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of other packages
                build(unfinished)
            unfinished.rename(final)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return final
