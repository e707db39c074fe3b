"""Flat growable arrays and the checks on the ids, logprobs and labels that enter them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolltree.values.errors import TokenError
from rolltree.values.types import FloatArray, IntArray

_INT32_MAX = 2**31 - 1
EMPTY_IDS: IntArray = np.empty(0, dtype=np.int32)
MIN_LOGPROB = -1000.0
# A dtype's index in this list is its code on disk, so append new ones at the end.
STORED_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f4", "<f8", "<f2", "?", "<u8")
STORED_CODES = {np.dtype(name).str: code for code, name in enumerate(STORED_DTYPES)}
MAX_NDIM = 8


class UnusableLogprobs(TokenError):
    """A value stands for a logprob that is not known; ids and other data may be right."""


class UnusableRouting(UnusableLogprobs):
    """Routed experts cannot be read, so it is not known of which function the logprobs are."""


class GrowBuffer:
    """An append-only array `[size, *item_shape]` that over-allocates by half when it grows."""

    __slots__ = ("_data", "size")

    def __init__(self, dtype: np.dtype[Any] | type, item_shape: tuple[int, ...] = ()) -> None:
        self._data: NDArray[Any] = np.empty((0, *item_shape), dtype=dtype)
        self.size = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self._data.dtype

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one item."""
        return self._data.shape[1:]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, with the unused space."""
        return self._data.nbytes

    def extend(self, values: NDArray[Any]) -> int:
        """Append `values` `[n, *item_shape]`; return the offset of the first one."""
        start, end = self.size, self.size + len(values)
        if end > len(self._data):
            grown = np.empty((end + end // 2 + 64, *self.item_shape), dtype=self.dtype)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:end] = values
        self.size = end
        return start

    def trim(self) -> None:
        """Free memory that is reserved beyond the stored items."""
        if self.size < len(self._data):
            self._data = self._data[: self.size].copy()

    def view(self, start: int, end: int) -> NDArray[Any]:
        """Return a view of `[start, end)`. Copy it before returning it to users."""
        return self._data[start:end]


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Return `values` as an array.

    Raises:
        TokenError: they have no common shape.
    """
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TokenError(
            f"{name} is not an array ({error}), so values cannot be matched to tokens. Give "
            "numbers in one shape."
        ) from error


def check_stored(values: NDArray[Any], name: str) -> None:
    """Check that an array can be written to disk.

    Raises:
        TokenError: its dtype is not in `STORED_DTYPES`, or it has more than 8 dimensions.
    """
    if values.dtype.newbyteorder("<").str not in STORED_CODES or values.ndim > MAX_NDIM:
        raise TokenError(
            f"{name} has dtype {values.dtype} and {values.ndim} dimensions, which cannot be "
            f"stored. Convert it to one of {', '.join(STORED_DTYPES)} with at most {MAX_NDIM} "
            "dimensions."
        )


def check_label(label: object, name: str) -> None:
    """Check that a label is text that UTF-8 can encode.

    Raises:
        TokenError: it is not; the message names the label.
    """
    try:
        label.encode()  # type: ignore[attr-defined]
    except (AttributeError, UnicodeEncodeError) as error:
        raise TokenError(
            f"{name} is {label!r}, which is not text that can be stored. Give a string."
        ) from error


def check_labels(agent: object, turn: object) -> None:
    """Check that labels are the name of an agent and the number of a turn or None.

    Raises:
        TokenError: one is not; the message names it.
    """
    # Nearly every name is ASCII, which can always be stored.
    if type(agent) is not str or not agent.isascii():
        check_label(agent, "agent")
    if turn is not None and not (
        # `True` is an integer to Python.
        isinstance(turn, int | np.integer)
        and not isinstance(turn, bool)
        and 0 <= turn <= _INT32_MAX
    ):
        raise TokenError(
            f"turn is {turn!r}; a turn is a number from 0 on, by which samples are grouped. Give "
            "one, or None."
        )


