"""Python values to JSON text and back, exactly, without pickle.

Plain JSON loses tuples, integer keys, bytes, arrays and non-finite floats. Here such a value is
written as an object that a key marks, `{"$t": kind, "v": ...}`, so the text stays valid JSON that
SQLite's own JSON functions can read. Objects with behaviour (sandboxes, games, clients) become an
`Opaque` with the name of their type, without their contents, which may hold secrets; so does what
raises when it is read. `deflate` and `inflate` compress blobs. The size of a run bounds the memory
that `loads` and `inflate` take, so untrusted runs can be read.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rolltree._helpers.untrusted import MAX_DEPTH

TAG = "$t"
_TAG_BYTES = TAG.encode()
MAX_BITS = 8192  # Python refuses to print much longer integers
# A blob inflates to 64 MiB at most, or to 20 times its size if that is more.
MAX_INFLATED_BYTES = 2**26
MAX_INFLATION = 20
# So many containers may be written again. Cells of a board that know their neighbours, which know
# theirs, would be written without end.
MAX_REPEATS = 10_000
_MAX_DEFLATE_RATIO = 1032
_MAX_EMPTY_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class Opaque:
    """Takes the place of a value that cannot be stored; it has the name of the value's type."""

    type: str


_encode_json = msgspec.json.Encoder().encode
# Made once, since `json.dumps` makes an encoder for every value.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Return `value` as ASCII JSON text that `loads` turns back into an equal value.

    It is exact for None, bool, int, float (NaN and infinities too), str, bytes, list, tuple, set,
    frozenset, dict with keys of these types, and numpy arrays of numbers (floats of more than 64
    bits become doubles). Numpy scalars become Python scalars, other numpy arrays lists, pydantic
    models dicts, and everything else `Opaque`.
    """
    met = _Met()
    packed = _pack(value, 0, met)
    if met.num_repeats > MAX_REPEATS:  # again, with each container written once
        met = _Met()
        met.num, met.num_repeats = MAX_REPEATS, MAX_REPEATS
        packed = _pack(value, 0, met)
    try:
        text = _encode_json(packed)
        if text.isascii():
            return text.decode()
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, RecursionError):
        pass
    # Python's encoder escapes what is not ASCII, and accepts lone surrogates.
    return _ENCODER.encode(packed)


def loads(text: str | bytes) -> Any:
    """Return the value that `dumps` wrote.

    Raises:
        ValueError: `dumps` did not write the text.
    """
    try:
        value = _parse(text)
        has_tag = TAG in text if isinstance(text, str) else _TAG_BYTES in text
        return _unpack(value) if has_tag else value
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError) as error:
        what = f"a value that rolltree did not write ({type(error).__name__}: {error})"
        raise ValueError(what) from error


def deflate(data: bytes) -> bytes:
    """Return compressed data for `inflate`, or uncompressed data that would inflate too much."""
    if not data:
        return b""
    # `inflate` refuses data that grow too much, since a small file could fill the memory; honest
    # data that it would refuse (a million equal tokens) are stored uncompressed.
    made = zlib.compress(data, 1)
    return made if len(data) <= _most_inflated(made) else zlib.compress(data, 0)


def inflate(data: bytes) -> bytes:
    """Return the data that `deflate` compressed.

    Raises:
        ValueError: `deflate` did not make the data, or they inflate to more than
            `MAX_INFLATED_BYTES` and `MAX_INFLATION` times their size.
    """
    if not data:
        return b""
    try:
        # Data cannot grow more than 1032 times, so a small blob needs no bound: the faster path.
        if _MAX_DEFLATE_RATIO * len(data) <= MAX_INFLATED_BYTES:
            return zlib.decompress(data)
        unpacker = zlib.decompressobj()
        inflated = unpacker.decompress(data, _most_inflated(data))
    except (zlib.error, MemoryError) as error:
        what = "it cannot be inflated" if isinstance(error, zlib.error) else "there is no memory"
        raise ValueError(f"{what} ({type(error).__name__}: {error})") from error
    if not unpacker.eof:
        raise ValueError(
            f"{len(data):,} bytes inflate to more than {_most_inflated(data):,}, which rolltree "
            "does not write"
        )
    return inflated


def _most_inflated(data: bytes) -> int:
    return max(MAX_INFLATED_BYTES, MAX_INFLATION * len(data))


def _parse(text: str | bytes) -> Any:
    """Do what `json.loads` does, in a quarter of the time."""
    try:
        return _parse_json(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        # Only Python accepts lone surrogates and 1e400; text that is not JSON raises here again.
        return json.loads(text)


_parse_json = msgspec.json.Decoder().decode


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as strict JSON data for other programs; what JSON cannot express is lost.

    Tuples, sets and arrays become lists, non-finite floats None, other objects text, and so does
    what is nested too deeply to be stored, as a list that contains itself is.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > MAX_DEPTH:
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, depth + 1) for key, item in _items(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item, depth + 1) for item in list(value)]
    if _is_numpy(value):
        return to_plain(_as_double(value).tolist(), depth)
    return f"<{value.type}>" if isinstance(value, Opaque) else str(value)


_SCALARS = frozenset([str, int, float, bool, type(None)])


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; False if `==` raises, or says it for each item of an array."""
    if type(one) is type(other) and type(one) in _SCALARS:  # as most are
        return bool(one == other)
    from rolltree._helpers.tasks import contained  # asyncio, which `show` does without

    try:
        with contained():
            return bool(one == other)
    except Exception:  # noqa: BLE001  an `__eq__` may raise anything
        return False


