"""Sampling settings in vLLM's names, and what one request has sampled so far.

It knows which settings vLLM obeys and which of them it would change in silence. It imports nothing
of vLLM, and knows nothing about threads and weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolltree.errors import UnsupportedSetting, did_you_mean
from rolltree.types import FinishReason, FloatArray, IntArray, SamplingParams

_COLDEST = 0.01
_PASSED = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
)
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "logprobs": (True, False, 0, 1),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "stream": (False,),
    "top_logprobs": (0,),
}
"""Values of servers' request fields that ask for what happens anyway."""


@dataclass(frozen=True, slots=True)
class VllmOutput:
    """One completion. Arrays of shape `[_C]`, one entry per sampled token, end token included.

    `logprobs` are those of the distribution sampled from (at temperature 0, of temperature 1).
    `stop` is the stop string, or the id in `stop_token_ids`, that ended it; None when an end token
    or the length did.
    """

    completion_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    stop: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    wait_s: float  # before vLLM got it, and while the engine was paused


@dataclass(slots=True, eq=False)
class Pending:
    """A request in the engine; once queued, only the engine's thread touches it."""

    prompt: IntArray
    sampling: SamplingParams
    fields: dict[str, Any]
    submitted_s: float  # time.monotonic()
    future: Future[VllmOutput] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    num_cached: int = 0
    wait_s: float = 0.0
    paused_s_before: float = 0.0

    def settle(self, outcome: VllmOutput | Exception) -> None:
        """Answer; a request that was cancelled meanwhile needs no answer."""
        try:
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        except InvalidStateError:
            pass

    def output(self, finish_reason: str | None, stop: str | int | None) -> VllmOutput:
        """Return what was sampled, now that it is complete.

        Raises:
            ValueError: vLLM stopped for a reason that is not known here.
        """
        own = isinstance(stop, str) or stop in self.sampling.stop_token_ids
        return VllmOutput(
            completion_ids=np.array(self.ids, np.int32),
            logprobs=np.minimum(np.array(self.logprobs, np.float32), np.float32(0)),
            versions=np.array(self.versions, np.int32),
            finish_reason=FinishReason(finish_reason or "stop"),
            stop=stop if own else None,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached,
            wait_s=self.wait_s,
        )


def vllm_fields(
    sampling: SamplingParams, *, eos_token_ids: tuple[int, ...], room: int, seed: int
) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` that mean `sampling`, every one explicit.

    `room`: how many tokens still fit. `seed`: for a request that brings none.

    Raises:
        UnsupportedSetting: vLLM would not sample as asked.
    """
    _check_numbers(sampling)
    extra: dict[str, Any] = {**sampling.extra, **sampling.extra.get("extra_body", {})}
    extra.pop("extra_body", None)
    ends: tuple[int, ...] = () if extra.get("ignore_eos") else eos_token_ids
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": (seed if sampling.seed is None else sampling.seed) % 2**63,
        "max_tokens": limit,
        "stop": list(sampling.stop),
        "stop_token_ids": list(dict.fromkeys((*sampling.stop_token_ids, *ends))),
        "logprobs": 0,  # the sampled token's alone
        "skip_special_tokens": False,
        **_further(extra),
    }


def _further(extra: Mapping[str, Any]) -> dict[str, Any]:
    passed: dict[str, Any] = {}
    for name, value in extra.items():
        if name in _PASSED:
            passed[name] = value
        elif value not in _NO_EFFECT.get(name, ()):
            raise UnsupportedSetting(
                f"the setting {name} = {value!r} is not one that vLLM in this process obeys, and "
                "sampling would go on as if it were not there."
                f"{did_you_mean(name, _PASSED)} Remove it, or use a vLLM server."
            )
    return passed


def _check_numbers(sampling: SamplingParams) -> None:
    checks = {
        "temperature": 0 <= sampling.temperature < float("inf"),
        "top_p": 0 < sampling.top_p <= 1,
        "top_k": sampling.top_k >= 0,
        "max_tokens": sampling.max_tokens is None or sampling.max_tokens >= 1,
    }
    for name, good in checks.items():
        if not good:
            raise UnsupportedSetting(
                f"{name} = {getattr(sampling, name)} is outside what can be sampled with "
                "(temperature >= 0, 0 < top_p <= 1, top_k >= 0, max_tokens >= 1)."
            )
    if 0 < sampling.temperature < _COLDEST:
        raise UnsupportedSetting(
            f"temperature = {sampling.temperature} is above 0 and below {_COLDEST}; vLLM samples "
            f"with {_COLDEST} instead, so the recorded temperature would be wrong. Use 0, or "
            f"{_COLDEST} and above."
        )