def as_ids(values: ArrayLike, name: str) -> IntArray:
    """Return `values` as contiguous int32 `[_T]`, without a copy if they already are.

    Negative ids of an int32 array pass here; `check_new_ids` refuses them when tokens are added.

    Raises:
        TokenError: not one-dimensional, not integers, or out of the int32 range.
    """
    if (
        type(values) is np.ndarray
        and values.dtype == np.int32
        and values.ndim == 1
        and values.flags.c_contiguous
    ):
        return values
    array = as_array(values, name)
    # numpy makes an empty list an array of floats.
    if array.size == 0 and array.ndim == 1:
        return EMPTY_IDS
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenError(
            f"{name} must be a flat sequence of token ids, got dtype {array.dtype} with shape "
            f"{array.shape}; matching is by integer id only. Pass the ids the engine reported."
        )
    # Checked before the conversion, which would wrap larger ids around.
    low, high = int(np.minimum.reduce(array)), int(np.maximum.reduce(array))
    if low < 0 or high > _INT32_MAX:
        raise TokenError(
            f"{name} holds ids from {low} to {high}; token ids are 0 to {_INT32_MAX}. Placeholders "
            "must be real ids of the vocabulary."
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def same_ids(first: IntArray, second: IntArray) -> bool:
    """Whether two arrays of ids, int32 `[_T]`, are equal.

    Every turn compares whole prompts; as bytes this takes a fifth of `np.array_equal`'s time.
    """
    if first.dtype != second.dtype:
        return np.array_equal(first, second)
    return len(first) == len(second) and first.tobytes() == second.tobytes()


def check_new_ids(ids: IntArray, name: str) -> None:
    """Raise for negative ids, which are padding or placeholders and never tokens."""
    if len(ids) and np.minimum.reduce(ids) < 0:
        position = int(np.argmax(ids < 0))
        raise TokenError(
            f"{name} holds the negative id {int(ids[position])} at offset {position} of what is "
            "new; such ids are padding or placeholders that no model ever got. Drop them."
        )


def checked_logprobs(values: object, count: int, weight: float | NDArray[Any] = 1.0) -> FloatArray:
    """Return one logprob per sampled token as float32 `[count]`, each at most 0.

    The only check of logprobs in the project, both for servers' answers and for insertion into a
    tree. By rounding, an engine's logprob may exceed 0 by up to 1e-3; such a value becomes 0. So
    does a placeholder at a token whose loss `weight` (one number, or `[count]`) is 0: nothing
    reads it, and tokens that were forced and not sampled have -inf.

    Raises:
        UnusableLogprobs: a value is not a logprob: missing, NaN, infinite, above 1e-3, or below
            -1000 (servers report -9999 for "unknown").
        TokenError: the length differs, or they are not numbers.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind not in "fiuO":  # else texts and booleans would be converted
            raise TypeError(f"their dtype is {array.dtype}")
        if array.dtype.kind == "O":
            array = array.astype(np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError) as error:
        raise TokenError(
            f"the logprobs of {count} sampled tokens are not a flat list of numbers ({error}). "
            "Give one number per sampled id, or pass None."
        ) from error
    if array.shape != (count,):
        extra = " An end token that was never sampled may have been appended." * (
            array.shape == (count - 1,)
        )
        size = f"{len(array)}" if array.ndim == 1 else f"an array {array.shape} of"
        raise TokenError(
            f"{count} sampled tokens came with {size} logprobs, so importance ratios would be "
            f"computed for the wrong tokens.{extra} Give exactly one logprob per sampled id, end "
            "token included."
        )
    if not count:
        return np.empty(0, np.float32)
    high, low = np.maximum.reduce(array), np.minimum.reduce(array)  # NaN if one is NaN
    if not (high <= 1e-3 and low >= MIN_LOGPROB) and not np.all(weight):
        unread = np.equal(weight, 0) & ~((array <= 1e-3) & (array >= MIN_LOGPROB))
        array = np.where(unread, 0.0, array)
        high, low = np.maximum.reduce(array), np.minimum.reduce(array)
    # Written so that NaN, for which every comparison is false, is refused.
    if not (high <= 1e-3 and low >= MIN_LOGPROB):
        bad = int(np.argmax(~((array <= 1e-3) & (array >= MIN_LOGPROB))))
        raise UnusableLogprobs(
            f"the logprob of sampled token {bad} is {float(array[bad])}, a placeholder and not a "
            "logprob; it would poison the importance ratio. Check the server's logprobs setting, "
            "or pass None when it gives none."
        )
    array = array.astype(np.float32)
    return array if high <= 0.0 else np.minimum(array, np.float32(0.0))


def readable_floats(values: FloatArray) -> list[float]:
    """Return float32 values as Python floats that round back to them, bit for bit.

    A decimal of at most six digits is used if it does, else the exact value, so that `-0.1` does
    not become `-0.10000000149011612`.
    """
    exact = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.floor(np.log10(np.abs(exact)))
    # A float32 always preserves six significant digits. 10^22 is the largest power of ten that is
    # exact in float64.
    power = 5 - magnitude
    usable = (power >= 0) & (power <= 22)
    scale = 10.0 ** np.where(usable, power, 0.0)
    short = np.rint(exact * scale) / scale
    same = usable & (short.astype(np.float32) == values)
    out: list[float] = np.where(same, short, exact).tolist()
    return out


def concat(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Concatenate parts into a new array that the caller owns; always a copy."""
    if not parts:
        return np.empty(0, dtype=dtype)
    return np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
