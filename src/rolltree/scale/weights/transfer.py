"""Publishing without a disk: vLLM's weight-transfer endpoints control it, a broadcast sends data.

    all servers     pause, /start_weight_update
    each server     /update_weights, which receives      } at the same time,
    the trainer     packs each bucket once and sends it  } the sending in a thread
    each server     /finish_weight_update, drop cached keys, set and verify the version, resume

vLLM must be started for it (`SETUP`); `rolltree serve` always supports it. Each server has its own
process group, so a failure affects only that server; its group is recreated at the next publish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rolltree._helpers.tasks import wait_shielded
from rolltree.inference.http import HttpClient
from rolltree.inference.reachable import call
from rolltree.inference.retry import ONCE, RetryPolicy
from rolltree.scale.weights.buckets import Bucket, TensorSpec, fill_buckets, specs_to_data
from rolltree.scale.weights.channel import (
    BackendName,
    Channel,
    Rendezvous,
    address_towards,
    check_backend,
    send,
)
from rolltree.scale.weights.publish import HasServer, publish_by, update_server
from rolltree.values.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    ServerError,
)

SETUP = (
    "vLLM receives weights when it is started with VLLM_SERVER_DEV_MODE=1 in its environment and "
    "--worker-extension-cls rolltree.scale.vllm.worker.WeightReload "
    """--weight-transfer-config '{"backend": "rolltree"}'."""
)
# A repeated request would join a transfer that is already under way (design/0012).
_FEW = RetryPolicy(max_retries=3, first_wait_s=0.1)
# How long /update_weights may take: practically unlimited, since the transfer has its own limits.
_DAY_S = 86400.0
# How long to wait for a server's answer that says why it aborted a transfer.
_REASON_S = 5.0
_POLL_S = 0.005


class WeightTransfer:
    """Sends weights to servers; reusable, one `publish` at a time.

    Args:
        clients: one per server.
        backend: `"gloo"`, or `"nccl"` between GPUs (not yet run on any).
        device: the GPU on which nccl's buckets are packed; None: torch's current GPU.
        address: an address of this machine that the servers, and only they, can reach. Both sides
            connect on any port, unencrypted. None: the address on the route to each server.
        bucket_bytes: size of the buckets that are packed and sent; two are in memory. A larger
            tensor is a bucket of its own.
        timeout_s: how long a server may take for one bucket, and to connect.

    Raises:
        ConfigError: a size or time is not above 0, or this torch lacks the backend.
    """

    def __init__(
        self,
        clients: Sequence[HasServer],
        *,
        backend: BackendName = "gloo",
        device: torch.device | str | None = None,
        address: str | None = None,
        bucket_bytes: int = 64 * 2**20,
        timeout_s: float = 60.0,
    ) -> None:
        if bucket_bytes < 1 or timeout_s <= 0:
            raise ConfigError(
                f"bucket_bytes is {bucket_bytes} and timeout_s is {timeout_s:g}; both must be > 0."
            )
        self._clients, self._backend = list(clients), backend
        self._address = address
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        check_backend(backend)
        self._device = torch.device("cpu")
        # Resolved here, since other threads have their own current device.
        if backend == "nccl":
            self._device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        elif device is not None:
            raise ConfigError(
                f"device is {str(device)!r}, but the gloo backend always packs on the CPU. Leave "
                "device out."
            )
        self._channels: dict[HttpClient, Channel] = {}

    async def open(self, clients: Sequence[HasServer] | None = None) -> None:
        """Connect to every server, or to those of `clients`, unless connected; `publish` does, too.

        Raises:
            ModelError: connecting to a server failed; the error says what the server needs.
        """
        outcomes = await asyncio.gather(
            *(self._channel_to(each.server) for each in clients or self._clients),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def publish(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        clients: Sequence[HasServer] | None = None,
    ) -> None:
        """Make every server, or those of `clients`, answer with these weights as policy `version`.

        Names, dtypes and shapes are those of the model's checkpoint; tied tensors come once. They
        are read until this returns and must not change meanwhile. When it returns, each server has
        checked every bucket and reported `version`, and each client's `version` is set.

        Raises:
            ConfigError: there are no tensors or no servers, a name comes twice, or the version is
                negative.
            PublishFailed: servers failed; the error names them and says which are left paused. All
                others have the new weights.
        """
        clients = self._clients if clients is None else clients
        names, tensors = _listed(named_tensors)
        specs = [TensorSpec.of(*pair) for pair in zip(names, tensors, strict=True)]
        info = {"tensors": specs_to_data(specs), "bucket_bytes": self._bucket_bytes}
        servers = [client.server for client in clients]
        broadcast = _Broadcast(
            servers, fill_buckets(specs, self._bucket_bytes), tensors, self._device
        )

        async def update(server: HttpClient) -> None:
            try:
                channel = await self._channel_to(server)

                async def load(server: HttpClient) -> None:
                    await self._load(server, channel, broadcast, info)

                # A server that fails is dropped; its group is recreated at the next publish.
                await update_server(server, load, version)
            except BaseException:  # a cancellation, too
                self._drop(server)
                raise
            finally:
                broadcast.leave(server)

        try:
            await publish_by(update, clients, version)
        finally:
            # Also after an error, since the trainer may change the tensors when this returns.
            await broadcast.ended()

    def forget(self, client: HasServer) -> None:
        """Disconnect from a server, which may have been replaced by another process."""
        self._drop(client.server)

    async def aclose(self) -> None:
        """Disconnect from every server."""
        for server in list(self._channels):
            self._drop(server)

    def _drop(self, server: HttpClient) -> None:
        channel = self._channels.pop(server, None)
        if channel is not None:
            channel.close()

    async def _channel_to(self, server: HttpClient) -> Channel:
        if server not in self._channels:
            try:
                self._channels[server] = await self._connect(server)
            except ModelError as error:
                raise ModelError(
                    f"{server.root_url} cannot be sent weights: {error} {SETUP}"
                ) from error
        return self._channels[server]

    async def _connect(self, server: HttpClient) -> Channel:
        answer = await call(server, "/get_world_size", None)
        num_workers = answer.get("world_size") if isinstance(answer, dict) else None
        if not isinstance(num_workers, int) or num_workers < 1:
            raise BadResponse(f"/get_world_size answered {answer!r}, without a world size.")
        address = self._address
        if address is None:
            address = await asyncio.to_thread(address_towards, server.root_url)
        rendezvous = Rendezvous(address, num_workers, self._backend, self._timeout_s)
        body = {"init_info": rendezvous.invitation.as_data()}
        asked = asyncio.ensure_future(
            call(
                server,
                "/init_weight_transfer_engine",
                body,
                retry=ONCE,
                timeout_s=3 * self._timeout_s,
            )
        )
        try:
            await self._wait_for_workers(rendezvous, asked)
            try:
                channel = await asyncio.to_thread(rendezvous.join, self._device)
            except ConnectionFailed:
                await asyncio.wait([asked], timeout=_REASON_S)
                if asked.done():
                    # The server's own error is more specific.
                    asked.result()
                raise
            try:
                await asked
            except BaseException:  # a cancellation, too
                channel.close()
                raise
        finally:
            await _cancel_request(asked)
        return channel

    async def _wait_for_workers(self, rendezvous: Rendezvous, asked: asyncio.Future[Any]) -> None:
        """Wait until every worker has connected; raises if the server fails before."""
        end = asyncio.get_running_loop().time() + self._timeout_s
        while not rendezvous.is_complete:
            if asked.done():
                asked.result()
                raise BadResponse("it reports that it is ready, but its workers did not connect.")
            if asyncio.get_running_loop().time() > end:
                raise ConnectionFailed(
                    f"its {rendezvous.invitation.world_size - 1} workers did not connect to "
                    f"{rendezvous.invitation.address} within {self._timeout_s:g} s. Can they reach "
                    "that address?"
                )
            await asyncio.sleep(_POLL_S)

    async def _load(
        self, server: HttpClient, channel: Channel, broadcast: _Broadcast, info: dict[str, Any]
    ) -> None:
        """Have one server take part in the broadcast, from `/start_weight_update` to the end."""
        await _start(server)
        sent = await broadcast.join(server, channel)
        asked = asyncio.ensure_future(
            call(server, "/update_weights", {"update_info": info}, retry=ONCE, timeout_s=_DAY_S)
        )
        # A server that answers with an error reads no more buckets, so its channel is closed.
        asked.add_done_callback(lambda done: _close_if_failed(done, channel))
        try:
            # Shielded, because all servers share the broadcast; it ends when the last server has
            # everything.
            lost = (await asyncio.shield(sent)).get(channel)
            patience_s = self._timeout_s if lost is None else min(_REASON_S, self._timeout_s)
            await asyncio.wait([asked], timeout=patience_s)
            if asked.done():
                asked.result()
            if lost is not None:
                raise ConnectionFailed(f"{server.root_url} did not receive all weights: {lost}")
            if not asked.done():
                raise ConnectionFailed(
                    f"{server.root_url} was sent all weights but did not load them within "
                    f"{patience_s:g} s. See its log."
                )
        finally:
            await _cancel_request(asked)
        await call(server, "/finish_weight_update", {}, retry=ONCE)


class _Broadcast:
    """One broadcast to all servers; it starts when each of them is ready or has failed."""

    def __init__(
        self,
        servers: Iterable[HttpClient],
        buckets: Sequence[Bucket],
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._awaited = set(servers)
        self._all_ready = asyncio.Event()
        self._payload = (buckets, tensors)
        self._device = device
        self._channels: list[Channel] = []
        self._sent: asyncio.Future[dict[Channel, Exception]] | None = None

    def leave(self, server: HttpClient) -> None:
        """Stop waiting for a server."""
        self._awaited.discard(server)
        if not self._awaited:
            self._all_ready.set()

    async def join(
        self, server: HttpClient, channel: Channel
    ) -> asyncio.Future[dict[Channel, Exception]]:
        """Wait for the other servers; return a future of the channels that failed, with errors."""
        self._channels.append(channel)
        self.leave(server)
        await self._all_ready.wait()
        if self._sent is None:
            work = asyncio.to_thread(send, *self._payload, tuple(self._channels), self._device)
            self._sent = asyncio.ensure_future(work)
        return self._sent

    async def ended(self) -> None:
        """Wait until nothing reads the tensors any more."""
        if self._sent is not None and (cancelled := await wait_shielded(self._sent)):
            raise cancelled


def _listed(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[str], list[Tensor]]:
    pairs = list(named_tensors)
    names = [name for name, _ in pairs]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not pairs or twice:
        what = f"{twice[0]!r} comes more than once" if twice else "there are no tensors"
        raise ConfigError(
            f"{what}, so these are not the weights of a model. Pass the names and tensors of a "
            "checkpoint, such as `model.named_parameters()`."
        )
    return names, [tensor for _, tensor in pairs]


async def _start(server: HttpClient) -> None:
    """Start an update; abandon an earlier update that a killed trainer left open."""
    try:
        await call(server, "/start_weight_update", {}, retry=ONCE)
    except ServerError as error:
        if error.status < 500:
            raise
        # Retried: vLLM closes the connection after an error, perhaps just as it is reused.
        await call(server, "/collective_rpc", {"method": "abandon_weight_update"}, retry=_FEW)
        await call(server, "/start_weight_update", {}, retry=ONCE)


async def _cancel_request(asked: asyncio.Future[Any]) -> None:
    """Cancel a request unless it has been answered, and wait until it has ended."""
    asked.cancel()
    await asyncio.wait([asked])
    if not asked.cancelled():
        # Retrieved, because asyncio would log the error otherwise.
        asked.exception()


def _close_if_failed(done: asyncio.Future[Any], channel: Channel) -> None:
    if not done.cancelled() and done.exception() is not None:
        channel.close()
