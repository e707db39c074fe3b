"""Servers that sample for a run: how they get weights, and what happens when one dies.

A server gets requests only while it has the published weights, and its answer counts only if it
still has them afterwards. If one fails, the run waits for it and asks for the version of its
weights before the next request; a restarted server reports "default" and gets the weights again.
Calls wait meanwhile, so no rollout is lost and none is sampled from other weights. When every
server has been away for `plan.AWAY_LIMIT_S`, the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

from rolltree.inference import ChatRenderer
from rolltree.inference.models import resolve_model
from rolltree.inference.openai_client import OpenAIClient
from rolltree.inference.reachable import FIRST_ANSWER_TIMEOUT_S, served_version
from rolltree.inference.retry import WHILE_AWAY
from rolltree.rollouts.requests import current_episode
from rolltree.scale.fleet import LABEL_TIMEOUT_S, Fleet, ServerState, server_client
from rolltree.scale.pool import EndpointPool
from rolltree.scale.weights.publish import HasServer
from rolltree.scale.weights.ways import AutoWay, DiskWay, SharedWay, TransferWay, Way
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.config import TrainConfig
from rolltree.training.models.plain_weights import plain_tensors
from rolltree.training.parts import engine_options
from rolltree.training.plan import AWAY_LIMIT_S
from rolltree.training.publishing import WeightTarget
from rolltree.values.errors import (
    ConfigError,
    ConnectionFailed,
    ModelError,
    PublishFailed,
    TrainingError,
)

T = TypeVar("T")
_MAX_REFUSALS = 3
"""How often a healthy server may reject weights before it is an error."""
PublishName = Literal["auto", "shared", "transfer", "disk"]


class Servers(Fleet):
    """The servers of a run as its `WeightTarget`.

    They have copies of the weights, so they keep sampling while the optimizer writes; weights are
    sent again only when it does not.

    Args:
        clients: one per server.
        way: how they get weights.
        away_limit_s: how long all servers may be away.
        pool: the client that sends calls to them; it follows `add` and `remove`, and the run waits
            for servers that fail. Without one any failure is final.

    `version` is the last published one, -1 before the first; `labels` has it, and the one that is
    being published.
    """

    def __init__(
        self,
        clients: Sequence[HasServer],
        way: Way,
        *,
        away_limit_s: float = AWAY_LIMIT_S,
        pool: EndpointPool | None = None,
    ) -> None:
        super().__init__()
        self._clients, self._limit_s = list(clients), away_limit_s
        self._way, self._pool = way, pool
        if isinstance(way, AutoWay):
            way.notify = lambda message: self.notify(message)
        if pool is not None:
            self.states = {client: ServerState() for client in pool.clients}
            pool.fleet = self
        self._leaving: OpenAIClient | None = None
        self.notify: Callable[[str], None] = lambda message: None
        """Receives notices for the user; the loop sets its own function."""
        self.probe: Callable[[Any, int], Awaitable[None]] | None = None
        """Probes one server with a version; the loop sets its publisher's function."""
        self._lock = asyncio.Lock()
        self.are_restarted = False
        """Whether something starts servers again, so that one that has not answered yet will."""
        self._has_answered = False
        self._lost = asyncio.Event()
        self._failure: Exception | None = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold back resending of weights, so that the trainer may write and publish them."""
        async with self._lock:
            yield

    async def publish(self, version: int) -> None:
        """Send every server the weights; call it inside `paused()`.

        A server that does not answer gets them before its next request.

        Raises:
            PublishFailed: servers answer, but none of them accepts the weights.
        """
        self._way.outdate()
        # A restarted process has lost the connection for transfers, which has to be made again
        # before anything is sent.
        restarts = map(self._note_restart, self.states)
        await asyncio.gather(*restarts, return_exceptions=True)  # what fails here fails below
        # Servers switch one after another; until the last one has, either label is right.
        self.labels = {*self.labels, str(version)}
        waiting: list[Any] = list(self._clients)
        for number in range(_MAX_REFUSALS):
            failed: list[Any] = []
            try:
                await self._way.send(waiting, version)
            except PublishFailed as error:
                # Servers that were removed meanwhile do not matter.
                failed = [client for client in error.clients if client in self._clients]
                # Other clients cannot be revived, so their failure is final.
                if not set(failed) <= self.states.keys():
                    raise
                if number == _MAX_REFUSALS - 1:
                    for client in failed:
                        self._give_up(client, error)
                    if self._failure is not None:
                        raise
                    break
            for client in set(waiting) & self.states.keys():
                self.states[client].needs_weights = client in failed
            # A server that is away is not waited for: a publish is part of the step that SIGTERM
            # must not interrupt (design/0014). `revive` gives it the weights.
            waiting = [client for client in failed if not await self._is_away(client)]
            if not waiting:
                break
            await asyncio.sleep(WHILE_AWAY.wait_s(number, None))
        self.version, self.labels = version, {str(version)}

    async def begin(
        self, notify: Callable[[str], None], probe: Callable[[Any, int], Awaitable[None]]
    ) -> None:
        """Wait until a server answers; `probe` checks one of them with a version.

        Raises:
            TrainingError: none has answered within some seconds: perhaps none was ever started.
        """
        self.notify, self.probe = notify, probe
        await self.guard(self.start())

    async def start(self) -> None:
        """Wait until a server answers, for a few seconds only."""
        # As if all had failed: each has to answer once before it gets a call.
        for state in self.states.values():
            state.is_suspect = True
        if self.states:
            await asyncio.wait(self.revive_all(), return_when=asyncio.FIRST_COMPLETED)

    async def ready(self, client: OpenAIClient) -> float:
        """Wait until a failed server is back with the published weights; return the seconds.

        Raises:
            ConnectionFailed: another server can answer instead, or none did for too long.
        """
        began, state = monotonic(), self.states.get(client)
        if state is not None and state.is_ready:
            return 0.0
        # Every call helps to bring all servers back, since its pool may send the next one to any.
        revivals = self.revive_all()
        # Wait only if no other server can answer. The rollout's deadline is suspended meanwhile:
        # that a server is away is not the model's fault (design/0014).
        if len(revivals) == len(self.states):
            episode = current_episode()
            with nullcontext() if episode is None else episode.clock.postponed():
                await asyncio.wait(revivals, return_when=asyncio.FIRST_COMPLETED)
        state = self.states.get(client)  # it may have been removed
        if state is None or not state.is_ready:
            raise ConnectionFailed(
                f"{client.server.root_url} is away, was removed, or has yet to get the run's "
                "weights. The call is made on another server."
            )
        return monotonic() - began

    def check(self, client: OpenAIClient) -> None:
        """Check that a healthy server has the published weights; if not, it gets them.

        Raises:
            ConnectionFailed: it does not have them yet.
        """
        if self.states[client].is_suspect:
            self.revive(client)
            raise ConnectionFailed(f"{client.server.root_url} has yet to get the run's weights.")

    def is_away(self, client: Any) -> bool:
        """Whether a server of the pool failed, or was removed from it."""
        state = self.states.get(client)
        return bool(self.states) and (state is None or state.is_suspect)

    async def counted(self, client: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer that `ask` gets, as `Fleet.counted` does for servers of a pool."""
        return await (super().counted(client, ask) if self.states else ask())

    def revive(self, client: OpenAIClient) -> asyncio.Task[None]:
        """Return the task that waits for a server and gives it the weights it should have.

        Raises:
            ConnectionFailed: it was removed.
        """
        state = self.states.get(client)
        if state is None:
            raise ConnectionFailed(f"{client.server.root_url} was removed from this run.")
        if state.revival is None or state.revival.done():
            state.revival = asyncio.create_task(self._revive(client), name="revive-server")
        return state.revival

    def revive_all(self) -> list[asyncio.Task[None]]:
        """Return the tasks that bring back the servers that are not ready."""
        return [self.revive(client) for client, state in self.states.items() if not state.is_ready]

    def add(self, client: OpenAIClient) -> asyncio.Task[None]:
        """Add a server during the run; return the task that waits until it is ready.

        It gets the published weights, and is probed, before its first request.
        """
        assert self._pool is not None
        # Whatever it reports: a label from before the run was restarted may match by chance.
        self.states[client] = ServerState(
            is_new=True, is_suspect=True, needs_weights=self.version >= 0
        )
        self._clients.append(client)
        self._pool.add(client)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self.remove(leaving)
        return self.revive(client)

    def remove(self, client: OpenAIClient) -> None:
        """Stop using a server; its calls move to others. Its client stays open.

        The last server stays until another is added; if it fails, the run waits for it.
        """
        if client not in self.states:
            return
        assert self._pool is not None
        if len(self.states) == 1:
            self._leaving = client
            return
        self._clients.remove(client)
        task = self.states.pop(client).revival
        self._pool.remove(client)
        # `_revive` itself may remove its server.
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._way.forget(client)

    async def guard(self, work: Awaitable[T]) -> T:
        """Return what `work` returns.

        Raises:
            TrainingError: no server answered for the limit; `work` was cancelled.
        """
        task = asyncio.ensure_future(work)
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([task, lost], return_when=asyncio.FIRST_COMPLETED)
            # Checked first: an error of `work` may only be a consequence of this one.
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
                f"{', '.join(each.server.root_url for each in self._clients)} keep the "
                f"weights of version {self.version} under the name {model!r}, so requests for that "
                "model now get the trained one. Restart the servers to get the original model "
                "back."
            )

    async def aclose(self) -> None:
        """Stop waiting for servers, and close the connections that carry weights."""
        revivals = [state.revival for state in self.states.values() if state.revival is not None]
        for task in revivals:
            task.cancel()
        await asyncio.gather(*revivals, return_exceptions=True)
        await self._way.aclose()

    async def _revive(self, client: OpenAIClient) -> None:
        num_refused = number = 0
        while True:
            if await _is_up(client):
                try:
                    await self._renew(client)
                    self._note_back(client)
                    return
                # A probe that fails is a TrainingError.
                except (ModelError, TrainingError) as error:
                    num_refused += 1
                    if num_refused == _MAX_REFUSALS:
                        self._give_up(client, error)
                        return
                except Exception as error:  # noqa: BLE001  `guard` raises it
                    self.lose(error)
                    return
            else:
                # Only refusals in a row count: the process that comes back may be a new one.
                num_refused = 0
                self._note_away(client)
                if self._away_s() >= self._patience_s:
                    self.lose(
                        TrainingError(
                            f"no server has answered for {self._patience()}: {self._urls()}. "
                            "Nothing is lost: start the servers, then run the same command, which "
                            "continues from here."
                        )
                    )
                    return
            wait_s = WHILE_AWAY.wait_s(number, None)
            # No longer than the limit, so that the run ends when its notice said it would.
            await asyncio.sleep(min(wait_s, max(self._patience_s - self._away_s(), 0.01)))
            number += 1

    async def _renew(self, client: OpenAIClient) -> None:
        """Send a server the published weights unless it has them, and probe it."""
        # The optimizer writes under the same lock, so a half-written model is never sent.
        async with self._lock:
            await self._note_restart(client)
            state = self.states[client]
            if state.needs_weights:
                await self._way.send([client], self.version)
                state.needs_weights = False
        # Without the lock, since a server that hangs must not keep the trainer from publishing.
        while self.probe is not None and self.version >= 0:
            version = self.version
            try:
                await self.probe(client, version)
                return
            except TrainingError:
                # If newer weights were published meanwhile, those are probed next.
                if self.version == version:
                    state.needs_weights = True
                    raise

    def _give_up(self, client: OpenAIClient, error: Exception) -> None:
        """Remove a server that answers but is unusable; end the run if no other is usable."""
        others = [state for each, state in self.states.items() if each is not client]
        if not any(state.is_ready for state in others):
            self.lose(error)
            return
        self.remove(client)
        self.notify(
            f"{client.server.root_url} is no longer used: it answers, but could not be given "
            f"the weights of version {self.version}: {error} The run goes on with "
            f"{self._urls()}."
        )

    async def _note_restart(self, client: OpenAIClient) -> None:
        """Ask a server for its version, and note it if it is wrong."""
        # Nothing was published yet, so no label can be wrong.
        if not self.labels:
            return
        state = self.states[client]
        try:
            label = await served_version(client.server, timeout_s=LABEL_TIMEOUT_S)
        except ModelError:
            state.is_suspect = True
            raise
        if label in self.labels:
            return
        # Answers in flight may come from these weights: their callers compare the epoch.
        state.epoch += 1
        state.needs_weights = True
        self._way.forget(client)
        if state.is_new:
            return
        self.notify(
            f"{client.server.root_url} says that its weights are {label!r}, but version "
            f"{self.version} was published: it was restarted, or another program publishes to it. "
            "It gets the run's weights before its next request."
        )

    async def _is_away(self, client: OpenAIClient) -> bool:
        """Return whether a server that did not take weights is unreachable, and note it if so."""
        if await _is_up(client):
            return False
        if client in self.states:
            self.states[client].is_suspect = True
            self._note_away(client)
        return True

    def _note_away(self, client: OpenAIClient) -> None:
        state = self.states[client]
        if state.away_since_s is not None:
            return
        state.away_since_s = monotonic()
        rest = "Its calls go to other servers."
        if all(each.away_since_s is not None for each in self.states.values()):
            rest = f"The run waits, and ends after {self._patience()}."
        self.notify(f"{client.server.root_url} does not answer. {rest}")

    @property
    def _patience_s(self) -> float:
        """How long all servers may be away: only briefly if perhaps none was ever started."""
        if self._has_answered or self.are_restarted:
            return self._limit_s
        return min(self._limit_s, FIRST_ANSWER_TIMEOUT_S)

    def _patience(self) -> str:
        is_start = self._patience_s < self._limit_s
        return f"{self._patience_s:g} s{' (none answered at the start)' if is_start else ''}"

    def _note_back(self, client: OpenAIClient) -> None:
        state = self.states[client]
        state.is_suspect, self._has_answered = False, True
        since_s, state.away_since_s = state.away_since_s, None
        if state.is_new:
            state.is_new = False
            self.notify(f"{client.server.root_url} has joined, with version {self.version}.")
        elif since_s is not None:
            self.notify(f"{client.server.root_url} is back after {monotonic() - since_s:.0f} s.")

    def _away_s(self) -> float:
        """Return for how long no server has answered."""
        since_s = [state.away_since_s for state in self.states.values()]
        known = [each for each in since_s if each is not None]
        # The time counts from when the last server went away.
        return monotonic() - max(known) if len(known) == len(since_s) else 0.0

    def _urls(self) -> str:
        return ", ".join(each.server.root_url for each in self.states)

    def lose(self, failure: Exception) -> None:
        """End the run with this error: `guard` raises the first one."""
        self._failure = self._failure or failure
        self._lost.set()


