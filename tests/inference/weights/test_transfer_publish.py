"""Publishing over gloo to servers in processes of their own, well and badly behaved ones."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from transfer_kit import Servers, same, tensors

from rolltree.inference import OpenAIClient, RetryPolicy, WeightTransfer, served_version
from rolltree.scale.weights import channel
from rolltree.values.errors import ConfigError, ModelError

BUCKET = 2048  # "embed" is larger, the others share


@pytest.fixture
def servers():
    started = Servers()
    yield started
    started.stop()


@pytest.fixture
async def connect(servers):
    """Start servers with faults, and return clients and a transfer; everything is closed."""
    made = []

    def connect(*faults, urls=(), timeout_s=30.0):
        clients = [
            OpenAIClient(f"{url}/v1", "m", retry=RetryPolicy(max_retries=0))
            for url in [*servers.start(*faults), *urls]
        ]
        transfer = WeightTransfer(clients, bucket_bytes=BUCKET, timeout_s=timeout_s)
        made.extend([*clients, transfer])
        return clients, transfer

    yield connect
    for each in made:
        await each.aclose()


async def held_by(client, path):
    await client.server.post("/collective_rpc", {"path": str(path)}, bytes, at_root=True)
    return torch.load(path)


async def is_paused(client):
    answer = await client.server.post("/is_paused", None, json.loads, at_root=True)
    return answer.value["is_paused"]


TRAINER = """
import asyncio, os, sys, time
from transfer_kit import tensors
from rolltree.inference import OpenAIClient, WeightTransfer
from rolltree.scale.weights import channel

pack = channel.pack

def pack_and_die(bucket, *args):
    if bucket.specs[0].name == "half":
        time.sleep(0.5)  # the first bucket has arrived, the server waits for this one
        os._exit(9)
    return pack(bucket, *args)

