"""A model client from flags: an OpenAI-compatible URL, or the embedded engine.

The embedded engine, and with it torch, is imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rolltree.inference import ModelClient, OpenAIClient


@asynccontextmanager
async def open_client(
    model: str, *, base_url: str | None, api_key: str | None, max_concurrent: int, seed: int
) -> AsyncIterator[ModelClient]:
    """Open the client for a model and close it afterwards.

    Raises:
        UnknownName: without `base_url`: no such local model.
    """
    client: ModelClient
    if base_url is not None:
        client = OpenAIClient(base_url, model, api_key=api_key, max_connections=max_concurrent)
    else:
        from rolltree.inference.local import local_client
        from rolltree.models import load_model

        loaded, tokenizer = load_model(model)
        client = local_client(
            loaded, tokenizer, name=model, max_batch=min(max_concurrent, 64), seed=seed
        )
    try:
        yield client
    finally:
        await client.aclose()
