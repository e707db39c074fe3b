"""The values that a training step had for each sampled token: rows of the table `trained`.

A row's blob `tokens` is zlib over a msgpack map from the names in `TOKEN_DTYPES` to the bytes of
little-endian arrays.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rolltree.store.codec import deflate, inflate
from rolltree.store.integrity import blob_checksum, checksum, is_intact
from rolltree.values.errors import StoreError
from rolltree.values.types import FloatArray, IntArray

TRAINED_COLUMNS = {
    "id": "INTEGER PRIMARY KEY",
    "request_id": "TEXT NOT NULL",
    "trajectory_index": "INTEGER NOT NULL",
    "step": "INTEGER NOT NULL",
    "num_tokens": "INTEGER NOT NULL",
    "blob_checksum": "INTEGER",
    "checksum": "INTEGER",
    "tokens": "BLOB",
}
"""The columns of the table; `checksum` covers those before it, `blob_checksum` the blob."""
_HEAD = tuple(TRAINED_COLUMNS)[:-1]

TOKEN_DTYPES = {
    "num_sampled": "<i4",
    "advantage": "<f4",
    "weight": "<f4",
    "logprob": "<f4",
    "entropy": "<f2",
    "reference": "<f4",
    "kl": "<f4",
}
"""The stored arrays of a row: `num_sampled` has one value per call, the others one per token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedRollout:
    """One trajectory as step `step` trained it: arrays over its sampled tokens, in call order.

    A token that was in no forward pass (its weight is 0, or all advantages of its rollout are 0 and
    `train.skip_zero_advantage` is set) has NaN for the model's values. Arrays are float32 `[_T]`.
    """

    request_id: str
    trajectory_index: int = 0
    # From 1; the weights before it are version `step - 1`.
    step: int
    # How many tokens each model call sampled, int32 `[num calls]`; their sum is `_T`.
    num_sampled: IntArray
    # From credit assignment; a KL in the reward is not subtracted from it.
    advantage: FloatArray
    # The factor of the token's policy loss: the aggregation's coefficient times the correction of
    # the importance ratio; 0 if a mask, the truncation policy, staleness or `max_seq_len` excludes
    # the token from the loss.
    weight: FloatArray
    # The trainer's logprob when the step's first update reads the token: with one mini-batch, that
    # of the weights before the step.
    logprob: FloatArray
    # The entropy of the trainer's distribution at the token, in nats, with float16 precision.
    entropy: FloatArray
    # The logprob of the reference model of the KL; None without one.
    reference: FloatArray | None = None
    # The KL over the whole vocabulary at the token, if `algorithm.kl` is `full`.
    kl: FloatArray | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens all calls sampled together."""
        return len(self.advantage)

    @property
    def call(self) -> IntArray:
        """The index of the call that sampled each token, int32 `[_T]`."""
        import numpy as np

        return np.repeat(np.arange(len(self.num_sampled), dtype=np.int32), self.num_sampled)

    def __post_init__(self) -> None:
        num_tokens = int(self.num_sampled.sum())
        for name in TOKEN_DTYPES:
            values = getattr(self, name)
            if name != "num_sampled" and values is not None and len(values) != num_tokens:
                raise StoreError(
                    f"{name} of rollout {self.request_id!r} has {len(values)} values for "
                    f"{num_tokens} sampled tokens, so values cannot be matched to tokens. Pass "
                    "one per token."
                )


def trained_to_sql(row: TrainedRollout) -> tuple[Any, ...]:
    """Return the SQL values of a row: the columns between `id` and the checksums, and the blob."""
    import numpy as np

    arrays = {
        name: np.ascontiguousarray(values, dtype).tobytes()
        for name, dtype in TOKEN_DTYPES.items()
        if (values := getattr(row, name)) is not None
    }
    blob = deflate(msgspec.msgpack.encode(arrays))
    return row.request_id, row.trajectory_index, row.step, row.num_tokens, blob


def trained_from_sql(values: Sequence[Any]) -> TrainedRollout:
    """Return the row with these values of `TRAINED_COLUMNS`.

    Raises:
        StoreError: see `verify_trained`; or `trained_to_sql` did not make the blob.
    """
    import numpy as np

    verify_trained(values)
    _, request_id, trajectory_index, step, _, _, _, blob = values
    try:
        arrays = {
            name: np.frombuffer(data, TOKEN_DTYPES[name])
            for name, data in msgspec.msgpack.decode(inflate(blob)).items()
        }
        arrays["entropy"] = arrays["entropy"].astype(np.float32)
        return TrainedRollout(
            request_id=request_id, trajectory_index=trajectory_index, step=step, **arrays
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"the trained tokens of rollout {request_id!r} (row {values[0]}) cannot be read"
        raise StoreError(f"{what}: {error}") from error


def verify_trained(values: Sequence[Any]) -> None:
    """Compare values of `TRAINED_COLUMNS`, with or without the blob, with their checksums.

    Raises:
        StoreError: they differ; the file is not named.
    """
    if not is_intact("trained", values, len(_HEAD) - 1):
        raise StoreError(
            f"the trained tokens of rollout {values[1]!r} (row {values[0]}) differ from their "
            "checksum"
        )


def insert_trained(connection: sqlite3.Connection, row_id: int, values: Sequence[Any]) -> None:
    """Insert the values of `trained_to_sql` with their checksums."""
    *light, blob = values
    head = (row_id, *light, blob_checksum([blob]))
    marks = ", ".join("?" for _ in TRAINED_COLUMNS)
    connection.execute(
        f"INSERT INTO trained VALUES ({marks})", (*head, checksum("trained", head), blob)
    )


def check_trained(connection: sqlite3.Connection, expected: int) -> None:
    """Check all rows of the table, without their blobs.

    Raises:
        StoreError: a row differs from its checksum or is missing; the file is not named.
    """
    number = 0
    for row in connection.execute(f"SELECT {', '.join(_HEAD)} FROM trained NOT INDEXED"):
        verify_trained(row)
        number += 1
    if number != expected:
        raise StoreError(f"table trained has {number} rows instead of {expected}")
