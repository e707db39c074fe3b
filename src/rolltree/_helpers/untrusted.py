"""Safely reads text from models, tools and environments, and makes it safe to show.

Reading takes linear time and gives a value or a `ValueError`, whatever the text is. For showing,
control characters that a terminal obeys and invisible characters are replaced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_DEPTH = 100
"""How deeply JSON that a model wrote, and what is stored, may be nested."""
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def read_json(text: str) -> Any:
    """Return the value of JSON that a model wrote; lone surrogates in it become U+FFFD.

    Numbers are finite, and integers have at most 4,300 digits (Python's limit).

    Raises:
        ValueError: it is not JSON, or nested deeper than 100 levels.
    """
    return _read(text, 0)[0]


def read_json_start(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and its end; raises like `read_json`."""
    return _read(text, start, whole=False)


def _read(text: str, start: int, *, whole: bool = True) -> tuple[Any, int]:
    try:
        if whole:
            value, end = _DECODER.decode(text), len(text)
        else:
            value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH:
        check_depth(value)
    part = text if whole else text[start:end]
    if "\\u" in part or not is_well_formed(part):
        value = well_formed(value)
    return value, end


def check_depth(value: Any) -> None:
    """Raise `ValueError` if lists and dicts are nested too deeply, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inside = item.values() if isinstance(item, dict) else item
            # Only lists and objects are levels, as in the count of brackets.
            inner.extend(child for child in inside if isinstance(child, dict | list))
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is out of range: {text[:40]}")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def is_well_formed(text: str) -> bool:
    """Return whether UTF-8 can hold the text: it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def well_formed(value: Any) -> Any:
    """Return JSON data with lone surrogates replaced by U+FFFD; a text without any is unchanged."""
    if isinstance(value, str):
        if is_well_formed(value):
            return value
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [well_formed(item) for item in value]
    return value


def encode_json(value: Any) -> bytes:
    """Return `value` as JSON in UTF-8; lone surrogates become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(well_formed(msgspec.to_builtins(value)))


def read_toml(text: str) -> dict[str, Any]:
    """Return the table that TOML describes.

    Raises:
        ValueError: it is not TOML, or nested deeper than 100 levels.
    """
    import tomllib

    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(table)
    return table


def between(text: str, start: str, end: str) -> Iterator[str]:
    """Yield the text between each `start` and the next `end`, from left to right.

    >>> list(between("<a>1</a> <a>2</a> <a>3", "<a>", "</a>"))
    ['1', '2']
    """
    at = text.find(start)
    while at >= 0:
        begin = at + len(start)
        stop = text.find(end, begin)
        if stop < 0:
            return
        yield text[begin:stop]
        at = text.find(start, stop + len(end))


def shorten(text: str, limit: int) -> str:
    """Return the text, cut at `limit` characters with a note that says how many were left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [{len(text) - limit:,} more characters were left out]"


# Text to show


def visible(text: str) -> str:
    r"""Return text that cannot control a terminal, with invisible characters replaced.

    ASCII control characters become their Unicode pictures, except newlines and tabs, which stay.
    Other controls, lone surrogates, marks that change the direction of text, tag characters and
    most other invisible ones become U+FFFD.

    >>> visible("\x1b[2Ja\u202eb")
    '␛[2Ja�b'
    """
    return _HARMFUL.sub(_picture, text)


_INVISIBLE = (
    *((0x80, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160)),
    *((0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200B), (0x200E, 0x200F), (0x2028, 0x202E)),
    *((0x2060, 0x206F), (0x3164, 0x3164), (0xD800, 0xDFFF), (0xFE00, 0xFE0D), (0xFEFF, 0xFEFF)),
    *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x13430, 0x1345F), (0x1BCA0, 0x1BCA3)),
    *((0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
)
"""Ranges of code points that change the direction of text, break lines or are invisible. The
joiners U+200C, U+200D and the variation selectors U+FE0E, U+FE0F stay: scripts and emoji need them.
"""


_HARMFUL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f"
    + "".join(f"{chr(low)}-{chr(high)}" for low, high in _INVISIBLE)
    + "]"
)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"
