"""A run folder of somebody else: whatever lies in place of its files, opening it ends soon, in
little memory, with one sentence, and writes nothing outside the folder."""

import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rolltree.store import Run, StoredRollout, list_runs, run_folders
from rolltree.store.database import WriterLock
from rolltree.values.errors import StoreError

FILES = ("run.db", "run.db-wal", "run.db-shm", "run.db-journal", "run.commits", "run.lock")
SCRIPT = """
import json, os, resource, signal, sys
from pathlib import Path
from rolltree.values.errors import RolltreeError
from rolltree.store import Run, summarize
from rolltree.insight.page import watching
from rolltree.records.overview import run_overview

def read(path):
    watching.change_mark([path])
    with Run.open(path, "r", check="rows") as run:
        run_overview(run)
    with Run.open(path, "r") as run:
        summarize(run), list(run.rollouts(status="ok"))

def written(path):
    with Run.open(path) as run:
        run.add_event("kept", {})

def continued(path):
    with Run.open_or_create(path, config={"a": 1}) as run:
        run.add_event("kept", {})

for path in map(Path, sys.argv[1:]):
    for action in (read, written, continued):
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
            signal.alarm(30)
            said = "ok"
            try:
                action(path)
            except RolltreeError as error:
                said = str(error)
            except BaseException as error:
                said = f"!{type(error).__name__}: {error}"
            print(json.dumps([path.name, action.__name__, said]), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps([path.name, action.__name__, f"!killed by {status}"]), flush=True)
"""


def outcomes(paths):
    """Return what reading and continuing each run said: its name, the action, `ok` or an error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def run_at(tmp_path_factory):
    """Return a function that puts a run into a folder."""
    made = tmp_path_factory.mktemp("made") / "run"
    with Run.create(made, config={"a": 1}) as run:
        run.add_rollouts([StoredRollout(request_id="one", env_id="e", reward=1.0)])
    return lambda path: Path(shutil.copytree(made, path))


def sparse(path, size=2**40):
    with path.open("wb") as file:
        file.truncate(size)


def socket_at(path):
    os.chdir(path.parent)  # its name may be long
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


ODD = {
    "pipe": os.mkfifo,
    "socket": socket_at,
    "folder": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "nowhere": lambda path: path.symlink_to(path.with_name("missing")),
    "link": lambda path: path.symlink_to("../precious"),
    "second": lambda path: os.link(path.parent.parent / "precious", path),
}


@pytest.mark.parametrize("kind", ODD)
def test_no_file_of_a_run_may_be_anything_but_a_file(kind, tmp_path, monkeypatch, run_at):
    monkeypatch.chdir(tmp_path)
    precious = tmp_path / "precious"
    precious.write_bytes(b"")  # what empty files would become a run in
    paths = []
    for name in FILES:
        paths.append(run_at(tmp_path / f"{name}-run"))
        (paths[-1] / name).unlink(missing_ok=True)
        ODD[kind](paths[-1] / name)
    good = run_at(tmp_path / "good")
    for path, action, said in outcomes([*paths, good]):
        if path == "good":
            assert said == "ok"
        elif kind == "second" and action == "read" and "shm" not in path:  # a copy by hard links
            assert not said.startswith("!"), (path, action, said)
        else:
            assert "not a regular file" in said, (path, action, said)
            assert path.removesuffix("-run") in said
    assert precious.read_bytes() == b""
    for path in paths:
        assert WriterLock.holder(path / "run.lock") is None
    assert [run.path for run in list_runs(tmp_path) if run.path.name == "good"] == [good]


def test_sparse_files_cost_no_memory(tmp_path, run_at):
    paths = []
    for name in FILES:
        paths.append(run_at(tmp_path / f"{name}-run"))
        if name != "run.db":
            sparse(paths[-1] / name)
        else:
            os.truncate(paths[-1] / name, 2**40)
    sparse(paths[0] / "config.json")
    for path, action, said in outcomes(paths):
        assert not said.startswith("!"), (path, action, said)


@pytest.mark.parametrize("kind", ODD)
def test_settings_for_people_are_written_over_nothing_else(kind, tmp_path, monkeypatch, run_at):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_text("precious")
    paths = [run_at(tmp_path / name) for name in ("config.json", "config.json.tmp")]
    for path in paths:
        (path / "config.json").unlink()
        ODD[kind](path / path.name)
    for path, action, said in outcomes(paths):
        is_in_the_way = (path, kind, action) == ("config.json", "folder", "continued")
        assert (said == "ok") != is_in_the_way, (path, action, said)
        assert not said.startswith("!")
    assert (tmp_path / "precious").read_text() == "precious"


EXPENSIVE = {
    "generated": "ALTER TABLE meta ADD COLUMN big AS (hex(zeroblob(400000000)))",
    "check": "CREATE TABLE more (a CHECK (length(hex(zeroblob(400000000))) > 0))",
    "default": "CREATE TABLE more (a DEFAULT (hex(zeroblob(400000000))))",
    "expression": "CREATE INDEX more ON events (length(kind || hex(zeroblob(40000))))",
    "partial": "CREATE INDEX more ON events (kind) WHERE length(kind || hex(zeroblob(40000)))",
    "collation": "CREATE TABLE more (a TEXT COLLATE nocase)",
    "references": "CREATE TABLE more (a REFERENCES meta (key) ON DELETE CASCADE)",
}


@pytest.mark.parametrize("kind", EXPENSIVE)
def test_a_schema_computes_nothing(kind, tmp_path, run_at):
    path = run_at(tmp_path / "run")
    database = sqlite3.connect(path / "run.db")
    database.execute(EXPENSIVE[kind])
    if kind == "check":
        database.execute("INSERT INTO more VALUES (1)")
    database.commit()
    database.close()
    for _, action, said in outcomes([path]):
        assert "rolltree never makes" in said, (action, said)


def test_values_have_a_bounded_size(tmp_path, run_at):
    path = run_at(tmp_path / "run")
    with Run.open(path, "r") as run, pytest.raises(StoreError, match="too big"):
        run.query("SELECT length(hex(zeroblob(400000000)))")


def journal(path, victim):
    """Write a rollback journal that tells SQLite to delete another file once it is undone."""
    name = str(victim).encode()
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 0, 0, 1, 512, 4096)
    tail = struct.pack(">I", 1) + name + struct.pack(">II", len(name), sum(name))
    path.write_bytes(head.ljust(512, b"\0") + tail + bytes.fromhex("d9d505f920a163d7"))


def test_a_journal_deletes_no_other_file(tmp_path, run_at):
    path, victim = run_at(tmp_path / "run"), tmp_path / "precious"
    victim.write_text("/nowhere\0")
    journal(path / "run.db-journal", victim)
    for _, action, said in outcomes([path]):
        assert "run.db-journal" in said, (action, said)
    assert victim.exists()


def test_what_cannot_be_looked_at_is_one_sentence(tmp_path):
    for name in ("x" * 300, "a\0b"):
        for mode in ("r", "w"):
            with pytest.raises(StoreError):
                Run.open(tmp_path / name, mode)
        with pytest.raises(StoreError):
            Run.open_or_create(tmp_path / name, config={})


def test_a_linked_run_folder_is_its_run(tmp_path, run_at):
    run_at(tmp_path / "real")
    (tmp_path / "latest").symlink_to("real")
    with Run.open(tmp_path / "latest") as run:
        assert run.num_rollouts() == 1
    assert len(list(run_folders(tmp_path))) == 1
