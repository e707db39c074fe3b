"""Publishes new weights to servers: has them load the weights, sets the version, verifies it.

The same calls work on vLLM (started with `VLLM_SERVER_DEV_MODE=1`) and on `rolltree serve`: pause,
load, drop cached keys, set the version, verify it, resume. A request in flight is kept and
continues with the new weights; each of its tokens carries the version that sampled it.
`publish_weights` has servers load safetensors from a disk that they can read, `publish_adapter` a
LoRA adapter (vLLM only). The other modules of `rolltree.scale.weights` move weights without a
disk, by the same procedure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from rolltree.inference.http import HttpClient
from rolltree.inference.reachable import call, served_version
from rolltree.values.errors import BadResponse, ConfigError, ModelError, PublishFailed, ServerError

RELOAD_METHOD = "reload_all_weights"
"""The worker's method that reloads all weights; in vLLM, a worker extension provides it."""
Update = Callable[[HttpClient], Awaitable[None]]
"""Updates one server, or loads its weights; raises `ModelError` if that fails."""


class HasServer(Protocol):
    """A client of one server, such as `OpenAIClient`."""

    version: int

    @property
    def server(self) -> HttpClient:
        """The client's server."""
        ...


async def publish_weights(
    clients: Sequence[HasServer], folder: Path, version: int, *, method: str = RELOAD_METHOD
) -> None:
    """Make every server answer with the weights in `folder`, as policy `version`.

    `folder` holds `*.safetensors` in Hugging Face's layout, or is a single such file; servers must
    see it under the same path. When this returns, each server has reported `version`, and each
    client's `version` is set. Servers are updated at the same time. `method` is the worker's
    method that reloads. vLLM's own, `"reload_weights"`, does not reload a tied output layer on a
    CPU; the default reloads everything, and `rolltree.scale.vllm.worker` adds it to vLLM.

    Raises:
        ConfigError: the folder has no safetensors, the version is negative, there is no server, or
            a server lacks the method (it continues with the weights it had).
        PublishFailed: servers failed; the error names them and says which are left paused. All
            others have the new weights.
    """
    body = {"method": method, "kwargs": {"weights_path": str(_weights_in(folder))}}

    async def load(server: HttpClient) -> None:
        try:
            await call(server, "/collective_rpc", body)
        except ServerError as error:
            if f"no attribute '{method}'" not in str(error):
                raise
            # Nothing was loaded, so the server may continue.
            await call(server, "/resume", {})
            raise ConfigError(
                f"the workers of {server.root_url} have no method {method!r}, so no weights were "
                "loaded. Start vLLM with --worker-extension-cls "
                "rolltree.scale.vllm.worker.WeightReload. Without it there is only vLLM's own "
                "method 'reload_weights', which leaves a tied output layer as it was on a CPU."
            ) from error

    await publish_by(lambda server: update_server(server, load, version), clients, version)


async def publish_adapter(
    clients: Sequence[HasServer], folder: Path, version: int, *, name: str
) -> None:
    """Make every vLLM server answer for model `name` with the adapter in `folder`, as `version`.

    `folder` holds `adapter_model.safetensors` and `adapter_config.json` (peft's layout) under the
    same path for the servers; clients request the model `name`. A new adapter of the same name
    replaces the old one. vLLM needs `--enable-lora` and, in its environment,
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and `VLLM_SERVER_DEV_MODE=1`. The rest is as in
    `publish_weights`.

    Raises:
        ConfigError: the folder holds no adapter, the version is negative, or there is no server.
        PublishFailed: as in `publish_weights`.
    """
    # Absolute, because servers have different working directories.
    folder = _weights_in(folder)
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{folder} has no adapter_config.json, so it is not a LoRA adapter. Whole models are "
            "published by publish_weights; adapters are saved by peft's save_pretrained."
        )
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}

    async def load(server: HttpClient) -> None:
        await call(server, "/v1/load_lora_adapter", body, bytes)

    await publish_by(lambda server: update_server(server, load, version), clients, version)


async def publish_by(update: Update, clients: Sequence[HasServer], version: int) -> None:
    """Update every server at the same time, and set the clients' versions.

    Raises:
        ConfigError: the version is negative, or there is no server.
        PublishFailed: servers failed; the error names them.
    """
    if version < 0 or not clients:
        raise ConfigError(
            f"version {version} cannot be published to {len(clients)} servers: the version must be "
            ">= 0, and there must be at least one server."
        )
    # All updates run to their end: an error of one server must not leave others halfway.
    outcomes = await asyncio.gather(
        *(update(client.server) for client in clients),
        return_exceptions=True,
    )
    failed: dict[HasServer, ModelError] = {}
    for client, outcome in zip(clients, outcomes, strict=True):
        if isinstance(outcome, ModelError):
            failed[client] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            # Even if another server failed, this one has the new weights.
            client.version = version
    if failed:
        raise PublishFailed(
            f"weights version {version} did not reach {len(failed)} of {len(clients)} servers, so "
            "they would answer with a different policy than the trainer's: "
            + " ".join(map(str, failed.values())),
            clients=tuple(failed),
        ) from next(iter(failed.values()))


def _weights_in(folder: Path) -> Path:
    # Not resolved: `/proc/PID/fd/N` would resolve to a name that other processes cannot open.
    if folder.is_file():
        return folder.absolute()
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} holds no *.safetensors, so there is nothing to publish. Save the model "
            "with save_pretrained first."
        )
    return folder.resolve()


async def update_server(server: HttpClient, load: Update, version: int) -> None:
    """Pause one server, give it weights by `load`, verify the version that it reports, resume.

    Raises:
        ModelError: it failed. If `load` had begun, the server is left paused.
    """
    # "keep": requests in flight are kept, and continue after the resume.
    await call(server, "/pause?mode=keep", {})
    paused = "It is left paused, since its weights may be half replaced."
    try:
        await load(server)
        reset = await call(server, "/reset_prefix_cache?reset_running_requests=true", {})
        if not isinstance(reset, dict) or reset.get("success") is not True:
            raise BadResponse(
                f"{server.root_url} did not drop its KV cache ({reset!r}), so answers would mix "
                "old and new weights."
            )
        # After loading, so that no token of the old weights gets the new version.
        await call(server, "/update_weight_version", {"new_version": str(version)})
        reported = await served_version(server)
        if reported != str(version):
            raise BadResponse(
                f"{server.root_url} reports version {reported!r} for its weights after it was "
                f"set to {version}. Is another trainer publishing to it?"
            )
    except ModelError as error:
        raise ModelError(f"{error} {paused}") from error
    # Only a server that has reported the right version is resumed.
    await call(server, "/resume", {})
