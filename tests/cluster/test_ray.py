"""The driver with fake roles on real Ray: a cluster of this machine, and one of several nodes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from driver_kit import driving, is_alive

from rolltree.scale.cluster.ray_launcher import RayLauncher
from rolltree.scale.cluster.roles import LOST
from rolltree.scale.cluster.state import read_state
from rolltree.values.errors import ClusterError
from wait_kit import until

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
cluster_utils = pytest.importorskip("ray.cluster_utils")
ray = pytest.importorskip("ray")
SLOW_S = 20.0


@pytest.fixture
def nodes():
    """A cluster with room for one role on each of four nodes besides the first."""
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    added = [made.add_node(num_cpus=1) for _ in range(4)]
    made.wait_for_nodes()
    yield made, added
    made.shutdown()


async def test_a_cluster_of_this_machine(tmp_path):
    async with driving(tmp_path, RayLauncher(), stall_s=SLOW_S) as d:
        await d.until_all()
        assert d.driver.control.url.startswith("http://127.0.0.1:")
        pids = {name: d.pid(name) for name in d.roster.roles}
        d.signal("worker-0", signal.SIGKILL)
        d.signal("trainer", signal.SIGKILL)
        await d.said("worker-0 was killed by signal 9")
        await d.said("trainer was killed by signal 9")
        await until(
            lambda: all(d.beats(n) and d.pid(n) != pids[n] for n in ("worker-0", "trainer"))
        )
        await d.request("/scale", {"rollout_workers": 3})
        await until(lambda: d.beats("worker-2"))
        pids |= {name: d.pid(name) for name in d.roster.roles}
        d.do("trainer", "0")
        await d.task
    assert not [pid for pid in pids.values() if is_alive(pid)]
    assert read_state(tmp_path) is None


ENDED = """
import asyncio, os, signal
from rolltree.scale.cluster.ray_launcher import RayLauncher

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    launcher = RayLauncher()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(told.wait(), 20)
    await launcher.aclose()
    print("saved")

asyncio.run(main())
"""


def test_sigterm_still_lets_the_run_save():
    """Ray installs a handler that prints native stacks and ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr[-2000:]
    assert "SIGTERM received" not in done.stderr


async def test_a_lost_node_is_replaced_by_another(tmp_path, nodes):
    cluster, added = nodes
    async with driving(tmp_path, RayLauncher(cluster.address), stall_s=SLOW_S) as d:
        await d.until_all()
        places = {name: role.place["node_id"] for name, role in d.roster.roles.items()}
        # One role fills a node, so four roles are on four.
        assert len(set(places.values())) == 4
        lost = next(name for name, node in places.items() if node in {n.node_id for n in added})
        pid = d.pid(lost)
        cluster.remove_node(
            next(n for n in added if n.node_id == places[lost]), allow_graceful=False
        )
        await d.said(f"{lost} was lost with its machine")
        await until(lambda: d.beats(lost) and d.pid(lost) != pid)
        assert d.role(lost).place["node_id"] != places[lost]
        await until(lambda: not is_alive(pid))
        d.do("trainer", "0")
        await d.task


def child(name):
    """Return the id of the child process of this name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid, command, _, parent = (folder / "stat").read_text().split()[:4]
            if command == f"({name})" and int(parent) == os.getpid():
                return int(pid)
    raise LookupError(name)


async def test_a_run_ends_when_the_last_machine_of_its_cluster_is_gone(tmp_path):
    async with driving(tmp_path, RayLauncher(), stall_s=SLOW_S) as d:
        await d.until_all()
        os.kill(child("raylet"), signal.SIGKILL)
        with pytest.raises(ClusterError, match="no machine of the Ray cluster is alive"):
            await asyncio.wait_for(d.task, 120)


@pytest.mark.parametrize("kind", ["RayActorError", "OutOfMemoryError", "NodeDiedError"])
async def test_whatever_ray_loses_is_a_role_to_start_again(kind):
    class Actor:
        @property
        def status(self):
            return self

        def remote(self):
            raise getattr(ray.exceptions, kind)("gone")

    launcher = object.__new__(RayLauncher)
    launcher._ray, launcher._actors, launcher._places = ray, {"worker-0": Actor()}, {"worker-0": 1}
    assert await launcher.alive("worker-0") == LOST


def test_an_address_where_no_cluster_is():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match="cannot be joined"):
            RayLauncher(f"127.0.0.1:{port}")
