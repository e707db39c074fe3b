"""A model client from flags: OpenAI-compatible URLs, one or several, or the embedded engine.

The embedded engine, and with it torch, is imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rolltree.inference import EndpointPool, ModelClient, OpenAIClient


@asynccontextmanager
async def open_client(
    model: str,
    *,
    base_urls: Sequence[str],
    api_key: str | None,
    max_concurrent: int,
    seed: int,
) -> AsyncIterator[ModelClient]:
    """Open the client for a model and close it afterwards.

    Raises:
        UnknownName: without `base_urls`: no such local model.
    """
    client: ModelClient
    if len(base_urls) > 1:
        client = EndpointPool.of(base_urls, model, api_key=api_key, max_connections=max_concurrent)
    elif base_urls:
        client = OpenAIClient(base_urls[0], model, api_key=api_key, max_connections=max_concurrent)
    else:
        from rolltree.inference.local import local_client
        from rolltree.models import load_model

        loaded, tokenizer = load_model(model)
        client = local_client(
            loaded,
            tokenizer,
            name=model,
            max_batch=min(max_concurrent, 64),
            pack_weights=True,
            seed=seed,
        )
    try:
        yield client
    finally:
        await client.aclose()
