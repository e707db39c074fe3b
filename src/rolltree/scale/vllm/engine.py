"""vLLM in the trainer's process: an engine that sends requests to one backend.

`publish` copies the trainer's weights into vLLM and drops every cached key and value.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.engine import (
    DEFAULT_MAX_CONTEXT,
    EngineOutput,
    EngineRequest,
    EngineThread,
    SampledToken,
)
from rolltree.inference.local.client import LocalClient, configured_end_ids
from rolltree.scale.vllm.backend import StepOutput, VllmBackend, Weights
from rolltree.values.errors import ModelError, UnsupportedSetting
from rolltree.values.types import FinishReason, IntArray, SamplingParams

# vLLM replaces lower temperatures by this one.
_COLDEST = 0.01
_DEFAULT_KV_BYTES = 2**30


@dataclass(slots=True, eq=False)
class VllmRequest(EngineRequest):
    """A request with vLLM's sampling fields, and the tokens sampled so far."""

    fields: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: Any = None

    def extend(self, added: StepOutput, version: int) -> None:
        """Append the tokens of one step, and report all but an answer's last token."""
        self.ids.extend(added.ids)
        self.logprobs.extend(added.logprobs)
        self.versions.extend([version] * len(added.ids))
        self.num_cached = max(self.num_cached, added.num_cached)
        self.routed_experts = added.routed_experts
        if self.on_token is not None:
            # The last token comes with the finished answer and its finish reason.
            told = len(added.ids) - added.finished
            for token, logprob in list(zip(added.ids, added.logprobs, strict=True))[:told]:
                self.on_token(SampledToken(token, min(logprob, 0.0), None, version))

    def output(self, finish_reason: str | None, stop: str | int | None) -> EngineOutput:
        """Return the complete answer.

        Raises:
            ValueError: vLLM's finish reason is unknown here.
        """
        own = isinstance(stop, str) or stop in self.sampling.stop_token_ids
        return EngineOutput(
            completion_ids=np.array(self.ids, np.int32),
            # vLLM's rounding can give a logprob slightly above 0.
            logprobs=np.minimum(np.array(self.logprobs, np.float32), np.float32(0)),
            versions=np.array(self.versions, np.int32),
            # vLLM cuts an answer that repeats itself, if it is asked to.
            finish_reason=FinishReason.LENGTH
            if finish_reason == "repetition"
            else FinishReason(finish_reason or "stop"),
            stop=stop if own else None,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached,
            wait_s=self.wait_s,
            routed_experts=self.routed_experts,
        )


