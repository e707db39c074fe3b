"""A rollout worker: `python -m rolltree.scale.cluster.worker`.

It asks the head for as many requests as it has free slots, plays them in its own environment on
the engines that the head reports as ready, and sends each result until the head has stored it. It
opens no port, and takes work only from the head that the driver names.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

import aiohttp

from rolltree._helpers.redact import environment_secrets, known_secrets, secrets_in
from rolltree._helpers.tasks import yield_fairly
from rolltree.environments import load_environment
from rolltree.inference import ChatRenderer, EndpointPool
from rolltree.inference.models import load_tokenizer
from rolltree.inference.openai_client import OpenAIClient
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.requests import current_episode
from rolltree.rollouts.wire import request_from_bytes, result_to_rows
from rolltree.scale.cluster.beat import Beats, Link, run_role
from rolltree.scale.cluster.messages import (
    Delivery,
    EngineState,
    FleetState,
    Item,
    Poll,
    Receipt,
    RoleMessage,
    Served,
    Suspect,
    Work,
    WorkDone,
    digest,
    read_message,
)
from rolltree.scale.cluster.roles import with_engines
from rolltree.scale.fleet import Fleet, ServerState, server_client
from rolltree.training import TrainConfig
from rolltree.training.launch import stop_on_sigterm
from rolltree.training.plan import AWAY_LIMIT_S
from rolltree.training.sections import ClusterSection
from rolltree.values.errors import (
    ClusterError,
    ConfigError,
    ConnectionFailed,
    RolltreeError,
)
from rolltree.values.types import RolloutResult

T = TypeVar("T", bound=RoleMessage)
_POLL_S = 10.0
_RENEW_S = 5.0
"""Seconds after which a worker lists its items again, so that it keeps them."""
_RETRY_S = 0.3
_GATHER_S = 0.05
_MAX_DELIVERY_BYTES = 2**23
_RATE_S = 30.0


class HeadLost(ClusterError):
    """The head does not answer; the driver starts it again."""


class TooLarge(ClusterError):
    """The head does not take a message of this size."""


class HeadClient:
    """A client of the head's server at its current address.

    Args:
        link: the connection to the driver, with the token.
        beats: has the head's current address.
    """

    def __init__(self, link: Link, beats: Beats) -> None:
        self._link, self._beats = link, beats
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HeadClient:
        timeout = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(
            headers=self._link.headers, timeout=timeout, connector=connector, trust_env=False
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(self, kind: type[T], path: str, message: RoleMessage | None = None) -> T:
        """Return the head's answer.

        Raises:
            HeadLost: it does not answer, or is not ready.
            TooLarge: the message is too large.
            ClusterError: it runs a different version of rolltree.
        """
        url = self._beats.answer.get("head")
        if url is None or self._http is None:
            raise HeadLost("the driver does not know the head's address yet")
        method = "GET" if message is None else "POST"
        # aiohttp sends a file in parts, without holding the event loop.
        body = None if message is None else BytesIO(message.to_bytes())
        try:
            async with self._http.request(method, f"{url}{path}", data=body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._beats.hurry()
            raise HeadLost(f"the head at {url} does not answer ({error!r})") from error
        if answer.status == 413:
            raise TooLarge(f"the head takes no more: {content[:200]!r}")
        if answer.status == 400:
            raise ClusterError(f"the head does not understand this worker: {content[:1000]!r}")
        if answer.status != 200:
            raise HeadLost(f"the head answered {answer.status}: {content[:200]!r}")
        return read_message(kind, content)


class Engines(Fleet):
    """The engines as the head sees them; takes the place of `Servers` when a call is made.

    A call is made only on an engine that the head reports as ready, and counts only if the engine
    has published weights afterwards.
    """

    def __init__(self, head: HeadClient, first: FleetState) -> None:
        super().__init__()
        self._head, self._state = head, first
        self._by_url: dict[str, EngineState] = {}
        self._asking: asyncio.Task[None] | None = None
        self.take(first)

    @property
    def urls(self) -> list[str]:
        """The addresses of all engines."""
        return list(self._by_url)

    @property
    def is_any_ready(self) -> bool:
        """Whether a call can be made."""
        return any(engine.is_ready for engine in self._state.engines)

    def take(self, state: FleetState) -> None:
        """Use the state that the head has sent."""
        self._state, self.version, self.labels = state, state.version, state.labels
        self._by_url = {engine.url: engine for engine in state.engines}

    async def refresh(self) -> None:
        """Get the state from the head; concurrent callers share one request."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._refresh())
        await asyncio.shield(self._asking)

    async def _refresh(self) -> None:
        with suppress(HeadLost):
            self.take(await self._head.ask(FleetState, "/fleet"))

    async def ready(self, client: OpenAIClient) -> float:
        """Wait until an engine can be called; return the seconds waited.

        Raises:
            ConnectionFailed: another engine can be called instead.
        """
        began, url = time.monotonic(), client.server.base_url
        state = self.states.setdefault(client, ServerState())
        if state.is_suspect:
            with suppress(HeadLost):
                self.take(await self._head.ask(FleetState, "/suspect", Suspect(url=url)))
                state.is_suspect = False
        # The rollout's deadline is suspended: it is not the model's fault that an engine is away.
        episode = current_episode()
        while state.is_suspect or not self._is_ready(url):
            if any(engine.is_ready and engine.url != url for engine in self._state.engines):
                raise ConnectionFailed(
                    f"{url} is away, or does not have the run's weights yet. The call is made on "
                    "another engine."
                )
            with nullcontext() if episode is None else episode.clock.postponed():
                await asyncio.sleep(_RETRY_S)
                await self.refresh()
            # A new head was not told of the suspicion, but checks every engine anyway.
            state.is_suspect = False
        known = self._by_url[url]
        client.version, state.epoch = known.version, known.epoch
        self.states[client] = state  # it may have left meanwhile, and come back
        return time.monotonic() - began

    def _is_ready(self, url: str) -> bool:
        known = self._by_url.get(url)
        return known is not None and known.is_ready

    def check(self, client: OpenAIClient) -> None:
        """Check that no call on an engine failed since the head was last asked about it.

        Raises:
            ConnectionFailed: one did; the next call reports the engine to the head.
        """
        state = self.states.get(client)
        if state is not None and state.is_suspect:
            raise ConnectionFailed(f"{client.server.root_url} has yet to get the run's weights.")

    async def _label(self, client: OpenAIClient, state: ServerState) -> str:
        label = await super()._label(client, state)
        if label not in self.labels:
            # The head may have published since the last refresh.
            await self.refresh()
        known = self._by_url.get(client.server.base_url)
        state.epoch = -1 if known is None else known.epoch
        return label


