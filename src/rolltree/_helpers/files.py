"""Opens files from untrusted sources, and replaces files as a whole.

The files of a run folder are opened only if they are regular, without following links and without
blocking, and files that are read whole have a size limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rolltree.values.errors import ConfigError

MAX_BYTES = 2**26
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_WRITES = os.O_WRONLY | os.O_RDWR
_numbers = itertools.count()


def odd_kind(path: str | Path, *, follow: bool = False, writes: bool = False) -> str | None:
    """Name what is at `path` if it is not a regular file; None if it is one, or does not exist.

    With `writes`, a file with several hard links is named too: a write would change all of them.

    Raises:
        OSError: the path cannot be examined.
    """
    try:
        return _odd(os.stat(path) if follow else os.lstat(path), writes)
    except FileNotFoundError:
        return None


def _odd(status: os.stat_result, writes: bool) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return _KINDS.get(stat.S_IFMT(status.st_mode), "no file")
    return f"a file with {status.st_nlink} hard links" if writes and status.st_nlink > 1 else None


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Return a descriptor of a regular file. It never blocks, and follows links only on request.

    Raises:
        OSError: it cannot be opened; or it is not a regular file, or would be written although it
            has several hard links (EINVAL).
    """
    writes = bool(flags & _WRITES)
    # Checked before opening it, since opening a device may already have an effect.
    kind = odd_kind(path, follow=follow, writes=writes)
    # Without blocking: opening a named pipe blocks until something writes to it.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    fd = -1
    try:
        if kind is None:
            fd = os.open(path, flags, 0o644)
            # It may be a different file by now.
            kind = _odd(os.fstat(fd), writes)
        if kind is not None:
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file of its own", str(path))
    except BaseException:  # Ctrl-C, too
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def open_to_append(path: str | Path) -> BinaryIO:
    """Open a regular file, which is created if it does not exist, to write at its end.

    Raises:
        OSError: as in `open_regular`.
    """
    return open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as in `open_regular`; or it is larger than `max_bytes` (EFBIG).
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        # The size may change meanwhile, so both the size and the read are checked.
        content = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    if content is None or len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
    return content


@contextlib.contextmanager
def whole_file(target: str | Path, *, follow: bool = True) -> Iterator[Path]:
    """Yield a temporary file that replaces `target`, synced, when the block succeeds.

    After a kill the old target is still there, and a hidden file that the next call removes. A
    target that is not a regular file, such as `/dev/stdout`, is written directly. Without `follow`
    a link is replaced.
    """
    final = Path(os.path.realpath(target) if follow else target)
    if follow and odd_kind(final) is not None:
        yield final
        return
    _remove_abandoned(final)
    part = _part_name(final)
    with _being_written(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
        with contextlib.suppress(OSError):
            if odd_kind(final) is None:
                # The new file gets the permissions of the old one.
                os.fchmod(fd, stat.S_IMODE(os.lstat(final).st_mode))
        yield part
        os.fsync(fd)
        # Renamed only after the sync: after a crash the name must not lead to an empty file.
        part.replace(final)


@contextlib.contextmanager
def whole_folder(target: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target`, synced, when the block succeeds.

    By then `target` must still be missing or empty.
    """
    final = Path(os.path.realpath(target))
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    part = _part_name(final)
    part.mkdir()
    with _being_written(part, os.O_RDONLY | os.O_DIRECTORY):
        yield part
        for path in (*part.rglob("*"), part):
            sync(path)
        # `rename` replaces a folder only if it is empty.
        part.rename(final)


def check_replaced(target: str | Path, is_own: Callable[[Path], bool]) -> None:
    """Check that a file that is to be written is new, empty, or an earlier one of its kind.

    A target that is not a regular file, such as `/dev/stdout`, is not replaced.

    Raises:
        ConfigError: a file is there that `is_own` does not recognize.
    """
    final = Path(os.path.realpath(target))
    if final.is_file() and final.stat().st_size and not is_own(final):
        raise ConfigError(
            f"{target} exists and is not an earlier export of this kind, so it would be lost. "
            "Choose another name, or move it away first."
        )


def write_whole(target: str | Path, content: str | bytes, *, follow: bool = True) -> None:
    """Write a text in UTF-8, or bytes, with `whole_file`."""
    with whole_file(target, follow=follow) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        import shutil

        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _part_name(final: Path) -> Path:
    return final.with_name(f".{final.name[:40]}.{os.getpid()}-{next(_numbers)}.part")


@contextlib.contextmanager
def _being_written(part: Path, flags: int) -> Iterator[int]:
    """Yield a locked descriptor of a temporary file or folder, which is removed on a failure."""
    fd = os.open(part, flags | os.O_CLOEXEC, 0o666)
    try:
        # The lock says that it is still being written. Some network disks have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            remove(part)
        raise
    finally:
        os.close(fd)


def _remove_abandoned(final: Path) -> None:
    """Remove what killed programs left for this target; a process that still writes has a lock."""
    start = f".{final.name[:40]}."
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(final.parent) as entries:
        left += [e.path for e in entries if e.name.startswith(start) and e.name.endswith(".part")]
    for path in left:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(Path(path))
            finally:
                os.close(fd)
