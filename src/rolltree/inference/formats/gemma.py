"""Grammar of Gemma's calls: `call:NAME{key:<|"|>text<|"|>,other:1}`."""

from __future__ import annotations

import re
from typing import Any

from rolltree._helpers.untrusted import MAX_DEPTH, read_json
from rolltree.inference.formats.calls import CallBlock, Source, made_call
from rolltree.inference.formats.rows import ToolFormat

_HEAD = re.compile(r"\s*(?:call)?:?\s*(?P<name>[\w./-][\w.:/-]*?)\s*\{")
_QUOTES = re.compile(r'<\|"\|>|<escape>')
_BARE = re.compile(r"[^,\[\]{}:]*")
_BARE_VALUE = re.compile(r"[^,\]}]*")


def read_gemma(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read one call."""
    head = _HEAD.match(source.text, at)
    if head is None:
        raise ValueError("a call is call:NAME{...}")
    reader = _Reader(source)
    name = head["name"]
    arguments, end = reader.object(head.end(), 0)
    for key in reader.texts & arguments.keys():
        arguments[key] = source.schemas.value(name, key, arguments[key])
    closed = source.past(row.closes, end)
    if row.closes and closed == end and source.past(row.opens, end) == end:
        raise ValueError("the call is not closed")
    return CallBlock(closed, [made_call(name, arguments)])


class _Reader:
    """Reads values; `texts` are the outer keys whose value was a text."""

    def __init__(self, source: Source) -> None:
        self._source, self._text = source, source.text
        self.texts: set[str] = set()

    def object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        """Read the pairs from `at` up to the brace."""
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        made: dict[str, Any] = {}
        while True:
            at = self._source.space(at)
            if self._text.startswith("}", at):
                return made, at + 1
            key, at = self._quoted(at) if _QUOTES.match(self._text, at) else self._bare(at)
            at = self._source.space(at)
            if not self._text.startswith(":", at) or not key:
                raise ValueError("an argument is key:value")
            value, at, is_text = self._value(at + 1, depth)
            made[key.strip("\"'")] = value
            if depth == 0 and is_text:
                self.texts.add(key.strip("\"'"))
            at = self._source.space(at)
            if self._text.startswith(",", at):
                at += 1

    def _value(self, at: int, depth: int) -> tuple[Any, int, bool]:
        at = self._source.space(at)
        if _QUOTES.match(self._text, at):
            return *self._quoted(at), True
        if self._text.startswith("{", at):
            return *self.object(at + 1, depth + 1), False
        if self._text.startswith("[", at):
            return *self._list(at + 1, depth + 1), False
        found = _BARE_VALUE.match(self._text, at)
        bare, end = (found[0].strip(), found.end()) if found else ("", at)
        if end >= len(self._text):
            raise ValueError("the call is not closed")
        try:
            return read_json(bare), end, False
        except ValueError:
            return bare, end, True

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        made: list[Any] = []
        while True:
            at = self._source.space(at)
            if self._text.startswith("]", at):
                return made, at + 1
            before = at
            value, at, _ = self._value(at, depth)
            made.append(value)
            at = self._source.space(at)
            if self._text.startswith(",", at):
                at += 1
            elif at == before:
                raise ValueError("a list is not closed")

    def _quoted(self, at: int) -> tuple[str, int]:
        opened = _QUOTES.match(self._text, at)
        assert opened is not None
        end = self._source.find(opened[0], opened.end())
        if end < 0:
            raise ValueError("a text is not closed")
        return self._text[opened.end() : end], end + len(opened[0])

    def _bare(self, at: int) -> tuple[str, int]:
        found = _BARE.match(self._text, at)
        return (found[0].strip(), found.end()) if found else ("", at)
