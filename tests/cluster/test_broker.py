"""The broker over real HTTP: workers that work, and clients that do not."""

import asyncio
import dataclasses
import io
import time
import zlib

import aiohttp
import pytest

from rolltree.inference import OpenAIClient
from rolltree.rollouts.requests import example_request, group_member
from rolltree.rollouts.wire import request_encoder, request_from_bytes, result_to_rows
from rolltree.scale.cluster.broker import Broker, Head
from rolltree.scale.cluster.messages import (
    Delivery,
    FleetState,
    Poll,
    Receipt,
    Served,
    Suspect,
    Work,
    WorkDone,
    digest,
    read_message,
)
from rolltree.scale.cluster.remote import RemoteRollouts
from rolltree.store import Run
from rolltree.values.errors import ConfigError, StoreError
from rolltree.values.types import RolloutResult, SamplingParams, State
from wait_kit import until

TOKEN = "token-of-the-tests"
FLEET = FleetState(version=3, labels=("3",), engines=())


class Source:
    env_id = "letters"

    def num_examples(self, split):
        return 9

    def example(self, split, index):
        return {}

    async def run_request(self, request, client):
        raise AssertionError("the head plays nothing")


def requests(number, step=1):
    return [
        example_request(
            "letters",
            {"prompt": [{"role": "user", "content": f"{n}"}], "example_id": n, "task": "t"},
            group_id=f"train/{step:06d}/g{n:02d}",
            seed=n,
            sampling=SamplingParams(max_tokens=4, extra={"api_key": "kept-for-the-worker"}),
            phase="train",
            train_step=step,
        )
        for n in range(number)
    ]


def played(request, reward=1.0):
    state = State(input=dict(request.input), trajectory=[], error=None, reward=reward)
    return RolloutResult(request, (state,), None)


def finished(item_id, *results, asked=None):
    encoded = tuple(request_encoder()(result.request) for result in results)
    rows = tuple(map(result_to_rows, results))
    asked = digest(encoded) if asked is None else asked
    return WorkDone(item_id=item_id, asked=asked, results=rows).to_bytes()


class Hand:
    """A worker by hand."""

    def __init__(self, url, name="worker-0", life="1", token=TOKEN):
        self.url, self.name, self.life = url, name, life
        self.http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})

    async def post(self, path, body):
        async with self.http.post(self.url + path, data=body) as answer:
            return answer.status, await answer.read()

    async def poll(self, free=8, have=(), wait_s=5.0):
        poll = Poll(
            worker=self.name,
            life=self.life,
            slots=8,
            free=free,
            have=tuple(have),
            wait_s=wait_s,
        )
        status, body = await self.post("/work", poll.to_bytes())
        assert status == 200, body
        return read_message(Work, body)

    async def deliver(self, *items):
        """Send the bytes of items; return what became of each."""
        delivery = Delivery(items=tuple((zlib.crc32(data), data) for data in items))
        status, body = await self.post("/results", delivery.to_bytes())
        assert status == 200, body
        return [status for status, _ in read_message(Receipt, body).items]

    async def send(self, item_id, *results, asked=None):
        (status,) = await self.deliver(finished(item_id, *results, asked=asked))
        return status


@pytest.fixture
async def at(tmp_path):
    """A broker with a store, and a worker."""
    run = Run.create(tmp_path / "run", config={}, kind="train")
    broker = Broker("127.0.0.1", TOKEN, queue_bytes=2**16)
    broker.start()
    suspects = []
    served = Served(model="m", end_ids=(1,), vocab_size=10)
    broker.attach(Head(run, "letters", served, lambda: FLEET, suspects.append))
    hand = Hand(broker.url)
    hand.run, hand.broker, hand.suspects = run, broker, suspects
    hand.rollouts = RemoteRollouts(
        Source(), OpenAIClient("http://127.0.0.1:9/v1", "m"), broker, run, max_concurrent=64
    )
    yield hand
    await hand.rollouts.client.aclose()
    await hand.http.close()
    broker.close()
    run.close()


async def collect(rollouts, wanted, found):
    async for batch in rollouts.run_stored(wanted, rollouts._run):
        found += [result for result, rows in batch if rows]


async def test_work_goes_out_and_comes_back_stored(at):
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(3), found))
    work = await at.poll()
    assert (work.fleet, len(work.items), work.drop) == (FLEET, 3, ())
    given = [request_from_bytes(item.requests[0]) for item in work.items]
    assert given == requests(3)
    for item, request in zip(work.items, given, strict=True):
        assert await at.send(item.item_id, played(request)) == "stored"
    await task
    assert [result.request for result in found] == requests(3)
    assert at.run.num_rollouts() == 3
    # The second result of a rollout is known, and changes nothing.
    assert await at.send(work.items[0].item_id, played(given[0], reward=9.0)) == "known"
    assert [row.reward for row in at.run.rollouts()] == [1.0, 1.0, 1.0]
    assert "kept-for-the-worker" not in str([row.record for row in at.run.rollouts(blobs=True)])


