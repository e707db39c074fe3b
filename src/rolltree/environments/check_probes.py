"""Scripted models for the environment check, and ways to format their answers for a parser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolltree.environments.parsers import Parser, XMLParser
from rolltree.inference.call import ModelCall
from rolltree.inference.client_base import ClientBase
from rolltree.values.errors import RolltreeError, UnsupportedSetting
from rolltree.values.types import ErrorKind, FinishReason, Messages, ModelResponse, ToolSchema

MAX_CALLS = 100

HOSTILE_ANSWERS = {
    "a number too long to read": "9" * 5000,
    "a superscript, which isdigit() takes": "\u00b2",
    "a number beyond all floats": "1e999",
    "2,000 brackets": "[" * 2000,
    "a lone surrogate and a NUL": "\ud800\x00",
}
"""Texts that make a careless parser raise, so that the rollout would have no reward."""

Style = Callable[[str], str]


class EndlessRollout(RolltreeError):
    """An environment called a probe more often than any rollout needs."""

    kind: ErrorKind = "machine"


class Probe(ClientBase):
    """A model client that answers every call with `reply`: a text, or a function of the prompt.

    `prompts` holds the first prompt of each rollout with its tools. With `error` every call raises
    it; with `hang` none returns.
    """

    model = "probe"

    def __init__(
        self,
        reply: str | Callable[[Messages], str] = "",
        *,
        error: Exception | None = None,
        hang: bool = False,
    ) -> None:
        self._reply, self._error, self._hang = reply, error, hang
        self.prompts: list[tuple[Messages, Sequence[ToolSchema]]] = []
        self.is_asked = asyncio.Event()
        self._num_calls = 0

    def session(self) -> Probe:
        """Return this probe itself, since each rollout gets a new probe."""
        self._num_calls = 0
        return self

    async def call(self, call: ModelCall) -> ModelResponse:
        """Return the reply.

        Raises:
            EndlessRollout: at call 101 of one rollout.
            UnsupportedSetting: the prompt is ids.
        """
        if isinstance(call.prompt, np.ndarray):
            raise UnsupportedSetting("a probe answers chats only; it has no tokenizer.")
        self._num_calls += 1
        self.is_asked.set()
        if self._num_calls == 1:
            self.prompts.append((call.prompt, call.tools or ()))
        if self._num_calls > MAX_CALLS:
            raise EndlessRollout(f"the rollout has made {MAX_CALLS} model calls and goes on")
        if self._hang:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        text = self._reply(call.prompt) if callable(self._reply) else self._reply
        message = {"role": "assistant", "content": text}
        temperature = call.sampling.temperature
        return ModelResponse(message, text, FinishReason.STOP, temperature=temperature)


def styles_of(parser: Parser) -> dict[str, Style]:
    """Return ways to write an answer that this parser may find, by name."""
    styles: dict[str, Style] = {"plain": str}
    if isinstance(parser, XMLParser):
        styles["tags"] = lambda text: _in_tags(parser, text)
    styles["boxed"] = lambda text: f"\\boxed{{{text}}}"
    styles["hash"] = lambda text: f"#### {text}"
    styles["think"] = lambda text: f"<think>\nLet me see.\n</think>\n{text}"
    styles["think-boxed"] = lambda text: f"<think>\nLet me see.\n</think>\n\\boxed{{{text}}}"
    styles["answer-tag"] = lambda text: f"<answer>{text}</answer>"
    styles["brackets"] = lambda text: f"[{text}]"
    return styles


def _in_tags(parser: XMLParser, text: str) -> str:
    fields: dict[str, Any] = dict.fromkeys(parser.get_fields(), "Let me see.")
    found = parser.answer_field if parser.answer_field in fields else parser.get_fields()[-1]
    return parser.format(**{**fields, found: text})
