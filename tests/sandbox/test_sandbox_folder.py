"""The private folder, after untrusted code has been at it."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.sandbox.folder import PREFIX, PrivateFolder, sweep
from rolltree.values.errors import SandboxError


@pytest.fixture
def folder(tmp_path):
    made = PrivateFolder(tmp_path)
    yield made
    made.remove()


def test_files_in_and_out(folder):
    folder.write("data/in.txt", b"abc")
    folder.write("data/in.txt", b"abcd")
    folder.write("top", b"")
    assert folder.read("data/in.txt", 4) == b"abcd"
    assert folder.names() == ["data/in.txt", "top"]
    assert (folder.path / "top").stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a/..", "x\0y"])
def test_paths_that_leave_it(folder, name):
    with pytest.raises(SandboxError, match="not a path inside"):
        folder.read(name, 10)
    with pytest.raises(SandboxError, match="not a path inside"):
        folder.write(name, b"")


@given(st.text(alphabet="ab./", max_size=12))
def test_no_path_reaches_outside(tmp_path_factory, name):
    made = PrivateFolder(tmp_path_factory.getbasetemp())
    try:
        made.write(name, b"x")
    except SandboxError:
        assert made.names() == []
    else:
        assert len(made.names()) == 1
    assert sorted(os.listdir(made.outer)) == ["lock", "work"]
    made.remove()


def test_links_are_not_followed(folder, tmp_path):
    bait = tmp_path / "bait"
    bait.write_text("secret")
    (tmp_path / "place").mkdir()
    os.symlink(bait, folder.path / "link")
    os.symlink(tmp_path / "place", folder.path / "way")
    for name in ("link", "way/x"):
        with pytest.raises(SandboxError, match="not followed"):
            folder.read(name, 10)
    with pytest.raises(SandboxError, match="not followed"):
        folder.write("way/x", b"")
    folder.write("link", b"new")  # the link is replaced, not followed
    assert bait.read_text() == "secret"
    assert folder.read("link", 3) == b"new"
    assert folder.names() == ["link"]
    assert list((tmp_path / "place").iterdir()) == []


def test_what_is_no_file_is_not_read(folder):
    os.mkfifo(folder.path / "pipe")
    (folder.path / "sub").mkdir()
    for name in ("pipe", "sub"):
        with pytest.raises(SandboxError, match="regular file"):
            folder.read(name, 10)
    with pytest.raises(SandboxError, match="no file 'none'"):
        folder.read("none", 10)
    folder.write("long", b"12345")
    with pytest.raises(SandboxError, match="more than 4 bytes"):
        folder.read("long", 4)
    with pytest.raises(SandboxError, match="cannot be opened"):
        folder.write("long/below", b"")


def test_remove_deletes_deep_locked_and_linked_trees(folder):
    deep = folder.path
    here = os.getcwd()
    os.chdir(deep)
    try:
        for _ in range(1200):  # deeper than a path can be written, or Python can recurse
            os.mkdir("d")
            os.chdir("d")
        Path("leaf").write_text("x")
    finally:
        os.chdir(here)
    locked = folder.path / "locked"
    locked.mkdir()
    (locked / "inner").mkdir()
    locked.chmod(0)
    os.symlink("/", folder.path / "root")
    folder.remove()
    assert not folder.outer.exists()
    folder.remove()
    assert Path("/usr").exists()


def test_listing_takes_one_step_a_folder(folder, monkeypatch):
    """2,000 nested folders took 28 s: each was entered from the top."""
    opened = []
    plain_open = os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a) or plain_open(*a, **k))
    here = os.getcwd()
    os.chdir(folder.path)
    try:
        for name in ["d"] * 2000 + ["e"]:
            os.mkdir(name)
            os.chdir(name)
        Path("bottom").touch()
        Path("../beside").touch()
        os.mkdir("../locked", 0o600)
    finally:
        os.chdir(here)
    (folder.path / "top").touch()
    os.mkdir(os.fsencode(folder.path) + b"/\xff")
    assert folder.names() == ["d/" * 2000 + "beside", "d/" * 2000 + "e/bottom", "top"]
    assert len(opened) <= 3 * 2002


def test_what_code_did_to_the_folder_itself_is_undone(folder):
    folder.path.chmod(0)
    folder.write("x", b"1")
    assert folder.path.stat().st_mode & 0o7777 == 0o700
    folder.path.chmod(0o7111)
    assert folder.names() == ["x"]
    moved = folder.path.rename(folder.outer / "moved")
    folder.path.symlink_to(moved)
    folder.write("y", b"2")
    assert folder.names() == ["y"]
    folder.path.rename(folder.outer / "moved2")
    folder.path.touch()
    assert folder.names() == []
    folder.remove()
    assert not folder.outer.exists()


def test_a_process_without_descriptors_is_no_doing_of_the_code(folder, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(SandboxError, match="ulimit") as caught:
        folder.read("x", 1)
    assert type(caught.value) is SandboxError


def test_folders_of_the_dead_are_swept(tmp_path):
    alive = PrivateFolder(tmp_path)
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "work").mkdir(parents=True)
    (dead / "lock").touch()
    other = tmp_path / f"{PREFIX}nolock"
    other.mkdir()
    os.symlink("/usr", tmp_path / f"{PREFIX}link")
    assert sweep(tmp_path) == 1
    assert not dead.exists()
    assert alive.path.exists()
    assert other.exists()
    with open(alive.outer / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    alive.remove()


@pytest.mark.parametrize("holds", [False, True])
def test_a_process_that_starts_takes_no_folder_that_is_being_made(tmp_path, monkeypatch, holds):
    """Another process sweeps between the lock's creation and its locking, or is at it."""
    flock, begun, held = fcntl.flock, [], []

    def late(fd, how):
        if not begun:
            begun.append(fd)
            if holds:
                (lock,) = tmp_path.glob(f"{PREFIX}*/lock")
                held.append(os.open(lock, os.O_RDWR))
                flock(held[0], how)
            else:
                assert sweep(tmp_path) == 1
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = PrivateFolder(tmp_path)
    folder.write("x", b"1")
    assert folder.names() == ["x"]
    assert begun
    assert sweep(tmp_path) == 0
    folder.remove()
    for fd in held:
        os.close(fd)
    sweep(tmp_path)
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_the_folder_is_removed_with_its_owner(tmp_path):
    made = PrivateFolder(tmp_path)
    outer = made.outer
    del made
    assert not outer.exists()
