"""Action parsers: turn an agent's text into an action, with a reward and feedback.

An action parser is a function from text to `ParseResult`. Parsers compose: each reads the action of
the one before.

Example:
    >>> parse = compose_parsers(without_thinking(), tagged("move"), one_of(["left", "right"]))
    >>> parse("<think>left?</think><move>Right!</move>").action
    'right'
    >>> parse("right").obs
    'Put your answer between <move> and </move>.'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import InvalidOperation
from typing import Any, TypeAlias

from rolltree._helpers.untrusted import shorten
from rolltree.environments.parsers.parser import CLOSE, Parser
from rolltree.environments.parsers.xml import XMLParser
from rolltree.values.errors import ConfigError
from rolltree.values.steps import ParseResult

ActionParser: TypeAlias = Callable[[str], ParseResult]
NOT_READABLE = (ValueError, OverflowError, RecursionError, InvalidOperation)
"""Exceptions of parsing a text as a number, as JSON or as a date."""


def as_text(text: str) -> ParseResult:
    """Return the stripped text as the action; an empty text is not an action."""
    action = text.strip()
    return ParseResult(action) if action else ParseResult(None, obs="You said nothing.")


def by_function(
    func: Callable[[str], Any],
    *,
    reward: float = 0.0,
    penalty: float = 0.0,
    feedback: str | None = None,
) -> ActionParser:
    """Return a parser whose action is `func(text)`; None and `NOT_READABLE` errors mean none.

    Args:
        func: turns a text into an action. The message of a `ValueError`, `RecursionError`,
            `OverflowError` or decimal's `InvalidOperation` is the feedback, unless `feedback` is
            given; any other error is a bug in `func`, and the episode ends and is scored.
        reward, penalty: the reward of a text with and without an action (a penalty is below 0).
        feedback: what the agent is told about a text without an action.
    """

    def parse(text: str) -> ParseResult:
        said = feedback
        try:
            action = func(text)
        # Any other error is a bug in `func`, which must not pass for a bad answer.
        except NOT_READABLE as error:
            action, said = None, feedback or shorten(str(error), 500)
        return ParseResult(None, penalty, said) if action is None else ParseResult(action, reward)

    return parse


def from_parser(parser: Parser, **verdict: Any) -> ActionParser:
    """Return a parser whose action is `parser.parse_answer(text)`; `verdict` as in `by_function`.

    An empty answer is not an action.
    """

    def answer(text: str) -> Any:
        found = parser.parse_answer(text)
        # An empty tag is not an action, though a parser returns its text.
        return None if found == "" else found

    return by_function(answer, **verdict)


def tagged(tag: str, **verdict: Any) -> ActionParser:
    """Return a parser for the text between the last `<tag>` and `</tag>`."""
    verdict.setdefault("feedback", f"Put your answer between <{tag}> and </{tag}>.")
    return from_parser(XMLParser([tag], answer_field=tag), **verdict)


def without_thinking(*, required: bool = False, **verdict: Any) -> ActionParser:
    """Return a parser for what follows the last `</think>`.

    Args:
        required: a text without reasoning is not an action; otherwise it is passed on whole.
        verdict: as in `by_function`.
    """
    verdict.setdefault("feedback", "Think between <think> and </think>, then answer.")

    def answer(text: str) -> str | None:
        _, found, rest = text.rpartition(CLOSE)
        return rest.strip() or None if found else None if required else text

    return by_function(answer, **verdict)


def one_of(names: Sequence[str], **verdict: Any) -> ActionParser:
    """Return a parser for the last of `names` in the text, case-insensitive.

    Raises:
        ConfigError: `names` is empty.
    """
    if not names:
        raise ConfigError("one_of needs at least one name; without one every text fails.")
    known = {name.lower(): name for name in names}
    # The longest first, or "up" would be found in "up left".
    words = sorted(known, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words))
    verdict.setdefault("feedback", f"Say one of: {', '.join(names)}.")

    def answer(text: str) -> str | None:
        found = pattern.findall(text.lower())
        return known[found[-1]] if found else None

    return by_function(answer, **verdict)


def compose_parsers(*parsers: ActionParser) -> ActionParser:
    """Return a parser that runs `parsers` in order, each on the action of the one before.

    Rewards add up. The first failure is the result, with its feedback.

    Raises:
        ConfigError: no parser is given.
    """
    if not parsers:
        raise ConfigError("compose_parsers needs at least one parser; without one nothing is read.")

    def parse(text: str) -> ParseResult:
        action: Any = text
        reward = 0.0
        obs: str | None = None
        for parser in parsers:
            result = parser(action)
            reward += result.reward
            if result.failed:
                return ParseResult(None, reward, result.obs)
            # A later parser's feedback is the more precise one.
            action, obs = result.action, result.obs or obs
        return ParseResult(action, reward, obs)

    return parse
