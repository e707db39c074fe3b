"""Deltas of an unfinished answer, token by token: text, reasoning, and tool calls at the end.

Text that a later token may change (an incomplete character, stop string or reasoning tag, a tool
call) is held back until it is settled, so nothing is ever taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rolltree.inference.chat import ChatRenderer
from rolltree.inference.formats.reader import cut_at_stop, unsettled
from rolltree.values.types import ChatMessage, SamplingParams, ToolSchema

if TYPE_CHECKING:
    from rolltree.inference.call import ModelCall
    from rolltree.inference.engine import SampledToken


def outgoing_message(message: ChatMessage) -> ChatMessage:
    """Return a parsed message as servers send it: without notes or empty content with calls."""
    sent = {name: value for name, value in message.items() if name != "parse_problems"}
    if sent.get("tool_calls") and not sent["content"]:
        sent["content"] = None
    return sent


class SettledText:
    """The text of an unfinished answer, as far as no later token can change it.

    Adding a token decodes a few tokens, not the whole answer.
    """

    def __init__(self, renderer: ChatRenderer, sampling: SamplingParams, begun: str = "") -> None:
        self._decode, self._stop = renderer.decode, sampling.stop
        # What the prompt has of the answer is part of its text, but stop strings end what follows.
        self._begun = begun
        self._silent = {*renderer.end_ids, *sampling.stop_token_ids}
        self._marks = renderer.mark_tokens
        self.places: set[int] | None = set() if self._marks else None
        """Where mark tokens begin in the text; None if no mark of the formats is a token."""
        if self.places is not None and begun:
            marks = "|".join(map(re.escape, self._marks.values()))
            self.places.update(found.start() for found in re.finditer(marks, begun))
        self._window: list[int] = []
        # How many ids of the window are part of `_text` already: they stay, since tokenizers decode
        # an id in context (the space before a word, a character of several ids).
        self._num_read = 0
        self._text = ""

    def add(self, token: int) -> str:
        """Add a token and return the settled text of all tokens."""
        if token not in self._silent:
            self._window.append(token)
            known = self._decode(self._window[: self._num_read])
            text = self._decode(self._window)
            # The last character may be incomplete; the next token decides.
            if not text.endswith("\ufffd"):
                self._text += text[len(known) :]
                del self._window[: self._num_read]
                self._num_read = len(self._window)
                if self.places is not None and token in self._marks:
                    before = len(self._begun) + len(self._text)
                    self.places.add(before - len(self._marks[token]))
        text = cut_at_stop(self._text, self._stop)
        return self._begun + text[: len(text) - unsettled(text, self._stop)]


class TextDeltas:
    """The new text of one choice since the previous call."""

    def __init__(self, given: str = "") -> None:
        self._given = given

    def next(self, text: str) -> str:
        """Return the part of `text` after what was returned before; empty if they differ."""
        # Returned text cannot be taken back. If a later token changes it after all, only the token
        # ids are exact.
        if not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        self._given = text
        return new


class MessageDeltas:
    """The new parts of one choice's message, as OpenAI's `delta` objects."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: Sequence[ToolSchema] | None,
        places: set[int] | None = None,
        begun: str = "",
    ) -> None:
        self._answer = renderer.reading(tools, places, is_begun=bool(begun))
        self._reasoning, self._content = TextDeltas(), TextDeltas(begun)
        self._is_new = True

    def next(self, text: str) -> dict[str, Any]:
        """Return the delta for an unfinished answer's settled text."""
        return self._delta(*self._answer.advance(text))

    def last(self, message: ChatMessage) -> dict[str, Any]:
        """Return the delta for the finished message; each tool call comes in one piece."""
        sent = outgoing_message(message)
        content = str(sent["content"] or "")
        delta = self._delta(str(sent.get("reasoning_content", "")), content)
        if sent.get("tool_calls"):
            calls = enumerate(sent["tool_calls"])
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return delta

    def _delta(self, reasoning: str, content: str) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if self._is_new else {}
        self._is_new = False
        parts = {
            "reasoning_content": self._reasoning.next(reasoning),
            "content": self._content.next(content),
        }
        return delta | {name: part for name, part in parts.items() if part}


def one_call_each(delta: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a `delta` so that none has several tool calls.

    OpenAI's server and vLLM send each call in chunks of its own, and some clients (llama-index)
    read only the first call of a chunk.
    """
    first, *others = delta.get("tool_calls") or [None]
    if not others:
        return [delta]
    return [delta | {"tool_calls": [first]}, *({"tool_calls": [call]} for call in others)]


class TokenListener:
    """Turns the tokens of one call, as an engine samples them, into deltas of its message.

    `put` may be called from any thread; the call's `on_delta` is called in the event loop in which
    this object was created.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        call: ModelCall,
        begun: str = "",
        num_prompt_tokens: int | None = None,
    ) -> None:
        assert call.on_delta is not None
        self._more = {} if num_prompt_tokens is None else {"num_prompt_tokens": num_prompt_tokens}
        self._reports_tokens = call.reports_tokens
        self._text, self._on_delta = SettledText(renderer, call.sampling, begun), call.on_delta
        is_chat = isinstance(call.prompt, list)
        self._deltas = (
            MessageDeltas(renderer, call.tools, self._text.places, begun)
            if is_chat
            else TextDeltas()
        )
        self._loop = asyncio.get_running_loop()

    def put(self, token: SampledToken) -> None:
        """Take one more token."""
        # RuntimeError: the loop is closed, so nothing listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.take, token.id, token.logprob)

    def take(self, token: int, logprob: float | None = None) -> None:
        """Take one more token, in the event loop."""
        text = self._text.add(token)
        new: ChatMessage = (
            self._deltas.next(text)
            if isinstance(self._deltas, MessageDeltas)
            else {"content": self._deltas.next(text)}
        )
        # Without the logprob of one token, those after it would be taken for its own.
        self._reports_tokens = self._reports_tokens and logprob is not None
        if self._reports_tokens:
            new["tokens"] = [(token, logprob)]
        if new.get("content") or isinstance(self._deltas, MessageDeltas) or self._reports_tokens:
            self._on_delta(new | self._more)
