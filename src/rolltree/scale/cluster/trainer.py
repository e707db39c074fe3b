"""The trainer's processes: `gang` starts one `python -m rolltree.scale.cluster.trainer` per rank.

Rank 0 is the head: it runs the training loop, holds the store, publishes weights to the engines and
serves the rollout workers. The other ranks follow it. When one of them dies, all end, and the
driver starts them again; the run continues from its checkpoint and its stored rollouts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from rolltree.inference import EndpointPool
from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.scale.cluster.beat import Beats, Link, run_role
from rolltree.scale.cluster.broker import Broker, Head
from rolltree.scale.cluster.messages import EngineState, FleetState, Served
from rolltree.scale.cluster.relay import HeadReporter
from rolltree.scale.cluster.remote import RemoteRollouts
from rolltree.scale.cluster.roles import with_engines
from rolltree.scale.fleet import server_client
from rolltree.scale.servers import Servers
from rolltree.store import Run
from rolltree.training import TrainConfig, TrainParts
from rolltree.training.launch import stop_on_sigterm, train_async
from rolltree.training.models.ranks import is_rank0
from rolltree.training.sections import ClusterSection
from rolltree.values.errors import RankLost, RolltreeError, StoreError

_TICK_S = 0.5


class HeadProcess:
    """The head's engines and workers, as `rolltree.training.launch.Outside`.

    Args:
        link: the connection to the driver.
        settings: the `cluster` section.
    """

    def __init__(self, link: Link, settings: ClusterSection) -> None:
        self.broker = Broker(
            link.host,
            link.token,
            visible=lambda: self.beats.answer.get("workers"),
        )
        self.broker.start()
        self._settings = settings
        self._run: Run | None = None
        self._config: TrainConfig | None = None
        self.beats = Beats(
            link,
            "trainer",
            self.broker.url,
            on_notice=self._note,
        )
        self._early: list[str] = []

    async def engines(self, config: TrainConfig) -> TrainConfig:
        """Wait for an engine, and return the config with the addresses of all known engines."""
        self.beats.say("waiting for engines", "engine")
        while not (urls := self._urls()):
            await asyncio.sleep(_TICK_S / 5)
            self.beats.advance()
            self.beats.hurry()
        self.beats.say("loading the model")
        self._config = with_engines(config, urls)
        return self._config

    def _urls(self) -> list[str]:
        return sorted(engine["url"] for engine in self.beats.answer.get("engines", ()))

    @asynccontextmanager
    async def rollouts(
        self, config: TrainConfig, source: RolloutSource, parts: TrainParts, run: Run
    ) -> AsyncIterator[RolloutEngine]:
        """Serve rollout workers; the yielded engine runs the rollouts of `run`."""
        servers: Any = parts.engine
        # An engine may have been killed since it registered, and the driver starts it again.
        servers.are_restarted = True
        pool: EndpointPool = parts.client
        loop = asyncio.get_running_loop()
        first = pool.clients[0]
        vocab_size = int(parts.model.get_input_embeddings().weight.shape[0])
        served = Served(
            model=first.model, end_ids=tuple(first.renderer.end_ids), vocab_size=vocab_size
        )

        def suspect(url: str) -> None:
            for client, state in servers.states.copy().items():
                if client.server.base_url == url and not state.is_suspect:
                    state.is_suspect = True
                    loop.call_soon_threadsafe(servers.revive_all)

        self._run = run
        early, self._early = self._early, []
        for message in early:
            run.add_event("notice", {"message": message})
        env_id = source.env_id
        self.broker.attach(Head(run, env_id, served, lambda: _fleet(servers), suspect))
        settings = self._settings
        rollouts = RemoteRollouts(
            source,
            pool,
            self.broker,
            run,
            max_concurrent=settings.rollout_workers * settings.slots_per_worker,
        )
        ticking = asyncio.create_task(self._tick(servers, pool, vocab_size, run.num_rollouts()))
        # If it failed unnoticed, the run would wait forever for engines that are never added.
        ticking.add_done_callback(partial(_end_with, servers))
        try:
            yield rollouts
        finally:
            self._run = None
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await asyncio.to_thread(self.broker.close)

    async def _tick(
        self, servers: Any, pool: EndpointPool, vocab_size: int, num_before: int
    ) -> None:
        """Report that the loop advances, and add and remove engines as they come and go."""
        config = self._config
        assert config is not None
        known = set[str]()
        while True:
            self.beats.advance()
            self.beats.metrics = {
                # For the whole run, so that the driver sees whether a restarted head progresses.
                "progress": num_before + self.broker.counts.stored,
                "version": servers.version,
                **self.broker.metrics(),
            }
            urls = {f"{url}/v1" for url in self._urls()}
            clients = {client.server.base_url: client for client in pool.clients}
            # `servers` removed an engine that refused the weights; the driver may still list it.
            known = (known | clients.keys()) & urls
            for url in sorted(urls - known):
                renderer = pool.clients[0].renderer
                servers.add(server_client(config, url, renderer, vocab_size))
            # Elsewhere, calls bring engines back, but the head makes none: an engine that missed a
            # publish, or failed outside of a worker's call, would stay out forever.
            servers.revive_all()
            # An empty list means that the driver knows no engines yet, not that all are gone.
            for url in sorted(clients.keys() - urls) if urls else ():
                servers.remove(clients[url])
            await asyncio.sleep(_TICK_S)

    def _note(self, message: str) -> None:
        """Store a notice of the driver, which has shown it."""
        run = self._run
        if run is None:
            self._early.append(message)
            return
        with suppress(StoreError):
            run.add_event("notice", {"message": message})


def _fleet(servers: Servers) -> FleetState:
    """Return the state of the engines for workers; called from the broker's thread."""
    engines = [
        EngineState(
            url=client.server.base_url,
            is_ready=state.is_ready and servers.version >= 0,
            version=client.version,
            epoch=state.epoch,
        )
        for client, state in servers.states.copy().items()
    ]
    return FleetState(
        version=servers.version, labels=tuple(sorted(servers.labels)), engines=tuple(engines)
    )


def _end_with(servers: Servers, ticking: asyncio.Task[None]) -> None:
    """End the run with the error of the task that follows the engines."""
    error = None if ticking.cancelled() else ticking.exception()
    if isinstance(error, Exception):
        servers.lose(error)


async def _lead(link: Link, config: TrainConfig, settings: ClusterSection) -> None:
    head = HeadProcess(link, settings)
    head.beats.start()
    with stop_on_sigterm():
        await train_async(config, cluster=head, reporter=HeadReporter(link, head.beats))


async def _follow(link: Link, config: TrainConfig, settings: ClusterSection) -> None:
    # It waits for commands of rank 0 without a loop of its own.
    beats = Beats(link, "rank", None, has_loop=False)
    beats.say("following rank 0", "trainer")
    beats.start()
    await train_async(config, cluster=_NOBODY)


_NOBODY: Any = object()
"""Stands for the `Outside` of a rank that follows, which never uses it."""


def main() -> int:
    """Train as the driver's config says; return the exit status."""
    rank = int(os.environ.get("RANK", "0"))
    link = Link()
    if rank:
        link.name = f"{link.name}-{rank}"

    def work(link: Link, config: TrainConfig, settings: ClusterSection) -> int:
        try:
            asyncio.run((_lead if is_rank0() else _follow)(link, config, settings))
        except RankLost as error:
            # The driver starts all ranks again together.
            print(error, file=sys.stderr)
            return 1
        return 0

    return run_role(link, work, () if rank else (RolltreeError,))


if __name__ == "__main__":
    sys.exit(main())