channel.pack = pack_and_die
transfer = WeightTransfer([OpenAIClient(sys.argv[1], "m")], bucket_bytes=2048, timeout_s=60)
asyncio.run(transfer.publish(tensors().items(), 1))
"""


async def test_a_trainer_that_is_killed_leaves_a_server_that_another_can_use(connect, tmp_path):
    (client,), transfer = connect(None)
    path = os.pathsep.join(each for each in sys.path if each)
    words = [sys.executable, "-c", TRAINER, client.server.base_url]
    died = await asyncio.to_thread(subprocess.run, words, env={**os.environ, "PYTHONPATH": path})
    assert died.returncode == 9
    began = time.monotonic()
    broke_off = ""
    while not broke_off and time.monotonic() - began < 60:  # it waits for no time-out
        answer = await client.server.post("/is_paused", None, json.loads, at_root=True)
        broke_off = answer.value["broke_off"]
    assert "the other side of a weight transfer is gone" in broke_off
    await transfer.publish(tensors().items(), 2)
    assert same(await held_by(client, tmp_path / "held"), tensors())
    assert not await is_paused(client)


async def test_every_server_holds_the_same_bits_and_says_so(connect, tmp_path):
    clients, transfer = connect(None, None)
    await transfer.open()
    await transfer.publish(tensors().items(), 3)
    for client in clients:
        assert same(await held_by(client, tmp_path / "held"), tensors())
        assert client.version == 3
        assert await served_version(client.server) == "3"
        assert not await is_paused(client)
    changed = {name: value.clone() for name, value in tensors().items()}
    changed["embed"][0, 0] = 77.0
    await transfer.publish(iter(changed.items()), 4)  # over the same channels
    assert same(await held_by(clients[1], tmp_path / "held"), changed)


async def test_flipped_bits_are_refused_before_they_are_loaded(connect, tmp_path, monkeypatch):
    clients, transfer = connect(None)
    pack = channel.pack

    def pack_badly(bucket, *args):
        buffer = pack(bucket, *args)
        if bucket.specs[0].name == "half":
            buffer[5] ^= 1
        return buffer

    monkeypatch.setattr(channel, "pack", pack_badly)
    with pytest.raises(ModelError, match=r"checksum mismatch.*begins with half.*paused"):
        await transfer.publish(tensors().items(), 5)
    assert clients[0].version == 0
    assert (await held_by(clients[0], tmp_path / "held")).keys() == {"embed"}
    assert await is_paused(clients[0])
    monkeypatch.undo()
    await transfer.publish(tensors().items(), 6)  # a new channel is made
    assert same(await held_by(clients[0], tmp_path / "held"), tensors())
    assert not await is_paused(clients[0])


@pytest.mark.parametrize(
    ("fault", "said", "timeout_s"),
    [
        ("die", "hung up|gone or gave up", 60.0),  # it is noticed, not waited for
        ("choke", "cannot load this", 60.0),
        ("unwilling", "no such parameter", 60.0),
        ("hang", r"not passed on within 3 s|gone or gave up", 3.0),
    ],
)
async def test_one_that_fails_in_the_middle_fails_alone(connect, tmp_path, fault, said, timeout_s):
    (bad, good), transfer = connect(fault, None, timeout_s=timeout_s)
    await transfer.open()
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"did not reach 1 of 2 servers") as caught:
        await transfer.publish(tensors().items(), 8)
    assert time.monotonic() - began < 50
    assert caught.match(said)
    assert bad.server.root_url in str(caught.value)
    assert good.server.root_url not in str(caught.value)
    assert (bad.version, good.version) == (0, 8)
    assert same(await held_by(good, tmp_path / "held"), tensors())


async def test_one_that_is_not_there_or_not_set_up_fails_alone(connect, tmp_path):
    (other, late, isolated, good, gone), transfer = connect(
        "refuse", "absent", "isolated", None, urls=["http://127.0.0.1:9"], timeout_s=3.0
    )
    with pytest.raises(ModelError, match="did not reach 4 of 5 servers") as caught:
        await transfer.publish(tensors().items(), 8)
    for client, said in (
        (other, "Invalid init_info for SomeOtherEngine.*--weight-transfer-config"),
        (late, "workers did not connect to 127.0.0.1 within 3 s"),
        (isolated, "500.*did not find each other in time .no way to the others"),
        (gone, "could not be reached"),
    ):
        assert caught.match(f"{client.server.root_url}.*{said}")
        assert client.version == 0
    assert good.version == 8
    assert same(await held_by(good, tmp_path / "held"), tensors())


async def test_a_publish_that_is_cancelled_lets_go_of_the_server(connect):
    (client,), transfer = connect("hang")
    await transfer.open()
    task = asyncio.ensure_future(transfer.publish(tensors().items(), 8))
    await asyncio.sleep(0.5)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 20.0
    assert client.version == 0


async def test_what_cannot_be_published(connect, monkeypatch):
    _, transfer = connect()
    with pytest.raises(ConfigError, match="there are no tensors"):
        await transfer.publish([], 1)
    with pytest.raises(ConfigError, match="'a' comes more than once"):
        await transfer.publish([("a", torch.ones(1)), ("a", torch.ones(1))], 1)
    with pytest.raises(ConfigError, match="must be >= 0"):
        await transfer.publish([("a", torch.ones(1))], 1)
    with pytest.raises(ConfigError, match="must be > 0"):
        WeightTransfer([], bucket_bytes=0)
    with pytest.raises(ConfigError, match="travel by gloo or nccl"):
        WeightTransfer([], backend="smoke")
    with pytest.raises(ConfigError, match="always packs on the CPU"):
        WeightTransfer([], device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="this torch lacks nccl or sees no GPU"):
        WeightTransfer([], backend="nccl")


async def test_an_address_of_another_machine(connect, servers):
    (url,) = servers.start(None)
    client = OpenAIClient(f"{url}/v1", "m")
    transfer = WeightTransfer([client], address="203.0.113.5")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.5.*engine\.transfer_address"):
        await transfer.open()
    await client.aclose()
