from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from rolltree.models.cache import cache_root, made_once


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
    return tmp_path


def put(folder: Path) -> None:
    (folder / "weights").write_text("whole")


def test_the_root_follows_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == home / "models"
    monkeypatch.delenv("ROLLTREE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root() == Path("/home/somebody/.cache/rolltree/models")


def test_a_folder_is_built_once() -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        put(folder)

    first = made_once("thing", build)
    assert made_once("thing", build) == first
    assert first == cache_root() / "thing"
    assert len(calls) == 1
    assert calls[0] != first  # it was built beside its place
    assert (first / "weights").read_text() == "whole"


def test_a_failed_build_leaves_nothing_and_can_be_repeated() -> None:
    def fail(folder: Path) -> None:
        put(folder)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        made_once("thing", fail)
    assert not (cache_root() / "thing").exists()
    assert (made_once("thing", put) / "weights").exists()


def slow_build(folder: Path) -> None:
    (folder / "weights").write_text("half")
    (folder.parent / f"started-{os.getpid()}").touch()
    time.sleep(0.5)
    (folder / "weights").write_text("whole")


def build_in_child() -> None:
    made_once("thing", slow_build)


def hang(folder: Path) -> None:
    (folder / "weights").write_text("half")
    (folder.parent / "hanging").touch()
    time.sleep(600)


def hang_in_child() -> None:
    made_once("thing", hang)


def test_two_processes_build_it_once() -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=build_in_child) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0]
    assert len(list(cache_root().glob("started-*"))) == 1
    assert (cache_root() / "thing" / "weights").read_text() == "whole"


def test_a_killed_builder_leaves_no_half_model() -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=hang_in_child)
    child.start()
    deadline = time.monotonic() + 30
    while not (cache_root() / "hanging").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert not (cache_root() / "thing").exists()
    made = made_once("thing", put)
    assert (made / "weights").read_text() == "whole"
    assert [path.name for path in cache_root().iterdir() if path.is_dir()] == ["thing"]
