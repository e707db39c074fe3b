"""Converts token trees to bytes and back, in one piece or call by call.

The tree is append-only, so what is new since a call is a slice of every buffer, and all pieces
together are the whole tree. Values are raw little-endian arrays, integers in the smallest type that
fits. Reading executes no code and trusts no value: every length is checked before it is used.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolltree.tokens.arena import NO_TURN, ROOT, CallTable
from rolltree.tokens.buffers import MAX_NDIM, STORED_CODES, STORED_DTYPES, check_stored
from rolltree.tokens.streams import (
    ABSENT,
    CONSTANT,
    PLACED,
    DenseEntry,
    ExtraStreams,
    PlacedEntry,
    SampledStream,
)
from rolltree.values.errors import TokenError

if TYPE_CHECKING:
    from rolltree.tokens.tree import TokenTree

MAGIC = b"RTT1"
_HEAD = struct.Struct("<4sIQ")
MAX_SAMPLED = 2**25
"""The most sampled tokens over all calls of a tree; calls may share tokens."""
_NARROWING = tuple(np.dtype(name) for name in ("u1", "i1", "<u2", "<i2", "<u4", "<i4"))
_FEW = 16
_SEQUENCES = (list, array)
_NARROW_CODES = tuple(
    (STORED_CODES[dtype.str], letter, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for dtype, letter in zip(_NARROWING, "BbHhIi", strict=True)
)
"""For each narrow type: its code, its letter in `struct`, and its limits."""
_ONE = tuple(
    (struct.Struct(f"<BBI{letter}").pack, code, least, most)
    for code, letter, least, most in _NARROW_CODES
)
_ONE_FLOAT = struct.Struct("<BBId").pack
_EMPTY = {name: struct.pack("<BBI", code, 1, 0) for name, code in STORED_CODES.items()}
_DTYPES = tuple(np.dtype(name) for name in STORED_DTYPES)
_FLOAT64 = np.dtype("<f8")
_INTEGERS = {dtype for dtype in _DTYPES if dtype.kind in "iu" and dtype != np.uint64}
_ALWAYS_IDS = {np.dtype("u1"), np.dtype("<u2")}  # they hold nothing but token ids
_FLAT_BYTES = bytes((STORED_DTYPES.index("u1"), 1))  # what an array of bytes begins with
_SHAPES = tuple(struct.Struct(f"<{ndim}I") for ndim in range(MAX_NDIM + 1))


def damaged_tokens(reason: str) -> TokenError:
    """Return the error for bytes that are not a token tree."""
    return TokenError(
        f"these bytes are not a token tree: {reason}. A truncated or foreign record cannot be "
        "trained; read the record again, or drop that rollout."
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
        """Write an array whose dtype is one of `STORED_DTYPES`."""
        if not values.size and values.ndim == 1 and values.dtype.str in _EMPTY:
            self._parts.append(_EMPTY[values.dtype.str])
            return
        # Files are little-endian on every machine.
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        check_stored(little, "an array")
        code = STORED_CODES[little.dtype.str]
        self._parts.append(struct.pack(f"<BB{little.ndim}I", code, little.ndim, *little.shape))
        self._parts.append(little.tobytes())

    def ints(self, values: ArrayLike) -> None:
        """Write integers in the narrowest type that holds them."""
        if isinstance(values, _SEQUENCES) and len(values) <= _FEW:
            self._few(values)
            return
        wide = np.asarray(values, dtype=np.int64)
        low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
        for dtype, (_, _, least, most) in zip(_NARROWING, _NARROW_CODES, strict=True):
            if least <= low and high <= most:
                self.array(wide.astype(dtype))
                return
        self.array(wide)

    def _few(self, values: Sequence[int]) -> None:
        # The same bytes without numpy, which takes ten times as long for a few numbers. It matters
        # for a journal, which saves call by call.
        if not values:
            self._parts.append(_EMPTY["|u1"])
            return
        if len(values) == 1:
            value = values[0]
            for pack, code, least, most in _ONE:
                if least <= value <= most:
                    self._parts.append(pack(code, 1, 1, value))
                    return
        low, high = min(values), max(values)
        for code, letter, least, most in _NARROW_CODES:
            if least <= low and high <= most:
                self._parts.append(
                    struct.pack(f"<BBI{len(values)}{letter}", code, 1, len(values), *values)
                )
                return
        self.array(np.array(values, np.int64))

    def floats(self, values: Sequence[float]) -> None:
        """Write float64 numbers."""
        if len(values) == 1:
            self._parts.append(_ONE_FLOAT(STORED_CODES[_FLOAT64.str], 1, 1, values[0]))
        elif len(values) <= _FEW and values:
            head = STORED_CODES[_FLOAT64.str], 1, len(values)
            self._parts.append(struct.pack(f"<BBI{len(values)}d", *head, *values))
        else:
            self.array(np.array(values, np.float64))

    def chunk(self) -> bytes:
        """Return everything written, with a length and a checksum in front."""
        body = b"".join(self._parts)
        return _HEAD.pack(MAGIC, zlib.crc32(body), len(body)) + body


class Reader:
    """Reads the values that a `Writer` wrote."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def _take(self, count: int) -> memoryview:
        if self._at + count > len(self._body):
            raise damaged_tokens("a value runs past the end")
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
            raise damaged_tokens("a label is not UTF-8") from error

    def array(self) -> NDArray[Any]:
        """Read an array."""
        # By offsets instead of `_take`: a small tree has 27 arrays, and slicing took half the time.
        body, head = self._body, self._at + 2
        if head > len(body):
            raise damaged_tokens("a value runs past the end")
        code, ndim = body[head - 2], body[head - 1]
        if code >= len(_DTYPES) or ndim > MAX_NDIM:
            raise damaged_tokens("unknown array type")
        dtype, layout = _DTYPES[code], _SHAPES[ndim]
        start = head + layout.size
        if start > len(body):
            raise damaged_tokens("a value runs past the end")
        shape = layout.unpack_from(body, head)
        count = math.prod(shape)
        self._at = start + count * dtype.itemsize
        if self._at > len(body):
            raise damaged_tokens("a value runs past the end")
        if not count and math.prod(shape[: shape.index(0)]) > len(body):
            raise damaged_tokens("an array has more rows than bytes")
        values = np.frombuffer(body, dtype, count, start)
        if dtype.kind == "b" and (values.view(np.uint8) > 1).any():
            raise damaged_tokens("a boolean is neither 0 nor 1")
        if ndim == 1:
            return values
        try:
            return values.reshape(shape)
        except ValueError as error:
            raise damaged_tokens("an array has an impossible shape") from error

    def ints(self, count: int | None = None) -> NDArray[Any]:
        """Read a flat array of integers, of length `count` if that is given."""
        values = self.array()
        if values.dtype not in _INTEGERS or values.ndim != 1:
            raise damaged_tokens("integers were expected")
        if count is not None and len(values) != count:
            raise damaged_tokens(f"{count} integers were expected, {len(values)} came")
        return values

    def numbers(self, count: int | None = None) -> list[int]:
        """Read what `ints` reads, as Python integers."""
        # Without numpy for numbers that fit in a byte: most trees have a handful of calls, and for
        # so few numbers a numpy operation takes longer than a loop.
        body, at = self._body, self._at
        if body[at : at + 2] == _FLAT_BYTES and (
            count is None or body[at + 2 : at + 6] == count.to_bytes(4, "little")
        ):
            start = at + 6
            end = start + int.from_bytes(body[at + 2 : start], "little")
            if end <= len(body):
                self._at = end
                return list(body[start:end])
        numbers: list[int] = self.ints(count).tolist()
        return numbers

    def done(self) -> None:
        """Raise if bytes are left over."""
        if self._at != len(self._body):
            raise damaged_tokens("bytes are left over")


