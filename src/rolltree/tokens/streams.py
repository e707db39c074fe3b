"""Streams: a call's values per token, or its arrays at placeholder positions.

There are three kinds, all append-only and stored in flat buffers: `SampledStream` (a scalar per
sampled token; a constant costs one number), `TokenStream` (values of any item shape for any part of
the path) and `PlacedStream` (one array per placeholder, of any shape; each distinct array is kept
once).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rolltree.tokens.buffers import GrowBuffer, as_array, check_label, check_stored
from rolltree.values.errors import TokenError
from rolltree.values.types import IntArray

# Stored in place of an offset, which is at least 0.
ABSENT = -1
CONSTANT = -2
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
PLACED: tuple[str, tuple[int, ...]] = ("placed", ())


class SampledStream:
    """One scalar per token and call. `offset[call]` is a buffer offset, `ABSENT` or `CONSTANT`.

    Args:
        dtype: int32 or float32.
        low, high: the smallest and the largest accepted value.
        optional: whether a call may have no values.
    """

    __slots__ = ("buffer", "constant", "high", "low", "offset", "optional")

    def __init__(
        self,
        dtype: type,
        low: float = 0.0,
        high: float = math.inf,
        *,
        optional: bool = False,
    ) -> None:
        self.buffer = GrowBuffer(dtype)
        self.offset = array("q")
        self.constant = array("d")
        # Finite, so that infinity is out of range for both dtypes.
        largest = _INT32_MAX if self.buffer.dtype.kind == "i" else _FLOAT32_MAX
        self.low, self.high = low, min(high, largest)
        self.optional = optional

    def holds(self, values: NDArray[Any]) -> bool:
        """Return whether all values are numbers from `low` to `high` that the dtype can hold."""
        # Whole numbers may be floats, as some JSON writers make them.
        kind, whole = values.dtype.kind, self.buffer.dtype.kind == "i"
        if kind not in ("iuf" if whole else "iufb"):
            return False
        if not values.size:
            return True
        if whole and kind == "f" and (values % 1 != 0).any():
            return False
        # Twice as fast as the methods, for as few values as a call has.
        least, most = np.minimum.reduce(values, None), np.maximum.reduce(values, None)
        return bool(least >= self.low and most <= self.high)

    def accepts(self, value: float) -> bool:
        """Return what `holds` would return for one Python number."""
        return self.low <= value <= self.high and (value % 1 == 0 or self.buffer.dtype.kind == "f")

    def check(self, values: Any, count: int, name: str) -> float | NDArray[Any]:
        """Return a scalar if `values` is one or is constant, else an array `[count]`.

        Raises:
            TokenError: an array has a different length, or values that this stream cannot hold.
        """
        # Nearly every call has one temperature and one version, for which no array is made.
        if type(values) in (int, float) and self.accepts(values):
            return float(values)
        array = as_array(values, name)
        if array.ndim and array.shape != (count,):
            raise TokenError(
                f"{name} has shape {array.shape} for {count} tokens; a shifted value would be "
                "trained at the wrong token. Give one number, or exactly one per token."
            )
        if not self.holds(array):
            raise TokenError(
                f"{name} holds values that are not {self.buffer.dtype} from {self.low:g} to "
                f"{self.high:g} (dtype {array.dtype}); they would change on the way, or train "
                "against their sign. Give finite numbers in that range."
            )
        if array.size == 0:
            return 0.0
        first = array.reshape(-1)[0]
        # Most streams of a call are constant, and are stored as one number.
        if array.ndim == 0 or (array == first).all():
            return float(first)
        return array.astype(self.buffer.dtype)

    def add(self, value: float | NDArray[Any] | None) -> None:
        """Append one call: a scalar, an array with a value per token, or None."""
        constant = 0.0
        if value is None:
            offset = ABSENT
        elif isinstance(value, np.ndarray):
            offset = self.buffer.extend(value)
        else:
            offset, constant = CONSTANT, float(value)
        self.offset.append(offset)
        self.constant.append(constant)

    def get(self, call: int, count: int) -> NDArray[Any] | None:
        """Return a call's `count` values: a view, or a filled array for a constant."""
        offset = self.offset[call]
        if offset >= 0:
            return self.buffer.view(offset, offset + count)
        if offset == ABSENT:
            return None
        # Made when it is read, since the buffer does not have it.
        return np.full(count, self.constant[call], dtype=self.buffer.dtype)

    def raw(self, call: int, count: int) -> float | NDArray[Any] | None:
        """Return the value that `add` got."""
        return self.constant[call] if self.offset[call] == CONSTANT else self.get(call, count)

    def value_range(self, call: int, count: int) -> tuple[Any, Any] | None:
        """Return the smallest and largest of a call's `count` values, or None without values."""
        offset = self.offset[call]
        if offset == ABSENT or not count:
            return None
        if offset == CONSTANT:
            value = self.buffer.dtype.type(self.constant[call])
            return value, value
        values = self.buffer.view(offset, offset + count)
        return values.min(), values.max()

    @property
    def nbytes(self) -> int:
        """Bytes held, slack included."""
        return self.buffer.nbytes + 16 * len(self.offset)


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Values `[n, ...]` for path positions `start .. start + n` of one call.

    `start=None` means the call's sampled tokens. Give values only for tokens that are new in this
    call: those of an earlier call already have that call's values.

    Example: routed experts of 3 sampled tokens, 2 layers, top 4: `TokenStream(array[3, 2, 4])`.
    """

    values: NDArray[Any]
    start: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedStream:
    """Arrays of any shape that belong to placeholder tokens, one per position of the path.

    Example: two images in a prompt: `PlacedStream([pixels_a, pixels_b], positions=[4, 260])`.
    """

    values: Sequence[NDArray[Any]]
    positions: Sequence[int] | IntArray


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """Location of a call's dense values: `count` items at `offset`, for positions from `start`."""

    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """One call's placed values: path positions and indices into the tree's blobs."""

    positions: IntArray
    blobs: tuple[int, ...]


