"""A client over vLLM in this process, for the model that a trainer holds.

It joins `VllmEngine` (ids to ids) and the messages' side of `LocalClient`, which is the same for
every engine in this process. It knows nothing about runs and configs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.local.client import LocalClient
from rolltree.inference.vllm.backend import VllmBackend
from rolltree.inference.vllm.engine import VllmEngine, parameters_of

_DEFAULT_CONTEXT = 2048
_DEFAULT_KV_BYTES = 2**30


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
    **options: Any,
) -> LocalClient:
    """Return a client over a new vLLM engine that samples with `model`'s weights.

    vLLM reads `folder` (the model's config, tokenizer and first weights) and takes over the current
    weights of `model` at every `client.engine.publish(version)`; they are in memory twice. None is
    2,048 tokens for `max_context`, or the model's own limit if that is less, and 1 GiB for
    `kv_budget_bytes`. `options` go to `VllmBackend`. Closing the client closes the engine.

    Raises:
        ConfigError: vLLM is not installed, or cannot serve the model as asked.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = configured if isinstance(configured, list) else [configured]
    ends = [int(token) for token in known if token is not None]
    renderer = renderer or ChatRenderer(tokenizer, end_ids=ends)
    own_limit = getattr(model.config, "max_position_embeddings", None) or _DEFAULT_CONTEXT
    context = max_context or min(own_limit, _DEFAULT_CONTEXT)
    engine = VllmEngine(
        lambda: VllmBackend(
            folder,
            max_batch=max_batch,
            max_context=context,
            kv_budget_bytes=kv_budget_bytes or _DEFAULT_KV_BYTES,
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
    return LocalClient(cast(Any, engine), tokenizer, name, renderer=renderer)