def chunks(data: bytes | bytearray | memoryview) -> list[Reader]:
    """Split concatenated chunks into readers, after checking lengths and checksums."""
    view = memoryview(data)
    readers: list[Reader] = []
    while len(view):
        if len(view) < _HEAD.size:
            raise damaged_tokens("the last record is cut off")
        magic, checksum, length = _HEAD.unpack(view[: _HEAD.size])
        if magic != MAGIC:
            raise damaged_tokens("the record does not start with its mark")
        body = view[_HEAD.size : _HEAD.size + length]
        if len(body) != length:
            raise damaged_tokens("the last record is cut off")
        if zlib.crc32(body) != checksum:
            raise damaged_tokens("the checksum does not match")
        readers.append(Reader(body))
        view = view[_HEAD.size + length :]
    return readers


# -- trees ---------------------------------------------------------------------------------------

# Without the columns of runs, which are found again by bisection.
_SAVED_COLUMNS = tuple(
    column.name for column in fields(CallTable) if column.name not in ("prompt_run", "end_run")
)


def save(tree: TokenTree, since: int) -> bytes:
    """Return the bytes of the calls from handle `since` on, with their new tokens and values."""
    calls, arena = tree.calls, tree.arena
    if not 0 <= since <= len(calls):
        raise TokenError(
            f"the tree has {len(calls)} calls and cannot be saved from call {since} on. Pass how "
            "many calls were saved before."
        )
    out = Writer()
    # The sizes after call `since - 1`: everything beyond them is new, so a piece is a slice of
    # every buffer.
    num_tokens = calls.num_tokens[since - 1] if since else 0
    num_runs = calls.num_runs[since - 1] if since else 0
    for number in (since, len(calls) - since, num_tokens, num_runs):
        out.number(number)
    out.ints(arena.ids[num_tokens:])
    out.ints(arena.run_start[num_runs:])
    out.ints(arena.run_parent[num_runs:])
    for name in _SAVED_COLUMNS:
        out.ints(getattr(calls, name)[since:])
    # All agents, not only new ones: a call of an earlier piece may have been labelled since then.
    out.number(len(tree.agents))
    for agent in tree.agents:
        out.text(agent)
    for stream in tree.sampled.values():
        _save_sampled(out, stream, since)
    _save_extra(out, tree.extra, since)
    return out.chunk()