async def test_a_result_of_a_former_head_is_taken_and_not_played_again(at):
    (request,) = requests(1, step=7)
    assert await at.send(request.request_id, played(request)) == "stored"
    found = []
    await collect(at.rollouts, [request], found)
    assert len(found) == at.run.num_rollouts() == 1


async def test_a_foreign_result_is_refused_and_the_request_played_again(at):
    (request,) = requests(1)
    found = []
    task = asyncio.create_task(collect(at.rollouts, [request], found))
    work = await at.poll()
    (other,) = requests(1, step=2)
    item_id = work.items[0].item_id
    asked = digest((request_encoder()(request),))
    reseeded = dataclasses.replace(request, seed=99)
    for bad in ([played(other)], [], [played(request)] * 2):
        assert await at.send(item_id, *bad, asked=asked) == "refused"
    assert await at.send(item_id, played(reseeded)) == "refused"
    (row,) = result_to_rows(played(request))
    unreadable = (*row[:-5], "{not json", *row[-4:])
    for rows in ((), (row, row), (unreadable,)):
        bad = WorkDone(item_id=item_id, asked=asked, results=(rows,))
        assert await at.deliver(bad.to_bytes()) == ["refused"]
    assert (await at.post("/results", b"junk"))[0] == 400
    assert at.run.num_rollouts() == 0
    work = await at.poll()
    await at.send(work.items[0].item_id, played(request))
    await task
    assert len(found) == 1


async def test_a_bad_item_leaves_the_others_of_its_delivery(at):
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(3), found))
    work = await at.poll()
    first, second, third = (
        finished(item.item_id, played(request_from_bytes(item.requests[0]))) for item in work.items
    )
    cut, turned = second[:-1], second[:-9] + bytes([second[-9] ^ 1]) + second[-8:]
    checksum = zlib.crc32(second)
    items = [(zlib.crc32(first), first), (checksum, cut), (checksum, turned)]
    items += [(zlib.crc32(b"junk"), b"junk"), (zlib.crc32(third), third)]
    body = Delivery(items=tuple(items)).to_bytes()
    assert (await at.post("/results", body[:-1]))[0] == 400
    assert at.run.num_rollouts() == 0
    status, answer = await at.post("/results", body)
    receipt = [status for status, _ in read_message(Receipt, answer).items]
    assert (status, receipt) == (200, ["stored", "refused", "refused", "refused", "stored"])
    # The worker has nothing left that the head takes, so the one that is missing is played again.
    (again,) = (await at.poll()).items
    assert (again.requests, again.attempt) == (work.items[1].requests, 2)
    assert await at.deliver(first, second, third) == ["known", "stored", "known"]
    assert await at.deliver(first, second, third) == ["known"] * 3
    await task
    assert len(found) == at.run.num_rollouts() == 3


async def test_an_item_twice_in_one_delivery_is_stored_once(at):
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(1), found))
    (item,) = (await at.poll()).items
    data = finished(item.item_id, played(request_from_bytes(item.requests[0])))
    assert await at.deliver(data, data) == ["stored", "later"]
    assert await at.deliver(data) == ["known"]
    await task
    assert len(found) == at.run.num_rollouts() == 1


async def test_a_store_that_fails_ends_the_run_and_not_the_results(at):
    def full(*rows, **options):
        raise StoreError("the disk is full")

    task = asyncio.create_task(collect(at.rollouts, requests(1), []))
    (item,) = (await at.poll()).items
    data = finished(item.item_id, played(request_from_bytes(item.requests[0])))
    at.run.add_encoded = full
    assert await at.deliver(data) == ["later"]
    with pytest.raises(StoreError, match="the disk is full"):
        await task
    del at.run.add_encoded
    assert await at.deliver(data) == ["stored"]


async def test_states_are_read_when_they_are_wanted(at):
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(1), found))
    (item,) = (await at.poll()).items
    await at.send(item.item_id, played(request_from_bytes(item.requests[0]), reward=0.5))
    await task
    (result,) = found
    assert [state.reward for state in result.states] == [0.5]
    assert dataclasses.replace(result, num_attempts=2).states == result.states


async def test_nobody_gets_in_without_the_token(at):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        async with aiohttp.ClientSession(headers=headers) as http:
            for path in ("/work", "/results", "/suspect"):
                async with http.post(at.url + path, data=io.BytesIO(b"x" * 2**20)) as answer:
                    assert answer.status == 401
            for path in ("/fleet", "/served"):
                async with http.get(at.url + path) as answer:
                    assert answer.status == 401


