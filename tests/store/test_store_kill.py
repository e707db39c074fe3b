"""SIGKILL anywhere: the run opens again, holds whole batches only, and goes on."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rolltree.store import Run, StoredRollout
from rolltree.values.errors import StoreError

WRITER = textwrap.dedent(
    """
    import sys
    from rolltree.store import Run, StoredRollout
    run = Run.open_or_create(sys.argv[1], config={"a": 1})
    batch = len(run.finished_ids()) // 8
    while True:
        run.add_rollouts(
            StoredRollout(request_id=f"{batch}-{i}", reward=batch, record=bytes(3000))
            for i in range(8)
        )
        run.add_step(batch, {"loss": 0.5})
        batch += 1
        print(batch, flush=True)
    """
)


def start(path):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    said = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    return said


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011, 0.027])
def test_killed_writer(tmp_path, delay_s):
    total = 0
    for num_kills in (1, 2):
        process = start(tmp_path / "run")
        first = int(process.stdout.readline())
        with pytest.raises(StoreError, match=f"process {process.pid}"):
            Run.open(tmp_path / "run")
        time.sleep(delay_s)
        said = [first, *map(int, kill(process))]
        with Run.open(tmp_path / "run", mode="r") as reader:  # before any writer repaired it
            assert reader.num_rollouts() % 8 == 0
        with Run.open(tmp_path / "run") as run:
            ids = [row.request_id for row in run.rollouts(blobs=False)]
            batches = len(ids) // 8
            assert ids == [f"{b}-{i}" for b in range(batches) for i in range(8)]
            assert batches >= said[-1] > total  # whatever was reported as stored is there
            assert batches - num_kills <= len(run.steps()) <= batches
            assert run.query("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
            assert run.add_rollouts([StoredRollout(request_id="0-0")]) == 0
        total = said[-1]


def test_killed_while_the_run_is_made(tmp_path):
    """Any state in which creation can stop is one from which the same command goes on."""
    trials = 0
    for delay_ms in range(0, 240, 20):
        path = tmp_path / str(delay_ms)
        process = start(path)
        time.sleep(delay_ms / 1000)
        kill(process)
        with Run.open_or_create(path, config={"a": 1}) as run:
            assert run.config == {"a": 1}
            assert (path / "config.json").is_file()
            trials += run.num_rollouts() == 0
    assert trials  # some died before their first batch
