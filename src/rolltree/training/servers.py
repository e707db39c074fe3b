"""Servers that sample for a run: how they get weights, and what happens when one dies.

A server is asked only while it has the published weights, and its answer counts only if it still
has them afterwards. One that fails is waited for and asked for its weights' version before its next
request; a restarted one says "default" and is given the weights again. Calls wait meanwhile, so no
rollout is lost and none is sampled from other weights. When every server has been away for
`engine.away_limit_s`, the run ends.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from rolltree.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    PublishFailed,
    ServerError,
    TrainingError,
)
from rolltree.inference import WeightTransfer, publish_weights
from rolltree.inference.call import ModelCall
from rolltree.inference.openai_client import OpenAIClient, OpenAIMemory
from rolltree.inference.publish import RELOAD_METHOD, HasServer, served_version
from rolltree.inference.reachable import FIRST_ANSWER_TIMEOUT_S
from rolltree.inference.retry import RetryPolicy
from rolltree.rollouts.requests import current_episode
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.lora import plain_tensors
from rolltree.types import ModelResponse

T = TypeVar("T")
_WAITS = RetryPolicy(first_wait_s=0.5, max_wait_s=15.0)
_MAX_REFUSALS = 3
"""How often a healthy server may reject weights before it is an error."""
_ASK_S = 60.0
"""How long a server may take to report the version of its weights."""


class TrainedServer(OpenAIClient):
    """The client of one server of a run; `OpenAIClient` says what it takes.

    Attributes:
        is_suspect: a call failed, so the server may be gone, or another process in its place. Calls
            wait until that is clear.
        needs_weights: it did not take the published weights.
        epoch: how often it was found to have other weights. An answer from before says nothing.
    """

    # None outside a run, where the client is an `OpenAIClient` and nothing more.
    fleet: Servers | None = None
    is_suspect = needs_weights = False
    epoch = 0
    away_since_s: float | None = None  # time.monotonic()
    _check: asyncio.Task[str] | None = None

    async def respond(self, call: ModelCall, memory: OpenAIMemory) -> ModelResponse:
        """Make one call, which counts only if the published weights answered it.

        Raises:
            ConnectionFailed: the server is away.
            BadResponse: it answered with other weights; it gets the published ones.
            ModelError: as `OpenAIClient`.
        """
        if self.fleet is None:
            return await super().respond(call, memory)
        waited_s = await self.fleet.ready(self)
        # Noted before the request: an answer from before a restart does not count, although the
        # restarted server has the right label again by the time it is asked.
        epoch = self.epoch
        try:
            answer = await super().respond(call, memory)
            await self._confirm(epoch)
        except (ConnectionFailed, BadResponse):
            self.is_suspect = True
            raise
        # A 4xx is about the request and says nothing about the process.
        except ServerError as error:
            self.is_suspect = self.is_suspect or error.status >= 500
            raise
        return answer.annotated(wait_s=waited_s) if waited_s else answer

    async def check_health(self) -> None:
        """Return if the server answers, with the published weights.

        Raises:
            ModelError: it does not, or not yet.
        """
        await super().check_health()
        # The pool would send calls to a server that passes this check, and its weights are not
        # known yet.
        if self.fleet is not None and self.is_suspect:
            self.fleet.revive(self)
            raise ConnectionFailed(f"{self.server.root_url} has yet to get the run's weights.")

    async def is_up(self) -> bool:
        """Whether the server answers at all."""
        try:
            await super().check_health()
        except ModelError:
            return False
        return True

    async def _confirm(self, epoch: int) -> None:
        """Raise `BadResponse` unless the server has had the published weights all along."""
        assert self.fleet is not None
        # Asked after the answer: a process cannot get its label back by itself, so a label that is
        # right now was right while the tokens were sampled (design/0014).
        label = await self._label()
        if self.epoch != epoch or label not in self.fleet.labels:
            raise BadResponse(
                f"{self.server.root_url} answered with weights that it calls {label!r}, and "
                f"version {self.fleet.version} was published, so the answer is not used."
            )

    async def _label(self) -> str:
        """Return the version that the server says it has, asked after this was called.

        All who ask while a question is on its way share the next one.
        """
        # An answer that is under way may be older than the caller's tokens, so only the next
        # question counts. A server has at most one of these at a time (design/0014).
        running = self._check
        if running is not None and not running.done():
            await asyncio.wait([running])
        # The first one to wake asks; the others find its task.
        if self._check is running or self._check is None:
            self._check = asyncio.create_task(served_version(self.server, timeout_s=_ASK_S))
            self._check.add_done_callback(_retrieved)
        # Several calls wait for this task, and one of them may be cancelled.
        return await asyncio.shield(self._check)


class Servers(ABC):
    """The servers of a run as its `WeightTarget`.

    They have copies of the weights, so they go on while the optimizer writes, and weights are given
    again only when it does not.

    Args:
        clients: one per server. `TrainedServer`s are waited for; with others, every failure is an
            error.
        away_limit_s: how long all servers may be away.
    """

    def __init__(self, clients: Sequence[HasServer], *, away_limit_s: float = 1800.0) -> None:
        self._clients, self._limit_s = list(clients), away_limit_s
        self._watched = [client for client in clients if isinstance(client, TrainedServer)]
        for client in self._watched:
            client.fleet = self
        self.version = -1
        """The version that was published last; -1 before the first."""
        self.labels: frozenset[str] = frozenset()
        """The labels that servers may report: that version, and the one being published."""
        self.notify: Callable[[str], None] = lambda message: None
        """Gets what a person should know; the loop puts its own function here."""
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
            PublishFailed: a server answers, and does not take them.
        """
        await self._prepare(version)
        # A restarted process has lost the connection for transfers, which has to be made again
        # before anything is sent.
        restarts = map(self._note_restart, self._watched)
        await asyncio.gather(*restarts, return_exceptions=True)  # what fails here fails below
        # Servers switch one after another; until the last one has, either label is right.
        self.labels |= {str(version)}
        waiting: list[Any] = list(self._clients)
        for number in range(_MAX_REFUSALS):
            failed: tuple[Any, ...] = ()
            try:
                await self._send(waiting, version)
            except PublishFailed as error:
                failed = error.clients
                # Other clients cannot be revived, so their failure is final.
                if number == _MAX_REFUSALS - 1 or not set(failed) <= set(self._watched):
                    raise
            for client in set(waiting) & set(self._watched):
                client.needs_weights = client in failed
            # A server that is away is not waited for: a publish is part of the step that SIGTERM
            # must not interrupt (design/0014). `revive` gives it the weights.
            waiting = [client for client in failed if not await self._is_away(client)]
            if not waiting:
                break
            await asyncio.sleep(_WAITS.wait_s(number, None))
        self.version, self.labels = version, frozenset([str(version)])
        await self._tidy()

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
        if server not in away:
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
                f"{server.server.root_url} is away, or has not got the run's weights yet. The call "
                "is made on another server."
            )
        return monotonic() - began

    def revive(self, server: TrainedServer) -> asyncio.Task[None]:
        """Return the task that waits for a server and gives it the weights it should have."""
        task = self._revivals.get(server)
        if task is None or task.done():
            task = asyncio.create_task(self._revive(server), name="revive-server")
            self._revivals[server] = task
        return task

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
        """Stop waiting for servers."""
        for task in self._revivals.values():
            task.cancel()
        await asyncio.gather(*self._revivals.values(), return_exceptions=True)

    @abstractmethod
    async def _send(self, clients: Sequence[HasServer], version: int) -> None:
        """Give these servers the weights as they are now; raises `PublishFailed`."""

    async def _prepare(self, version: int) -> None:  # noqa: B027
        """Do what comes before the first `_send` of a version."""

    async def _tidy(self) -> None:  # noqa: B027
        """Do what comes after it."""

    def _forget(self, server: TrainedServer) -> None:  # noqa: B027
        """Take note that another process is in a server's place."""

    async def _revive(self, server: TrainedServer) -> None:
        num_refused = number = 0
        while True:
            if await server.is_up():
                try:
                    await self._renew(server)
                    self._note_back(server)
                    return
                except ModelError as error:
                    num_refused += 1
                    if num_refused == _MAX_REFUSALS:
                        self._lose(error)
                        return
                except Exception as error:  # noqa: BLE001  `or_lost` raises it
                    self._lose(error)
                    return
            else:
                # Refusals count in a row. The process that comes back may be another one.
                num_refused = 0
                self._note_away(server)
                if self._away_s() >= self._patience_s:
                    self._lose(
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
        """Give a server that answers the published weights if it has others."""
        # The optimizer writes under the same lock, so a half-written model is never sent.
        async with self._lock:
            await self._note_restart(server)
            if server.needs_weights:
                await self._send([server], self.version)
                server.needs_weights = False

    async def _note_restart(self, server: TrainedServer) -> None:
        """Ask a server for its version, and take note of one that it should not have."""
        # Nothing was published yet, so no label can be wrong.
        if not self.labels:
            return
        try:
            label = await served_version(server.server, timeout_s=_ASK_S)
        except ModelError:
            server.is_suspect = True
            raise
        if label in self.labels:
            return
        # Answers that are under way may come from these weights: their callers compare the epoch.
        server.epoch += 1
        server.needs_weights = True
        self._forget(server)
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
        if since_s is not None:
            self.notify(f"{server.server.root_url} is back after {monotonic() - since_s:.0f} s.")

    def _away_s(self) -> float:
        """Return for how long no server has answered."""
        since_s = [each.away_since_s for each in self._watched]
        known = [each for each in since_s if each is not None]
        # The time counts from when the last server went away.
        return monotonic() - max(known) if len(known) == len(since_s) else 0.0

    def _names(self) -> str:
        return ", ".join(each.server.root_url for each in self._watched)

    def _lose(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self._lost.set()


class ServerTarget(Servers):
    """Publishes to servers by disk: writes a version, has every server reload it.

    Args:
        model: the module that is trained.
        clients: one per server.
        folder: where versions are written, readable for the servers under the same path.
        method: the worker's method that reloads, see `publish_weights`.
        away_limit_s: see `Servers`.
    """

    def __init__(
        self,
        model: Any,
        clients: Sequence[HasServer],
        folder: Path,
        *,
        method: str = RELOAD_METHOD,
        away_limit_s: float = 1800.0,
    ) -> None:
        super().__init__(clients, away_limit_s=away_limit_s)
        self._model, self._method = model, method
        self._folder = folder

    async def _prepare(self, version: int) -> None:
        await asyncio.to_thread(export_model, self._model, None, self._path(version))

    async def _send(self, clients: Sequence[HasServer], version: int) -> None:
        await publish_weights(clients, self._path(version), version, method=self._method)

    async def _tidy(self) -> None:
        # The current version stays, for servers that come back.
        for old in self._folder.glob("version-*"):
            if old != self._path(self.version):
                await asyncio.to_thread(shutil.rmtree, old)

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version:06d}"


class TransferTarget(Servers):
    """Publishes to servers by sending them the weights.

    Args:
        model: the module that is trained, or a plain copy of it (adapters, ranks).
        clients: one per server.
        address: this machine's, as the servers reach it.
        away_limit_s: see `Servers`.

    Raises:
        ConfigError: the model's tensors have other names than its checkpoint's.
    """

    def __init__(
        self,
        model: Any,
        clients: Sequence[HasServer],
        *,
        address: str,
        away_limit_s: float = 1800.0,
    ) -> None:
        check_served_names(model, "engine.publish = 'disk'")
        super().__init__(clients, away_limit_s=away_limit_s)
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        self._model = model
        self._transfer = WeightTransfer(
            clients,
            backend="nccl" if on_gpu else "gloo",
            device=device if on_gpu else None,
            address=address,
        )

    async def _send(self, clients: Sequence[HasServer], version: int) -> None:
        await self._transfer.publish(plain_tensors(self._model), version, clients)

    def _forget(self, server: TrainedServer) -> None:
        self._transfer.forget(server)

    async def aclose(self) -> None:
        """Close the connections to the servers."""
        await super().aclose()
        await self._transfer.aclose()


def check_served_names(model: Any, way_out: str) -> None:
    """Refuse a model whose tensors vLLM does not know by their names.

    Raises:
        ConfigError: naming the way out.
    """
    # transformers notes here how it renamed or fused tensors on reading.
    if getattr(model, "_weight_conversions", None):
        raise ConfigError(
            f"the tensors of {type(model).__name__} were renamed or fused when its checkpoint "
            f"was read, so vLLM would not know what it is given. Use {way_out}, which writes them "
            "as they were."
        )


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Look at a task's error, which all who asked for it may have stopped waiting for."""
    if not task.cancelled():
        task.exception()
