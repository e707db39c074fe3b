"""Grammars of calls in tags: Qwen's functions, MiniMax's and DeepSeek's invokes, GLM's pairs.

Values are text without quotes or escapes. A closing tag ends a value if the structure goes
on after it, so a value may contain the tag; a missing one is made up for by the next tag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from rolltree._helpers.untrusted import read_json_start
from rolltree.inference.formats.calls import CallBlock, Source, Unreadable, made_call
from rolltree.inference.formats.rows import ToolFormat


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of one spelling, as patterns; `trims` is how many line breaks frame a value."""

    function: re.Pattern[str]
    parameter: re.Pattern[str]
    next_parameter: re.Pattern[str]  # where one begins although the last was not closed
    close_parameter: re.Pattern[str]  # where the structure goes on
    any_close: str
    close_function: str
    after_function: re.Pattern[str]
    trims: bool


@lru_cache(32)
def _tags(row: ToolFormat) -> _Tags:
    if row.grammar == "tags":
        function, parameter = r"<function=(?P<name>[^>\n]+)>", r"<parameter=(?P<key>[^>\n]+)>"
        opened, prefix, names = "<function=", "", ("parameter", "function")
    else:
        prefix, names = row.prefix, ("parameter", "invoke")
        mark = re.escape(prefix)
        function = rf"<{mark}invoke name=(?P<name>[^>\n]+)>"
        parameter = (
            rf"<{mark}parameter name=(?P<key>\"[^\"\n]*\"|[^\s>]+)"
            r"(?:\s+string=\"(?P<string>true|false)\")?\s*>"
        )
        opened = f"<{prefix}invoke"
    closes = [f"</{prefix}{name}>" for name in names]
    ends = "|".join(map(re.escape, (closes[1], opened, *row.closes, *row.opens, *row.wraps)))
    plain = parameter.replace("?P<key>", "?:").replace("?P<string>", "?:")
    return _Tags(
        re.compile(rf"\s*{function}"),
        re.compile(rf"\s*{parameter}"),
        # Not \s, which would try every line break of a long run of them.
        re.compile(rf"\n[ \t]*{parameter}"),
        re.compile(rf"{re.escape(closes[0])}(?=\s*(?:{plain}|{ends}|$))"),
        closes[0],
        closes[1],
        re.compile(rf"\n?{re.escape(closes[1])}(?=\s*(?:{ends}|$))"),
        row.grammar == "tags",
    )


