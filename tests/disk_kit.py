"""Real disks that are small or read-only: a tmpfs of a given size, mounted for one test."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*words: str) -> str:
    """Run mount and return what it complains about."""
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or "mount failed"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yield a folder on a disk of `size` bytes ("2m"); skip the test where none can be."""
    folder.mkdir()
    trouble = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if trouble:
        pytest.skip(f"no disk can be mounted here: {trouble}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Make a mounted small disk read-only for a while."""
    assert not _mount("-o", "remount,ro", str(disk))
    try:
        yield
    finally:
        assert not _mount("-o", "remount,rw", str(disk))


def resize(disk: Path, size: str) -> None:
    """Give a mounted small disk another size."""
    assert not _mount("-o", f"remount,size={size}", str(disk))
