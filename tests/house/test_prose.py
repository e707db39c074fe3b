"""Plain English: phrases that sound translated stay out of docs, comments and messages."""

import re

import pytest

from house.texts import ROOT, code_files, pages, sentences, without_code

PHRASES = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|such|need|doubt|less)\w": "is not a ...",
    r"\b(?:none|true|false|only|nothing|set|empty|zero|0|not|also) where\b": "... if",
    r"\bnobody (?:knows|could tell|can tell|says)\b": "say what is not known",
    r"\bamiss\b": "rejects, wrong",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    # Not the service that tools ask, among the names of `redact`.
    r"(?<!\bmaps )\bweather\b": "failures outside the program",
    r"\bwhile there is hope\b": "until ...",
    r"\blast words\b": "the final response",
    r"\bas much as it likes\b": "unlimited",
    r"\bstrangers?\b": "untrusted code, other people",
    r"\b(?:is|are|gets?) paid\b": "earns reward",
    r"\bhalf a character\b": "a lone surrogate",
}
"""Phrases, as patterns that ignore case, each with what to write instead."""


def texts():
    """Yield (where, text) of everything that a person may read."""
    for page, text in pages().items():
        yield page, without_code(text)
    for path in code_files():
        for line, text in sentences(path):
            yield f"{path.relative_to(ROOT)}:{line}", re.sub(r'(?<=["\s])\s+|"\s+f?"', " ", text)


def found_in(text):
    """Return the phrases of a text that are not English idiom."""
    flat = re.sub(r"\s+", " ", text)
    return [
        f"{match[0]!r} (write: {better})"
        for phrase, better in PHRASES.items()
        for match in re.finditer(phrase, flat, re.IGNORECASE)
    ]


def test_prose_is_plain_english():
    wrong = [f"{where}: {phrase}" for where, text in texts() for phrase in found_in(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is no array.", 1),
        ("There is no array. It is no longer one.", 0),
        ("None where\nthere is none", 1),
        ("Say where it is.", 0),
    ],
)
def test_the_phrases_are_found(text, count):
    assert len(found_in(text)) == count
