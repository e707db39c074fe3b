"""Folders that appear whole or not at all: sync, rename, remove.

It knows paths and nothing about what is in them. It leaves out retention.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> dict[str, int]:
    """Sync every file below a folder, and the folders; return their sizes by relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in (*files, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def remove(path: Path) -> None:
    """Remove a file or a folder; nothing is fine too."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def put_in_place(working: Path, final: Path) -> None:
    """Rename a synced folder to its name, replacing what is there."""
    remove(final)
    working.rename(final)
    sync(final.parent)