def _save_sampled(out: Writer, stream: SampledStream, since: int) -> None:
    given = stream.offset[since:]
    # Offsets count from the first value of this piece, so they do not depend on earlier pieces.
    if len(given) <= _FEW:
        first = next((offset for offset in given if offset >= 0), stream.buffer.size)
        out.ints([offset - first if offset >= 0 else offset for offset in given])
    else:
        offsets = np.array(given, dtype=np.int64)
        stored = offsets[offsets >= 0]
        first = int(stored[0]) if len(stored) else stream.buffer.size
        out.ints(np.where(offsets >= 0, offsets - first, offsets))
    out.floats(stream.constant[since:])
    out.array(stream.buffer.view(first, stream.buffer.size))


def _save_extra(out: Writer, extra: ExtraStreams, since: int) -> None:
    dense = {
        name: [(call, entry) for call, entry in entries.items() if call >= since]
        for name, entries in extra.dense.items()
    }
    dense = {name: entries for name, entries in dense.items() if entries}
    out.number(len(dense))
    for name, rows in dense.items():
        buffer = extra.buffers[name]
        first = rows[0][1].offset
        out.text(name)
        out.ints([call for call, _ in rows])
        out.ints([entry.start for _, entry in rows])
        out.ints([entry.count for _, entry in rows])
        out.array(buffer.view(first, buffer.size))
    placed = {
        name: [(call, entry) for call, entry in entries.items() if call >= since]
        for name, entries in extra.placed.items()
    }
    placed = {name: rows_ for name, rows_ in placed.items() if rows_}
    earlier = [
        max(entry.blobs, default=-1)
        for entries in extra.placed.values()
        for call, entry in entries.items()
        if call < since
    ]
    known_blobs = max(earlier, default=-1) + 1
    out.number(known_blobs)
    out.number(len(extra.blobs) - known_blobs)
    for blob in extra.blobs[known_blobs:]:
        out.array(blob)
    out.number(len(placed))
    for name, rows_ in placed.items():
        out.text(name)
        out.number(len(rows_))
        for call, entry in rows_:
            out.number(call)
            out.ints(entry.positions)
            out.ints(entry.blobs)


def load(tree: TokenTree, data: bytes | bytearray | memoryview) -> None:
    """Append saved chunks to a tree that holds exactly the calls before them.

    Raises:
        TokenError: the bytes are missing, truncated, of another format, out of order, or contradict
            themselves. The tree must not be used after that.
    """
    readers = chunks(data)
    if not readers:
        raise damaged_tokens("there are no bytes")
    for reader in readers:
        _load_chunk(tree, reader)
    if sum(tree.calls.num_sampled) > MAX_SAMPLED:
        raise damaged_tokens(f"its calls sampled more than {MAX_SAMPLED:,} tokens")


