"""One process group per server: how trainer and workers connect, and how buckets are sent.

The trainer (rank 0) opens a store on one of its addresses and sends an invitation. The workers
(ranks 1 and up) connect to the store, and both sides make a process group that no other part of the
program uses: gloo between CPUs, nccl between GPUs. Every wait has a time limit. A gloo operation
cannot be cancelled, so when a channel is closed, a separate thread waits for it.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as torch_distributed
from torch import Tensor

from rolltree.scale.weights.buckets import Bucket, pack, unpack_bucket
from rolltree.values.errors import ConfigError, ConnectionFailed

# torch's stubs leave out stores and groups.
dist: Any = torch_distributed
BackendName = Literal["gloo", "nccl"]
# Waiting polls, because a wait for a gloo operation cannot be interrupted.
_POLL_S = 0.0005
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Invitation:
    """The address at which the workers of one server connect to the trainer, sent as JSON.

    `world_size` includes the trainer; `timeout_s` is how long a worker waits for one bucket.
    """

    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: str
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)]
    backend: BackendName
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]

    def as_data(self) -> dict[str, Any]:
        """Return the invitation as JSON data."""
        return asdict(self)


@dataclass(slots=True)
class PendingBroadcast:
    """A broadcast under way; it keeps its buffer alive."""

    work: Any
    buffer: Tensor
    began_s: float


class Channel:
    """A process group in which rank 0 broadcasts. Any thread may close it.

    Args:
        group: torch's process group; nothing else uses it.
        device: the device of the buffers.
        timeout_s: how long one broadcast may take.
    """

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._group = group

    def start(self, buffer: Tensor) -> PendingBroadcast:
        """Start to broadcast `buffer`, or to receive into it.

        Raises:
            ConnectionFailed: the channel is closed.
        """
        group, options = self._group, dist.BroadcastOptions()
        if group is None:
            raise _given_up()
        options.rootRank = 0
        return PendingBroadcast(group.broadcast([buffer], options), buffer, time.monotonic())

    def wait(self, flight: PendingBroadcast) -> None:
        """Wait until a broadcast is done.

        Raises:
            ConnectionFailed: a member is gone, time is up, or the channel was closed meanwhile. The
                channel is then closed.
        """
        try:
            while not flight.work.is_completed():
                if self._group is None:
                    raise _given_up()
                if time.monotonic() - flight.began_s > self.timeout_s:
                    raise ConnectionFailed(
                        f"a bucket of weights was not passed on within {self.timeout_s:g} s. Is "
                        "the other side still running? Raise timeout_s if it is only slow."
                    )
                time.sleep(_POLL_S)
            flight.work.wait()
        except RuntimeError as error:
            # torch's message names a socket, not the reason.
            self.close()
            raise ConnectionFailed(
                f"the other side of a weight transfer is gone or gave up ({error})."
            ) from error
        except ConnectionFailed:
            self.close()
            raise

    def broadcast(self, buffer: Tensor) -> None:
        """Call `start`, then `wait`."""
        self.wait(self.start(buffer))

    def close(self) -> None:
        """Leave the group; pending operations of the other members fail."""
        box, self._group = [self._group], None
        # Dropping the last reference waits for the operation under way, which gloo cannot
        # interrupt, so a separate thread does it (design/0012).
        if box[0] is not None:
            threading.Thread(target=_free, args=(box,), daemon=True).start()


class Rendezvous:
    """The trainer's side of a channel that is being set up.

    `invitation` is for the workers. Call `join` when `is_complete`.

    Raises:
        ConfigError: `address` is not an address of this machine.
    """

    def __init__(
        self, address: str, num_workers: int, backend: BackendName, timeout_s: float
    ) -> None:
        listener = _listen(address)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            # torch's default listens on every address.
            master_listen_fd=listener.detach(),
        )
        token = secrets.token_hex(_TOKEN_BYTES)
        # Workers wait twice as long: while the trainer waits for a server that hangs, the healthy
        # servers must not give up first (design/0012).
        self.invitation = Invitation(address, port, token, 1 + num_workers, backend, 2 * timeout_s)
        self._timeout_s = timeout_s
        self._store = dist.PrefixStore(token, store)

    @property
    def is_complete(self) -> bool:
        """Whether every worker has connected."""
        ranks = range(1, self.invitation.world_size)
        return bool(self._store.check([_seat(rank) for rank in ranks]))

    def join(self, device: torch.device) -> Channel:
        """Set up the channel together with the workers; it blocks.

        Raises:
            ConnectionFailed: a worker did not join in time.
            ConfigError: this torch lacks the backend.
        """
        return _join(self._store, self.invitation, 0, device, self._timeout_s)


def accept(invitation: Invitation, rank: int, device: torch.device) -> Channel:
    """Connect to the trainer as worker `rank` (from 1) and set up the channel; it blocks.

    Raises:
        ConnectionFailed: the trainer cannot be reached, or did not join in time.
        ConfigError: this torch lacks the backend.
    """
    try:
        store = dist.TCPStore(
            invitation.address,
            invitation.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=invitation.timeout_s),
        )
        named = dist.PrefixStore(invitation.token, store)
        named.set(_seat(rank), "here")
    except RuntimeError as error:
        raise ConnectionFailed(
            f"the trainer cannot be reached at {invitation.address}:{invitation.port} ({error}). "
            "Is its address one that this machine can reach (engine.transfer_address)?"
        ) from error
    return _join(named, invitation, rank, device, invitation.timeout_s)


def send(
    buckets: Sequence[Bucket],
    tensors: Sequence[Tensor],
    channels: Sequence[Channel],
    device: torch.device,
) -> dict[Channel, Exception]:
    """Send tensors through all channels at the same time; return the errors by channel.

    Each bucket is packed once, while the previous bucket is being sent. A channel that fails is
    dropped; the others continue.
    """
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    memories = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    failed: dict[Channel, Exception] = {}
    pending: list[tuple[Channel, PendingBroadcast]] = []

    def land() -> None:
        for channel, flight in pending:
            try:
                channel.wait(flight)
            except ConnectionFailed as error:
                failed[channel] = error

    done = 0
    for number, bucket in enumerate(buckets):
        held = tensors[done : done + len(bucket.specs)]
        done += len(held)
        # Packed into the second buffer, while the first may still be in flight.
        buffer = pack(bucket, held, memories[number % 2])
        land()
        pending = []
        for channel in channels:
            if channel not in failed:
                try:
                    pending.append((channel, channel.start(buffer)))
                except (ConnectionFailed, RuntimeError) as error:
                    failed[channel] = error
        if not pending:
            return failed
    land()
    return failed


def receive(channel: Channel, buckets: Iterable[Bucket]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the verified tensors of each bucket as it arrives, while the next one is received.

    Each bucket has its own memory, so the loader may keep views of it.

    Raises:
        ConnectionFailed: the trainer is gone, or sends nothing in time.
        BadResponse: a checksum differs.
    """

    def start(bucket: Bucket | None) -> PendingBroadcast | None:
        if bucket is None:
            return None
        return channel.start(
            torch.empty(bucket.num_bytes, dtype=torch.uint8, device=channel.device)
        )

    coming = iter(buckets)
    bucket = next(coming, None)
    flight = start(bucket)
    while bucket is not None and flight is not None:
        channel.wait(flight)
        arrived, buffer = bucket, flight.buffer
        bucket = next(coming, None)
        flight = start(bucket)
        yield unpack_bucket(arrived, buffer)


