"""What the head does beside the training loop, and what the driver knows of roles that end."""

import asyncio
from types import SimpleNamespace

from rolltree.cluster.roster import Registration, Roster
from rolltree.cluster.trainer import HeadProcess
from wait_kit import until


async def test_an_engine_that_failed_outside_of_a_call_is_brought_back():
    def client(**flags):
        server = SimpleNamespace(base_url=f"http://{len(clients)}/v1")
        clients.append(SimpleNamespace(server=server, **{**flags}))
        return clients[-1]

    clients, revived = [], []
    client(is_suspect=False, needs_weights=False)
    client(is_suspect=True, needs_weights=False)
    client(is_suspect=False, needs_weights=True)
    servers = SimpleNamespace(version=3, revive=revived.append)
    broker = SimpleNamespace(counts=SimpleNamespace(stored=0), metrics=dict)
    head = SimpleNamespace(
        beats=SimpleNamespace(advance=int),
        broker=broker,
        _config=object(),
        _urls=lambda: ["http://0", "http://1", "http://2"],
    )
    pool = SimpleNamespace(clients=clients)
    ticking = asyncio.create_task(HeadProcess._tick(head, servers, pool, 9, 0))
    await until(lambda: revived)
    ticking.cancel()
    assert revived == clients[1:]


def test_a_role_that_waits_to_be_started_again_is_not_late():
    now = [0.0]
    roster = Roster(20.0, lambda: now[0])
    roster.started("engine-0", "engine")
    roster.register(Registration("engine-0", "engine", "http://1", 1, "here"))
    now[0] = 400.0
    roster.ended("engine-0")
    (role,) = roster.status()["roles"]
    assert (role["state"], role["up_s"]) == ("starting", 0.0)
