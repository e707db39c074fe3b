"""The worker side of `MathRubric`: decides whether two answers mean the same.

It runs in its own process because comparing expressions that a model wrote can take unlimited time
or memory. math-verify parses answers with a grammar and runs no code.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify


class UnreadableReference(ValueError):
    """math-verify finds no expression in the reference answer."""


def compare_answers(gold: str, given: str) -> bool:
    """Return whether two answers mean the same.

    Raises:
        UnreadableReference: the reference answer cannot be parsed.
    """
    reference = parse(_in_math(gold), parsing_timeout=None)
    if not reference:
        raise UnreadableReference(f"math-verify cannot parse the reference answer {gold!r}")
    candidate = parse(_in_math(given), parsing_timeout=None)
    return bool(candidate) and bool(verify(reference, candidate, timeout_seconds=None))


def answer(question: list[str]) -> dict[str, object]:
    """Compare `[gold, given]`: `{"equal": ...}`, or `{"unreadable": ...}` for the reference."""
    try:
        return {"equal": compare_answers(*question)}
    except UnreadableReference as error:
        return {"unreadable": str(error)}


def compare_boxed(question: list[str]) -> bool:
    """Compare `[gold, given]`, each put into a box as it is; unreadable text equals nothing."""
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in question)
    return bool(verify(gold, given, timeout_seconds=None))


def _in_math(text: str) -> str:
    r"""Return `text` as LaTeX in `\boxed`, unless it has its own mathematics delimiters."""
    return text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"


# They log a warning for every odd answer.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
# Loads what a comparison needs, before a time limit counts.
compare_answers("1", "1")
