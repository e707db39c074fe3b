"""Converts requests and results to bytes and back, for rollout workers in other processes.

A result is sent as the rows that the store keeps, so the receiver can store it without encoding it
again, and reads its messages and tokens only if they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rolltree.rollouts.decode import UNREADABLE, decode_request, decode_results
from rolltree.rollouts.message_table import MessageReader, MessageTable
from rolltree.rollouts.record import encode_result, request_data
from rolltree.store import StoredRollout, dumps, loads
from rolltree.store.rows import LIGHT, SqlRow, read_sql, to_sql
from rolltree.values.errors import ConfigError, StoreError
from rolltree.values.types import RolloutRequest, RolloutResult

_OPAQUE = '{"$t":"opaque"'
_NUM_LIGHT = len(LIGHT)
_OWN = [name for name in RolloutRequest.__dataclass_fields__ if name not in ("input", "sampling")]


def request_encoder() -> Callable[[RolloutRequest], bytes]:
    """Return a function that encodes requests for `request_from_bytes`.

    An input that successive requests share is encoded once. The function raises `ConfigError` for
    an object that is not data, which cannot leave the process.
    """
    of: tuple[object, object] = (None, None)
    shared = ""

    def encode(request: RolloutRequest) -> bytes:
        nonlocal of, shared
        # Members of a group share these objects.
        if of[0] is not request.input or of[1] is not request.sampling:
            shared, of = _shared_text(request), (request.input, request.sampling)
        own = {name: getattr(request, name) for name in _OWN}
        return f"{shared}{dumps(own)[1:]}}}".encode()

    return encode


def _shared_text(request: RolloutRequest) -> str:
    """Return the first part of a request's text: the fields that a group's members share."""
    table = MessageTable()
    data = request_data(request, table)
    # With its secrets, unlike in the store: the worker sends these fields to the server.
    data["sampling"]["extra"] = dict(request.sampling.extra)
    data = {name: data[name] for name in ("input", "sampling")}
    text = f'{{"table":{table.to_json()},{dumps({"request": data})[1:-2]},'
    if _OPAQUE in text:
        raise ConfigError(
            f"the request {request.request_id!r} holds an object that is not data, which a rollout "
            "worker in another process would not get. Have the environment make such objects in "
            "`setup_state` from plain data, or train in one process, without [cluster]."
        )
    return text


def request_from_bytes(data: bytes) -> RolloutRequest:
    """Return the request that a `request_encoder` encoded.

    Raises:
        StoreError: an encoder did not make these bytes.
    """
    try:
        found = loads(data)
        return decode_request(found["request"], MessageReader(found["table"]))
    except UNREADABLE as error:
        raise StoreError(f"this is not a request ({type(error).__name__}: {error}).") from error


def result_to_rows(result: RolloutResult, secrets: tuple[str, ...] = ()) -> tuple[SqlRow, ...]:
    """Return a result as the store's rows, with the known secrets cut out."""
    return tuple(to_sql(row, secrets) for row in encode_result(result))


class _LaterResult(RolloutResult):
    """A result whose states are decoded from its rows on first access."""

    __slots__ = ("_rows",)
    _rows: Sequence[SqlRow]

    def __getattr__(self, name: str) -> Any:
        # Called only while the slot is empty.
        if name != "states":
            raise AttributeError(name)
        (found,) = decode_results(map(read_sql, self._rows))
        object.__setattr__(self, "states", found.states)
        object.__setattr__(self, "_rows", ())
        return found.states


def result_from_rows(
    rows: Sequence[SqlRow], request: RolloutRequest | None = None
) -> tuple[RolloutResult, list[StoredRollout]]:
    """Return a result that came as rows, and the rows without their blobs.

    Its states are decoded on first access, which raises `StoreError` if they are unreadable.

    Raises:
        StoreError: the rows do not belong to one result, or not to `request`.
    """
    try:
        stored = [read_sql(row[:_NUM_LIGHT]) for row in rows]
        result = _read(rows, stored, request)
    except UNREADABLE as error:
        raise StoreError(
            f"these rows are not a result ({type(error).__name__}: {error})."
        ) from error
    asked = result.request
    for index, row in enumerate(stored):
        place = (row.request_id, row.trajectory_index, row.num_trajectories)
        if place != (asked.request_id, index, len(stored)) or _scope(row) != _scope(asked):
            raise StoreError(
                f"row {index} of {row.request_id!r} does not belong to a result of "
                f"{asked.request_id!r} that has {len(stored)} rows."
            )
    return result, stored


def _read(
    rows: Sequence[SqlRow], stored: Sequence[StoredRollout], request: RolloutRequest | None
) -> RolloutResult:
    if request is None or not all(row.status == "ok" for row in stored):
        (whole,) = decode_results(map(read_sql, rows))
        # The request in the rows lacks the secrets in its sampling fields.
        return replace(whole, request=request or whole.request)
    result = object.__new__(_LaterResult)
    values = {"request": request, "error": None, "num_attempts": stored[0].num_attempts}
    for name, value in {**values, "_rows": rows}.items():
        object.__setattr__(result, name, value)
    return result


def _scope(of: StoredRollout | RolloutRequest) -> tuple[object, ...]:
    return of.group_id, of.index_in_group, of.phase, of.train_step, of.env_id
