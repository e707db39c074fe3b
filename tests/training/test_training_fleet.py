"""Servers that join and leave a run while it goes on, and how each gets its weights."""

from __future__ import annotations

import asyncio

import pytest
import server_away_kit as kit
from loop_kit import start
from serve_kit import ADMIN_TOKEN, TOKEN

from rolltree.inference import EndpointPool, OpenAIClient
from rolltree.inference.retry import RetryPolicy
from rolltree.scale import servers
from rolltree.scale.servers import Servers
from rolltree.training import build_parts
from rolltree.values.errors import ConnectionFailed, PublishFailed, TrainingError


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("SERVE_TOKEN", TOKEN)
    monkeypatch.setenv("SERVE_ADMIN_TOKEN", ADMIN_TOKEN)


class Mine(OpenAIClient):
    """A server of which nothing exists but what it says."""

    label, up, version = "default", True, -1

    def __init__(self, port):
        super().__init__(f"http://a:{port}/v1", "m", retry=RetryPolicy(max_retries=0))

    async def check_health(self):
        if not self.up:
            raise ConnectionFailed("gone")


class Recorder:
    """Gives every server its label, but those that refuse."""

    name = "recorder"

    def __init__(self):
        self.sent, self.refusing, self.forgotten = [], set(), []

    async def why_not(self, client):
        return None

    def outdate(self):
        pass

    async def send(self, clients, version):
        self.sent.append((set(clients), version))
        bad = tuple(client for client in clients if client in self.refusing)
        for client in set(clients) - set(bad):
            client.label = str(version)
        if bad:
            raise PublishFailed("it is full", clients=bad)

    def forget(self, client):
        self.forgotten.append(client)

    async def aclose(self):
        pass


@pytest.fixture
async def fleet(monkeypatch):
    """Two servers that have version 3, with their pool; labels are asked without HTTP."""
    by_server = {}

    async def label(server, **options):
        return by_server[server].label

    def server(port):
        made = Mine(port)
        by_server[made.server] = made
        return made

    monkeypatch.setattr(servers, "served_version", label)
    monkeypatch.setattr(servers, "WHILE_AWAY", RetryPolicy(first_wait_s=0.001, max_wait_s=0.002))
    first, second = server(1), server(2)
    pool = EndpointPool([first, second])
    made = Servers([first, second], Recorder(), pool=pool)
    made.said = []
    made.notify = made.said.append
    made.server = server
    async with made.paused():
        await made.publish(3)
    yield made
    await made.aclose()
    for each in by_server.values():
        await each.aclose()


