"""Routed experts in a server's answer: `routed_experts` of a choice, as vLLM writes it.

The field is the base64 text of a `.npy` file: integers `[tokens, layers, experts per token]` for
all tokens of the call except the last. The file's header is not trusted: the size in it must match
the data.
"""

from __future__ import annotations

import binascii
import io
import math
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from rolltree.tokens import checked_routing
from rolltree.tokens.buffers import UnusableRouting

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_MAX_ITEM = 8
"""Bytes of the largest integer."""


def encode_routing(values: NDArray[Any]) -> str:
    """Return routed experts as a server sends them."""
    with io.BytesIO() as file:
        np.save(file, values, allow_pickle=False)
        return b64encode(file.getbuffer()).decode()


def decode_routing(value: object, path_len: int) -> NDArray[Any] | None:
    """Return the routed experts `[n, layers, top_k]` of a call of `path_len` tokens.

    `value` is a choice's field; None if the server sent none.

    Raises:
        UnusableRouting: the field is malformed, or covers more tokens than the model was given.
    """
    if not isinstance(value, str | list | dict | int | float):
        return None
    if not isinstance(value, str):
        raise _unreadable(f"is a {type(value).__name__}")
    try:
        data = b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(f"is not base64 ({error})") from error
    file = io.BytesIO(data)
    try:
        # The header is a Python literal that numpy evaluates, so its size is limited.
        shape, fortran, dtype = _HEADERS[npy.read_magic(file)](file, max_header_size=1000)
    except (ValueError, KeyError, SyntaxError, TypeError) as error:
        raise _unreadable(f"is not a .npy file ({str(error)[:80]})") from error
    rest = len(data) - file.tell()
    plain = dtype.kind in "iu" and dtype.itemsize <= _MAX_ITEM and not fortran
    # Checked before an array is made of the data.
    if not plain or len(shape) != 3 or min(shape) < 1 or math.prod(shape) * dtype.itemsize != rest:
        raise _unreadable(f"has {rest} bytes for an array of {dtype} and shape {shape}")
    array = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    return checked_routing(array, path_len)


def _unreadable(what: str) -> UnusableRouting:
    return UnusableRouting(
        f"the server's routed_experts {what}; expected the base64 text of a .npy file of "
        "integers [tokens, layers, experts per token], as vLLM sends it. Nothing could be "
        "replayed: check the server, or start it without them."
    )
