"""Arrays and strings as bytes: the smallest integer type that fits, then raw little-endian data.

Knows numpy dtypes, lengths and checksums. Knows nothing about trees; leaves out compression, which
belongs to whoever stores the bytes. Reading executes nothing and trusts nothing: every length is
checked before it is used.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolltree.errors import TokenError

MAGIC = b"RTT1"
_HEAD = struct.Struct("<4sIQ")
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f4", "<f8", "<f2", "?", "<u8")
_CODES = {np.dtype(name).str: code for code, name in enumerate(_DTYPES)}
_NARROWING = tuple(np.dtype(name) for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4"))
_MAX_NDIM = 8


def damaged(reason: str) -> TokenError:
    """Return the error for bytes that are no token tree."""
    return TokenError(
        f"these bytes are not a token tree: {reason}. A torn or foreign record cannot be trained; "
        "read the record again, or drop that rollout."
    )


class Writer:
    """Collects values; `chunk` frames them with a length and a checksum."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def number(self, value: int) -> None:
        """Write an unsigned 32-bit number."""
        self._parts.append(struct.pack("<I", value))

    def text(self, value: str) -> None:
        """Write a string."""
        raw = value.encode()
        self.number(len(raw))
        self._parts.append(raw)

    def array(self, values: NDArray[Any]) -> None:
        """Write an array of any listed dtype, as it is."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        code = _CODES.get(little.dtype.str)
        if code is None or little.ndim > _MAX_NDIM:
            raise TokenError(
                f"an array of dtype {values.dtype} and {values.ndim} dimensions cannot be stored. "
                f"Convert it to one of {', '.join(_DTYPES)} with at most {_MAX_NDIM} dimensions."
            )
        self._parts.append(struct.pack(f"<BB{little.ndim}I", code, little.ndim, *little.shape))
        self._parts.append(little.tobytes())

    def ints(self, values: ArrayLike) -> None:
        """Write integers in the narrowest type that holds them."""
        wide = np.asarray(values, dtype=np.int64)
        low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
        for dtype in _NARROWING:
            limits = np.iinfo(dtype)
            if limits.min <= low and high <= limits.max:
                self.array(wide.astype(dtype))
                return
        self.array(wide)

    def chunk(self) -> bytes:
        """Return everything written, framed."""
        body = b"".join(self._parts)
        return _HEAD.pack(MAGIC, zlib.crc32(body), len(body)) + body


class Reader:
    """Reads back what a `Writer` wrote."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def _take(self, count: int) -> memoryview:
        if self._at + count > len(self._body):
            raise damaged("a value runs past the end")
        part = self._body[self._at : self._at + count]
        self._at += count
        return part

    def number(self) -> int:
        """Read an unsigned 32-bit number."""
        return int.from_bytes(self._take(4), "little")

    def text(self) -> str:
        """Read a string."""
        try:
            return bytes(self._take(self.number())).decode()
        except UnicodeDecodeError as error:
            raise damaged("a label is not UTF-8") from error

    def array(self) -> NDArray[Any]:
        """Read an array."""
        code, ndim = self._take(2)
        if code >= len(_DTYPES) or ndim > _MAX_NDIM:
            raise damaged("unknown array type")
        shape = struct.unpack(f"<{ndim}I", self._take(4 * ndim))
        dtype = np.dtype(_DTYPES[code])
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return np.frombuffer(self._take(size), dtype=dtype).reshape(shape)

    def ints(self, count: int | None = None) -> NDArray[np.int64]:
        """Read a flat array of integers, of a known length when `count` is given."""
        values = self.array()
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise damaged("integers were expected")
        if count is not None and len(values) != count:
            raise damaged(f"{count} integers were expected, {len(values)} came")
        return values.astype(np.int64)

    def done(self) -> None:
        """Refuse bytes that are left over."""
        if self._at != len(self._body):
            raise damaged("bytes are left over")


def chunks(data: bytes | bytearray | memoryview) -> list[Reader]:
    """Split concatenated chunks into readers, lengths and checksums verified."""
    view = memoryview(data)
    found: list[Reader] = []
    while len(view):
        if len(view) < _HEAD.size:
            raise damaged("the last record is cut off")
        magic, checksum, length = _HEAD.unpack(view[: _HEAD.size])
        if magic != MAGIC:
            raise damaged("the record does not start with its mark")
        body = view[_HEAD.size : _HEAD.size + length]
        if len(body) != length:
            raise damaged("the last record is cut off")
        if zlib.crc32(body) != checksum:
            raise damaged("the checksum does not match")
        found.append(Reader(body))
        view = view[_HEAD.size + length :]
    return found
