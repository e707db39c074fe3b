"""Samples and plain data as bytes, for the other ranks of the same run, without pickle.

msgpack with one extension: a numpy array is its dtype, shape and content. It knows what training
reads of a sample (tokens, records, origins, streams). It leaves out the rest of `Sample.info`,
which describes where a sample came from, and sending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltree.samples import SampleStream
from rolltree.types import Records, Sample, SampleOrigin

_ARRAY = 1


def encode(value: Any) -> bytes:
    """Return plain data with numpy arrays in it as bytes."""
    return msgspec.msgpack.encode(value, enc_hook=_to_extension)


def decode(data: bytes) -> Any:
    """Return what `encode` was given; tuples come back as lists, arrays are read-only."""
    return msgspec.msgpack.Decoder(ext_hook=_from_extension).decode(data)


def samples_to_data(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return samples as data for `encode`."""
    return [
        {
            "ids": sample.ids,
            "positions": sample.positions,
            "subtree_end": sample.subtree_end,
            "records": {
                name: getattr(sample.records, name) for name in Records.__dataclass_fields__
            },
            "origins": [_origin(origin) for origin in sample.origins],
            "streams": {
                name: {"positions": stream.positions, "values": stream.values}
                for name, stream in sample.info.get("streams", {}).items()
            },
        }
        for sample in samples
    ]


def samples_from_data(data: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples that `samples_to_data` described."""
    return [
        Sample(
            row["ids"],
            row["positions"],
            row["subtree_end"],
            Records(**row["records"]),
            tuple(
                SampleOrigin(**{**origin, "calls": tuple(origin["calls"])})
                for origin in row["origins"]
            ),
            {"streams": {name: _stream(**stream) for name, stream in row["streams"].items()}},
        )
        for row in data
    ]


def _origin(origin: SampleOrigin) -> dict[str, Any]:
    return {name: getattr(origin, name) for name in SampleOrigin.__dataclass_fields__}


def _stream(positions: Any, values: Any) -> SampleStream:
    return SampleStream(positions, tuple(values) if isinstance(values, list) else values)


def _to_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        head = (array.dtype.str, value.shape, array.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(head))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_extension(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
