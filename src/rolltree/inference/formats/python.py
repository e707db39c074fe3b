"""Grammar of calls in Python, as Llama 4, LFM2 and OLMo 3 write them: `[f(a=1), g()]`.

The text is parsed, never run; only literals are values.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rolltree._helpers.untrusted import shorten
from rolltree.inference.formats.calls import CallBlock, Source, made_call, read_objects
from rolltree.inference.formats.reader import ToolCall
from rolltree.inference.formats.rows import ToolFormat

_MAX_CALL = 2_000_000
_MAX_DEPTH = 100
_CALL = re.compile(r"\s*[A-Za-z_][\w.]*\s*\(")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_ZEROS = re.compile(r"(?<![\w.'\"])0+(?=[1-9]\d*\s*[,)\]}])")
_TOKEN = r"\\.|['\"()\[\]{},\n]"


def read_python(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read a list of calls, or calls on lines of their own; some models write JSON as well."""
    text, marked = source.text, at > start
    begin = source.space(at)
    in_list = text.startswith("[", begin)
    if text.startswith("{", source.space(begin + in_list)):
        return read_objects(source, start, at, row)
    marks = (*row.opens, *row.closes) if marked else ()
    parts, end = _parts(source, begin + in_list, in_list, marks, row.opens)
    block, was_meant = CallBlock(end), False
    for first, last in parts:
        part = text[first:last].strip()
        if not part:
            continue
        try:
            block.calls.append(_call(part, source))
        except ValueError as error:
            block.problems.append(f"{shorten(part, 64)}: {error}")
            block.unread.append((first, last))
            was_meant |= part.partition("(")[0].strip() in source.schemas
    if marked:
        if not block.calls and not block.problems and not in_list:
            raise ValueError("a block of calls has none")
        block.end = source.past(row.closes, end)
        return block
    starts = not text[source.begin : start].strip()
    alone = starts and not text[end:].strip()
    known = source.schemas and all(call.name in source.schemas for call in block.calls)
    if not block.calls or not (alone or known):
        # A list in prose, such as [see(1)], is just text.
        return CallBlock(end, [], block.problems if alone or was_meant else [])
    return block


def _parts(
    source: Source, at: int, in_list: bool, marks: tuple[str, ...], opens: Sequence[str]
) -> tuple[list[tuple[int, int]], int]:
    """Return the spans of a block's calls, and its end without the mark.

    Calls are cut at commas or line ends outside of brackets and quotes. The block ends at its
    bracket, at a closing mark outside of quotes, or at an opening one.
    """
    parts: list[tuple[int, int]] = []
    depth, quote, begin = 0, "", at
    for found in _tokens(marks).finditer(source.text, at):
        token, place = found[0], found.start()
        if token in marks:
            if source.marks.real(token, place) and (token in opens or not quote):
                break
        elif quote:
            # A quote inside of a text that was not escaped is none: something else would follow.
            if token == quote and _ends_quote(source.text, place):
                quote = ""
        elif token in "'\"":
            quote = token
        elif token in "([{":
            depth += 1
        elif token in ")]}" and depth:
            depth -= 1
        elif token == "]" and in_list:
            return [*parts, (begin, place)], place + 1
        elif depth == 0 and token in ",\n":
            parts.append((begin, place))
            begin = place + 1
    else:
        place = len(source.text)
    if quote and 0 <= (close := source.first(marks, begin)[0]) < place:
        place = close
    return [*parts, (begin, place)], place


@lru_cache(32)
def _tokens(marks: tuple[str, ...]) -> re.Pattern[str]:
    spelled = sorted(marks, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, spelled), _TOKEN]), re.DOTALL)


def _ends_quote(text: str, at: int) -> bool:
    following = text[at + 1 : at + 40].lstrip()
    return not following or following[0] in ",)]}:"


def _call(text: str, source: Source) -> ToolCall:
    if not _CALL.match(text):
        raise ValueError("a call is NAME(argument=value, ...)")
    if len(text) > _MAX_CALL:
        raise ValueError(f"a call has at most {_MAX_CALL:,} characters")
    tree = None
    for form in (text.strip(), _repaired(text.strip())):
        try:
            tree = _parsed(form)
            break
        except ValueError as error:
            problem = error
    if tree is None:
        raise problem
    if not isinstance(tree, ast.Call):
        raise ValueError("it is not one call")
    name = ast.unparse(tree.func)
    keys = source.schemas.keys_of(name)
    if len(tree.args) > len(keys):
        raise ValueError("arguments are given by name")
    arguments = {key: _value(node) for key, node in zip(keys, tree.args, strict=False)}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise ValueError("arguments are given by name")
        arguments[keyword.arg] = _value(keyword.value)
    return made_call(name, arguments)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else "it cannot be parsed"
        raise ValueError(why) from None


def _repaired(text: str) -> str:
    """Return a call with line breaks and quotes inside of texts escaped, and no leading zeros."""
    made: list[str] = []
    quote, at = "", 0
    for found in re.finditer(r"\\.|['\"\n\x00]", text, re.DOTALL):
        token, place = found[0], found.start()
        made.append(text[at:place])
        at = found.end()
        if quote and token == "\n":
            token = "\\n"
        elif quote and token == "\x00":
            token = "\\x00"
        elif quote and token == quote:
            if _ends_quote(text, place):
                quote = ""
            else:
                token = "\\" + token
        elif not quote and token in "'\"":
            quote = token
        made.append(token)
    return _ZEROS.sub("", "".join([*made, text[at:]]))


def literal(text: str) -> Any:
    """Return the value of a Python literal.

    Raises:
        ValueError: it is none, or not a value of JSON.
    """
    return _value(_parsed(text.strip()))


def _value(node: ast.expr | None, depth: int = 0) -> Any:
    """Return the value of a literal as JSON has it; sets and tuples become lists."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(each, depth + 1) for each in node.elts]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {str(_value(key)): _value(each, depth + 1) for key, each in pairs}
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
    raise ValueError("an argument is not a literal")
