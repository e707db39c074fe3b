"""Servers that sample for a run: how they get weights, and what happens when one dies.

A server is asked only while it has the published weights, and its answer counts only if it still
has them afterwards. One that fails is waited for and asked for its weights' version before its next
request; a restarted one says "default" and is given the weights again. Calls wait meanwhile, so no
rollout is lost and none is sampled from other weights. When every server has been away for
`engine.away_limit_s`, the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

from rolltree.errors import (
    ConfigError,
    ConnectionFailed,
    ModelError,
    PublishFailed,
    TrainingError,
)
from rolltree.inference.pool import EndpointPool
from rolltree.inference.reachable import FIRST_ANSWER_TIMEOUT_S
from rolltree.inference.retry import RetryPolicy
from rolltree.inference.weights.publish import RELOAD_METHOD, HasServer, served_version
from rolltree.inference.weights.ways import AutoWay, DiskWay, SharedWay, TransferWay, Way
from rolltree.rollouts.requests import current_episode
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.lora import plain_tensors
from rolltree.training.server_client import ASK_S, PROBED, TrainedServer

T = TypeVar("T")
_WAITS = RetryPolicy(first_wait_s=0.5, max_wait_s=15.0)
_MAX_REFUSALS = 3
"""How often a healthy server may reject weights before it is an error."""
PublishName = Literal["auto", "shared", "transfer", "disk"]


class Servers:
    """The servers of a run as its `WeightTarget`.

    They have copies of the weights, so they go on while the optimizer writes, and weights are given
    again only when it does not.

    Args:
        clients: one per server. `TrainedServer`s are waited for; with others, every failure is an
            error.
        way: how they get weights.
        away_limit_s: how long all servers may be away.
        pool: the client that sends calls to them, if it is to follow `add` and `remove`.
    """

    def __init__(
        self,
        clients: Sequence[HasServer],
        way: Way,
        *,
        away_limit_s: float = 1800.0,
        pool: EndpointPool | None = None,
    ) -> None:
        self._clients, self._limit_s = list(clients), away_limit_s
        self._way, self._pool = way, pool
        if isinstance(way, AutoWay):
            way.notify = lambda message: self.notify(message)
        self._watched = [client for client in clients if isinstance(client, TrainedServer)]
        for client in self._watched:
            client.fleet = self
        self._leaving: TrainedServer | None = None
        self.version = -1
        """The version that was published last; -1 before the first."""
        self.labels: frozenset[str] = frozenset()
        """The labels that servers may report: that version, and the one being published."""
        self.notify: Callable[[str], None] = lambda message: None
        """Gets what a person should know; the loop puts its own function here."""
        self.probe: Callable[[Any, int], Awaitable[None]] | None = None
        """Checks what one server samples with a version; the loop puts its publisher's here."""
        self._lock = asyncio.Lock()
        self._revivals: dict[TrainedServer, asyncio.Task[None]] = {}
        self._has_answered = False
        self._lost = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Let no weights be given again: the trainer may write them, and publish."""
        async with self._lock:
            yield

    async def publish(self, version: int) -> None:
        """Give every server the weights; call it inside `paused()`.

        A server that does not answer gets them before its next request.

        Raises:
            PublishFailed: servers answer, and none of them takes the weights.
        """
        self._way.outdate()
        # A restarted process has lost the connection for transfers, which has to be made again
        # before anything is sent.
        restarts = map(self._note_restart, self._watched)
        await asyncio.gather(*restarts, return_exceptions=True)  # what fails here fails below
        # Servers switch one after another; until the last one has, either label is right.
        self.labels |= {str(version)}
        waiting: list[Any] = list(self._clients)
        for number in range(_MAX_REFUSALS):
            failed: list[Any] = []
            try:
                await self._way.send(waiting, version)
            except PublishFailed as error:
                # One that was taken out meanwhile is missed by nobody.
                failed = [client for client in error.clients if client in self._clients]
                # Other clients cannot be revived, so their failure is final.
                if not set(failed) <= set(self._watched):
                    raise
                if number == _MAX_REFUSALS - 1:
                    for client in failed:
                        self._give_up(client, error)
                    if self._failure is not None:
                        raise
                    break
            for client in set(waiting) & set(self._watched):
                client.needs_weights = client in failed
            # A server that is away is not waited for: a publish is part of the step that SIGTERM
            # must not interrupt (design/0014). `revive` gives it the weights.
            waiting = [client for client in failed if not await self._is_away(client)]
            if not waiting:
                break
            await asyncio.sleep(_WAITS.wait_s(number, None))
        self.version, self.labels = version, frozenset([str(version)])

    async def start(self) -> None:
        """Wait until a server answers; a few seconds, since none of them may ever have been there.

        `or_lost` raises where none does.
        """
        # As if all had failed: each has to answer once before it gets a call.
        for server in self._watched:
            server.is_suspect = True
        if self._watched:
            revivals = [self.revive(server) for server in self._watched]
            await asyncio.wait(revivals, return_when=asyncio.FIRST_COMPLETED)

    async def ready(self, server: TrainedServer) -> float:
        """Wait until a server that failed is there, with the published weights; return how long.

        Raises:
            ConnectionFailed: another server is there instead, or none was for too long.
        """
        began = monotonic()
        # Every call helps to bring all servers back, since its pool may send the next one to any.
        away = [each for each in self._watched if each.is_suspect or each.needs_weights]
        if server not in away and server in self._watched:
            return 0.0
        revivals = [self.revive(each) for each in away]
        # Only then is there nobody else to ask. The deadline of the rollout stands still
        # meanwhile: a server that is away is not the model's doing (design/0014).
        if len(away) == len(self._watched):
            episode = current_episode()
            with nullcontext() if episode is None else episode.clock.postponed():
                await asyncio.wait(revivals, return_when=asyncio.FIRST_COMPLETED)
        if server.is_suspect or server.needs_weights:
            raise ConnectionFailed(
                f"{server.server.root_url} is away, was taken out, or has yet to get the run's "
                "weights. The call is made on another server."
            )
        return monotonic() - began

    def revive(self, server: TrainedServer) -> asyncio.Task[None]:
        """Return the task that waits for a server and gives it the weights it should have.

        Raises:
            ConnectionFailed: it was removed.
        """
        if server not in self._watched:
            raise ConnectionFailed(f"{server.server.root_url} was taken out of this run.")
        task = self._revivals.get(server)
        if task is None or task.done():
            task = asyncio.create_task(self._revive(server), name="revive-server")
            self._revivals[server] = task
        return task

    def add(self, server: TrainedServer) -> asyncio.Task[None]:
        """Take in a server while the run goes on; return the task that waits until it is ready.

        It gets the published weights, and is probed, before its first request.
        """
        server.fleet, server.is_new, server.is_suspect = self, True, True
        # Whatever it says: a label of an earlier life of the run may be right by chance.
        server.needs_weights = self.version >= 0
        self._clients.append(server)
        self._watched.append(server)
        if self._pool is not None:
            self._pool.add(server)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self.remove(leaving)
        return self.revive(server)

    def remove(self, server: TrainedServer) -> None:
        """Do without a server from now on; its calls move on. Its client stays open.

        The last one stays until another is added, and is waited for as any other.
        """
        if server not in self._watched:
            return
        if len(self._watched) == 1:
            self._leaving = server
            return
        self._clients.remove(server)
        self._watched.remove(server)
        server.is_suspect = True  # for calls that have chosen it already
        if self._pool is not None:
            self._pool.remove(server)
        task = self._revivals.pop(server, None)
        # `_revive` itself may do without its server.
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._way.forget(server)

    async def or_lost(self, work: Awaitable[T]) -> T:
        """Return what `work` returns.

        Raises:
            TrainingError: no server answered for `engine.away_limit_s`; `work` was cancelled.
        """
        task = asyncio.ensure_future(work)
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([task, lost], return_when=asyncio.FIRST_COMPLETED)
            # First: `work` may have ended with an error that only follows from this one.
            if self._failure is not None:
                raise self._failure
            return task.result()
        finally:
            for each in (task, lost):
                each.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)

    def announce_kept_weights(self) -> None:
        """Tell the user at the end of a run that the servers keep the trained weights."""
        # Version 0 is the model as it was before training.
        if self.version > 0:
            model = getattr(self._clients[0], "model", "the model")
            self.notify(
                f"{', '.join(each.server.root_url for each in self._clients)} go on with the "
                f"weights of version {self.version} under the name {model!r}: who asks for that "
                "model now measures the trained one. Start the servers again for the model that "
                "they began with."
            )

    async def aclose(self) -> None:
        """Stop waiting for servers, and close what carries weights to them."""
        for task in self._revivals.values():
            task.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)
        await self._way.aclose()

    async def _revive(self, server: TrainedServer) -> None:
        num_refused = number = 0
        while True:
            if await server.is_up():
                try:
                    await self._renew(server)
                    self._note_back(server)
                    return
                # A probe that fails is a TrainingError.
                except (ModelError, TrainingError) as error:
                    num_refused += 1
                    if num_refused == _MAX_REFUSALS:
                        self._give_up(server, error)
                        return
                except Exception as error:  # noqa: BLE001  `or_lost` raises it
                    self.lose(error)
                    return
            else:
                # Refusals count in a row. The process that comes back may be another one.
                num_refused = 0
                self._note_away(server)
                if self._away_s() >= self._patience_s:
                    self.lose(
                        TrainingError(
                            f"no server has answered for {self._patience_s:g} s "
                            f"({self._limit()}): {self._names()}. Nothing that was done is lost. "
                            "Start the servers, then the same command: it continues here."
                        )
                    )
                    return
            wait_s = _WAITS.wait_s(number, None)
            # No longer than until the limit, so that the run ends when its notice said it would.
            await asyncio.sleep(min(wait_s, max(self._patience_s - self._away_s(), 0.01)))
            number += 1

    async def _renew(self, server: TrainedServer) -> None:
        """Give a server that answers the published weights if it has others, and probe it."""
        # The optimizer writes under the same lock, so a half-written model is never sent.
        async with self._lock:
            await self._note_restart(server)
            if server.needs_weights:
                await self._way.send([server], self.version)
                server.needs_weights = False
        # Without the lock, since a server that hangs must not keep the trainer from publishing.
        while self.probe is not None and self.version >= 0:
            version = self.version
            token = PROBED.set(server)
            try:
                await self.probe(server, version)
                return
            except TrainingError:
                # It is as good as the others if it has been given the next weights meanwhile.
                if self.version == version:
                    server.needs_weights = True
                    raise
            finally:
                PROBED.reset(token)

    def _give_up(self, server: TrainedServer, error: Exception) -> None:
        """Do without a server that answers and cannot be used; end the run if it was the last."""
        others = [each for each in self._watched if each is not server]
        if all(each.is_suspect or each.needs_weights for each in others):
            self.lose(error)
            return
        self.remove(server)
        self.notify(
            f"{server.server.root_url} is not used any more, since it answers and could not be "
            f"given the weights of version {self.version}: {error} The run goes on with "
            f"{self._names()}."
        )

    async def _note_restart(self, server: TrainedServer) -> None:
        """Ask a server for its version, and take note of one that it should not have."""
        # Nothing was published yet, so no label can be wrong.
        if not self.labels:
            return
        try:
            label = await served_version(server.server, timeout_s=ASK_S)
        except ModelError:
            server.is_suspect = True
            raise
        if label in self.labels:
            return
        # Answers that are under way may come from these weights: their callers compare the epoch.
        server.epoch += 1
        server.needs_weights = True
        self._way.forget(server)
        if server.is_new:
            return
        self.notify(
            f"{server.server.root_url} says that its weights are {label!r}, and version "
            f"{self.version} was published: it was restarted, or another program publishes to it. "
            "It gets the run's weights before another request."
        )

    async def _is_away(self, server: TrainedServer) -> bool:
        """Return whether a server that did not take weights does not answer at all."""
        if await server.is_up():
            return False
        server.is_suspect = True
        self._note_away(server)
        return True

    def _note_away(self, server: TrainedServer) -> None:
        if server.away_since_s is not None:
            return
        server.away_since_s = monotonic()
        rest = "Other servers are asked instead."
        if all(each.away_since_s is not None for each in self._watched):
            rest = f"The run waits, and ends after {self._patience_s:g} s ({self._limit()})."
        self.notify(f"{server.server.root_url} does not answer. {rest}")

    @property
    def _patience_s(self) -> float:
        """How long all servers may be away: only briefly until one has answered."""
        return self._limit_s if self._has_answered else min(self._limit_s, FIRST_ANSWER_TIMEOUT_S)

    def _limit(self) -> str:
        """Return what `_patience_s` comes from."""
        is_start = self._patience_s < self._limit_s
        return "none was there at the start" if is_start else "engine.away_limit_s"

    def _note_back(self, server: TrainedServer) -> None:
        server.is_suspect, self._has_answered = False, True
        since_s, server.away_since_s = server.away_since_s, None
        if server.is_new:
            server.is_new = False
            self.notify(f"{server.server.root_url} takes part, with version {self.version}.")
        elif since_s is not None:
            self.notify(f"{server.server.root_url} is back after {monotonic() - since_s:.0f} s.")

    def _away_s(self) -> float:
        """Return for how long no server has answered."""
        since_s = [each.away_since_s for each in self._watched]
        known = [each for each in since_s if each is not None]
        # The time counts from when the last server went away.
        return monotonic() - max(known) if len(known) == len(since_s) else 0.0

    def _names(self) -> str:
        return ", ".join(each.server.root_url for each in self._watched)

    def lose(self, failure: Exception) -> None:
        """End the run with this error: `or_lost` raises the first one."""
        self._failure = self._failure or failure
        self._lost.set()


def weight_way(
    model: Any,
    folder: Path,
    *,
    publish: PublishName = "auto",
    method: str = RELOAD_METHOD,
    address: str | None = None,
) -> Way:
    """Return the way in which servers get a model's weights; `engine.publish` names it.

    Args:
        model: the module that is trained, or a plain copy of it (adapters, ranks).
        folder: where a disk's versions are written.
        publish: `auto` lets each server take the first that it can of shared memory, transfer and
            disk.
        method: the worker's method that reloads from a disk, see `publish_weights`.
        address: this machine's, as servers reach it; None finds it.

    Raises:
        ConfigError: the model's tensors have other names than its checkpoint's, and not the disk
            was chosen.
    """

    def tensors() -> Iterable[tuple[str, Any]]:
        return plain_tensors(model)

    def disk() -> Way:
        return DiskWay(lambda path: export_model(model, None, path), folder, method=method)

    def transfer() -> Way:
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        return TransferWay(
            tensors,
            backend="nccl" if on_gpu else "gloo",
            device=device if on_gpu else None,
            address=address,
        )

    def auto() -> Way:
        # Only a disk has them under the names of the checkpoint.
        if is_renamed(model):
            return AutoWay([disk()], because="its tensors have other names than its checkpoint")
        return AutoWay([SharedWay(tensors), transfer(), disk()])

    if publish in ("shared", "transfer"):
        check_served_names(model, "engine.publish = 'disk'")
    ways: dict[PublishName, Callable[[], Way]] = {
        "auto": auto,
        "shared": lambda: SharedWay(tensors),
        "transfer": transfer,
        "disk": disk,
    }
    return ways[publish]()


def is_renamed(model: Any) -> bool:
    """Return whether the tensors have other names than in the checkpoint they were read from."""
    # transformers notes here how it renamed or fused tensors on reading.
    return bool(getattr(model, "_weight_conversions", None))


def check_served_names(model: Any, way_out: str) -> None:
    """Refuse a model whose tensors vLLM does not know by their names.

    Raises:
        ConfigError: naming the way out.
    """
    if is_renamed(model):
        raise ConfigError(
            f"the tensors of {type(model).__name__} were renamed or fused when its checkpoint "
            f"was read, so vLLM would not know what it is given. Use {way_out}, which writes them "
            "as they were."
        )
