"""Finds out whether an engine that has a copy of the weights serves those of the trainer.

What the engine samples after a few prompts is compared with the trainer's forward pass
(design/0022).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rolltree._helpers.tasks import run_shielded
from rolltree.training.models.shards import reshard
from rolltree.training.publishing import NO_HOOKS, RunHooks, run_hooks
from rolltree.values.errors import ModelError, TrainingError
from rolltree.values.types import FloatArray, GenerateRequest, IntArray, Sample, SamplingParams

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


class WeightProbe:
    """Compares what `client` samples with the logprobs of the trainer; see `Publisher`."""

    def __init__(
        self, model: Any, engine: Any, client: Any, *, tolerance: float, score: Score | None
    ) -> None:
        self._engine, self._client, self._tolerance = engine, client, tolerance
        self._score: Score = score or partial(next_logprobs, model)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        rng = np.random.default_rng(0)
        self._prompts: IntArray = rng.integers(
            0, vocabulary, (_NUM_FIRST, _PROMPT_TOKENS), dtype=np.int32
        )
        self._before: FloatArray | None = None  # logprobs of the weights before the step
        self._noise: dict[Any, float] = {}  # by client
        self._scored: _Scored | None = None  # of the last version that was verified

    def expect(self, samples: Sequence[Sample]) -> None:
        """Record the probe's logprobs with the current weights, before a step on `samples`.

        Weights that an engine fails to renew show where they were trained, so the next probe uses
        pieces of the samples that end before trained tokens.
        """
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

    async def verify(self, version: int, *, is_old: bool) -> dict[str, float]:
        """Check what every client serves, and return `Publisher.verify`'s metrics.

        `is_old`: it may serve the weights from before the step.
        """
        # All ranks run this pass, and none of them may leave it in the middle.
        after = await run_shielded(asyncio.to_thread(self._score, self._prompts))
        scored = self._scored = _Scored(version, self._prompts, self._before, after)
        probes: list[_Differences] = []
        hooks = run_hooks(self._engine)
        for client in getattr(self._client, "clients", [self._client]):
            if hooks.is_away(client):
                continue
            try:
                probes.append(await self._check(client, scored, hooks, is_old=is_old))
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

    async def check_one(self, client: Any, version: int) -> None:
        """Do what `Publisher.probe` does."""
        if self._scored is not None and self._scored.version == version:
            # Not counted: no answer of the server counts before it is probed.
            await self._check(client, self._scored, NO_HOOKS, is_old=True)

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