async def _is_up(client: Any) -> bool:
    """Return whether a server answers at all."""
    try:
        await client.check_health()
    except ModelError:
        return False
    return True


def weight_way(
    model: Any,
    folder: Path,
    *,
    publish: PublishName = "auto",
    address: str | None = None,
) -> Way:
    """Return the `Way` in which servers get a model's weights; `engine.publish` names it.

    Args:
        model: the module that is trained, or a plain copy of it (adapters, ranks).
        folder: where versions are written for `disk`.
        publish: with `auto`, each server uses the first that works of shared memory, transfer and
            disk.
        address: of this machine, as servers reach it; None: found automatically.

    Raises:
        ConfigError: the model's tensors are named differently from its checkpoint's, and
            `shared` or `transfer` was chosen.
    """

    def tensors() -> Iterable[tuple[str, Any]]:
        return plain_tensors(model)

    def disk() -> Way:
        return DiskWay(lambda path: export_model(model, None, path), folder)

    def transfer() -> Way:
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        return TransferWay(
            tensors,
            backend="nccl" if on_gpu else "gloo",
            device=device if on_gpu else None,
            address=address,
        )

    if publish == "disk":
        return disk()
    # Only files on disk have the names of the checkpoint.
    if publish == "auto" and is_renamed(model):
        return AutoWay([disk()], because="its tensors are named differently from its checkpoint's")
    if publish == "auto":
        return AutoWay([SharedWay(tensors), transfer(), disk()])
    check_served_names(model, "engine.publish = 'disk'")
    return SharedWay(tensors) if publish == "shared" else transfer()


