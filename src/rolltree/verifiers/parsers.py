"""The parsers of verifiers 0.1.8, which read and score texts differently from rolltree's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rolltree.environments import parsers as rooms
from rolltree.environments.parsers.parser import CLOSE, OPEN, identity
from rolltree.values.types import ChatMessage, Messages

_THINKS_OUT_LOUD = (
    "%s finds an answer only when the text has <think>...</think>. A server or a chat template "
    "that takes the reasoning out of the text, as those of Qwen3 and DeepSeek-R1 do, leaves "
    "nothing for it to find."
)


class Parser(rooms.Parser):
    """Returns the last assistant message, passed through `extract_fn`, as the answer."""

    logger: logging.Logger
    logger = logging.getLogger("verifiers.parsers")

    def __init__(self, extract_fn: Callable[[str], Any] = identity) -> None:
        self.logger = logging.getLogger(f"verifiers.parsers.{type(self).__name__}")
        self.extract_fn = extract_fn

    def _by_role(self, completion: list[ChatMessage], role: str) -> list[ChatMessage]:
        # A KeyError for a message without a role, as in verifiers.
        return [message for message in completion if message["role"] == role]

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer in the last assistant message.

        Raises:
            IndexError: there is no assistant message.
        """
        if isinstance(completion, str):
            return self.parse(completion)
        # An IndexError without messages, as in verifiers; the rubric turns it into 0.0.
        return self.parse(str(self.get_assistant_messages(completion)[-1].get("content", "")))

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function that always gives 1."""

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return 1.0

        return format_reward_func


class ThinkParser(Parser, rooms.ThinkParser):
    """The answer is what follows the last `</think>`; without one it is `extract_fn("")`."""

    def __init__(self, extract_fn: Callable[[str], Any] = identity) -> None:
        super().__init__(extract_fn)
        self.logger.warning(_THINKS_OUT_LOUD, "ThinkParser")

    def score_format(self, text: str) -> float:
        """Return 1 for reasoning at the start, closed once, with anything after it; else 0."""
        # verifiers strips for the beginning only: white space after the last tag counts as an
        # answer.
        opens = text.strip().startswith(OPEN) and text.count(OPEN) == 1
        return float(opens and text.count(CLOSE) == 1 and not text.endswith(CLOSE))

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function: the mean of `score_format` over the assistant messages.

        Without messages the function raises ZeroDivisionError, as in verifiers; rubrics score it 0.
        """

        def format_reward_func(completion: list[ChatMessage], **kwargs: Any) -> float:
            messages = self.get_assistant_messages(completion)
            return sum(self.score_format(message["content"]) for message in messages) / len(
                messages
            )

        return format_reward_func


class MaybeThinkParser(Parser, rooms.MaybeThinkParser):
    """The answer is what follows the last `</think>`, or the whole text; its format reward is 1."""

    def score_format(self, text: str) -> float:
        """Return 1."""
        return 1.0


class XMLParser(Parser, rooms.XMLParser):
    """Named fields between tags; a tuple in `fields` names alternatives, the canonical one first.

    Raises:
        ValueError: a canonical name comes twice, or a tuple is empty.
        TypeError: a field is neither a string nor a tuple of strings.
    """

    def __init__(
        self,
        fields: Sequence[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = identity,
    ) -> None:
        super().__init__(extract_fn=extract_fn)
        self.answer_field = answer_field
        self._fields: list[tuple[str, list[str]]] = []  # type: ignore[assignment]
        for field in fields:
            names = _alternatives(field)
            if names[0] in self.get_fields():
                raise ValueError(f"Duplicate field name: {names[0]}")
            self._fields.append((names[0], names))
        every = [name for _, names in self._fields for name in names]
        self._tags = {name: (f"<{name}>", f"</{name}>") for name in every}
        if "think" in self.get_fields():
            self.logger.warning(_THINKS_OUT_LOUD, "an XMLParser with the field 'think'")

    def parse(self, text: str, strip: bool = True, last: bool = False) -> SimpleNamespace:
        """Return a namespace with one attribute per tag name: its text, or None when missing.

        The first occurrence of a tag counts; with `last`, the last one. White space around the text
        is removed, with or without `strip`.
        """
        # In linear time; the regular expression of verifiers takes quadratic time on `<a><a>...`,
        # which a model can write. It has white space outside its group, so it always strips.
        return super().parse(text, last=last)

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer field of the latest assistant message that has one, else None.

        In a message the first occurrence counts, in a string the last one; `extract_fn` is not
        called.
        """
        if isinstance(completion, str):
            # A string is read from its end, messages from their beginnings, as in verifiers.
            return getattr(self.parse(completion, last=True), self.answer_field, None)
        for message in reversed(self.get_assistant_messages(completion)):
            value = getattr(self.parse(_content(message)), self.answer_field, None)
            if value is not None:
                return value
        return None

    def get_format_str(self) -> str:
        """Return a template of the format, to put into a system prompt."""
        lines = []
        for _, names in self._fields:
            tag = names[0] if len(names) == 1 else f"[ {' | '.join(names)} ]"
            lines.append(f"<{tag}>\n...\n</{tag}>")
        return "\n".join(lines).strip()

    def format(self, **kwargs: Any) -> str:
        """Return text with the given fields under their canonical names.

        Raises:
            ValueError: a field has no value.
        """
        parts = []
        for canonical, names in self._fields:
            given = next((name for name in [canonical, *names] if name in kwargs), None)
            if given is None or kwargs[given] is None:
                raise ValueError(f"Missing value for field '{canonical}' (allowed: {names})")
            parts.append(f"<{canonical}>\n{kwargs[given]}\n</{canonical}>")
        return "\n".join(parts)

    def score_format(self, text: str) -> float:
        """Return the format score of one message, in [0, 1].

        0.4 times the share of fields with a tag in the text, if at least one is complete; 0.2 for
        beginning with the first field and 0.2 for ending with the last one; 0.2 always, unless an
        overridden `parse` loses a field with `strip=False`.
        """
        bare, raw = self.parse(text), self.parse(text, strip=False)
        complete = [name for name in self._tags if getattr(bare, name, None) is not None]
        met = [
            any(name in complete or f"<{name}>" in text or f"</{name}>" in text for name in names)
            for _, names in self._fields
        ]
        tidy = all(getattr(raw, name, None) is not None for name in complete)
        body = text.strip()
        starts = any(body.startswith(f"<{name}>") for name in self._fields[0][1])
        ends = any(body.endswith(f"</{name}>") for name in self._fields[-1][1])
        # Added in this order, so that the sum equals verifiers' to the last digit.
        score = 0.0
        for share in (
            0.4 * (sum(met) / len(met)) if complete else 0.0,
            *(0.2 * part for part in (tidy, starts, ends)),
        ):
            score += share
        return score

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function: the mean of `score_format` over the assistant messages."""

        def format_reward_func(completion: list[ChatMessage]) -> float:
            messages = self.get_assistant_messages(completion)
            scores = [self.score_format(_content(message)) for message in messages]
            return sum(scores) / len(scores) if scores else 0.0

        return format_reward_func


def _alternatives(field: object) -> list[str]:
    if isinstance(field, str):
        return [field]
    if not isinstance(field, tuple):
        raise TypeError("Each field must be a string or a tuple of strings.")
    if not field:
        raise ValueError("Field tuple cannot be empty.")
    if not all(isinstance(name, str) for name in field):
        raise TypeError("All alternatives in a tuple must be strings.")
    return list(field)


def _content(message: ChatMessage) -> str:
    assert "content" in message
    return str(message["content"])