class VllmEngine(EngineThread[VllmRequest]):
    """An engine over one `VllmBackend`, which is created in the engine's own thread.

    Args:
        make_backend: creates the backend, for at least `max_batch` and `max_context`.
        weights: returns the current weights of the trained model; called at every `publish`.

    The other arguments are `EngineThread`'s.

    Raises:
        ConfigError: a number is out of range, or the backend cannot be created.
    """

    label = "the vLLM engine"
    extra_settings = (
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

    def __init__(
        self,
        make_backend: Callable[[], VllmBackend],
        weights: Callable[[], Weights],
        *,
        eos_token_ids: Iterable[int] = (),
        max_batch: int = 64,
        max_context: int = DEFAULT_MAX_CONTEXT,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            eos_token_ids=eos_token_ids,
            max_batch=max_batch,
            max_context=max_context,
            version=version,
            seed=seed,
        )
        self._make_backend, self._weights = make_backend, weights
        self._waiting: deque[VllmRequest] = deque()
        self._running: dict[str, VllmRequest] = {}
        self._names = itertools.count()
        self._start("rolltree-vllm")
        self.vocab_size = self._backend.vocab_size

    def _open(self) -> None:
        self._backend = self._make_backend()

    def _close(self) -> None:
        self._backend.close()

    def _new_request(
        self, prompt: IntArray, sampling: SamplingParams, extra: Mapping[str, Any], seed: int
    ) -> VllmRequest:
        limit = self.max_context
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        fields = vllm_fields(
            sampling,
            extra,
            eos_token_ids=self.eos_token_ids,
            max_tokens=limit - len(prompt),
            seed=seed,
        )
        return VllmRequest(prompt, sampling, seed, limit, fields=fields)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def _step(self, new: list[VllmRequest], version: int) -> None:
        self._waiting.extend(new)
        # Waiting is counted here (`wait_s`), so vLLM gets no more than it decodes.
        while self._waiting and len(self._running) < self.max_batch:
            self._admit(self._waiting.popleft())
        if not self._running:
            return
        self._counts.num_steps += 1
        for added in self._backend.step():
            self._take(added, version)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(r for r in self._waiting if not r.future.cancelled())
        gone = [name for name, request in self._running.items() if request.future.cancelled()]
        self._backend.abort(gone)
        for name in gone:
            del self._running[name]

    def _forget_requests(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _take_weights(self, version: int) -> None:
        self._backend.load(self._weights())

    def _admit(self, request: VllmRequest) -> None:
        name = f"rolltree-{next(self._names)}"
        try:
            self._backend.add(name, request.prompt.tolist(), request.fields)
        except (ValueError, TypeError) as error:
            request.settle(
                UnsupportedSetting(
                    f"vLLM refused the request ({error}), so it has no answer. Change its sampling "
                    "settings."
                )
            )
            return
        request.admit()
        self._running[name] = request

    def _take(self, added: StepOutput, version: int) -> None:
        request = self._running.get(added.request_id)
        if request is None:
            return
        request.extend(added, version)
        self._counts.num_sampled_tokens += len(added.ids)
        if not added.finished:
            return
        del self._running[added.request_id]
        self._counts.num_prompt_tokens += len(request.prompt)
        self._counts.num_cached_tokens += request.num_cached
        outcome: EngineOutput | Exception
        try:
            outcome = request.output(added.finish_reason, added.stop_reason)
        except ValueError:
            outcome = ModelError(
                f"vLLM ended a request with finish reason {added.finish_reason!r}, so its answer "
                "is incomplete. See its log."
            )
        request.settle(outcome)


def vllm_fields(
    sampling: SamplingParams,
    extra: Mapping[str, Any],
    *,
    eos_token_ids: tuple[int, ...],
    max_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` for `sampling`, all of them explicit.

    Raises:
        UnsupportedSetting: vLLM would sample differently.
    """
    if 0 < sampling.temperature < _COLDEST:
        raise UnsupportedSetting(
            f"temperature = {sampling.temperature} is above 0 and below {_COLDEST}; vLLM samples "
            f"with {_COLDEST} instead, so the recorded temperature would be wrong. Use 0, or "
            f"{_COLDEST} and above."
        )
    ends: tuple[int, ...] = () if extra.get("ignore_eos") else eos_token_ids
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed % 2**63,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop),
        # All end tokens are listed, because `generation_config` is not read.
        "stop_token_ids": list(dict.fromkeys((*sampling.stop_token_ids, *ends))),
        # 0: the logprob of the sampled token only.
        "logprobs": 0,
        "skip_special_tokens": False,
        **{name: extra[name] for name in VllmEngine.extra_settings if name in extra},
    }


def parameters_of(model: Any) -> Callable[[], Weights]:
    """Return a function that yields a model's weights, named as in a Hugging Face checkpoint.

    Tied weights come once, under their first name.
    """

    def weights() -> Weights:
        for name, tensor in model.named_parameters():
            yield name, tensor.detach()
        persistent = model.state_dict(keep_vars=True)
        # Some checkpoints contain buffers, such as a router's bias.
        for name, tensor in model.named_buffers():
            if name in persistent:
                yield name, tensor

    return weights


def vllm_client(
    folder: Path,
    model: Any,
    tokenizer: Any,
    *,
    name: str = "vllm",
    renderer: ChatRenderer | None = None,
    max_batch: int = 64,
    max_context: int | None = None,
    kv_budget_bytes: int | None = None,
    prefill_chunk: int | None = None,
    version: int = 0,
    seed: int = 0,
    record_experts: bool = False,
    **options: Any,
) -> LocalClient:
    """Return a client over a new vLLM engine that samples with `model`'s weights.

    vLLM reads `folder` (the model's config, tokenizer and first weights) and copies the current
    weights of `model` at every `client.engine.publish(version)`, so they are in memory twice.
    `max_context` None is 2,048 tokens, or the model's own limit if that is less; `kv_budget_bytes`
    None is 1 GiB. `record_experts` records the experts of an MoE model that each token is routed to
    (vLLM 0.32 needs a GPU for it). `options` are passed to `VllmBackend`. Closing the client closes
    the engine.

    Raises:
        ConfigError: vLLM is not installed, or cannot serve the model with these settings.
    """
    ends = configured_end_ids(model)
    if record_experts:
        options["enable_return_routed_experts"] = True
    renderer = renderer or ChatRenderer(tokenizer, end_ids=ends)
    config = model.config.get_text_config()
    own_limit = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_CONTEXT
    context = min(own_limit, DEFAULT_MAX_CONTEXT) if max_context is None else max_context
    kv_bytes = _DEFAULT_KV_BYTES if kv_budget_bytes is None else kv_budget_bytes
    engine = VllmEngine(
        lambda: VllmBackend(
            folder,
            max_batch=max_batch,
            max_context=context,
            kv_budget_bytes=kv_bytes,
            prefill_chunk=prefill_chunk,
            seed=seed,
            **options,
        ),
        parameters_of(model),
        eos_token_ids={*ends, *renderer.end_ids},
        max_batch=max_batch,
        max_context=context,
        version=version,
        seed=seed,
    )
    return LocalClient(engine, tokenizer, name, renderer=renderer)
