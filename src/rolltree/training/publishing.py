"""Publishes new weights to the engine that samples, with versions, and verifies them.

The embedded engine reads the trainer's own tensors, which is checked by their addresses. Engines
with a copy (vLLM, servers, adapters, ranks) are probed after every publish: the tokens that they
sample after pieces of the text that the step trained on are compared with the trainer's forward
pass, before the step and after it (`weight_probe.py`). With `WeightLock` an asynchronous step
pauses the engine while the optimizer writes. Servers are handled in `scale/servers.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from rolltree.values.errors import TrainingError
from rolltree.values.types import Sample

if TYPE_CHECKING:
    from rolltree.training.weight_probe import Score, WeightProbe

T = TypeVar("T")


class WeightTarget(Protocol):
    """The engine that gets the weights: embedded, vLLM, servers, or a stand-in for one."""

    @property
    def version(self) -> int:
        """The policy version that it samples with."""
        ...

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which nothing is sampled."""
        ...

    def publish(self, version: int) -> Awaitable[None] | None:
        """Use the current weights as those of `version`; a coroutine is awaited."""
        ...


@runtime_checkable
class RunHooks(Protocol):
    """What an engine does besides, if it can fail apart from the run."""

    async def begin(
        self, notify: Callable[[str], None], probe: Callable[[Any, int], Awaitable[None]]
    ) -> None:
        """Get ready to sample; `notify` gets notices, `probe` checks one part with a version."""
        return

    async def guard(self, work: Awaitable[T]) -> T:
        """Return what `work` returns, or raise if the engine is lost meanwhile."""
        return await work

    async def counted(self, client: Any, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer that `ask` gets from one client, if it has the published weights."""
        return await ask()

    def is_away(self, client: Any) -> bool:
        """Whether one client failed apart from the others, and gets the weights later."""
        return False

    def announce_kept_weights(self) -> None:
        """Tell the user at the end of a run where the trained weights are still served."""
        return

    async def aclose(self) -> None:
        """Release what the engine holds for the run."""
        return


class _NoHooks(RunHooks):
    """The hooks of an engine in this process, which do nothing."""


NO_HOOKS = _NoHooks()


def run_hooks(engine: WeightTarget) -> RunHooks:
    """Return the engine's own hooks, or some that do nothing."""
    return engine if isinstance(engine, RunHooks) else NO_HOOKS


class Publisher:
    """Publishes the weights of `model` to `engine` and checks what `client` samples from.

    Args:
        model: the module that is trained.
        engine: a `WeightTarget`; `served_tensors()`, if present, returns the tensors it computes
            with.
        client: samples from the engine; a pool is probed server by server.
        tolerance: the most that a probe's logprobs may ever differ.
        score: the trainer's forward pass, of all ranks; `next_logprobs` of `model` if it is None.
        renew: called before every publish.

    `spent_s` is how long the last publish took.
    """

    def __init__(
        self,
        model: Any,
        engine: Any,
        client: Any,
        *,
        tolerance: float,
        score: Score | None = None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._engine, self._client = model, engine, client
        self._tolerance, self._score, self._renew = tolerance, score, renew
        self.spent_s = 0.0

    @cached_property
    def _probe(self) -> WeightProbe:
        from rolltree.training.weight_probe import WeightProbe

        return WeightProbe(
            self._model, self._engine, self._client, tolerance=self._tolerance, score=self._score
        )

    def expect(self, samples: Sequence[Sample]) -> None:
        """Record what the next probe needs of the current weights, before a step on `samples`."""
        # Without a copy no weights can be out of date. Without samples the step raises.
        if samples and not self.shares_memory():
            self._probe.expect(samples)

    async def publish(self, version: int) -> None:
        """Hand the weights over; call it inside `engine.paused()`.

        Raises:
            TrainingError: the engine reports a different version afterwards.
        """
        began = time.perf_counter()
        self._renew()
        done = self._engine.publish(version)
        if inspect.isawaitable(done):
            await done
        self.spent_s = time.perf_counter() - began
        if self._engine.version != version:
            raise TrainingError(
                f"version {version} was published, but the engine reports version "
                f"{self._engine.version!r}. Does another program publish to it?"
            )

    def shares_memory(self) -> bool:
        """Return whether the engine computes with the very tensors that are trained."""
        served = getattr(self._engine, "served_tensors", None)
        if served is None:
            return False
        addresses = {(tensor.data_ptr(), tensor.numel()) for tensor in served()}
        # Frozen weights cannot be old.
        own = [p for p in self._model.parameters() if p.requires_grad]
        return all((p.data_ptr(), p.numel()) in addresses for p in own)

    async def verify(self, version: int, *, always: bool = False) -> dict[str, float]:
        """Check the served weights, with the engine running, and return metrics.

        An engine that computes with the trained tensors themselves is probed only if `always` is
        set: it has the weights, but its logprobs may still differ from the trainer's.

        `publish/probe_error` is the distance of the served weights from the trainer's, and
        `publish/probe_step` the distance that the last step moved these, both as upper quartiles of
        logprob differences. A server that is away is left out: it gets the weights before its next
        request.

        Raises:
            TrainingError: the served weights are not the trainer's.
        """
        shares = self.shares_memory()
        if shares and not always:
            return {}
        return await self._probe.verify(version, is_old=not shares)

    async def probe(self, client: Any, version: int) -> None:
        """Check one client that got the weights apart from the others, such as a new server.

        Nothing is checked before the first `verify` of the version, which looks at every client.

        Raises:
            TrainingError: its weights are not the trainer's.
            ModelError: it does not answer.
        """
        await self._probe.check_one(client, version)


class WeightLock:
    """Pauses the engine while the optimizer writes, for a trainer that steps in a thread.

    The optimizer writes the weights in place, so a token sampled between its first write and the
    publish would come from half old, half new weights. Create it in the event loop, and open it in
    the trainer's thread.

    Args:
        paused: returns the context in which the engine runs no step.
        publish: awaited in that context after the weights are written.

    If the block fails, the weights may be half written: nothing is published and the engine stays
    paused until `aclose`, so that the rollouts can be cancelled first. `paused_s` is how long the
    engine was paused.
    """

    def __init__(
        self,
        paused: Callable[[], AbstractAsyncContextManager[None]],
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._paused, self._publish = paused, publish
        self._loop = asyncio.get_running_loop()
        self._stack = AsyncExitStack()
        self.paused_s = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Open the pause, let the block write, publish, close the pause."""
        self._wait(self._stack.enter_async_context(self._paused()))
        began = time.perf_counter()
        # Without `finally`: after a failure nothing is published, and the engine stays paused.
        yield
        self._wait(self._publish())
        self._wait(self._stack.aclose())
        self.paused_s = time.perf_counter() - began

    async def aclose(self) -> None:
        """Resume the engine after a failure."""
        await self._stack.aclose()

    def _wait(self, awaitable: Awaitable[Any]) -> None:
        async def run() -> None:
            await awaitable

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()
