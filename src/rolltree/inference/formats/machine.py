"""The state machine that reads an answer: whole, or while it is written.

It goes from reasoning to content to what may be calls. Text that a later token may still change is
held back, so that any cutting into pieces gives the same message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolltree.inference.formats.reader import CompletionParser, unsettled
from rolltree.values.types import ChatMessage, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.formats.calls import Source
from rolltree.inference.formats.reader import ToolCall, ToolCalls

_MAY_BE_BARE = re.compile(r"[\[{]")


class Reading:
    """An answer that is read while it grows. `advance` and `finish` take its whole text so far."""

    def __init__(
        self,
        parser: CompletionParser,
        tools: Sequence[ToolSchema] | None,
        places: set[int] | frozenset[int] | None,
    ) -> None:
        self._thoughts, self._tools = parser.thoughts, tools
        self._row = parser.tools
        self._starts_inside = parser.starts_inside
        self._tokens, self._places = frozenset(parser.tokens.values()), places
        self._state = "start"
        self._from = 0  # where the current part begins
        self._scanned = 0
        self._held = -1  # where a call may begin
        self._reasoning: list[str] = []
        self._content: list[tuple[int, int]] = []
        self._text = ""
        row = self._row
        opens, around = (row.opens, (*row.wraps, *row.inner)) if tools else ((), ())
        wraps = (*self._thoughts.wraps, *around)
        self._opens, self._around = opens, around
        starts = (self._thoughts.start, self._thoughts.end)
        self._any = tuple(mark for mark in (*starts, *opens, *wraps) if mark)

    def advance(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that no later text can change."""
        self._scan(text, final=False)
        limit = len(text) - unsettled(text, self._any)
        reasoning = list(self._reasoning)
        said = ""
        if self._state == "reasoning":
            stop = min(limit, self._held) if self._held >= 0 else limit
            begin = self._past_lead(text)
            if begin < 0:
                stop = begin = 0
            reasoning.append(text[begin:stop])
        elif self._state in ("content", "held"):
            said = text[self._from : max(self._from, self._settled_end(text, limit))]
        said = self._joined(text, self._content, self._reasoning, said)
        if self._tools or self._thoughts.wraps:
            # If a call follows, the space around the content goes.
            said = "" if said[:1].isspace() else said.rstrip()
        return "\n".join(reasoning).strip("\n"), said

    def _settled_end(self, text: str, limit: int) -> int:
        limit = min(limit, self._held) if self._state == "held" else limit
        # Marks around the calls are content only if there are none.
        return min([limit, *(at for m in self._around if (at := text.find(m, self._from)) >= 0)])

    def finish(self, text: str) -> ChatMessage:
        """Return the message of the whole answer."""
        found: ToolCalls | None = None
        self._scan(text, final=True)
        rest, reasoning = text[self._from :], self._reasoning
        if self._may_call(text):
            found = self._calls(text, self._from)
            rest = found.content
        content = self._joined(text, self._content, reasoning, rest)
        if found is None:
            return self._message(text, content, reasoning)
        content = content.strip() if found.calls else content
        return self._message(text, content, reasoning, found.calls, found.problems)

    def _message(
        self,
        text: str,
        content: str,
        reasoning: Sequence[str],
        calls: Sequence[ToolCall] = (),
        problems: Sequence[str] = (),
    ) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = "\n".join(reasoning).strip("\n")
        if calls:
            from rolltree.inference.formats.calls import call_messages

            message["tool_calls"] = call_messages(calls, text)
        if problems:
            message["parse_problems"] = list(problems)
        return message

    def _may_call(self, text: str) -> bool:
        """Whether there may be calls: for the usual plain answer nothing more is loaded or done."""
        if not self._tools or not self._row.grammar:
            return False
        if self._row.bare and _MAY_BE_BARE.search(text, self._from):
            return True
        return any(text.find(mark, self._from) >= 0 for mark in (*self._opens, *self._row.wraps))

    def _joined(
        self,
        text: str,
        spans: Sequence[tuple[int, int]],
        reasoning: Sequence[str],
        rest: str = "",
    ) -> str:
        """Return the content: these parts of the text and the rest, without the marks around it."""
        said = "".join(text[start:end] for start, end in spans) + rest
        if self._thoughts.wraps:
            for mark in self._thoughts.wraps:
                said = said.replace(mark, "")
            return said.strip("\n")
        # The line breaks after the reasoning belong to its mark.
        return said.lstrip("\n") if reasoning and not any(end for _, end in spans[:1]) else said

    def _calls(self, text: str, begin: int) -> ToolCalls:
        from rolltree.inference.formats.calls import read_calls

        return read_calls(self._source(text, begin), self._row)

    def _source(self, text: str, begin: int = 0) -> Source:
        from rolltree.inference.formats.calls import Marks, Source
        from rolltree.inference.formats.schema import Schemas

        return Source(text, Marks(self._tokens, self._places), Schemas(self._tools), begin)

    def _real(self, mark: str, at: int) -> bool:
        return self._places is None or mark not in self._tokens or at in self._places

    def _find(self, text: str, mark: str, at: int) -> int:
        """Return where `mark` is next, at or after `at`, in what was not searched yet."""
        if not mark:
            return -1
        found = text.find(mark, max(at, self._scanned - len(mark) + 1))
        while found >= 0 and not self._real(mark, found):
            found = text.find(mark, found + 1)
        return found

    def _first(self, text: str, marks: Sequence[str], at: int) -> int:
        found = [place for mark in marks if (place := self._find(text, mark, at)) >= 0]
        return min(found, default=-1)

    def _scan(self, text: str, *, final: bool) -> None:
        """Go on through the parts of the answer as far as the text allows."""
        steps = {"start": self._begin, "reasoning": self._think, "content": self._say}
        while (step := steps.get(self._state)) is not None and step(text, final):
            self._scanned = 0
        self._scanned = len(text)

    def _begin(self, text: str, final: bool) -> bool:
        mark = self._thoughts.start
        begin = len(text) - len(text.lstrip())
        if mark and not final and len(text) - begin < len(mark) and mark.startswith(text[begin:]):
            return False
        opened = bool(mark) and text.startswith(mark, begin) and self._real(mark, begin)
        if opened or self._starts_inside:
            self._state, self._from = "reasoning", begin + len(mark) if opened else 0
        else:
            self._state = "content"
        return True

    def _past_lead(self, text: str) -> int:
        """Return where reasoning begins after its lead; -1 while that is not known."""
        lead, begin = self._thoughts.lead, self._from
        if lead and text.startswith(lead, begin):
            return begin + len(lead)
        return -1 if lead and lead.startswith(text[begin : begin + len(lead)]) else begin

    def _think(self, text: str, final: bool) -> bool:
        end = self._find(text, self._thoughts.end, self._from)
        if self._held < 0 and self._opens:
            self._held = self._first(text, (*self._around, *self._opens), self._from)
        if end < 0 and not final:
            return False
        begin = max(self._from, self._past_lead(text))
        if end >= 0:
            self._reasoning.append(text[begin:end])
            self._from = end + len(self._thoughts.end)
        elif self._held >= 0 and self._calls(text, self._held).calls:
            # A model may call a tool without ending its reasoning.
            self._reasoning.append(text[begin : self._held])
            self._from = self._held
        else:
            self._reasoning.append(text[begin:])
            self._from = len(text)
        self._state, self._held = "content", -1
        return True

    def _say(self, text: str, final: bool) -> bool:
        """Find where content ends: at a call, or at reasoning that begins after it."""
        starts = (self._thoughts.start,) if self._thoughts.anywhere else ()
        think = self._first(text, starts, self._from)
        call = self._first(text, self._opens, self._from)
        if self._tools and self._row.bare:
            bare = _MAY_BE_BARE.search(text, max(self._from, self._scanned - 1))
            if bare and not 0 <= call <= bare.start():
                call = bare.start()
        if think >= 0 and not 0 <= call < think:
            self._content.append((self._from, think))
            self._state, self._from = "reasoning", think + len(self._thoughts.start)
            return True
        if call >= 0:
            self._state, self._held = "held", call
        return False