def read_functions(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read functions with parameters, one or several in a block."""
    tags = _tags(row)
    # The mark may be the tag itself, when the model left the outer one out.
    at = start if tags.function.match(source.text, start) else at
    block = CallBlock(at)
    while tags.function.match(source.text, block.end):
        try:
            _read_function(source, block, tags, row)
        except Unreadable as error:
            if not block.calls:
                raise
            block.problems.append(str(error))
            block.resume = max(error.resume, block.end + 1)
            return block
        closed = source.past(row.closes, block.end)
        if closed > block.end:
            block.end = closed
            break
    if not block.calls:
        raise Unreadable("a call is <function=NAME>...</function>")
    return block


def read_invokes(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read invokes with named parameters."""
    tags = _tags(row)
    found = start if tags.function.match(source.text, start) else at
    if tags.function.match(source.text, found) is None:
        # Step 3 writes `function`, a separator and the name again before the tag.
        found = source.find(f"<{row.prefix}invoke", at)
        following = source.first(row.opens, at)[0]
        if found < 0 or 0 <= following < found:
            raise Unreadable("a call names its tool as invoke name=...")
    block = CallBlock(found)
    _read_function(source, block, tags, row)
    block.end = source.past(row.closes, block.end)
    return block


def _read_function(source: Source, block: CallBlock, tags: _Tags, row: ToolFormat) -> None:
    """Read the function at the end of a block into it."""
    text = source.text
    head = tags.function.match(text, block.end)
    if head is None:
        raise Unreadable("a call names its tool in its tag")
    name, at = head["name"].strip().strip("\"'"), head.end()
    arguments: dict[str, object] = {}
    known = source.schemas.keys_of(name)
    while True:
        parameter = tags.parameter.match(text, at)
        if parameter is None:
            break
        key = parameter["key"].strip().strip("\"'")
        value, at = _value(source, parameter.end(), tags, known)
        is_typed = not tags.trims and parameter.groupdict().get("string") == "false"
        if tags.trims:
            # The format puts the value on lines of its own; further breaks belong to the value.
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = source.schemas.value(name, key, value, otherwise=is_typed)
    begin = source.space(at)
    if text.startswith("{", begin) and not arguments:  # Llama's older <function=name>{...}
        try:
            value_of, at = read_json_start(text, begin)
        except ValueError as error:
            raise Unreadable(f"the arguments of {name}: {error}", meant=True) from None
        block.calls.append(made_call(name, value_of))
    else:
        block.calls.append(made_call(name, arguments))
    closed = source.past((tags.close_function,), at)
    if (
        closed == at
        and not _goes_on(source, at, row)
        and not (source.space(at) == len(text) and source.schemas.complete(name, arguments))
    ):
        block.calls.pop()
        raise Unreadable(f"the call of {name} is not closed", at, meant=True)
    block.end = closed


def _goes_on(source: Source, at: int, row: ToolFormat) -> bool:
    """Whether a mark follows that ends a function although its own closing tag is missing."""
    return source.past((*row.closes, *row.wraps, *row.opens), at) > at


def _value(source: Source, at: int, tags: _Tags, known: list[str]) -> tuple[str, int]:
    """Return the text of a value and where its parameter ends."""
    text = source.text
    start, end = source.search(tags.close_parameter, at)
    ends = [(start, end)] if start >= 0 else []
    # A parameter on a new line ends one without a closing tag, unless the schema does not know it.
    begin = source.search(tags.next_parameter, at)[0]
    if begin >= 0 and (start < 0 or begin < start):
        key = tags.next_parameter.match(text, begin)
        if key is not None and (not known or key["key"].strip("\"'") in known):
            closed = source.find(tags.any_close, at)
            if not 0 <= closed < begin:
                ends.append((begin, begin))
    begin = source.search(tags.after_function, at)[0]
    if begin >= 0:
        ends.append((begin, begin))
    if not ends:
        first = source.find(tags.any_close, at)
        if first < 0:
            raise Unreadable("a parameter is not closed", at, meant=True)
        ends.append((first, first + len(tags.any_close)))
    start, end = min(ends)
    return text[at:start], end


_NAME = re.compile(r"\s*(?P<name>[^\s<>{}\[\]]+)\s*(?=<|\Z)")
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|<tool_call>|\Z))")
_NEXT_KEY = re.compile(r"\n[ \t]*<arg_key>")


def read_pairs(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read a name and `<arg_key>`/`<arg_value>` pairs."""
    text = source.text
    head = _NAME.match(text, at)
    if head is None:
        raise Unreadable("a call starts with the tool's name")
    name, at = head["name"], head.end()
    arguments: dict[str, object] = {}
    while (key_at := source.past(("<arg_key>",), at)) > at:
        begin = source.find("<arg_value>", key_at)
        nested = source.find("<arg_key>", key_at)
        if begin < 0 or 0 <= nested < begin:
            raise Unreadable("an <arg_key> has no <arg_value>", key_at, meant=True)
        key = text[key_at:begin].strip().removesuffix("</arg_key>").strip()
        after = begin + len("<arg_value>")
        stop, end = source.search(_VALUE_END, after)
        next_key = source.search(_NEXT_KEY, after)[0]
        unclosed = source.find("</arg_value>", after)
        if next_key >= 0 and (stop < 0 or next_key < stop) and not 0 <= unclosed < next_key:
            stop, end = next_key, next_key
        if stop < 0:
            stop, end = unclosed, unclosed + len("</arg_value>")
        if stop < 0:
            raise Unreadable("an <arg_value> is not closed", after, meant=True)
        arguments[key] = source.schemas.value(name, key, text[after:stop])
        at = end
    closed = source.past(row.closes, at)
    # After a tag in prose the name would be its next word, and the next call would follow.
    if closed == at and (not arguments or source.past(row.opens, at) == at):
        ends = source.space(at) == len(text)
        if not ends or not source.schemas.complete(name, arguments):
            why = "the call is not closed" if ends else "text in a call"
            raise Unreadable(why, meant=bool(arguments))
    return CallBlock(closed, [made_call(name, arguments)])
