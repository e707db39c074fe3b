"""What workers and the head say to each other, as MessagePack; nothing is pickled."""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from rolltree.errors import StoreError
from rolltree.store.rows import SqlRow

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class RoleMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the messages."""

    def to_bytes(self) -> bytes:
        """Return it as bytes for `read_message`."""
        return _encode(self)


def read_message(kind: type[T], data: bytes) -> T:
    """Return the message.

    Raises:
        msgspec.DecodeError: these are not the bytes of such a message.
    """
    return msgspec.msgpack.decode(data, type=kind)


class EngineState(RoleMessage, frozen=True):
    """One engine. It is `is_ready` while it has the published weights and passed the probe."""

    url: str
    is_ready: bool
    version: int
    epoch: int


class FleetState(RoleMessage, frozen=True):
    """The engines that workers may ask, and the labels that their weights may have."""

    version: int
    labels: tuple[str, ...]
    engines: tuple[EngineState, ...]


class Served(RoleMessage, frozen=True):
    """What workers must know of the model to render prompts and read answers as the head does."""

    model: str
    end_ids: tuple[int, ...]
    vocab_size: int


class Poll(RoleMessage, frozen=True):
    """A worker asks for work.

    `life` is a name of its process, `slots` how many rollouts it plays at a time, `free` how many
    more it can begin, `have` the items that it has, None to leave that for a later poll. The answer
    may take `wait_s`.
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
    """The answer to a poll: new items, what need not be played any more, and the engines.

    `head` names the head's life. Another one does not know what was played for the last.
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
    """The bytes of several `WorkDone`, each with its CRC-32: a bad one leaves the others."""

    items: tuple[tuple[int, bytes], ...]


class Receipt(RoleMessage, frozen=True):
    """What became of the items of a delivery, in its order: a status, and why if it is refused.

    They are `stored`, `known` if they were stored before, `refused`, or to be sent again `later`.
    """

    items: tuple[tuple[str, str], ...]


def digest(requests: tuple[bytes, ...]) -> int:
    """Return the CRC-32 of requests as bytes."""
    return zlib.crc32(b"".join(requests))


def read_item(given: tuple[int, bytes]) -> WorkDone:
    """Return an item of a delivery.

    Raises:
        StoreError: these are not the bytes that were sent, or not those of a result.
    """
    checksum, data = given
    if zlib.crc32(data) != checksum:
        raise StoreError("these bytes differ from their checksum")
    try:
        return read_message(WorkDone, data)
    except msgspec.DecodeError as error:
        raise StoreError(f"this is not a result ({error})") from error


class Suspect(RoleMessage, frozen=True):
    """A call to an engine failed; the head looks at it before it is asked again."""

    url: str
