"""Publishes new weights to the engine that samples, with versions, and verifies them.

The embedded engine reads the trainer's own tensors, which is checked by their addresses. Engines
with a copy (vLLM, servers, adapters, ranks) are probed after every publish: the tokens that they
sample after pieces of the text that the step trained on are compared with the trainer's forward
pass, before the step and after it. With `WeightLock` an asynchronous step pauses the engine while
the optimizer writes. Servers are handled in `scale/servers.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from rolltree._helpers.tasks import run_shielded
from rolltree.training.models.ranks import reshard
from rolltree.values.errors import ModelError, TrainingError
from rolltree.values.types import FloatArray, GenerateRequest, IntArray, Sample, SamplingParams

T = TypeVar("T")
Score = Callable[[IntArray], FloatArray]
"""Prompts `[_N, _T]` -> the trainer's logprobs of every next token `[_N, _V]`."""

# The first publish follows no step whose samples a probe could use, so its probe has random tokens,
# and more prompts.
_NUM_PROMPTS, _NUM_FIRST, _PROMPT_TOKENS = 8, 32, 16
_NUM_TRIES = 3
_MOST = 0.75  # quantile: in a mixture, a rounding error routes some prompts differently
_NEAR = 1e-3  # share of what the step changed
_NOISE = 4.0  # times the engine's difference with the first weights
_ROUNDING = 4 * float(np.finfo(np.float32).eps)  # relative to a logprob


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


_NO_HOOKS = _NoHooks()


def run_hooks(engine: WeightTarget) -> RunHooks:
    """Return the engine's own hooks, or some that do nothing."""
    return engine if isinstance(engine, RunHooks) else _NO_HOOKS


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
        self._tolerance, self._renew = tolerance, renew
        self._score: Score = score or partial(next_logprobs, model)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        rng = np.random.default_rng(0)
        self._prompts: IntArray = rng.integers(
            0, vocabulary, (_NUM_FIRST, _PROMPT_TOKENS), dtype=np.int32
        )
        self._before: FloatArray | None = None  # logprobs of the weights before the step
        self._noise: dict[Any, float] = {}  # by client
        self._scored: _Scored | None = None  # of the last version that was verified
        self.spent_s = 0.0

    def expect(self, samples: Sequence[Sample]) -> None:
        """Record the probe's logprobs with the current weights, before a step on `samples`.

        Weights that an engine fails to renew show where they were trained, so the next probe uses
        pieces of the samples that end before trained tokens.
        """
        # Without a copy no weights can be out of date. Without samples the step raises.
        if self.shares_memory() or not samples:
            return
        ids = np.concatenate([sample.ids for sample in samples])
        # Where each sample begins in `ids`. `source` is the position before a trained token, so a
        # piece that ends there probes a prediction that the step moves.
        firsts = np.cumsum([0, *(len(sample.ids) for sample in samples[:-1])])
        ends = np.concatenate(
            [first + s.records.source for first, s in zip(firsts, samples, strict=True)]
        )
        if not len(ends):
            ends = np.arange(len(ids))
        ends = ends[np.linspace(0, len(ends) - 1, _NUM_PROMPTS).astype(np.int64)]
        # [_NUM_PROMPTS, _PROMPT_TOKENS]. Pieces that begin before the first id wrap around to the
        # last: any tokens will do, since both sides read the same.
        self._prompts = ids[(ends[:, None] + np.arange(1 - _PROMPT_TOKENS, 1)) % len(ids)]
        self._before = self._score(self._prompts)

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
        # All ranks run this pass, and none of them may leave it in the middle.
        after = await run_shielded(asyncio.to_thread(self._score, self._prompts))
        scored = self._scored = _Scored(version, self._prompts, self._before, after)
        probes: list[_Differences] = []
        hooks = run_hooks(self._engine)
        for client in getattr(self._client, "clients", [self._client]):
            if hooks.is_away(client):
                continue
            try:
                probes.append(await self._check(client, scored, hooks, is_old=not shares))
            # A server that died during the probe gets the weights before its next request.
            except ModelError:
                if not hooks.is_away(client):
                    raise
        if not probes:
            return {}
        metrics = {"publish/probe_error": max(each.error for each in probes)}
        if self._before is not None:
            metrics["publish/probe_step"] = max(each.moved for each in probes)
        return metrics

    async def probe(self, client: Any, version: int) -> None:
        """Check one client that got the weights apart from the others, such as a new server.

        Nothing is checked before the first `verify` of the version, which looks at every client.

        Raises:
            TrainingError: its weights are not the trainer's.
            ModelError: it does not answer.
        """
        if self._scored is not None and self._scored.version == version:
            # Not counted: no answer of the server counts before it is probed.
            await self._check(client, self._scored, _NO_HOOKS, is_old=True)

    def shares_memory(self) -> bool:
        """Return whether the engine computes with the very tensors that are trained."""
        served = getattr(self._engine, "served_tensors", None)
        if served is None:
            return False
        addresses = {(tensor.data_ptr(), tensor.numel()) for tensor in served()}
        # Frozen weights cannot be old.
        own = [p for p in self._model.parameters() if p.requires_grad]
        return all((p.data_ptr(), p.numel()) in addresses for p in own)

    async def _check(
        self, client: Any, scored: _Scored, hooks: RunHooks, *, is_old: bool
    ) -> _Differences:
        """Probe one client; if the result looks wrong, sample more and judge all tries together.

        `hooks` decide which answers count. `is_old`: it may serve the weights from before the step.
        """
        # A server that was away at the first publish is judged by the others' noise.
        noise = self._noise.get(client, max(self._noise.values(), default=None))
        noise = noise if is_old else None
        version = scored.version
        ids, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        for number in range(_NUM_TRIES):
            # Different seeds in each try, so the tries are independent and are judged together.
            more = await _sample(client, scored, hooks, version * _NUM_TRIES + number)
            ids, logprobs = np.append(ids, more[0]), np.append(logprobs, more[1])
            differences = _compare(ids, logprobs, scored.before, scored.after)
            why = differences.why_not(noise, self._tolerance)
            if why is None:
                # Set at the first publish only: a later difference may already come from weights
                # that are out of date.
                self._noise.setdefault(client, differences.error)
                return differences
        raise TrainingError(
            f"version {version} was published to {client!r}, and it serves other weights: {why}. "
            "Usual causes: the reload left a part as it was, another model "
            "or another precision than when the run started, or 16-bit weights there "
            "(engine.probe_tolerance = 0.5)."
        )


