"""Weights in memory that other processes of this machine map."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transfer_kit import same, tensors

from rolltree.inference import OpenAIClient, RetryPolicy
from rolltree.scale.weights import ways as weight_ways
from rolltree.scale.weights.receive import weights_mark
from rolltree.scale.weights.shared import SharedWeights
from rolltree.scale.weights.ways import AutoWay, SharedWay
from rolltree.values.errors import ConfigError, ModelError, PublishFailed


@pytest.fixture
def shared():
    made = SharedWeights()
    yield made
    made.close()


def test_the_file_holds_the_same_bits_and_then_those_of_the_next_version(shared):
    assert weights_mark(shared.path) == shared.mark  # before there are any weights
    first = tensors()
    shared.write(first.items())
    assert weights_mark(shared.path) == shared.mark
    assert same(load_file(shared.path), first)
    second = {name: value.clone() for name, value in first.items()}
    second["embed"][0, 0] = 77.0
    second["half"][1, 1] = -3.0
    shared.write(second.items())
    assert same(load_file(shared.path), second)


def test_another_file_has_no_mark_or_another(shared, tmp_path):
    other = SharedWeights()
    assert weights_mark(other.path) not in (None, shared.mark)
    other.close()
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("no weights")
    os.mkfifo(tmp_path / "pipe")
    for name in ("weights.safetensors", "text", "pipe", "nothing", "with\0zero"):
        assert weights_mark(tmp_path / name) is None


def test_other_tensors_and_dtypes_that_no_file_can_hold_are_refused(shared):
    shared.write([("a", torch.ones(2))])
    with pytest.raises(ConfigError, match="tensors of the model changed"):
        shared.write([("a", torch.ones(3))])
    other = SharedWeights()
    with pytest.raises(ConfigError, match="complex64, which safetensors cannot hold"):
        other.write([("a", torch.ones(2, dtype=torch.complex64))])
    other.close()


HOLDER = """
import sys, time, torch
from rolltree.scale.weights.shared import SharedWeights
shared = SharedWeights()
shared.write([("a", torch.ones(1000))])
print(shared.path, flush=True)
time.sleep(60)
"""


def test_a_trainer_that_is_killed_leaves_no_memory_behind():
    path = os.pathsep.join(each for each in sys.path if each)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    file = holder.stdout.readline().strip()
    assert load_file(file)["a"].sum() == 1000  # another process reads it
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    deadline = time.monotonic() + 10
    while os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(file)


async def test_memory_that_is_not_there_is_a_reason_for_another_way(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    async def sees(server, path, body):
        return {"results": [weights_mark(Path(body["kwargs"]["weights_path"]))]}

    way = SharedWay(lambda: tensors().items())
    monkeypatch.setattr(weight_ways, "call", sees)
    client = OpenAIClient("http://127.0.0.1:9/v1", "m")
    assert await way.why_not(client) is None
    await way.aclose()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "not enough memory for another copy" in await way.why_not(client)
    monkeypatch.delattr(os, "memfd_create")
    await way.aclose()
    assert "need Linux" in await way.why_not(client)
    await client.aclose()


class Way:
    """Takes the clients of `takes`, and fails for those of `fails`."""

    def __init__(self, name, takes=(), fails=()):
        self.name, self.takes, self.fails = name, takes, fails
        self.sent, self.log = [], []

    async def why_not(self, client):
        return None if client in self.takes else "too far."

    def outdate(self):
        self.log.append("outdate")

    async def send(self, clients, version):
        self.sent.append((list(clients), version))
        bad = tuple(client for client in clients if client in self.fails)
        if bad:
            raise PublishFailed(f"not by {self.name}", clients=bad)

    def forget(self, client):
        self.log.append("forget")

    async def aclose(self):
        self.log.append("close")


class TestChoice:
    @pytest.fixture
    async def clients(self, monkeypatch):
        async def served(server):
            if server.root_url.endswith(":1"):
                raise ModelError("away")
            return "default"

        monkeypatch.setattr(weight_ways, "served_version", served)
        policy = RetryPolicy(max_retries=0)
        made = [OpenAIClient(f"http://a:{port}/v1", "m", retry=policy) for port in (1, 2, 3, 4)]
        yield made
        for client in made:
            await client.aclose()

    async def test_each_server_takes_the_first_way_it_can_and_the_run_says_which(self, clients):
        _, near, far, poor = clients
        ways = [Way("memory", [near]), Way("wire", [near, far]), Way("disk")]
        auto, said = AutoWay(ways), []
        auto.notify = said.append
        await auto.send([near, far, poor], 1)
        assert [way.sent for way in ways] == [[([near], 1)], [([far], 1)], [([poor], 1)]]
        assert said == [
            "http://a:2: weights go by memory.",
            "http://a:3: weights go by wire. Not by memory: too far.",
            "http://a:4: weights go by disk. Not by memory: too far. Not by wire: too far.",
        ]
        await auto.send([near, far], 2)  # nothing new
        auto.forget(near)
        await auto.send([near], 3)  # the same again
        assert len(said) == 3
        ways[0].takes = ()
        auto.forget(near)
        await auto.send([near], 4)
        assert said[3] == "http://a:2: weights go by wire. Not by memory: too far."
        auto.outdate()
        await auto.aclose()
        assert all(way.log == ["forget", "forget", "outdate", "close"] for way in ways)

    async def test_a_server_that_fails_in_one_way_fails_alone(self, clients):
        gone, near, far, poor = clients
        ways = [Way("memory", [near, poor], fails=[poor]), Way("disk")]
        auto = AutoWay(ways)
        with pytest.raises(PublishFailed, match=r"away.*not by memory") as caught:
            await auto.send([gone, near, far, poor], 1)
        assert set(caught.value.clients) == {gone, poor}
        assert ways[0].sent == [([near, poor], 1)]
        assert ways[1].sent == [([far], 1)]

    async def test_a_choice_outlives_a_send_that_broke_off(self, clients):
        class Full(Way):
            async def why_not(self, client):
                if client is far and not self.log:
                    self.log.append("full")
                    raise ConfigError("no memory")
                return

        _, near, far, _ = clients
        way = Full("memory")
        auto, said = AutoWay([way, Way("disk")]), []
        auto.notify = said.append
        with pytest.raises(ConfigError, match="no memory"):
            await auto.send([far, near], 1)
        await auto.send([far, near], 2)
        assert way.sent == [([far, near], 2)]
        assert said == ["http://a:3, http://a:2: weights go by memory."]
