"""Tool calls in an answer: finds the blocks, has each read by its row's grammar, and loses nothing.

What cannot be read stays in the content, and a problem says why. A block ends where its grammar
says, not at the first text that looks like a closing mark. All of it takes linear time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, TypeAlias

from rolltree._helpers.untrusted import read_json, read_json_start, shorten, well_formed
from rolltree.inference.formats.reader import ToolCall, ToolCalls
from rolltree.inference.formats.rows import TOOL_FORMATS, ToolFormat
from rolltree.inference.formats.schema import Schemas

MAX_PROBLEMS = 8
"""How many unreadable calls of one message are reported to the model."""
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_REST_OF_JSON = re.compile(r"[\s\]}]*")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


class Unreadable(ValueError):
    """A block is not a call; the next one is sought from `resume` on, if that is known.

    `meant` says that the model certainly meant to make a call.
    """

    def __init__(self, why: object, resume: int = 0, *, meant: bool = False) -> None:
        super().__init__(str(why))
        self.resume, self.meant = resume, meant


@dataclass(frozen=True, slots=True)
class Marks:
    """Which spellings of marks in a text are marks.

    `tokens` are the marks that are single tokens of the tokenizer, and `places` where such tokens
    begin in the text. Without `places` the ids are not known, and every spelling counts.
    """

    tokens: frozenset[str] = frozenset()
    places: set[int] | frozenset[int] | None = None

    def real(self, mark: str, at: int) -> bool:
        """Whether the spelling of `mark` at `at` is the mark."""
        return self.places is None or at in self.places or mark not in self.tokens


@dataclass(slots=True)
class Source:
    """A text with its marks and the tools' schemas. Searches remember where they failed."""

    text: str
    marks: Marks = Marks()
    schemas: Schemas = field(default_factory=Schemas)
    begin: int = 0
    """Where the content begins: before it is reasoning."""
    _match_cache: dict[object, tuple[int, int, int]] = field(default_factory=dict)

    def find(self, mark: str, at: int) -> int:
        """Return where the next `mark` begins, or -1."""

        def search() -> tuple[int, int]:
            found = self.text.find(mark, at)
            while found >= 0 and not self.marks.real(mark, found):
                found = self.text.find(mark, found + 1)
            return found, found

        return self._remembered(mark, at, search)[0]

    def search(self, pattern: re.Pattern[str], at: int) -> tuple[int, int]:
        """Return the span of the next match, or (-1, -1)."""

        def search() -> tuple[int, int]:
            found = pattern.search(self.text, at)
            while found is not None and not self._starts_real(found.start()):
                found = pattern.search(self.text, found.start() + 1)
            return found.span() if found else (-1, -1)

        return self._remembered(pattern, at, search)

    def _starts_real(self, at: int) -> bool:
        """Whether no mark in letters begins at `at`."""
        if self.marks.places is None:
            return True
        at = self.space(at)
        marks = self.marks
        return all(marks.real(m, at) for m in marks.tokens if self.text.startswith(m, at))

    def _remembered(
        self, key: object, at: int, search: Callable[[], tuple[int, int]]
    ) -> tuple[int, int]:
        # Without it a text of opening marks alone would be searched to its end for each of them.
        since, start, end = self._match_cache.get(key, (len(self.text) + 1, -1, -1))
        if not (since <= at and (start < 0 or start >= at)):
            start, end = search()
            self._match_cache[key] = (at, start, end)
        return start, end

    def first(self, marks: Sequence[str], at: int) -> tuple[int, str]:
        """Return where the first of several marks begins, and which: the longest there."""
        found = [(start, -len(mark), mark) for mark in marks if (start := self.find(mark, at)) >= 0]
        start, _, mark = min(found, default=(-1, 0, ""))
        return start, mark

    def without(self, marks: Sequence[str], start: int, end: int) -> str:
        """Return a part of the text without these marks."""
        parts = []
        while marks:
            at, mark = self.first(marks, start)
            if not 0 <= at < end:
                break
            parts.append(self.text[start:at])
            start = at + len(mark)
        return "".join([*parts, self.text[start:end]])

    def past(self, marks: Sequence[str], at: int) -> int:
        """Return the end of the mark that follows at `at`, after white space; or `at`."""
        start = self.space(at)
        for mark in marks:
            if self.text.startswith(mark, start) and self.marks.real(mark, start):
                return start + len(mark)
        return at

    def space(self, at: int) -> int:
        """Return the end of the white space at `at`."""
        found = _SPACE.match(self.text, at)
        return found.end() if found else at