async def test_results_that_would_not_fit_are_kept_by_the_worker(at):
    at.broker.counts.waiting_bytes = 2**16
    async with at.http.post(at.url + "/results", data=b"x" * 100) as answer:
        assert answer.status == 503
    at.broker.counts.waiting_bytes = 0
    async with at.http.post(at.url + "/work", data=io.BytesIO(b"x" * 2**23)) as answer:
        assert answer.status == 413


async def half_sent(at, length, data=b"x"):
    """Send the head of a delivery and a part of its body; return the connection."""
    host, _, port = at.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /results HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("length", [2**16, 2**29])
async def test_a_delivery_that_stops_half_way_does_not_keep_others_waiting(at, monkeypatch, length):
    monkeypatch.setattr("rolltree.scale.cluster.broker._PROMPT_S", 0.05)
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(1), found))
    (item,) = (await at.poll()).items
    _, writer = await half_sent(at, length)
    await until(lambda: at.broker.counts.waiting_bytes == 1)
    await at.send(item.item_id, played(request_from_bytes(item.requests[0])))
    await asyncio.wait_for(task, 30)
    assert len(found) == 1
    writer.close()
    await until(lambda: at.broker.counts.waiting_bytes == 0)


async def test_a_body_that_does_not_arrive_is_not_waited_for(at, monkeypatch):
    monkeypatch.setattr("rolltree.scale.cluster.control._BODY_S", 0.2)
    reader, writer = await half_sent(at, 100)
    assert b"408" in await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    await until(lambda: at.broker.counts.waiting_bytes == 0)


async def test_a_delivery_that_cannot_be_stored_is_refused_by_its_size(at):
    reader, writer = await half_sent(at, 2**30 + 1)
    assert b"413" in await asyncio.wait_for(reader.readline(), 30)
    writer.close()


async def test_a_worker_that_begins_again_gets_its_requests_again(at):
    found = []
    task = asyncio.create_task(collect(at.rollouts, requests(2), found))
    first = await at.poll()
    at.life = "2"
    again = await at.poll()
    assert [item.requests for item in again.items] == [item.requests for item in first.items]
    assert [item.attempt for item in again.items] == [2, 2]
    for item in again.items:
        await at.send(item.item_id, played(request_from_bytes(item.requests[0])))
    await task
    assert len(found) == 2


async def test_what_nobody_wants_any_more_is_dropped(at):
    task = asyncio.create_task(collect(at.rollouts, requests(1), []))
    work = await at.poll()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    have = [item.item_id for item in work.items]
    assert list((await at.poll(have=have)).drop) == have


async def test_a_suspect_is_passed_on(at):
    status, body = await at.post("/suspect", Suspect(url="http://engine/v1").to_bytes())
    assert (status, read_message(FleetState, body)) == (200, FLEET)
    assert at.suspects == ["http://engine/v1"]


async def test_work_that_comes_during_a_poll_is_handed_out_at_once(at):
    polling = asyncio.create_task(at.poll(wait_s=10.0))
    await until(lambda: at.broker.num_slots == 8, "the poll")
    began = time.monotonic()
    task = asyncio.create_task(collect(at.rollouts, requests(1), []))
    assert len((await polling).items) == 1
    assert time.monotonic() - began < 5.0
    task.cancel()


class Compared(Source):
    has_group_rewards = True

    async def score_group(self, states):
        raise AssertionError("the head scores nothing")


async def test_a_group_whose_members_are_compared_goes_to_one_worker_and_is_stored_whole(at):
    members = [group_member(request, n) for request in requests(2) for n in range(3)]
    rollouts = RemoteRollouts(Compared(), at.rollouts.client, at.broker, at.run, max_concurrent=64)
    found = []
    task = asyncio.create_task(collect(rollouts, members, found))
    work = await at.poll(free=4)
    assert [len(item.requests) for item in work.items] == [3]
    more = await at.poll(free=4, have=[item.item_id for item in work.items])
    for item in (*work.items, *more.items):
        given = list(map(request_from_bytes, item.requests))
        assert await at.send(item.item_id, *map(played, given[:2])) == "refused"  # not whole
        assert not at.run.num_rollouts(group_id=given[0].group_id)
        await at.send(item.item_id, *map(played, given))
        assert at.run.num_rollouts(group_id=given[0].group_id) == 3
    await task
    assert [result.request for result in found] == members


async def test_an_object_that_is_not_data_cannot_leave_the_process(at):
    (request,) = requests(1)
    request.input["game"] = object()
    with pytest.raises(ConfigError, match="holds an object that is not data"):
        await collect(at.rollouts, [request], [])
