"""What the head does beside the training loop."""

import asyncio
from types import SimpleNamespace

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
