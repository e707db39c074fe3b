"""Requests and results as bytes, for processes that play rollouts for another one.

A result travels as the rows that the store keeps, so whoever stores it need not encode it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolltree.errors import ConfigError, StoreError
from rolltree.rollouts.decode import UNREADABLE, decode_request, decode_results
from rolltree.rollouts.message_table import MessageReader, MessageTable
from rolltree.rollouts.record import encode_result, request_data
from rolltree.store import StoredRollout, dumps, loads
from rolltree.types import RolloutRequest, RolloutResult

_OPAQUE = '{"$t":"opaque"'
_COLUMNS = [name for name in StoredRollout.__dataclass_fields__ if name not in ("record", "tokens")]

Row = tuple[bytes, bytes, bytes]
"""The columns, the record and the tokens of a row of the store."""


def request_to_bytes(request: RolloutRequest) -> bytes:
    """Return what `request_from_bytes` turns back.

    Raises:
        ConfigError: its input holds an object with behaviour, which cannot leave the process.
    """
    table = MessageTable()
    data = request_data(request, table)
    # Not cut as in the store: the request is to be made.
    data["sampling"]["extra"] = dict(request.sampling.extra)
    text = f'{{"table":{table.to_json()},{dumps({"request": data})[1:]}'
    if _OPAQUE in text:
        raise ConfigError(
            f"the request {request.request_id!r} holds an object that is not data, which a rollout "
            "worker in another process would not get. Have the environment make such objects in "
            "`setup_state` from plain data, or train in one process, without [cluster]."
        )
    return text.encode()


def request_from_bytes(data: bytes) -> RolloutRequest:
    """Return the request that `request_to_bytes` was given.

    Raises:
        StoreError: it made no such bytes.
    """
    try:
        found = loads(data)
        return decode_request(found["request"], MessageReader(found["table"]))
    except UNREADABLE as error:
        raise StoreError(f"this is not a request ({type(error).__name__}: {error}).") from error


def result_to_rows(result: RolloutResult) -> list[Row]:
    """Return a result as rows of bytes."""
    return [_row(row) for row in encode_result(result)]


def _row(row: StoredRollout) -> Row:
    columns = {name: getattr(row, name) for name in _COLUMNS}
    return dumps(columns).encode(), row.record, row.tokens


def result_from_rows(
    rows: Sequence[Row], request: RolloutRequest | None = None
) -> tuple[RolloutResult, list[StoredRollout]]:
    """Return a result that came as bytes, and its rows as the store takes them.

    Raises:
        StoreError: the rows are not those of one result, or not of that `request`.
    """
    try:
        stored = [_stored(row) for row in rows]
        (result,) = decode_results(stored)
    except UNREADABLE as error:
        raise StoreError(
            f"these rows are not a result ({type(error).__name__}: {error})."
        ) from error
    asked = request or result.request
    for index, row in enumerate(stored):
        place = (row.request_id, row.trajectory_index, row.num_trajectories)
        if place != (asked.request_id, index, len(stored)) or _scope(row) != _scope(asked):
            raise StoreError(
                f"row {index} of {row.request_id!r} does not belong to a result of "
                f"{asked.request_id!r} that has {len(stored)} rows."
            )
    seeds = (result.request.seed, result.request.sampling_seed)
    if seeds != (asked.seed, asked.sampling_seed):
        raise StoreError(f"the result of {asked.request_id!r} has other seeds than its request.")
    # The one that was asked has its sampling fields whole.
    return replace(result, request=asked), stored


def _stored(row: Row) -> StoredRollout:
    columns, record, tokens = row
    data: dict[str, Any] = loads(columns)
    return StoredRollout(**data, record=record, tokens=tokens)


def _scope(of: StoredRollout | RolloutRequest) -> tuple[object, ...]:
    return of.group_id, of.index_in_group, of.phase, of.train_step, of.env_id


def light(rows: Sequence[StoredRollout]) -> list[StoredRollout]:
    """Return rows without their blobs, as `run.rollouts(blobs=False)` reads them."""
    return [replace(row, record=b"", tokens=b"") for row in rows]