@dataclass(slots=True)
class CallBlock:
    """What a grammar has read: calls, the end of the block, and what could not be read.

    The next block is sought from `resume` on, if that is after the end. `unread` spans stay in the
    content, if there are calls beside them.
    """

    end: int
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resume: int = 0
    unread: list[tuple[int, int]] = field(default_factory=list)


Grammar: TypeAlias = Callable[[Source, int, int, ToolFormat], CallBlock]
"""Reads the block whose mark spans `[start, at)`; raises `ValueError` if it is none."""


def read_calls(source: Source, row: ToolFormat) -> ToolCalls:
    """Return the calls of an answer's content."""
    text = source.text
    calls: list[ToolCall] = []
    problems: list[str] = []
    kept: list[tuple[int, int]] = []
    at = written = source.begin
    if not row.grammar:
        return ToolCalls(text[at:])
    read = grammar(row.grammar)
    while (span := _next_open(source, row, at)) is not None:
        start, after = span
        try:
            block = read(source, start, after, row)
        except ValueError as error:
            at = max(after if after > start else start + 1, getattr(error, "resume", 0))
            was_meant = getattr(error, "meant", False) or not _is_prose(source, after, row)
            if was_meant and (after > start or source.space(written) >= start):
                problems.append(f"tool call {len(calls) + len(problems)}: {error}")
            continue
        if after == start and not block.calls and not block.problems:
            # JSON that is an answer.
            at = max(block.end, start + 1)
            continue
        if block.problems and not block.calls:
            # The history shows the model what it wrote, and the problem what was wrong with it.
            at = max(block.end, start + 1)
        else:
            kept += [(written, start), *block.unread]
            written = max(block.end, start + 1)
            at = max(written, block.resume)
        problems += [f"tool call {len(calls) + len(problems)}: {p}" for p in block.problems]
        calls += block.calls
    kept.append((written, len(text)))
    if (
        not (calls or problems)
        and sum(source.find(mark, source.begin) >= 0 for mark in row.wraps) > 1
    ):
        problems.append("the marks of calls are around no call")
    drops = row.wraps if calls and not problems else ()
    content = "".join(source.without(drops, *span) for span in kept)
    if len(problems) > MAX_PROBLEMS:
        more = len(problems) - MAX_PROBLEMS
        problems = [*problems[:MAX_PROBLEMS], f"{more} more calls cannot be read"]
    return ToolCalls(content.strip() if calls else content, tuple(calls), tuple(problems))


def calls_in_text(row: ToolFormat, text: str, tools: Sequence[Any] | None = None) -> ToolCalls:
    """Return the calls in a text whose token ids are not known."""
    source = Source(text, schemas=Schemas(tools))
    if row.grammar != "harmony":
        return read_calls(source, row)
    from rolltree.inference.formats.harmony import Messages

    messages = Messages(with_calls=True)
    messages.read(source, final=True)
    return messages.result()


ToolParser: TypeAlias = Callable[..., ToolCalls]
"""From a text, and the tools that it may call, to content and calls."""

TOOL_PARSERS: dict[str, ToolParser] = {
    name: partial(calls_in_text, row) for name, row in TOOL_FORMATS.items()
}


def _next_open(source: Source, row: ToolFormat, at: int) -> tuple[int, int] | None:
    """Return where a block may begin, and where its mark ends; a bare call has an empty mark."""
    start, mark = source.first(row.opens, at)
    span = (start, start + len(mark))
    if row.bare:
        found = source.search(_compiled(row.bare), at)[0]
        if found >= 0 and (start < 0 or found < start):
            span = (found, found)
    return None if span[0] < 0 else span


_compiled = lru_cache(64)(re.compile)
_ATTEMPT = re.compile(r"\s*(?:[{\[<]|[^\s<]{0,200}+\s*\Z)")


