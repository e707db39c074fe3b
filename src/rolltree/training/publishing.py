"""New weights to the engine that samples, versioned and verified.

The embedded engine reads the trainer's own tensors, which their addresses prove. Engines with a
copy (vLLM, servers) are probed after every publish: the logprobs of a few sampled tokens are
compared with the trainer's. `WeightLock` is how an asynchronous step pauses the engine while the
optimizer writes. Servers are `servers.py`'s.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from rolltree.errors import ModelError, TrainingError
from rolltree.types import GenerateRequest, IntArray, ModelResponse, SamplingParams

_PROBE_TOKENS = 16
_SAMPLED_TOKENS = 2


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
        """Use the weights as they are now, as those of `version`; awaited if it is a coroutine."""
        ...


class Publisher:
    """Publishes the weights of `model` to `engine` and checks what `client` samples from.

    Args:
        model: the module that is trained, or a plain copy of it that `renew` brings up to date.
        engine: a `WeightTarget`; `served_tensors()`, where it has it, gives what it computes with.
        client: samples from the engine; a pool is probed server by server.
        tolerance: the most that a probe's logprobs may differ.
        renew: called before every publish.
    """

    def __init__(
        self,
        model: Any,
        engine: Any,
        client: Any,
        *,
        tolerance: float,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._engine, self._client = model, engine, client
        self._tolerance, self._renew = tolerance, renew
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        rng = np.random.default_rng(0)
        self._prompt: IntArray = rng.integers(0, vocabulary, _PROBE_TOKENS).astype(np.int32)

    async def publish(self, version: int) -> None:
        """Hand the weights over; call it inside `engine.paused()`.

        Raises:
            TrainingError: the engine then says that it has another version.
        """
        self._renew()
        done = self._engine.publish(version)
        if inspect.isawaitable(done):
            await done
        if self._engine.version != version:
            raise TrainingError(
                f"version {version} was published, but the engine reports version "
                f"{self._engine.version!r}. Does another program publish to it?"
            )

    async def verify(self, version: int) -> dict[str, float]:
        """Check what is served, with the engine running, and return metrics.

        A server that is away is left out: it gets the weights before another request.

        Raises:
            TrainingError: something serves other weights than the trainer's.
        """
        if self.shares_memory():
            return {}
        errors = []
        for client in getattr(self._client, "clients", [self._client]):
            if getattr(client, "is_suspect", False):
                continue
            try:
                errors.append(await self._probe(client, version))
            except ModelError:
                if not getattr(client, "is_suspect", False):
                    raise
        return {"publish/probe_error": max(errors)} if errors else {}

    def shares_memory(self) -> bool:
        """Return whether the engine computes with the very tensors that are trained."""
        served = getattr(self._engine, "served_tensors", None)
        if served is None:
            return False
        addresses = {(tensor.data_ptr(), tensor.numel()) for tensor in served()}
        own = [p for p in self._model.parameters() if p.requires_grad]
        return all((p.data_ptr(), p.numel()) in addresses for p in own)

    async def _probe(self, client: Any, version: int) -> float:
        sampling = SamplingParams(temperature=1.0, max_tokens=_SAMPLED_TOKENS, seed=version)
        answer = await client.generate(GenerateRequest(self._prompt, sampling))
        if answer.completion_ids is None or answer.logprobs is None:
            raise TrainingError(
                f"{client!r} returns no token ids or no logprobs, so its weights cannot be "
                "verified and its samples cannot be trained on. See docs/inference.md, Servers, "
                "for how to start it."
            )
        if answer.versions is not None and (answer.versions != version).any():
            raise TrainingError(
                f"{client!r} sampled with version {int(answer.versions[0])} after version "
                f"{version} was published. Does another program publish to it?"
            )
        error = float(np.abs(self._own_logprobs(answer) - answer.logprobs).max())
        if not error <= self._tolerance:
            raise TrainingError(
                f"version {version} was published to {client!r}, and it serves other weights: the "
                f"logprobs of a probe differ from the trainer's by {error:.3g} "
                f"(engine.probe_tolerance is {self._tolerance}). Usual causes: the reload left a "
                "part as it was (vLLM on a CPU with tied embeddings: engine.reload_method = "
                "'reload_all_weights'), another model, or 16-bit weights there (raise the bound)."
            )
        return error

    @torch.no_grad()
    def _own_logprobs(self, answer: ModelResponse) -> Any:
        """Return the trainer's logprobs of what a probe sampled, by the model's plain forward."""
        assert answer.completion_ids is not None
        path = np.concatenate([self._prompt, answer.completion_ids]).astype(np.int64)
        device = self._model.get_input_embeddings().weight.device
        ids = torch.from_numpy(path).to(device)
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        logprobs = logits[_PROBE_TOKENS - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, ids[_PROBE_TOKENS:, None])[:, 0].cpu().numpy()


class WeightLock:
    """Pauses the engine while the optimizer writes, for a trainer that steps in a thread.

    The optimizer writes the weights in place, so a token sampled between its first write and the
    publish would come from half old, half new weights. Make it in the event loop, open it in the
    trainer's thread.

    Args:
        paused: returns the context in which the engine runs no step.
        publish: awaited in it once the weights are written.

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