@dataclass(slots=True, eq=False)
class _Finished:
    """The results of an item as bytes; `is_taken` is set when the head has settled them."""

    item_id: str
    checksum: int
    data: bytes
    is_taken: asyncio.Future[None]


class Worker:
    """Plays the rollouts that the head hands out.

    Args:
        link: the connection to the driver.
        config: the settings of the run.
        beats: report the worker's state to the driver.
        head: the client of the head's server.
    """

    def __init__(self, link: Link, config: TrainConfig, beats: Beats, head: HeadClient) -> None:
        assert config.cluster is not None
        self._link, self._name, self._life = link, link.name, secrets.token_hex(8)
        self._config, self._beats, self._head = config, beats, head
        self._slots = config.cluster.slots_per_worker
        self._playing: dict[str, asyncio.Task[_Finished]] = {}
        self._finished: asyncio.Queue[_Finished] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._costs: dict[str, int] = {}
        self._head_life = ""
        self._renew_at = 0.0
        self._secrets: Sequence[str] = ()
        self._ended = asyncio.Event()
        self._done: deque[tuple[float, int]] = deque()
        self._num_rollouts = self._num_tokens = 0

    _engines: Engines
    _rollouts: RolloutEngine

    async def run(self, source: Any) -> None:
        """Work until the driver drains this worker."""
        config = self._config
        self._secrets = secrets_in(config.as_dict())
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model.name)
        served = await self._when_ready(Served, "/served")
        self._engines = Engines(self._head, await self._when_ready(FleetState, "/fleet"))
        self._renderer = ChatRenderer(tokenizer, end_ids=list(served.end_ids))
        self._vocab_size = served.vocab_size
        clients = [self._client(url) for url in self._engines.urls]
        # A call waits for engines for as long as the head does, and needs its own time after that.
        limit_s = AWAY_LIMIT_S + max(c.server.deadline_s for c in clients)
        pool = EndpointPool(clients, deadline_s=limit_s)
        pool.fleet = self._engines
        self._rollouts = RolloutEngine(
            source,
            pool,
            max_concurrent=max(self._slots, config.algorithm.group_size),
            time_limit_s=config.engine.time_limit_s,
            deadline_s=config.engine.deadline_s,
            retries=config.engine.retries,
            notify=self._link.note,
        )
        ticking = asyncio.create_task(self._tick())
        try:
            await self._work(pool)
        finally:
            ticking.cancel()
            for task in (*self._playing.values(), *self._tasks.values()):
                task.cancel()
            await asyncio.gather(ticking, *self._tasks.values(), return_exceptions=True)
            await pool.aclose()

    async def _when_ready(self, kind: type[T], path: str) -> T:
        self._beats.say("waiting for the head", "trainer")
        while True:
            with suppress(HeadLost):
                found = await self._head.ask(kind, path)
                if not isinstance(found, FleetState) or found.engines:
                    return found
            self._beats.advance()
            self._beats.hurry()
            await asyncio.sleep(_RETRY_S)

    def _client(self, url: str) -> OpenAIClient:
        config = with_engines(self._config, [url.removesuffix("/v1")])
        return server_client(config, url, self._renderer, self._vocab_size)

    async def _work(self, pool: EndpointPool) -> None:
        delivering = asyncio.create_task(self._deliver())
        try:
            while not self._beats.answer.get("drain") or self._tasks:
                if delivering.done():
                    delivering.result()
                await self._poll(pool)
        finally:
            delivering.cancel()

    async def _poll(self, pool: EndpointPool) -> None:
        free = self._slots - sum(self._costs.values())
        if self._beats.answer.get("drain"):
            free = 0
        # Not in every poll: the list may be long, and matters only if a message was lost.
        is_due = time.monotonic() >= self._renew_at
        poll = Poll(
            worker=self._name,
            life=self._life,
            slots=self._slots,
            free=max(0, free),
            have=tuple(self._tasks) if is_due else None,
            wait_s=_POLL_S,
        )
        self._ended.clear()
        try:
            work = await self._head.ask(Work, "/work", poll)
        except HeadLost:
            self._renew_at = 0.0
            self._beats.say(f"waiting for the head, {len(self._tasks)} in hand", "trainer")
            await asyncio.sleep(_RETRY_S)
            return
        if is_due:
            self._renew_at = time.monotonic() + _RENEW_S
        self._take(work, pool)
        if work.drop and not work.items:
            # The head answers at once while it lists items, such as an earlier head's, to drop.
            await asyncio.sleep(_RETRY_S)
        elif self._tasks and free <= len(work.items):
            with suppress(TimeoutError):
                async with asyncio.timeout(_RENEW_S):
                    await self._ended.wait()

    def _take(self, work: Work, pool: EndpointPool) -> None:
        """Begin new items, and cancel those that are not needed any more."""
        self._engines.take(work.fleet)
        self._follow(pool)
        dropped = set(work.drop)
        if work.head != self._head_life:
            # A new head: its engines have other weights, so unfinished items are dropped, and the
            # head offers them again. Finished results are sent, since they belong to the run.
            self._head_life = work.head
            dropped = set(self._playing)
        for item_id in dropped & self._playing.keys():
            self._playing[item_id].cancel()
        for item in work.items:
            old = self._tasks.get(item.item_id)
            self._costs[item.item_id] = len(item.requests)
            task = asyncio.create_task(self._finish(item, old), name=f"item-{item.item_id}")
            self._tasks[item.item_id] = task
        num = sum(self._costs.values())
        if num:
            self._beats.say(f"sampling {num} rollouts")
        else:
            self._beats.say("waiting for rollouts to play", "trainer")

    def _follow(self, pool: EndpointPool) -> None:
        """Make the pool use the head's engines, and no others."""
        urls = self._engines.urls
        if not urls:
            return
        known = {client.server.base_url: client for client in pool.clients}
        for url in urls:
            if url not in known:
                pool.add(self._client(url))
        for url, client in known.items():
            if url not in urls:
                pool.remove(client)  # its rollouts move to other engines
                self._engines.states.pop(client, None)

    async def _finish(self, item: Item, old: asyncio.Task[None] | None) -> None:
        """Play an item and send its results."""
        playing = asyncio.create_task(self._play(item))
        self._playing[item.item_id] = playing
        try:
            if old is not None:
                await asyncio.wait([old])
            await asyncio.wait([playing])
            if playing.cancelled():
                return
            finished = playing.result()
            del self._playing[item.item_id]
            self._finished.put_nowait(finished)
            await finished.is_taken
        except RolltreeError as error:
            # The head is not told: it requeues the item after a poll that does not list it, and
            # gives up after several attempts.
            print(f"{item.item_id}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            playing.cancel()
            if self._tasks.get(item.item_id) is asyncio.current_task():
                del self._tasks[item.item_id], self._costs[item.item_id]
            if self._playing.get(item.item_id) is playing:
                del self._playing[item.item_id]
            self._ended.set()

    async def _play(self, item: Item) -> _Finished:
        requests = list(map(request_from_bytes, item.requests))
        results = await self._rollouts.run_all(requests)
        checksum, data = await asyncio.to_thread(_encoded, item, results, self._secrets)
        num_tokens = sum(
            len(step["tokens"]["completion_ids"])
            for result in results
            for state in result.states
            for step in state.trajectory
            if step.get("tokens") is not None
        )
        self._num_rollouts += len(results)
        self._num_tokens += num_tokens
        self._done.append((time.monotonic(), num_tokens))
        await yield_fairly()
        taken = asyncio.get_running_loop().create_future()
        return _Finished(item.item_id, checksum, data, taken)

    async def _deliver(self) -> None:
        """Send results in batches, and send each again until a head has stored it."""
        waiting, sent_at = list[_Finished](), 0.0
        while True:
            if not waiting:
                waiting.append(await self._finished.get())
            # A single result is sent at once; if many come, a request carries several.
            await asyncio.sleep(max(0.0, sent_at + _GATHER_S - time.monotonic()))
            sent_at = time.monotonic()
            while not self._finished.empty():
                waiting.append(self._finished.get_nowait())
            sizes = itertools.accumulate(len(finished.data) for finished in waiting)
            num = max(1, sum(size <= _MAX_DELIVERY_BYTES for size in sizes))
            batch = waiting[:num]
            items = tuple((finished.checksum, finished.data) for finished in batch)
            try:
                receipt = await self._head.ask(Receipt, "/results", Delivery(items=items))
            except HeadLost:
                await asyncio.sleep(_RETRY_S)
                continue
            except TooLarge as error:
                # Only a single result is larger than a batch.
                receipt = Receipt(items=(("refused", f"{error}"),))
            del waiting[:num]
            for finished, (status, why) in zip(batch, receipt.items, strict=True):
                if status == "later":
                    waiting.append(finished)
                    continue
                if status == "refused":
                    print(f"{finished.item_id}: the head refused it: {why}", file=sys.stderr)
                if not finished.is_taken.done():
                    finished.is_taken.set_result(None)
            if len(waiting) >= num:
                await asyncio.sleep(_RETRY_S)

    async def _tick(self) -> None:
        while True:
            self._beats.advance()
            if self._costs and not self._engines.is_any_ready:
                self._beats.say("waiting for an engine with the run's weights", "engine")
            now = time.monotonic()
            while self._done and now - self._done[0][0] > _RATE_S:
                self._done.popleft()
            self._beats.metrics = {
                "rollouts": self._num_rollouts,
                "in_flight": sum(self._costs.values()),
                "tokens_per_s": round(sum(num for _, num in self._done) / _RATE_S, 1),
            }
            await asyncio.sleep(1.0)


def _encoded(
    item: Item, results: Sequence[RolloutResult], config_secrets: Sequence[str]
) -> tuple[int, bytes]:
    # Collected here, since the environment may have loaded keys that the head does not know.
    secrets = known_secrets((*config_secrets, *environment_secrets()))
    rows = tuple(result_to_rows(result, secrets) for result in results)
    done = WorkDone(item_id=item.item_id, asked=digest(item.requests), results=rows)
    data = done.to_bytes()
    return zlib.crc32(data), data


async def _run(link: Link, config: TrainConfig, cluster: ClusterSection) -> None:
    """Work for the driver's run until it ends.

    Raises:
        ConfigError: the settings, or the environment, cannot be used.
    """
    if not config.env.id:
        raise ConfigError("the config has no env.id, so a worker has nothing to play. Set it.")
    beats = Beats(link, "worker", None)
    beats.say("loading the environment")
    beats.start()
    source = load_environment(config.env.id, compat=config.env.compat, **config.env.args)
    with stop_on_sigterm():
        async with source, HeadClient(link, beats) as head:
            await Worker(link, config, beats, head).run(source)


if __name__ == "__main__":
    sys.exit(run_role(Link(), lambda *given: asyncio.run(_run(*given))))
