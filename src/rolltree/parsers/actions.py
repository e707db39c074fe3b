"""Action parsers: from what an agent wrote to an action, with a reward and feedback.

An action parser is a function from text to `ParseResult`. Parsers compose: each reads the action of
the one before. It knows text and the spec-1 parsers. It knows nothing about worlds, and leaves out
tool calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from rolltree.steps import ParseResult

ActionParser: TypeAlias = Callable[[str], ParseResult]


def as_text(text: str) -> ParseResult:
    """The action is the text, stripped; an empty text is no action."""
    action = text.strip()
    return ParseResult(action) if action else ParseResult(None, obs="You said nothing.")


def compose_parsers(*parsers: ActionParser) -> ActionParser:
    """Return a parser that runs `parsers` in order, each on the action of the one before.

    Rewards add up. The first failure ends it: its feedback is the result's.

    Raises:
        ValueError: there is no parser.
    """
    if not parsers:
        raise ValueError("compose_parsers needs at least one parser; without one nothing is read.")

    def parse(text: str) -> ParseResult:
        action: Any = text
        reward = 0.0
        obs: str | None = None
        for parser in parsers:
            result = parser(action)
            reward += result.reward
            if result.failed:
                return ParseResult(None, reward, result.obs)
            action, obs = result.action, result.obs or obs
        return ParseResult(action, reward, obs)

    return parse