def _load_chunk(tree: TokenTree, reader: Reader) -> None:
    calls, arena = tree.calls, tree.arena
    since, count, num_tokens, num_runs = (reader.number() for _ in range(4))
    # A piece fits only after the calls that preceded it when it was saved.
    if (since, num_tokens, num_runs) != (len(calls), arena.num_tokens, arena.num_runs):
        raise damaged_tokens(
            f"the record continues after call {since}, but the tree holds {len(calls)} calls"
        )
    ids = reader.ints()
    starts = reader.numbers()
    _load_runs(tree, ids, starts, reader.numbers(len(starts)))
    columns = [reader.numbers(count) for _ in _SAVED_COLUMNS]
    agents = [reader.text() for _ in range(reader.number())]
    if agents[: len(tree.agents)] != tree.agents:
        raise damaged_tokens("its agents do not continue those of the pieces before")
    tree.agents[:] = agents
    if len(set(tree.agents)) < len(tree.agents):
        raise damaged_tokens("two agents have one name")
    for row in zip(*columns, strict=True):
        _load_call(tree, *row)
    _check_reached(tree)
    for name, stream in tree.sampled.items():
        lengths = calls.prompt_len if name == "prompt_mask" else calls.num_sampled
        _load_sampled(reader, stream, lengths[since:])
    _load_extra(reader, tree, since)
    reader.done()


def _load_runs(tree: TokenTree, ids: Any, starts: list[int], parents: list[int]) -> None:
    arena = tree.arena
    if ids.dtype not in _ALWAYS_IDS and len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
        raise damaged_tokens("a token id is out of range")
    first = arena.num_tokens
    total = first + len(ids)
    edges = [first, *starts, total]
    # Runs must not be empty, must lie within these tokens, in order, and hang below an earlier
    # token; and the first token of a tree must begin a run.
    if (
        any(low >= high for low, high in pairwise(edges[1:]))
        or edges[1] < first
        or any(not -1 <= parent < start for parent, start in zip(parents, starts, strict=True))
        or (len(ids) and not starts and not arena.num_runs)
    ):
        raise damaged_tokens("the runs do not tile the tokens")
    ids = ids.astype(np.int32)
    # Tokens before the first new run continue the newest old run.
    if edges[1] > first:
        last = first - 1
        if arena.append(ids[: edges[1] - first], arena.place(last)).token != edges[1] - 1 or (
            last < 0
        ):
            raise damaged_tokens("tokens continue a run that does not exist")
    for low, high, parent in zip(edges[1:], edges[2:], parents, strict=False):
        place = arena.place(parent) if parent >= 0 else ROOT
        piece = ids[low - first : high - first]
        # `insert` would have followed the other run or continued it; matching would find only one
        # of two equal paths.
        if (parent == low - 1 and parent >= 0) or arena.match(piece[:1], place)[0]:
            raise damaged_tokens("two runs hold the same path")
        arena.append(piece, place)


def _load_call(
    tree: TokenTree,
    prompt_token: int,
    end_token: int,
    prompt_len: int,
    sampled: int,
    parent: int,
    agent: int,
    turn: int,
    num_tokens: int,
    num_runs: int,
) -> None:
    """Append a call; the arguments are in the order of `_SAVED_COLUMNS`."""
    arena, calls = tree.arena, tree.calls
    if not (-1 <= prompt_token <= end_token < arena.num_tokens) or not (
        -1 <= parent < len(calls) and 0 <= agent < len(tree.agents)
    ):
        raise damaged_tokens("a call points outside the tree")
    prompt_end = arena.place(prompt_token) if prompt_token >= 0 else ROOT
    end = arena.place(end_token) if end_token >= 0 else ROOT
    # Samples are cut by these lengths, and a wrong one would train prompt tokens.
    if (
        arena.depth(prompt_end) != prompt_len
        or arena.depth(end) != prompt_len + sampled
        or sampled < 0
        or arena.up(end, sampled) != prompt_end
    ):
        raise damaged_tokens("a call's lengths do not fit its path")
    # Later code trusts `parent` without comparing ids again.
    if parent >= 0:
        added = prompt_len - tree.path_len(parent)
        if added < 0 or arena.up(prompt_end, added) != calls.end(parent):
            raise damaged_tokens("a call does not extend its parent")
    if not NO_TURN <= turn < 2**31:
        raise damaged_tokens("a turn is not a number from 0 on")
    before = calls.num_tokens[-1] if len(calls) else 0
    # `save` slices by these numbers, so wrong ones would damage the next piece.
    if not max(before, end_token + 1) <= num_tokens <= arena.num_tokens or (
        num_runs != bisect_left(arena.run_start, num_tokens)
    ):
        raise damaged_tokens("a call does not say how large the tree was")
    calls.append(
        prompt_end,
        end,
        prompt_len=prompt_len,
        num_sampled=sampled,
        parent=parent,
        agent=agent,
        turn=turn,
        num_tokens=num_tokens,
        num_runs=num_runs,
    )