def check_backend(backend: str) -> None:
    """Refuse a backend that cannot be used here.

    Raises:
        ConfigError: it is unknown, or it is nccl and torch has none or sees no GPU.
    """
    if backend not in _GROUPS:
        raise ConfigError(f"backend is {backend!r}; weights travel by {' or '.join(_GROUPS)}.")
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError(
            "weights are to be sent by nccl, but this torch lacks nccl or sees no GPU. Use backend "
            "'gloo', which sends from and to the CPU's memory."
        )


def buffer_device(backend: str, device: torch.device) -> torch.device:
    """Return the device of the buffers for a model on `device`.

    Raises:
        ConfigError: `check_backend` refuses it, or it is nccl and the model is not on a GPU.
    """
    check_backend(backend)
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"weights are to be sent by nccl, which needs a GPU on both sides, but the model is on "
            f"{device}. Use backend 'gloo', or put both on GPUs."
        )
    return device if backend == "nccl" else torch.device("cpu")


def _join(
    store: Any, invitation: Invitation, rank: int, device: torch.device, timeout_s: float
) -> Channel:
    """Make the group; its first broadcast verifies that every member belongs to it."""
    device = buffer_device(invitation.backend, device)
    try:
        group = _GROUPS[invitation.backend](store, rank, invitation, timeout_s)
    except RuntimeError as error:
        raise ConnectionFailed(
            f"trainer and server did not find each other in time ({error}). They must reach each "
            f"other on any port: the trainer is at {invitation.address}."
        ) from error
    channel = Channel(group, device, timeout_s)
    greeting = torch.tensor(list(bytes.fromhex(invitation.token)), dtype=torch.uint8)
    # The token came over HTTP, so only the trainer that sent it can broadcast it.
    heard = greeting.to(device) if rank == 0 else torch.zeros(_TOKEN_BYTES, dtype=torch.uint8)
    heard = heard.to(device)
    channel.broadcast(heard)
    if not torch.equal(heard.cpu(), greeting):
        channel.close()
        raise ConnectionFailed(
            "the process that connected is not the trainer; no weights were received."
        )
    return channel


def _gloo(store: Any, rank: int, invitation: Invitation, timeout_s: float) -> Any:
    own = invitation.address
    if rank:
        host = f"[{own}]" if ":" in own else own
        own = address_towards(f"tcp://{host}:{invitation.port}")
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, invitation.world_size, options)


def _nccl(store: Any, rank: int, invitation: Invitation, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    # Longer than `Channel.wait`'s own limit, which must come first.
    options._timeout = timedelta(seconds=2 * timeout_s)
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    # With 2, a lost peer ends this group, not the process. torch reads it when the group is made.
    os.environ[name] = "2"
    try:
        return dist.ProcessGroupNCCL(store, rank, invitation.world_size, options)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_GROUPS: dict[str, Callable[[Any, int, Invitation, float], Any]] = {"gloo": _gloo, "nccl": _nccl}


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the trainer cannot listen on {address!r} ({error}). Set engine.transfer_address to "
            "an address of this machine that the servers can reach."
        ) from error
    return listener


def address_towards(url: str) -> str:
    """Return this machine's address on the route to a URL's host; nothing is sent.

    Raises:
        ConnectionFailed: the host name cannot be resolved, or has no route.
    """
    parts = urlsplit(url)
    try:
        kind = socket.SOCK_DGRAM
        family, _, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=kind)[0]
        with socket.socket(family, kind) as probe:
            # Connecting a datagram socket only looks up the route.
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConnectionFailed(f"{parts.hostname} has no route or address ({error}).") from error


def _free(box: list[Any]) -> None:
    group = box.pop()
    # Not for gloo, whose abort does nothing.
    if not isinstance(group, dist.ProcessGroupGloo):
        group.abort()


def _given_up() -> ConnectionFailed:
    return ConnectionFailed("the transfer was cancelled because the other side failed.")


def _seat(rank: int) -> str:
    return f"worker/{rank}"
