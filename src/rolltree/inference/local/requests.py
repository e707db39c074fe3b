"""A request inside the engine, and what comes of it.

It knows the sampling settings and the request's own stream of random numbers. It knows nothing
about slots, tensors or models.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rolltree.inference.local.processors import Processors
from rolltree.types import FinishReason, FloatArray, IntArray, SamplingParams

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class LocalOutput:
    """One completion of the embedded engine. Arrays of shape `[_C]`, one entry per sampled token.

    `logprobs` are those of the distribution sampled from, `raw_logprobs` those of the model's own
    softmax. `stop` is the stop string, or the id in `stop_token_ids`, that ended it; None when an
    end token or the length did.
    """

    completion_ids: IntArray
    logprobs: FloatArray
    raw_logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    stop: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    wait_s: float  # before it was admitted, and while the engine was paused


class LocalToken(NamedTuple):
    """One sampled token, as told while its answer goes on; the fields are `LocalOutput`'s."""

    id: int
    logprobs: float
    raw_logprobs: float
    version: int


class UniformStream:
    """Uniform numbers in [0, 1) that depend on the seed alone (Philox, a counter-based stream)."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.Philox(seed))
        self._block: list[float] = []

    def __next__(self) -> float:
        if not self._block:
            self._block = self._rng.random(_BLOCK, dtype=np.float32)[::-1].tolist()
        return self._block.pop()


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the engine. After it is queued only the engine's thread touches it."""

    prompt: IntArray
    sampling: SamplingParams
    uniforms: UniformStream
    limit: int  # longest prompt + completion, in tokens
    submitted_s: float  # time.monotonic()
    processors: Processors | None = None
    on_token: Callable[[LocalToken], None] | None = None
    future: Future[LocalOutput] = field(default_factory=Future)
    num_cached: int = 0
    wait_s: float = 0.0
    paused_s_before: float = 0.0

    def settle(self, outcome: LocalOutput | Exception) -> None:
        """Answer; a request that was cancelled meanwhile needs no answer."""
        try:
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        except InvalidStateError:
            pass