def _check_reached(tree: TokenTree) -> None:
    """Reject tokens that are on no call's path."""
    arena, calls = tree.arena, tree.calls
    if arena.num_tokens != (calls.num_tokens[-1] if len(calls) else 0):
        raise damaged_tokens("tokens belong to no call")
    reached = [-1] * (arena.num_runs + 1)  # the last one is for the root, whose run is -1
    # A run is reached up to the last end of a call on it, or the last token below which another run
    # hangs.
    for runs, tokens in (
        (calls.end_run, calls.end_token),
        (arena.run_parent_run, arena.run_parent),
    ):
        for run, token in zip(runs, tokens, strict=True):
            if token > reached[run]:
                reached[run] = token
    ends = [*arena.run_start[1:], arena.num_tokens]
    if any(token != end - 1 for token, end in zip(reached[:-1], ends, strict=False)):
        raise damaged_tokens("tokens belong to no call")


def _load_sampled(reader: Reader, stream: SampledStream, lengths: Sequence[int]) -> None:
    offsets = reader.numbers(len(lengths))
    constants, values = reader.array(), reader.array()
    if (
        constants.dtype != _FLOAT64
        or constants.shape != (len(lengths),)
        or values.dtype != stream.buffer.dtype
        or values.ndim != 1
        or not stream.holds(values)
    ):
        raise damaged_tokens("a stream does not fit its calls")
    at, first = 0, stream.buffer.size
    for length, offset, constant in zip(lengths, offsets, constants.tolist(), strict=True):
        # The calls' values are consecutive, and an unused constant is 0.
        if offset == CONSTANT:
            fits = stream.accepts(constant)
        elif offset == ABSENT:
            fits = stream.optional and constant == 0.0
        else:
            fits = offset == at and constant == 0.0
            offset, at = first + at, at + length
        if not fits:
            raise damaged_tokens("a stream does not fit its calls")
        stream.offset.append(offset)
        stream.constant.append(constant)
    if at != len(values):
        raise damaged_tokens("a stream does not fit its calls")
    if at:
        stream.buffer.extend(values)


def _load_extra(reader: Reader, tree: TokenTree, since: int) -> None:
    extra, num_calls = tree.extra, len(tree.calls)

    def path_len(call: int) -> int:
        if not since <= call < num_calls:
            raise damaged_tokens("a stream names a call that does not exist")
        return tree.path_len(call)

    for _ in range(reader.number()):
        name = reader.text()
        handles = reader.numbers()
        starts, counts = reader.numbers(len(handles)), reader.numbers(len(handles))
        values = reader.array()
        if values.ndim == 0 or len(values) != sum(counts) or min(counts, default=0) < 0:
            raise damaged_tokens("a stream does not fit its calls")
        extra.check_kind(name, (values.dtype.str, values.shape[1:]))
        offset = extra.append_values(name, values)
        for call, start, count in zip(handles, starts, counts, strict=True):
            # The second would hide the first, whose values would never be read.
            if call in extra.dense[name]:
                raise damaged_tokens("a call has two streams of one name")
            if start < 0 or start + count > path_len(call):
                raise damaged_tokens("a stream runs past its call")
            extra.dense[name][call] = DenseEntry(start, count, offset)
            offset += count
    # Blobs are numbered across pieces.
    if reader.number() != len(extra.blobs):
        raise damaged_tokens("placed arrays are missing")
    for _ in range(reader.number()):
        extra.add_blob(reader.array())
    for _ in range(reader.number()):
        name = reader.text()
        extra.check_kind(name, PLACED)
        for _ in range(reader.number()):
            call = reader.number()
            if call in extra.placed.get(name, ()):
                raise damaged_tokens("a call has two streams of one name")
            positions = reader.ints()
            blobs = reader.numbers(len(positions))
            total = path_len(call)
            if any(not 0 <= blob < len(extra.blobs) for blob in blobs) or (
                len(positions) and not (positions.min() >= 0 and positions.max() < total)
            ):
                raise damaged_tokens("a placed array is outside its call")
            entry = PlacedEntry(positions.astype(np.int32), tuple(blobs))
            extra.placed.setdefault(name, {})[call] = entry