class TestMembers:
    async def test_one_that_joins_gets_its_weights_and_is_probed_before_a_call(self, fleet):
        probed = []

        async def probe(client, version):
            assert client.label == str(version)
            assert fleet.states[client].is_suspect  # no call yet
            probed.append((client, version))

        fleet.probe = probe
        new = fleet.server(5)
        new.label = "3"  # of an earlier life of the run: it gets the weights all the same
        ready = fleet.add(new)
        assert fleet._pool.endpoints[-1].client is new
        with pytest.raises(ConnectionFailed, match="made on another server"):
            await fleet.ready(new)
        await ready
        assert await fleet.ready(new) == 0.0
        assert fleet._way.sent[-1] == ({new}, 3)
        assert probed == [(new, 3)]
        assert fleet.said == ["http://a:5 has joined, with version 3."]
        async with fleet.paused():
            await fleet.publish(4)
        assert fleet._way.sent[-1][0] == {*fleet.states}
        assert new.label == "4"

    async def test_one_that_serves_other_weights_is_dropped(self, fleet):
        async def probe(client, version):
            raise TrainingError("it serves other weights.")

        fleet.probe = probe
        new = fleet.server(5)
        await fleet.add(new)
        assert len([1 for clients, _ in fleet._way.sent if clients == {new}]) == 3
        assert new not in fleet._pool.clients
        assert "http://a:5 is no longer used" in fleet.said[-1]
        assert "it serves other weights. The run goes on with http://a:1" in fleet.said[-1]
        assert await fleet.guard(asyncio.sleep(0, "goes on")) == "goes on"
        with pytest.raises(ConnectionFailed, match="was removed"):
            await fleet.ready(new)

    async def test_one_that_refuses_a_publish_is_dropped_and_the_last_ends_the_run(self, fleet):
        first, second = fleet.states
        fleet._way.refusing = {second}
        async with fleet.paused():
            await fleet.publish(4)
        assert (first.label, second.label) == ("4", "3")
        assert fleet._pool.clients == [first]
        assert "it is full" in fleet.said[-1]
        fleet._way.refusing = {first}
        async with fleet.paused():
            with pytest.raises(PublishFailed, match="it is full"):
                await fleet.publish(5)

    async def test_one_that_leaves_gets_no_more_calls(self, fleet):
        first, second = fleet.states
        stay = fleet._pool.endpoints[0]
        fleet.remove(first)
        assert fleet._way.forgotten == [first]
        assert fleet._pool.clients == [second]
        assert (await fleet._pool.choose(b"key", stay)).client is second
        with pytest.raises(ConnectionFailed, match="was removed"):
            await fleet.ready(first)
        fleet.remove(first)  # twice does no harm
        async with fleet.paused():
            await fleet.publish(4)
        assert fleet._way.sent[-1] == ({second}, 4)

    async def test_the_last_one_stays_until_another_comes(self, fleet):
        first, second = fleet.states
        fleet.remove(first)
        second.up = False
        fleet.states[second].is_suspect = True
        fleet.remove(second)
        assert fleet._pool.clients == [second]
        call = asyncio.create_task(fleet.ready(second))
        await asyncio.sleep(0.02)
        assert not call.done()  # it waits, as for any server that is away
        new = fleet.server(5)
        await fleet.add(new)
        assert fleet._pool.clients == [new]
        with pytest.raises(ConnectionFailed):  # which its pool takes to the new one
            await call
        assert await fleet.ready(new) == 0.0

    async def test_one_that_leaves_during_a_publish_is_not_missed(self, fleet):
        first, second = fleet.states
        fleet._way.refusing = {second}
        send = fleet._way.send

        async def leave_and_send(clients, version):
            fleet.remove(second)
            await send(clients, version)

        fleet._way.send = leave_and_send
        async with fleet.paused():
            await fleet.publish(4)
        assert fleet.version == 4
        assert first.label == "4"


@pytest.mark.long
def test_a_server_joins_and_the_first_one_is_killed(model, tmp_path):
    """Real servers: the run ends with every rollout, and each call had published weights."""
    first, second = kit.Phoenix(str(model)), kit.Phoenix(str(model))
    try:
        config = kit.server_config(
            model,
            tmp_path / "run",
            [first.url],
            engine={"max_concurrent": 6},
            algorithm={"group_size": 6},
            optim={"lr": 2e-2},
            train={"num_steps": 4, "async_steps": 1},
        )
        parts = build_parts(config)

        def join():
            options = {"api_key": TOKEN, "admin_key": ADMIN_TOKEN, "token_ids": "vllm"}
            old = parts.client.clients[0]
            new = OpenAIClient(
                second.url,
                "m",
                renderer=old.renderer,
                logprobs_mode="processed",
                retry=RetryPolicy(max_retries=0),
                **options,
            )

            def leave(task):
                first.kill()
                parts.engine.remove(old)

            parts.engine.add(new).add_done_callback(leave)

        seen = kit.At({2: 2}, join)
        report = start(config, kit.EarlyIsEasy(), parts=parts, reporter=seen)
        assert len(report.metrics) == 4
        for step in report.metrics:
            assert step["error/mean"] == 0
            assert step.get("train/sampling/sampling_logp_difference/mean", 0.0) < 1e-3
        said = " ".join(seen.notices)
        assert f"{first.url.removesuffix('/v1')}: weights go by shared memory." in said
        assert f"{second.url.removesuffix('/v1')}: weights go by shared memory." in said
        assert f"{second.url.removesuffix('/v1')} has joined, with version" in said
        assert not (tmp_path / "run" / "weights").exists()
        assert [client.server.base_url for client in parts.client.clients] == [second.url]
    finally:
        first.served.process.kill()
        second.close()
