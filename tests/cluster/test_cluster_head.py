"""What the head does beside the training loop, and what the driver knows of roles that end."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from rolltree.inference import EndpointPool, OpenAIClient
from rolltree.scale.cluster.beat import Beats
from rolltree.scale.cluster.roster import Beat, Registration, Roster
from rolltree.scale.cluster.trainer import HeadProcess
from rolltree.scale.servers import Servers
from wait_kit import until


async def test_an_engine_that_failed_outside_of_a_call_is_brought_back():
    clients = [OpenAIClient(f"http://{number}/v1", "m") for number in range(3)]
    pool, revived = EndpointPool(clients), []
    servers = Servers(clients, None, pool=pool)
    servers.version = 3
    servers.states[clients[1]].is_suspect = True
    servers.states[clients[2]].needs_weights = True
    servers.revive = revived.append
    broker = SimpleNamespace(counts=SimpleNamespace(stored=0), metrics=dict)
    head = SimpleNamespace(
        beats=SimpleNamespace(advance=int),
        broker=broker,
        _config=object(),
        _urls=lambda: ["http://0", "http://1", "http://2"],
    )
    ticking = asyncio.create_task(HeadProcess._tick(head, servers, pool, 9, 0))
    await until(lambda: revived)
    ticking.cancel()
    assert revived[:2] == clients[1:]


def test_a_role_that_waits_to_be_started_again_is_not_late():
    now = [0.0]
    roster = Roster(lambda: now[0])
    roster.started("engine-0", "engine")
    roster.register(Registration("engine-0", "engine", "http://1", 1, "here"))
    now[0] = 400.0
    roster.ended("engine-0")
    (role,) = roster.status()["roles"]
    assert (role["state"], role["up_s"]) == ("starting", 0.0)


def test_a_notice_whose_answer_is_lost_comes_with_the_next_one():
    roster, told = Roster(float), []
    lost = [False, True, True, False, False]

    class Link:
        name = "trainer"

        def ask(self, path, body):
            beats.hurry()
            if path == "/register":
                return roster.register(msgspec.convert(body, Registration))
            answer = roster.note_beat(msgspec.convert(body, Beat))
            roster.notice(f"notice {len(roster.notices)}")
            if not lost:
                raise SystemExit  # ends the loop
            if lost.pop(0):
                raise ConnectionResetError
            return answer

    beats = Beats(Link(), "trainer", None, on_notice=told.append)
    with pytest.raises(SystemExit):
        beats._run()
    assert told == [f"notice {number}" for number in range(4)]
    # A trainer that is started again does not get what the one before it has acknowledged.
    again = msgspec.convert(beats._beat() | {"num_notices": 0}, Beat)
    assert roster.note_beat(again)["notices"] == ["notice 4", "notice 5"]