@dataclass(frozen=True, slots=True)
class _Scored:
    """The trainer's logprobs that a probe of one version is compared with.

    `prompts`: int32 `[_N, _T]`. `before` (None: there was no step), `after`: the trainer's logprobs
    `[_N, _V]` of the next token, before the step and with this version.
    """

    version: int
    prompts: IntArray
    before: FloatArray | None
    after: FloatArray


async def _sample(
    client: Any, scored: _Scored, hooks: RunHooks, seed: int
) -> tuple[IntArray, FloatArray]:
    """Return the token that a client samples after each prompt, and its logprob."""
    # One token, because `before` has the distribution of the next token only (design/0022).
    sampling = SamplingParams(temperature=1.0, max_tokens=1)
    size = len(scored.prompts)
    requests = [
        GenerateRequest(prompt, replace(sampling, seed=seed * size + number))
        for number, prompt in enumerate(scored.prompts)
    ]
    asking = (hooks.counted(client, partial(client.generate, request)) for request in requests)
    answers = await asyncio.gather(*asking)
    for answer in answers:
        if answer.completion_ids is None or answer.logprobs is None:
            raise TrainingError(
                f"{client!r} returns no token ids or no logprobs, so its weights cannot be "
                "verified and its samples cannot be trained on. See docs/inference.md, "
                "Servers, for how to start it."
            )
        if answer.versions is not None and (answer.versions != scored.version).any():
            raise TrainingError(
                f"{client!r} sampled with version {int(answer.versions[0])} after version "
                f"{scored.version} was published. Does another program publish to it?"
            )
    ids = np.array([answer.completion_ids[0] for answer in answers], np.int32)
    return ids, np.array([answer.logprobs[0] for answer in answers], np.float32)


@dataclass(frozen=True, slots=True)
class _Differences:
    """A probe's differences of logprobs, each the upper quartile over its prompts.

    `error`: between the engine and the weights after the step. `moved`: between the weights before
    and after the step. `behind`: the share of the way from before to after that the engine is
    missing, as a median. `rounding`: a difference that float32 cannot resolve.
    """

    error: float
    moved: float
    behind: float
    rounding: float
    num_prompts: int

    def why_not(self, noise: float | None, tolerance: float) -> str | None:
        """Return why these are not the new weights, or None.

        `noise` is the engine's difference when it has the trainer's weights, None if unknown.
        """
        # Not `>`: NaN has to fail, too.
        if not self.error <= tolerance:
            return (
                f"the logprobs of a probe differ from the trainer's by {self.error:.3g} "
                f"(engine.probe_tolerance is {tolerance})"
            )
        if noise is None:
            return None
        known = max(noise, self.rounding)
        if self.error > max(_NEAR * self.moved, _NOISE * known):
            return (
                f"the logprobs of a probe differ from the trainer's by {self.error:.3g}; with the "
                f"first weights it was {noise:.3g}, and the last step moved them by "
                f"{self.moved:.3g}"
            )
        # The error is always judged, the direction only if a median over this many prompts can tell
        # the step from noise (design/0022).
        is_clear = self.moved * self.num_prompts**0.5 > 2 * _NOISE * known
        if is_clear and self.behind > 0.5:
            return (
                f"a probe is nearer to the weights before the last step ({self.behind:.0%} of the "
                "way is missing)"
            )
        return None


def _most(differences: FloatArray) -> float:
    return float(np.quantile(np.abs(differences), _MOST, method="lower"))


def _compare(
    ids: IntArray, logprobs: FloatArray, before: FloatArray | None, after: FloatArray
) -> _Differences:
    """Compare sampled tokens, `[_N]` or a multiple of it, with the trainer's `[_N, _V]`."""
    # Each try samples after the same prompts in the same order.
    rows = np.arange(len(ids)) % len(after)
    error = logprobs - after[rows, ids]
    moved = np.zeros_like(error) if before is None else before[rows, ids] - after[rows, ids]
    typical = _most(moved)
    middle = float(np.median(np.abs(moved)))
    # Differences count in the direction of the old weights: 0 is the new ones, 1 the old ones.
    behind = float(np.median(error * np.sign(moved))) / middle if middle else 0.0
    return _Differences(
        error=_most(error),
        moved=typical,
        behind=behind,
        rounding=_ROUNDING * float(np.abs(after).mean()),
        num_prompts=len(ids),
    )


@torch.no_grad()
def next_logprobs(model: Any, prompts: IntArray) -> FloatArray:
    """Return the logprobs `[_N, _V]` of the token after each of the prompts `[_N, _T]`.

    It runs the model's own forward pass, with adapters and shards; every rank has to call it.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.from_numpy(prompts.astype(np.int64)).to(device)
    takes = inspect.signature(model.forward).parameters
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    logits = model(input_ids=ids, use_cache=False, **only_last).logits[:, -1].float()
    # A backward pass would do this, but none follows.
    reshard(model)
    logprobs: FloatArray = logits.log_softmax(-1).cpu().numpy()
    return logprobs


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