def _is_numpy(value: Any) -> bool:
    """Whether it is an array or a scalar of numpy; if so, numpy has been imported already."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, (np.ndarray, np.generic))


class _Met(dict[int, Any]):
    """How many containers were written, and, once they are many, each of them by its id.

    An id is unique only while its object is alive, so the objects are kept.
    """

    num = num_repeats = 0  # of the class, since one is made for every value

    def is_too_often(self, value: Any) -> bool:
        """Whether this container was written before, as too many others were."""
        if id(value) not in self:
            self[id(value)] = value
            return False
        self.num_repeats += 1
        return self.num_repeats > MAX_REPEATS


def _pack(value: Any, depth: int, met: _Met) -> Any:
    # Python's own types first, since nearly all values of a record are of them.
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if kind is int:
        return value if value.bit_length() <= MAX_BITS else _opaque("int of more than 8192 bits")
    if kind is list or kind is dict:
        if depth > MAX_DEPTH:
            return _opaque(f"{kind.__name__} nested deeper than {MAX_DEPTH}")
        met.num += 1
        if met.num > MAX_REPEATS and met.is_too_often(value):
            return _opaque(f"{kind.__name__} that was written before")
        if kind is list:
            return [_pack(item, depth + 1, met) for item in value]
        return _pack_dict(value, depth, met)
    from rolltree._helpers.tasks import contained

    try:
        # Other classes may raise wherever they are read.
        with contained():
            return _pack_other(value, depth, met)
    except Exception as error:  # noqa: BLE001  it costs the value, not the run
        return _opaque(f"{_name_of(value)} (unreadable: {type(error).__name__})")


def _pack_other(value: Any, depth: int, met: _Met) -> Any:
    # By the methods of Python's own types, which a class may override.
    if isinstance(value, int):
        return _pack(int.__int__(value), depth, met)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return _pack(float.__float__(value), depth, met)
    if depth > MAX_DEPTH:
        return _opaque(f"{type(value).__name__} nested deeper than {MAX_DEPTH}")
    met.num += 1
    if met.num > MAX_REPEATS and isinstance(value, _SHARED) and met.is_too_often(value):
        return _opaque(f"{type(value).__name__} that was written before")
    for kind, pack in _PACKERS.items():
        if isinstance(value, kind):
            return pack(value, depth, met)
    if _is_numpy(value):
        return _pack_numpy(value, depth, met)
    # Of its class, since a mock has every attribute, and a class of models the method unbound.
    if hasattr(type(value), "model_dump"):
        return _pack(value.model_dump(), depth + 1, met)
    return _opaque(value.type if isinstance(value, Opaque) else _name_of(value))


def _opaque(name: str) -> dict[str, str]:
    return {TAG: "opaque", "v": name}


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _pack_dict(value: Mapping[Any, Any], depth: int, met: _Met) -> Any:
    items = _items(value)
    if all(type(key) is str and key != TAG for key, _ in items):
        return {
            key: item if type(item) is str else _pack(item, depth + 1, met) for key, item in items
        }
    pairs = [[_pack(key, depth + 1, met), _pack(item, depth + 1, met)] for key, item in items]
    return {TAG: "dict", "v": pairs}


def _items(value: Mapping[Any, Any]) -> Collection[tuple[Any, Any]]:
    # Code of an environment may still change what it left in a state, say a cache that all rollouts
    # share, while a thread stores one of them. To copy a dict is one step for other threads; to
    # list its items is not, since a garbage collection may run meanwhile.
    return value.copy().items() if type(value) is dict else list(value.items())


def _pack_items(tag: str) -> Callable[[Any, int, _Met], Any]:
    return lambda value, depth, met: {
        TAG: tag,
        "v": [_pack(item, depth + 1, met) for item in list(value)],
    }


def _pack_numpy(value: Any, depth: int, met: _Met) -> Any:
    import numpy as np

    if not isinstance(value, np.ndarray):
        return _pack(_python_scalar(value), depth + 1, met)
    if value.dtype.kind not in "biufc" or isinstance(value, np.ma.MaskedArray):
        return _pack(value.tolist(), depth + 1, met)
    plain = _as_double(value)
    raw = base64.b64encode(np.ascontiguousarray(plain).tobytes()).decode()
    return {TAG: "array", "dtype": plain.dtype.str, "shape": list(plain.shape), "v": raw}


def _as_double(value: Any) -> Any:
    """Return a numpy value of more than 64 bits per float, which Python has not, in 64 bits."""
    is_long = value.dtype.char in "gG"
    return value.astype("f8" if value.dtype.kind == "f" else "c16") if is_long else value


def _python_scalar(value: Any) -> Any:
    return _as_double(value).item()


_SHARED = (Mapping, list)  # whatever contains itself has one of these inside
_PACKERS: dict[Any, Callable[[Any, int, _Met], Any]] = {
    Mapping: lambda value, depth, met: _pack_dict(
        value if isinstance(value, dict) else dict(value), depth, met
    ),
    list: lambda value, depth, met: [_pack(item, depth + 1, met) for item in list(value)],
    tuple: _pack_items("tuple"),
    frozenset: _pack_items("frozenset"),
    set: _pack_items("set"),
    bytes: lambda value, *_: {TAG: "bytes", "v": base64.b64encode(value).decode()},
}


def _unpack(value: Any) -> Any:
    """Return the value that parsed JSON encodes; its lists and dicts are changed in place."""
    if type(value) is list:
        for index, item in enumerate(value):
            if type(item) in _NESTED:
                value[index] = _unpack(item)
    elif type(value) is dict:
        if TAG in value:
            return _UNPACKERS[value[TAG]](value)
        for key, item in value.items():
            if type(item) in _NESTED:
                value[key] = _unpack(item)
    return value


_NESTED = (list, dict)  # checked before a call, since most values of a record are text


def _unpack_array(value: dict[str, Any]) -> Any:
    import numpy as np

    # The bytes of an array bound its size, unless a dimension is 0.
    flat = np.frombuffer(base64.b64decode(value["v"]), dtype=np.dtype(value["dtype"]))
    shape = value["shape"]
    if not flat.size and math.prod(shape[: shape.index(0)]) > _MAX_EMPTY_ROWS:
        raise ValueError(f"an empty array has the shape {shape}")
    return flat.reshape(shape).copy()


_UNPACKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["v"]),
    "tuple": lambda value: tuple(_unpack(item) for item in value["v"]),
    "frozenset": lambda value: frozenset(_unpack(item) for item in value["v"]),
    "set": lambda value: {_unpack(item) for item in value["v"]},
    "bytes": lambda value: base64.b64decode(value["v"]),
    "dict": lambda value: {_unpack(key): _unpack(item) for key, item in value["v"]},
    "array": _unpack_array,
    "opaque": lambda value: Opaque(value["v"]),
}