def is_renamed(model: Any) -> bool:
    """Return whether the tensors are named differently from the checkpoint they come from."""
    # transformers records here how it renamed or fused tensors when it read them.
    return bool(getattr(model, "_weight_conversions", None))


def check_served_names(model: Any, alternative: str) -> None:
    """Refuse a model whose tensors vLLM does not know by their names.

    Raises:
        ConfigError: it names the alternative.
    """
    if is_renamed(model):
        raise ConfigError(
            f"the tensors of {type(model).__name__} were renamed or fused when its checkpoint "
            f"was read, so vLLM would not know their names. Use {alternative}, which writes "
            "them as they were."
        )


def vllm_engine(config: TrainConfig, model: Any, tokenizer: Any) -> tuple[Any, WeightTarget]:
    """Return the client and the engine of `engine.kind = "vllm"`."""
    from rolltree.scale.vllm import vllm_client

    check_served_names(model, "engine.kind = 'servers' with engine.publish = 'disk'")
    folder = resolve_model(config.model.name)
    client = vllm_client(folder, model, tokenizer, **engine_options(config))
    return client, client.engine


def server_engine(config: TrainConfig, model: Any, tokenizer: Any) -> tuple[Any, WeightTarget]:
    """Return the client and the engine of `engine.kind = "servers"`."""
    section = config.engine
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = configured if isinstance(configured, list) else [configured]
    # A model may end its turns with more ids than the tokenizer's single one.
    renderer = ChatRenderer(tokenizer, end_ids=[int(i) for i in known if i is not None])
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    clients = [server_client(config, url, renderer, vocab_size) for url in section.urls]
    # A call may wait as long as the run does, and then needs its own time in addition.
    deadline_s = AWAY_LIMIT_S + max(client.server.deadline_s for client in clients)
    pool = EndpointPool(clients, deadline_s=deadline_s)
    way = weight_way(
        model,
        # Absolute, because servers have different working directories.
        Path(config.run.dir).absolute() / "weights",
        publish=section.publish,
        address=section.transfer_address,
    )
    return pool, Servers(clients, way, away_limit_s=AWAY_LIMIT_S, pool=pool)
