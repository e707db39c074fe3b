"""Answers after reasoning: everything behind `</think>`.

It knows the one pair of tags that reasoning models use. It knows nothing about chat templates that
strip or hide reasoning. It leaves out reasoning that a server returns in its own field.
"""

from __future__ import annotations

from typing import Any

from rolltree.parsers.parser import Parser

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """The answer is what follows the last `</think>`; without one there is no answer (`""`)."""

    def parse(self, text: str) -> Any:
        """Return `extract_fn` of the text behind the reasoning."""
        _, found, answer = text.rpartition(CLOSE)
        return self.extract_fn(answer.strip() if found else "")

    def score_format(self, text: str) -> float:
        """Return 1 for one opening tag at the start, one closing tag and text behind it, or 0."""
        body = text.strip()
        kept = (
            body.startswith(OPEN)
            and body.count(OPEN) == 1
            and body.count(CLOSE) == 1
            and not body.endswith(CLOSE)
        )
        return float(kept)


class MaybeThinkParser(ThinkParser):
    """Like `ThinkParser`, but a text without reasoning is all answer."""

    def parse(self, text: str) -> Any:
        """Return `extract_fn` of the text behind the reasoning, or of the whole text."""
        return super().parse(text) if CLOSE in text else self.extract_fn(text.strip())

    def score_format(self, text: str) -> float:
        """Return 1 for a text without any tag; otherwise as `ThinkParser`."""
        return 1.0 if OPEN not in text and CLOSE not in text else super().score_format(text)
