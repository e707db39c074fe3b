"""No run keeps the page from showing another: locked, endless to tell, gone meanwhile."""

import sqlite3
import threading
import time

import pytest

import golden_kit
from rolltree.insight.page import api
from rolltree.store import Run
from rolltree.values.errors import StoreError, UnknownName


@pytest.fixture
def runs(tmp_path):
    """Return the runs of a folder: `good`, and four that another program has locked."""
    golden_kit.unpack(f"{golden_kit.SCHEMAS[-1]}/train", tmp_path / "good")
    locks = []
    for number in range(4):
        Run.create(tmp_path / f"locked-{number}", kind="eval", config={}).close()
        lock = sqlite3.connect(tmp_path / f"locked-{number}" / "run.db", isolation_level=None)
        lock.execute("PRAGMA locking_mode = EXCLUSIVE")
        lock.execute("BEGIN EXCLUSIVE")
        locks.append(lock)
    found = api.Runs(tmp_path)
    found.unlock = lambda: [lock.close() for lock in locks]
    yield found
    found.unlock()
    for look in found._looks.values():
        look.join()


def test_the_list_does_not_wait_for_a_locked_run(runs):
    began = time.monotonic()
    told = runs.overviews()
    assert time.monotonic() - began < 9  # one locked run takes ten
    assert [row["id"] for row in told["runs"]] == ["good"]
    assert {row["id"] for row in told["unreadable"]} == {f"locked-{n}" for n in range(4)}
    mark = runs.mark()
    runs.unlock()
    for look in runs._looks.values():
        look.join()
    assert runs.mark() != mark  # so the page asks again
    assert len(runs.overviews()["runs"]) == 5


def test_opening_a_locked_run_keeps_nobody_waiting(runs):
    said = []

    def get():
        with pytest.raises(StoreError) as caught:
            runs.get("locked-0")
        said.append(str(caught.value))

    thread = threading.Thread(target=get)
    thread.start()
    assert runs.get("good").num_rollouts()
    assert not said
    thread.join()
    assert "locked" in said[0]


def test_the_story_of_one_run_does_not_wait_for_that_of_another(tmp_path, monkeypatch):
    told, begun, may_end = {}, threading.Event(), threading.Event()

    def story(run):
        if run.path.name == "slow":
            begun.set()
            may_end.wait()
        return {"sentences": []}

    monkeypatch.setattr(api, "run_story", story)
    with Run.create(tmp_path / "slow") as slow, Run.create(tmp_path / "quick") as quick:
        first = threading.Thread(target=lambda: told.update(slow=api._story(slow)))
        first.start()
        begun.wait()
        other = threading.Thread(target=lambda: told.update(quick=api._story(quick)))
        other.start()
        other.join(60)
        was_told = "quick" in told
        may_end.set()
        first.join()
        other.join()
    assert was_told


def test_a_run_that_is_gone_is_said_to_be(runs, tmp_path, monkeypatch):
    folder = tmp_path / "good"
    monkeypatch.setattr(runs, "folder", lambda name: folder / "nowhere")
    with pytest.raises(UnknownName, match="gone"):
        runs.get("good")
