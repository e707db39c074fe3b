"""Keeps what the viewer has computed for runs between starts, outside the run folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from rolltree._helpers.files import read_regular, write_whole
from rolltree.records.values import json_bytes


def cache_folder() -> Path:
    """Return the folder: `ROLLTREE_CACHE`, else `rolltree` in the user's cache folder."""
    if named := os.environ.get("ROLLTREE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rolltree"


def cache_file(folder: Path, suffix: str) -> Path:
    """Return the file for a run, in a folder that only this user can read.

    Raises:
        OSError: the folder cannot be created.
    """
    where = cache_folder()
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return where / f"{name}{suffix}"


def kept(folder: Path, mark: str) -> Any:
    """Return the value that was kept for a run in this state, else None."""
    # A cache never causes an error: unreadable values are computed again.
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        found = msgspec.json.decode(read_regular(cache_file(folder, ".json")))
        if isinstance(found, dict) and found.get("mark") == mark:
            return found.get("value")
    return None


def keep(folder: Path, mark: str, value: Any) -> None:
    """Keep a value that was computed for a run in this state."""
    with contextlib.suppress(OSError):
        write_whole(cache_file(folder, ".json"), json_bytes({"mark": mark, "value": value}))
