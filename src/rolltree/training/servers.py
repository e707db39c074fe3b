"""Servers as what serves the trained weights: by disk or by transfer, versioned.

    disk        weights/version-000012/ in the run directory, in Hugging Face's layout; the servers
                see the same path and reload
    transfer    they are sent the tensors, and nothing is written

Servers hold copies, so they need not stand still while the optimizer writes; each is paused while
it loads, its requests stay and go on with the new weights. It knows clients of servers. It leaves
out starting them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolltree.errors import ConfigError
from rolltree.inference import ChatRenderer, EndpointPool, WeightTransfer, publish_weights
from rolltree.inference.publish import HasServer
from rolltree.training.config import TrainConfig
from rolltree.training.export import export_model
from rolltree.training.lora import plain_tensors


class _Copies:
    """What servers with copies of the weights have in common."""

    _version = -1

    @property
    def version(self) -> int:
        """The version that all servers have confirmed; -1 before the first."""
        return self._version

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Do nothing: the trainer's tensors are not the servers'."""
        yield


class ServerTarget(_Copies):
    """A `WeightTarget` over servers.

    Args:
        model: the module that is trained.
        clients: one per server.
        folder: where versions are written, readable for the servers under the same path.
        method: the worker's method that reloads, see `publish_weights`.
    """

    def __init__(
        self, model: Any, clients: Sequence[HasServer], folder: Path, *, method: str
    ) -> None:
        self._model, self._clients, self._method = model, clients, method
        self._folder = folder

    async def publish(self, version: int) -> None:
        """Write the weights, have every server load them, and remove older ones.

        Raises:
            ModelError: a server failed; it is named.
        """
        path = self._folder / f"version-{version:06d}"
        await asyncio.to_thread(export_model, self._model, None, path)
        await publish_weights(self._clients, path, version, method=self._method)
        self._version = version
        for old in self._folder.glob("version-*"):
            if old != path:
                await asyncio.to_thread(shutil.rmtree, old)


class TransferTarget(_Copies):
    """A `WeightTarget` over servers that are sent the weights.

    Args:
        model: the module that is trained, or a plain copy of it (adapters, ranks).
        clients: one per server.
        address: this machine's, as the servers reach it.

    Raises:
        ConfigError: the model's tensors have other names than its checkpoint's.
    """

    def __init__(self, model: Any, clients: Sequence[HasServer], *, address: str) -> None:
        if getattr(model, "_weight_conversions", None):
            raise ConfigError(
                f"the tensors of {type(model).__name__} were renamed or fused when its checkpoint "
                "was read, so servers would not know what is sent. Use engine.publish = 'disk', "
                "which writes them as they were."
            )
        device = next(model.parameters()).device
        on_gpu = device.type == "cuda"
        self._model = model
        self._transfer = WeightTransfer(
            clients,
            backend="nccl" if on_gpu else "gloo",
            device=device if on_gpu else None,
            address=address,
        )

    async def publish(self, version: int) -> None:
        """Send every server the weights.

        Raises:
            ModelError: a server failed; it is named.
        """
        await self._transfer.publish(plain_tensors(self._model), version)
        self._version = version

    async def aclose(self) -> None:
        """Let go of the servers."""
        await self._transfer.aclose()


def server_parts(
    config: TrainConfig, model: Any, tokenizer: Any
) -> tuple[EndpointPool, ServerTarget | TransferTarget]:
    """Return the client and the weight target for `engine.urls`.

    Raises:
        ConfigError: `engine.api_key_env` names a variable that is not set, or the model cannot be
            transferred.
    """
    section = config.engine
    key = None if section.api_key_env is None else os.environ.get(section.api_key_env)
    if section.api_key_env is not None and not key:
        raise ConfigError(
            f"engine.api_key_env is {section.api_key_env!r} and that variable is not set, so the "
            "servers would refuse every request. Export it, or leave the setting out."
        )
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = configured if isinstance(configured, list) else [configured]
    pool = EndpointPool.of(
        section.urls,
        section.served_model or config.model.name,
        api_key=key,
        renderer=ChatRenderer(tokenizer, end_ids=[int(i) for i in known if i is not None]),
        token_ids="vllm",
        logprobs_mode="processed",
    )
    if section.publish == "transfer":
        return pool, TransferTarget(model, pool.clients, address=section.transfer_address)
    folder = Path(config.run.dir).absolute() / "weights"
    return pool, ServerTarget(model, pool.clients, folder, method=section.reload_method)
