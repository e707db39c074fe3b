"""The ranks of a trainer: their environment, their end, and what they listen on."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sockets_kit import listeners

from wait_kit import wait_until

RANK = """
import json, os, pathlib, signal, sys, time
out, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if mode == "saves":
    signal.signal(signal.SIGTERM, lambda *_: ((out / f"{rank}.saved").touch(), os._exit(75)))
part = out / f".{rank}"
part.write_text(json.dumps(dict(os.environ) | {"pid": os.getpid()}))
part.rename(out / rank)
while mode == "waits" and rank == "1" and not (out / "go").exists():
    time.sleep(0.02)
while mode in ("dies", "fails") and not (out / "0").exists():
    time.sleep(0.02)
if mode == "dies" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fails" and rank == "1":
    sys.exit(3)
if mode not in ("ends", "waits"):
    time.sleep(600)
"""
GLOO = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group(
    "gloo", init_method=os.environ["ROLLTREE_RENDEZVOUS"],
    rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
)
group = dist.new_group(backend="gloo")
dist.barrier(group=group)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").close()
time.sleep(600)
"""


class Gang:
    def __init__(self, folder, code, mode=""):
        self.folder = folder
        main = (
            "import sys; from rolltree.scale.cluster.gang import run_gang;"
            "sys.exit(run_gang(2, [sys.executable, '-c', *sys.argv[1:]]))"
        )
        words = [sys.executable, "-c", main, code, str(folder), mode]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def until_up(self):
        wait_until(lambda: all((self.folder / rank).exists() for rank in "01"))

    def environments(self):
        self.until_up()
        return [json.loads((self.folder / rank).read_text()) for rank in "01"]


@pytest.fixture
def gang(tmp_path):
    made = []

    def make(*given):
        made.append(Gang(tmp_path, *given))
        return made[-1]

    yield make
    for each in made:
        each.process.terminate()
        each.process.communicate()


def test_every_rank_knows_its_place_and_meets_the_others_in_a_private_file(gang):
    started = gang(RANK, "waits")
    first, second = started.environments()
    assert [each["RANK"] for each in (first, second)] == ["0", "1"]
    assert [each["LOCAL_RANK"] for each in (first, second)] == ["0", "1"]
    assert {each["WORLD_SIZE"] for each in (first, second)} == {"2"}
    assert {each["LOCAL_WORLD_SIZE"] for each in (first, second)} == {"2"}
    assert first["ROLLTREE_RENDEZVOUS"] == second["ROLLTREE_RENDEZVOUS"]
    store = Path(first["ROLLTREE_RENDEZVOUS"].removeprefix("file://"))
    assert store.parent.stat().st_mode & 0o777 == 0o700
    (started.folder / "go").touch()
    assert started.process.wait() == 0
    assert not store.parent.exists()


@pytest.mark.parametrize(("mode", "status", "said"), [("dies", 137, "-9"), ("fails", 3, "3")])
def test_a_rank_that_ends_takes_the_others_with_it(gang, mode, status, said):
    started = gang(RANK, mode)
    first = started.environments()[0]
    assert started.process.wait() == status
    assert f"rank 1 ended with status {said}" in started.process.stdout.read()
    assert not Path(f"/proc/{first['pid']}").exists()


def test_a_signal_reaches_every_rank(gang):
    started = gang(RANK, "saves")
    started.until_up()
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait() == 75
    assert all((started.folder / f"{rank}.saved").exists() for rank in "01")


def test_ranks_listen_on_loopback_only(gang, monkeypatch):
    # What a user has set for runs on several machines.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[-1][1])
    started = gang(GLOO)
    started.until_up()
    found = listeners(started.process.pid)
    assert found
    assert {each.address for each in found} == {"127.0.0.1"}
