"""Answers read as a tokenizer's own `response_template` says (transformers 5.13 and later).

The template decides what is content, reasoning and calls; arguments that it leaves as texts get the
types of the tool's schema.
"""

from __future__ import annotations

import json
from typing import Any

from rolltree._helpers.untrusted import well_formed
from rolltree.inference.formats.calls import call_of, made_call
from rolltree.inference.formats.machine import Reading
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.schema import Schemas
from rolltree.values.types import ChatMessage

_REASONING = ("reasoning_content", "reasoning", "thinking")


class ResponseReading(Reading):
    """An answer that transformers reads once it is whole; until then nothing of it is settled."""

    def __init__(self, parser: CompletionParser, tools: Any, places: Any) -> None:
        super().__init__(parser, tools, places)
        self._respond, self._start = parser.respond, parser.start

    def advance(self, text: str) -> tuple[str, str]:
        """Return nothing: a later text may change every field."""
        return "", ""

    def finish(self, text: str) -> ChatMessage:
        """Return the message of the whole answer."""
        assert self._respond is not None
        try:
            found = self._respond(text, prefix=self._start)
            content = well_formed(str(found.get("content") or ""))
            thoughts = [str(found[name]) for name in _REASONING if found.get(name)][:1]
            given = found.get("tool_calls") if self._tools else None
            listed = given if isinstance(given, list) else [given] if given else []
            calls = [self._typed(call) for call in listed]
        # Whatever a template's expressions raise for what a model wrote.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return self._message(text, text, [], (), (f"response_template: {error}",))
        if not self._tools and found.get("tool_calls"):
            content = text
        return self._message(text, content, well_formed(thoughts), calls)

    def _typed(self, given: Any) -> Any:
        call = call_of(given)
        schemas = Schemas(self._tools)
        typed = {
            key: schemas.value(call.name, key, value) if isinstance(value, str) else value
            for key, value in json.loads(call.arguments).items()
        }
        return made_call(call.name, typed)