class ExtraStreams:
    """All named extra streams of a tree."""

    __slots__ = ("_digests", "blobs", "buffers", "dense", "placed")

    def __init__(self) -> None:
        self.buffers: dict[str, GrowBuffer] = {}
        self.dense: dict[str, dict[int, DenseEntry]] = {}
        self.placed: dict[str, dict[int, PlacedEntry]] = {}
        self.blobs: list[NDArray[Any]] = []
        self._digests: dict[bytes, int] = {}

    def check_all(
        self, streams: Mapping[str, Any] | None, prompt_len: int, num_sampled: int
    ) -> dict[str, TokenStream | PlacedStream]:
        """Return all streams of a call as `check` does, without storing anything."""
        if streams is None:
            return {}
        if not isinstance(streams, Mapping):
            raise TokenError(
                f"streams is a {type(streams).__name__}, but streams are looked up by name later. "
                'Give a dict: streams={"name": values}.'
            )
        # All are checked before the first is stored, so that a refused call changes nothing.
        return {
            name: self.check(name, value, prompt_len, num_sampled)
            for name, value in streams.items()
        }

    def check(
        self, name: str, value: object, prompt_len: int, num_sampled: int
    ) -> TokenStream | PlacedStream:
        """Return `value` as a stream that fits a call of this size, without storing anything.

        Raises:
            TokenError: the length is wrong, positions are outside the call, or the kind, dtype or
                item shape differs from earlier values of `name`.
        """
        check_label(name, "a stream's name")
        total = prompt_len + num_sampled
        if isinstance(value, PlacedStream):
            return self._check_placed(name, value, total)
        stream = value if isinstance(value, TokenStream) else TokenStream(cast(Any, value))
        values = as_array(stream.values, f"stream {name!r}")
        start = prompt_len if stream.start is None else stream.start
        if not isinstance(start, int | np.integer):
            raise TokenError(f"stream {name!r} starts at {start!r}; give a position of the path.")
        count = len(values) if values.ndim else -1
        wrong = count < 0 or (stream.start is None and count != num_sampled)
        if wrong or start < 0 or start + count > total:
            raise TokenError(
                f"stream {name!r} has shape {values.shape} from position {start}, but the call has "
                f"{prompt_len} prompt and {num_sampled} sampled tokens; values would land on the "
                "wrong tokens. Give one per sampled token, or TokenStream(values, start=position)."
            )
        check_stored(values, f"stream {name!r}")
        # One dtype and item shape per name, since all calls' values lie in one buffer.
        self.check_kind(name, (values.dtype.str, values.shape[1:]))
        return TokenStream(values, int(start))

    def kind(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Return the dtype and item shape of a dense stream, `PLACED`, or None if unknown."""
        buffer = self.buffers.get(name)
        if buffer is not None:
            return buffer.dtype.str, buffer.item_shape
        return PLACED if name in self.placed else None

    def check_kind(self, name: str, kind: tuple[str, tuple[int, ...]] | None) -> None:
        """Check that values are of the same kind as earlier values of `name`.

        Raises:
            TokenError: the dtype or item shape differs, or only one of them is placed arrays.
        """
        known = self.kind(name)
        if known is not None and kind is not None and known != kind:
            raise TokenError(
                f"stream {name!r} has values of kind {kind} and had {known} before; a name must "
                "keep one kind of value, so that samples can be merged. Use another name."
            )

    def _check_placed(self, name: str, value: PlacedStream, total: int) -> PlacedStream:
        arrays = [np.ascontiguousarray(as_array(item, f"stream {name!r}")) for item in value.values]
        positions = as_array(value.positions, f"the positions of stream {name!r}")
        if positions.shape != (len(arrays),) or (
            len(positions)
            and not (
                positions.dtype.kind in "iu" and positions.min() >= 0 and positions.max() < total
            )
        ):
            raise TokenError(
                f"stream {name!r} places {len(arrays)} arrays at positions "
                f"{positions.tolist()} of a call with {total} tokens. Give one position inside the "
                "call per array."
            )
        self.check_kind(name, PLACED)
        for item in arrays:
            check_stored(item, f"an array of stream {name!r}")
        return PlacedStream(arrays, positions.astype(np.int32))

    def add(self, call: int, name: str, stream: TokenStream | PlacedStream) -> None:
        """Store a checked stream for `call`."""
        if isinstance(stream, PlacedStream):
            blobs = tuple(self.add_blob(item) for item in stream.values)
            positions = np.asarray(stream.positions, dtype=np.int32)
            self.placed.setdefault(name, {})[call] = PlacedEntry(positions, blobs)
            return
        offset = self.append_values(name, stream.values)
        self.dense[name][call] = DenseEntry(stream.start or 0, len(stream.values), offset)

    def append_values(self, name: str, values: NDArray[Any]) -> int:
        """Append checked dense values; return the offset of the first one."""
        if name not in self.buffers:
            self.buffers[name] = GrowBuffer(values.dtype, values.shape[1:])
            self.dense[name] = {}
        return self.buffers[name].extend(values)

    def add_blob(self, item: NDArray[Any]) -> int:
        """Keep a copy of an array, once; return its index."""
        # An image in the prompt of every turn is kept once. The key has type and shape, since
        # different arrays may have equal bytes.
        key = hashlib.blake2b(item.tobytes(), digest_size=16)
        key.update(f"{item.dtype.str}{item.shape}".encode())
        digest = key.digest()
        if digest not in self._digests:
            self._digests[digest] = len(self.blobs)
            # Copied, since the caller may write into its array later.
            self.blobs.append(item.copy())
        return self._digests[digest]

    def names(self) -> list[str]:
        """Return the names of all streams: dense ones, then placed ones, in order of first use."""
        return [*self.dense, *self.placed]

    def get(self, name: str, call: int) -> TokenStream | PlacedStream | None:
        """Return the stream `name` of `call`, or None."""
        dense = self.dense.get(name, {}).get(call)
        if dense is not None:
            values = self.buffers[name].view(dense.offset, dense.offset + dense.count)
            return TokenStream(values, dense.start)
        placed = self.placed.get(name, {}).get(call)
        if placed is not None:
            return PlacedStream([self.blobs[index] for index in placed.blobs], placed.positions)
        return None

    @property
    def nbytes(self) -> int:
        """Bytes held, slack included."""
        held = sum(buffer.nbytes for buffer in self.buffers.values())
        entries = sum(map(len, self.dense.values())) + sum(map(len, self.placed.values()))
        return held + sum(blob.nbytes for blob in self.blobs) + 120 * entries
