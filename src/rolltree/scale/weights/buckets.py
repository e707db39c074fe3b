"""Packs tensors into buckets of bytes, each with a checksum.

Both sides derive the same buckets from the same list of names, dtypes and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rolltree.values.errors import BadResponse, ConfigError

# Tensors begin at multiples of this: a view as another dtype must be aligned to the dtype's size,
# and checksums need words of 8 bytes.
ALIGN_BYTES = 16
_TAIL_BYTES = 8
_BLOCK_WORDS = 2**17
# 2**64 divided by the golden ratio, as int64: its multiples modulo 2**64 are spread evenly.
_ODD = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, dtype (as in `"bfloat16"`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """Describe a tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        """The size of the tensor without padding."""
        return math.prod(self.shape) * as_torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together; `starts` has their offsets in bytes.

    The buffer of a bucket is uint8 `[num_bytes]`; its last 8 bytes are the checksum of the rest.
    """

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    num_bytes: int


def specs_to_data(specs: Iterable[TensorSpec]) -> list[list[Any]]:
    """Return specs as JSON: `[name, dtype, shape]` each."""
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in specs]


def specs_from_data(data: object) -> list[TensorSpec]:
    """Return the specs that `specs_to_data` wrote.

    Raises:
        ConfigError: it is something else, or names a dtype that torch lacks.
    """
    rows: list[Any] = data if isinstance(data, list) else [data]
    specs = []
    for row in rows:
        try:
            name, dtype, shape = row
            spec = TensorSpec(str(name), str(dtype), tuple(int(size) for size in shape))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{row!r} does not describe a tensor. Send [name, dtype, shape], as "
                "`WeightTransfer` does."
            ) from error
        if min(spec.shape, default=0) < 0:
            raise ConfigError(f"{spec.name} has a negative size in its shape {spec.shape}.")
        as_torch_dtype(spec.dtype)
        specs.append(spec)
    return specs


def fill_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Put tensors into buckets of at most `bucket_bytes`, in order; a larger one gets its own.

    >>> two = [TensorSpec("a", "float32", (3,)), TensorSpec("b", "int8", (5,))]
    >>> [(bucket.starts, bucket.num_bytes) for bucket in fill_buckets(two, 1024)]
    [((0, 16), 40)]
    """
    buckets: list[Bucket] = []
    held: list[TensorSpec] = []
    starts: list[int] = []
    end = 0

    def close() -> None:
        if held:
            buckets.append(Bucket(tuple(held), tuple(starts), end + _TAIL_BYTES))

    for spec in specs:
        size = -(-spec.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if held and end + size + _TAIL_BYTES > bucket_bytes:
            close()
            held, starts, end = [], [], 0
        held.append(spec)
        starts.append(end)
        end += size
    close()
    return buckets


def pack(bucket: Bucket, tensors: Sequence[Tensor], memory: Tensor) -> Tensor:
    """Pack a bucket's tensors into the beginning of uint8 `memory`; return that part of it.

    The padding between tensors is not cleared.
    """
    buffer = memory[: bucket.num_bytes]
    for spec, start, tensor in zip(bucket.specs, bucket.starts, tensors, strict=True):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + spec.num_bytes].copy_(data)
    buffer[-_TAIL_BYTES:].view(torch.int64).copy_(bucket_checksum(buffer[:-_TAIL_BYTES]))
    return buffer


def unpack_bucket(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of a buffer that has arrived, with their names; they share its memory.

    Raises:
        BadResponse: its checksum is wrong.
    """
    sent = int(buffer[-_TAIL_BYTES:].view(torch.int64))
    found = int(bucket_checksum(buffer[:-_TAIL_BYTES]))
    if sent != found:
        raise BadResponse(
            f"checksum mismatch in the bucket that begins with {bucket.specs[0].name} (received "
            f"{found:x}, sent {sent:x}), so these weights were not loaded. Was the trainer's model "
            "changed during the transfer? Otherwise suspect the network, and publish again."
        )
    return [
        (
            spec.name,
            buffer[start : start + spec.num_bytes]
            .view(as_torch_dtype(spec.dtype))
            .view(spec.shape),
        )
        for spec, start in zip(bucket.specs, bucket.starts, strict=True)
    ]


def bucket_checksum(data: Tensor) -> Tensor:
    """Return the int64 checksum of uint8 `[8 n]`: a sum of words weighted by position.

    It detects any change of a single word, and almost any swap of two words within a block (of
    1 MiB) or of two blocks. It stays on the device of `data`.
    """
    # Odd weights are invertible modulo 2**64, so a changed word changes the sum. A plain sum would
    # miss words that moved. 64 MiB take 17 ms on one core (CRC-32: 31 ms), and on a GPU nothing is
    # copied to the host (design/0012).
    words: Any = data.view(torch.int64)
    places = torch.arange(1, min(_BLOCK_WORDS, len(words)) + 1, device=data.device)
    weights = (places * _ODD) | 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for block in words.split(_BLOCK_WORDS):
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return total


def as_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with this name.

    Raises:
        ConfigError: torch lacks it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} is not a torch dtype, so this tensor cannot be received.")
    return found
