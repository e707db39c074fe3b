"""Detects that runs have grown, without opening them, for pages that follow runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from rolltree.store.database import WriterLock

_GROWS = ("run.commits", "run.db")


def is_running(folder: Path) -> bool:
    """Whether a process writes to the run in `folder`."""
    return WriterLock.holder(folder / "run.lock") is not None


def change_mark(folders: Iterable[Path]) -> str:
    """Return a text that changes after a run was added, removed, written to, or ended."""
    marks = sorted(f"{folder} {is_running(folder)} {_written(folder)}" for folder in folders)
    return hashlib.blake2b("\n".join(marks).encode("utf-8", "replace"), digest_size=12).hexdigest()


def _written(folder: Path) -> list[tuple[int, int]]:
    # Two `stat` calls a run instead of opening its database, since a page polls this often.
    found = []
    for name in _GROWS:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found.append((status.st_mtime_ns, status.st_size))
    return found
