"""The formats of tool calls and of reasoning, a row each, and how a chat template shows its own.

A row (`rows.toml`) is data: the marks that begin and end a block, and the grammar between them.
Marks that are tokens of the tokenizer are read as ids, others as text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rolltree.values.errors import UnknownName, did_you_mean


@dataclass(frozen=True, slots=True)
class ToolFormat:
    r"""How one family of models writes tool calls.

    Args:
        name: what `tool_parser=` and notices call it.
        grammar: how the text after an opening mark is read: `"json"` (an object, several, or a
            list), `"keyed"` (JSON with the name as the only key), `"named"` (the name, then JSON),
            `"tags"` (`<function=...>`), `"invoke"` (`<invoke name=...>`), `"pairs"` (`<arg_key>`),
            `"python"`, `"gemma"` or `"harmony"`.
        opens: the marks that begin a block of calls.
        closes: the marks that may end it.
        wraps: marks around all blocks, which are not content.
        inner: further marks inside of blocks.
        prefix: what the tags of `"invoke"` begin with.
        head: for `"named"`, a regular expression of what precedes the JSON, with a group `name`
            (or `other`) and, if the format has ids, `id`.
        bare: a regular expression of the start of a call without a mark.
        found_by: texts of which one in a chat template shows that the format is its own.

    Example:
        >>> mine = ToolFormat("mine", "json", ("<call>",), ("</call>",))
    """

    name: str
    grammar: str = ""
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    prefix: str = ""
    head: str = ""
    bare: str = ""
    found_by: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark of the format."""
        return tuple(dict.fromkeys((*self.opens, *self.closes, *self.wraps, *self.inner)))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning.

    Args:
        name: what `reasoning=` and notices call it.
        start: the mark that begins it.
        end: the mark that ends it.
        lead: a word after `start` that is not part of it.
        anywhere: whether it may begin after content, which only a special token may.
        wraps: marks around the answer that are not content.
        found_by: texts of which one in a chat template shows that the marks are its own.
    """

    name: str
    start: str = ""
    end: str = ""
    lead: str = ""
    anywhere: bool = False
    wraps: tuple[str, ...] = ()
    found_by: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark of the format."""
        return tuple(mark for mark in (self.start, self.end, *self.wraps) if mark)


_Row = TypeVar("_Row", ToolFormat, ReasoningFormat)


def _rows(kind: type[_Row], table: dict[str, dict[str, Any]]) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    for name, fields in table.items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        rows[name] = kind(name, **given)
    return rows


_TABLES = tomllib.loads((Path(__file__).with_name("rows.toml")).read_text(encoding="utf-8"))
TOOL_FORMATS: dict[str, ToolFormat] = _rows(ToolFormat, _TABLES["tools"])
"""The formats of tool calls by name, in the order in which a template is searched for them."""
REASONING_FORMATS: dict[str, ReasoningFormat] = _rows(ReasoningFormat, _TABLES["reasoning"])
"""The formats of reasoning by name, in the order in which a template is searched for them."""
REASONING_TAGS: dict[str, tuple[str, str]] = {
    name: (row.start, row.end) for name, row in REASONING_FORMATS.items()
}


def _shown(template: str, rows: Iterable[_Row], otherwise: _Row) -> _Row:
    found = (row for row in rows if any(mark in template for mark in row.found_by))
    return next(found, otherwise)


def tool_format(named: str | ToolFormat, template: str = "") -> ToolFormat:
    """Return a row by its name ("auto": the one that `template` shows), or the row itself.

    Raises:
        UnknownName: there is none of that name.
    """
    return _named("tool-call", named, template, TOOL_FORMATS)


def reasoning_format(named: str | ReasoningFormat, template: str = "") -> ReasoningFormat:
    """Return a row by its name, likewise."""
    return _named("reasoning", named, template, REASONING_FORMATS)


def _named(what: str, named: str | _Row, template: str, table: dict[str, _Row]) -> _Row:
    if not isinstance(named, str):
        return named
    if named == "auto":
        return _shown(template, table.values(), table["none"])
    if named not in table:
        raise UnknownName(f"unknown {what} format {named!r}." + did_you_mean(named, table))
    return table[named]