def _is_prose(source: Source, at: int, row: ToolFormat) -> bool:
    """Whether what follows a mark is a sentence about it: no call begins and none ends.

    A single word up to the end is a call that was cut off after its name.
    """
    if _ATTEMPT.match(source.text, at):
        return False
    if row.grammar in ("named", "gemma"):  # their marks are tokens, which no sentence has
        return False
    close, _ = source.first(row.closes, at)
    following, _ = source.first(row.opens, at)
    return close < 0 or 0 <= following < close


def grammar(name: str) -> Grammar:
    """Return the reader of a grammar; most models need only one of these modules."""
    module, function = _GRAMMARS[name]
    found: Grammar = getattr(import_module(f"rolltree.inference.formats.{module}"), function)
    return found


_GRAMMARS = {
    "json": ("calls", "read_objects"),
    "keyed": ("calls", "read_objects"),
    "named": ("calls", "read_named"),
    "tags": ("tagged", "read_functions"),
    "invoke": ("tagged", "read_invokes"),
    "pairs": ("tagged", "read_pairs"),
    "python": ("python", "read_python"),
    "gemma": ("gemma", "read_gemma"),
}


def read_objects(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read one JSON object, several, or a list of them."""
    text, marked = source.text, at > start
    at = source.space(source.past(row.inner, at))
    in_list = text.startswith("[", at)
    block = CallBlock(at + in_list)
    while True:
        begin = _BETWEEN.match(text, block.end).end()  # type: ignore[union-attr]
        if not text.startswith("{", begin):
            break
        try:
            value, end = read_json_start(text, begin)
        except ValueError as error:
            # What comes before is read, and JSON inside of what is cut off does not count.
            where = max(getattr(error, "pos", len(text)), begin + 1)
            if not block.calls:
                raise Unreadable(f"not a tool call in JSON: {error}", where) from None
            block.problems.append(str(error))
            block.end, block.resume = begin, where
            return block
        if not (marked or (in_list and block.calls)) and _is_an_answer(value, source, start, end):
            break
        block.end = end
        try:
            block.calls.append(call_of(value, keyed=row.grammar == "keyed"))
        except ValueError as error:
            block.problems.append(f"{error}, and not {shorten(text[begin:end], 64)}")
            block.unread.append((begin, end))
    if in_list:
        block.end = _past_list(source, block)
    if not block.calls and not block.problems:
        if not marked:
            return CallBlock(_end_of_json(text, at))
        raise Unreadable('a call is a JSON object with a "name"')
    return _closed(source, block, row)


def _past_list(source: Source, block: CallBlock) -> int:
    end = source.space(block.end)
    return end + 1 if source.text.startswith("]", end) else block.end


def _closed(source: Source, block: CallBlock, row: ToolFormat) -> CallBlock:
    """Return the block with its closing mark; a brace too many does not matter before it."""
    rest = _REST_OF_JSON.match(source.text, block.end)
    end = rest.end() if rest else block.end
    closed = source.past(row.closes, end)
    if closed > end:
        block.end = closed
    elif not row.closes and source.text[block.end : end].strip() == "" and row.bare:
        semicolon = source.space(block.end)
        if source.text.startswith(";", semicolon):
            block.end = semicolon + 1
    return block


def _end_of_json(text: str, at: int) -> int:
    try:
        return read_json_start(text, at)[1]
    except ValueError:
        return at + 1


def _is_an_answer(value: Any, source: Source, start: int, end: int) -> bool:
    """Whether JSON without a mark is just an answer: amid text, it has to name a known tool."""
    name = value.get("name") if isinstance(value, dict) else None
    has_arguments = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
    if name is None:
        return True
    if isinstance(name, str) and source.schemas and name in source.schemas:
        return False
    before, after = source.text[source.begin : start], source.text[end : end + 100]
    alone = not (before.strip() or after.strip(" \t\n;{"))
    return not (has_arguments or not isinstance(name, str)) or (bool(source.schemas) and not alone)


def call_of(value: Any, *, keyed: bool = False) -> ToolCall:
    """Return the call that a JSON object makes; `keyed` ones are {"name": {arguments}}.

    Raises:
        ValueError: it has no name, or its arguments are not an object.
    """
    if not isinstance(value, dict):
        raise ValueError('a call is a JSON object with a "name"')
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    function = value.get("function")
    if name is None and isinstance(function, dict):
        name, arguments = function.get("name"), function.get("arguments", {})
    elif name is None and isinstance(function, str):
        name = function
    elif name is None and keyed and len(value) == 1:
        ((name, arguments),) = value.items()
    if not isinstance(name, str):
        raise ValueError('a call is a JSON object with a "name"')
    # Some models write the object as a JSON string, as in OpenAI's messages.
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    made = made_call(name, arguments)
    written = value.get("tool_call_id", value.get("id"))
    return replace(made, id=written) if isinstance(written, str) and written else made


def made_call(name: str, arguments: Any) -> ToolCall:
    """Return a call; its texts are well-formed.

    Raises:
        ValueError: the arguments are not an object of JSON.
    """
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {shorten(name, 64)} are not a JSON object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(well_formed(name), well_formed(text))


def read_named(source: Source, start: int, at: int, row: ToolFormat) -> CallBlock:
    """Read a name, then a JSON object; or, as older models of Mistral, a list of objects."""
    text = source.text
    head = _compiled(row.head).match(text, at)
    if head is None:
        if not text.startswith("[", source.space(at)):
            raise ValueError("a call has no separator between its name and its arguments")
        block = read_objects(source, start, at, row)
        block.calls = [_with_mistral_id(call, call.id) for call in block.calls]
        return block
    groups = head.groupdict()
    name = (groups["name"] or groups.get("other") or "").strip()
    try:
        value, end = read_json_start(text, head.end())
    except ValueError as error:
        raise Unreadable(f"the arguments of {shorten(name, 64)}: {error}") from None
    call = made_call(name.removeprefix("functions."), value)
    written = (groups.get("id") or "").strip()
    call = replace(call, id=written) if row.closes and written else _with_mistral_id(call, written)
    # DeepSeek V3 fences the arguments.
    return _closed(source, CallBlock(source.past(("```",), end), [call]), row)


def _with_mistral_id(call: ToolCall, written: str | None) -> ToolCall:
    # Mistral's templates take nine letters and digits, and refuse other ids.
    return replace(call, id=written if _MISTRAL_ID.fullmatch(written or "") else None)


def call_messages(calls: Sequence[ToolCall], text: str) -> list[dict[str, Any]]:
    """Return the calls as OpenAI's `tool_calls`.

    A call keeps the id that the model wrote, unless an earlier call has the same. Other ids are
    nine letters and digits (some templates require this) and depend only on the index and `text`,
    so the same completion always gives the same message.
    """
    # Results refer to a call by its id, so ids must be unique.
    taken: set[str] = set()
    made = []
    for index, call in enumerate(calls):
        name = call.id if call.id and call.id not in taken else _made_id(index, text)
        taken.add(name)
        function = {"name": call.name, "arguments": call.arguments}
        made.append({"id": name, "type": "function", "function": function})
    return made


def _made_id(index: int, text: str) -> str:
    return hashlib.blake2b(f"{index}:{text}".encode(errors="surrogatepass")).hexdigest()[:9]


def mark_places(
    text: str, ids: Sequence[int], tokens: Mapping[int, str], decode: Callable[[list[int]], str]
) -> frozenset[int] | None:
    """Return where the mark tokens among `ids` begin in their text; None if that is not known.

    `text` is what the ids spell, or a beginning of it.
    """
    longest = sorted(tokens.values(), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest)))
    spelled = [found.start() for found in pattern.finditer(text)]
    if len(spelled) == sum(token in tokens for token in ids):
        return frozenset(spelled)
    # Some were written in letters: the text between two tokens says how many.
    flags: list[bool] = []
    run: list[int] = []
    for token in ids:
        if token in tokens:
            flags += [False] * len(pattern.findall(decode(run)))
            flags.append(True)
            run = []
        else:
            run.append(token)
    flags += [False] * len(pattern.findall(decode(run)))
    if len(flags) < len(spelled):
        return None
    return frozenset(at for at, flag in zip(spelled, flags, strict=False) if flag)
