"""Made models: built once by whoever comes first, whole or not there at all."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from rolltree.inference.models.made import cache_root, made_once


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
    return tmp_path / "models"


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def write(text, log):
    def build(folder):
        log.append(folder)
        (folder / "part").write_text(text)

    return build


class TestPlace:
    def test_the_environment_names_the_place(self, home):
        assert cache_root() == home

    def test_without_it_the_users_cache(self, monkeypatch):
        monkeypatch.delenv("ROLLTREE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/nowhere")
        assert cache_root() == Path("/nowhere/.cache/rolltree/models")

    @pytest.mark.usefixtures("home")
    def test_a_tilde_is_the_users_home(self, monkeypatch):
        monkeypatch.setenv("HOME", "/nowhere")
        monkeypatch.setenv("ROLLTREE_HOME", "~/rt")
        assert cache_root() == Path("/nowhere/rt/models")


class TestOnce:
    def test_built_in_another_place_and_only_once(self, home):
        log = []
        first = made_once("m", write("one", log))
        second = made_once("m", write("two", log))
        assert first == second == home / "m"
        assert (first / "part").read_text() == "one"
        assert len(log) == 1
        assert log[0] != first
        assert log[0].parent == first.parent  # beside it, so that the rename is one step
        assert not log[0].exists()

    def test_two_keys_are_two_models(self, home):
        made_once("a", write("1", []))
        made_once("b", write("2", []))
        assert visible(home) == ["a", "b"]
        assert [(home / key / "part").read_text() for key in "ab"] == ["1", "2"]

    def test_a_deleted_model_is_made_again(self, home):
        folder = made_once("m", write("one", []))
        (folder / "part").unlink()
        folder.rmdir()
        assert (made_once("m", write("two", [])) / "part").read_text() == "two"

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
    def test_a_failed_build_leaves_no_folder_and_no_lock(self, home, error):
        def fail(folder):
            (folder / "half").write_text("half")
            raise error

        with pytest.raises(type(error)):
            made_once("m", fail)
        assert visible(home) == []
        assert not (home / ".m.unfinished").exists()
        assert (made_once("m", write("whole", [])) / "part").read_text() == "whole"

    def test_what_a_killed_builder_left_is_not_mixed_in(self, home):
        left = home / ".m.unfinished"
        left.mkdir(parents=True)
        (left / "stale").write_text("stale")
        folder = made_once("m", write("fresh", []))
        assert [path.name for path in folder.iterdir()] == ["part"]

    def test_threads_of_one_process_build_once_too(self, home):
        log, found = [], []
        threads = [
            threading.Thread(target=lambda: found.append(made_once("m", write("x", log))))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(log) == 1
        assert found == [home / "m"] * 8


SLOW_BUILD = textwrap.dedent(
    """
    import os, sys, time
    from rolltree.inference.models.made import made_once

    def build(folder):
        (folder / "half").write_text(str(os.getpid()))
        print("building", flush=True)
        time.sleep(float(sys.argv[1]))
        (folder / "whole").write_text(str(os.getpid()))

    print(made_once("m", build) / "whole", flush=True)
    """
)


def start(seconds, home):
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ROLLTREE_HOME": str(home.parent)},
    )


class TestProcesses:
    def test_a_race_has_one_builder_and_two_results(self, home):
        racers = [start(0.3, home) for _ in range(2)]
        said = [racer.communicate(timeout=60)[0].split() for racer in racers]
        assert [racer.returncode for racer in racers] == [0, 0]
        assert sum("building" in words for words in said) == 1
        assert {words[-1] for words in said} == {str(home / "m" / "whole")}
        folder = home / "m"
        assert (folder / "half").read_text() == (folder / "whole").read_text()
        builder = next(r for r, words in zip(racers, said, strict=True) if "building" in words)
        assert (folder / "whole").read_text() == str(builder.pid)

    def test_a_killed_builder_leaves_nothing_that_looks_made(self, home):
        victim = start(60, home)
        assert victim.stdout.readline() == "building\n"
        os.kill(victim.pid, signal.SIGKILL)
        victim.stdout.close()
        victim.wait()
        assert visible(home) == []
        assert (home / ".m.unfinished" / "half").read_text() == str(victim.pid)
        folder = made_once("m", write("whole", []))
        assert sorted(path.name for path in folder.iterdir()) == ["part"]
        assert visible(home) == ["m"]

    def test_who_waits_for_a_killed_builder_builds(self, home):
        victim = start(60, home)
        assert victim.stdout.readline() == "building\n"
        waiting = threading.Event()
        found = []

        def wait():
            waiting.set()
            found.append(made_once("m", write("by the waiter", [])))

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        thread.join(0.1)
        assert thread.is_alive()  # the lock is the victim's
        os.kill(victim.pid, signal.SIGKILL)
        victim.stdout.close()
        victim.wait()
        thread.join(10)
        assert (found[0] / "part").read_text() == "by the waiter"
