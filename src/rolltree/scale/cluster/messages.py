"""The messages between workers and the head, as MessagePack; nothing is pickled."""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from rolltree.store.rows import SqlRow
from rolltree.values.errors import StoreError

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class RoleMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the messages."""

    def to_bytes(self) -> bytes:
        """Return the message as bytes for `read_message`."""
        return _encode(self)


def read_message(kind: type[T], data: bytes) -> T:
    """Return the message that the bytes encode.

    Raises:
        msgspec.DecodeError: the bytes do not encode a message of this kind.
    """
    return msgspec.msgpack.decode(data, type=kind)


class EngineState(RoleMessage, frozen=True):
    """The state of an engine, which is ready if it has the published weights and passed a probe."""

    url: str
    is_ready: bool
    version: int
    epoch: int


class FleetState(RoleMessage, frozen=True):
    """The engines that workers may call, and the labels that their weights may have."""

    version: int
    labels: tuple[str, ...]
    engines: tuple[EngineState, ...]


class Served(RoleMessage, frozen=True):
    """The facts about the model that workers need to render prompts and parse answers."""

    model: str
    end_ids: tuple[int, ...]
    vocab_size: int


class Poll(RoleMessage, frozen=True):
    """A worker's request for work.

    `life` identifies its process, `slots` is how many rollouts it plays at a time, `free` how many
    more it can begin. `have` lists the items that it has; None leaves that to a later poll. The
    answer may take `wait_s`.
    """

    worker: str
    life: str
    slots: int
    free: int
    have: tuple[str, ...] | None
    wait_s: float


class Item(RoleMessage, frozen=True):
    """Requests whose results belong together: one, or a group whose members are compared."""

    item_id: str
    attempt: int
    requests: tuple[bytes, ...]


class Work(RoleMessage, frozen=True):
    """The answer to a poll: new items, items that need not be played any more, and the engines.

    `head` identifies the head's process. A new head does not know the items of the last one.
    """

    head: str
    items: tuple[Item, ...]
    drop: tuple[str, ...]
    fleet: FleetState


class WorkDone(RoleMessage, frozen=True):
    """The results of an item, in the order of its requests, as the store's rows.

    `asked` is `digest` of the requests as the worker got them.
    """

    item_id: str
    asked: int
    results: tuple[tuple[SqlRow, ...], ...]


class Delivery(RoleMessage, frozen=True):
    """The bytes of several `WorkDone`, each with its CRC-32, which are checked one by one."""

    items: tuple[tuple[int, bytes], ...]


class Receipt(RoleMessage, frozen=True):
    """The status of each item of a delivery, in its order, and the reason if it is refused.

    A status is `stored`, `known` (it was stored before), `refused`, or `later` (send it again).
    """

    items: tuple[tuple[str, str], ...]


def digest(requests: tuple[bytes, ...]) -> int:
    """Return the CRC-32 of requests as bytes."""
    return zlib.crc32(b"".join(requests))


def read_item(given: tuple[int, bytes]) -> WorkDone:
    """Return an item of a delivery.

    Raises:
        StoreError: the bytes were changed on the way, or do not encode a result.
    """
    checksum, data = given
    if zlib.crc32(data) != checksum:
        raise StoreError("these bytes differ from their checksum")
    try:
        return read_message(WorkDone, data)
    except msgspec.DecodeError as error:
        raise StoreError(f"this is not a result ({error})") from error


class Suspect(RoleMessage, frozen=True):
    """A report that a call to an engine failed; the head checks the engine before more calls."""

    url: str
