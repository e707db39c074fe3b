"""Plain English: phrases that sound translated stay out of docs, comments and messages."""

import re
from pathlib import Path

import pytest

from house.texts import ROOT, SRC, code_files, pages, sentences, without_code

PHRASES = {
    r"(?<!there )\b(?:is|are|was|were) no "
    r"(?!(?:longer|more|such|need|doubt|less|further)\b)[\w`{]": "is not a ...",
    r"\b(?:none|true|false|only|nothing|set|empty|zero|0|not|also) (?-i:where)\b": "... if",
    r"\bwhere there (?:is|are) (?:no|none|some)\b": "if",
    r"\bwhere (?:it is|they are) (?:none|missing|installed|long)\b": "if",
    r"[.:;] who (?:only |still )?(?:asks|wants|reads|looks|needs|says)\b": "a caller that ...",
    r"\bto who (?:asks|has|wants)\b": "to a caller that ...",
    r"\bof which (?:no|there|the|who|it is|even)\b": "whose ..., some of which",
    r"\banother one than\b|\bthat is another one\b": "differs from",
    r"\b(?:as|what|where) one (?:asks|looks|wants|sees)\b|\bone's own\b": "name who it is",
    r"(?<!'s )\b(?:issue|spec) \d": "say what it is, not its number",
    r"\bas ever\b": "as usual, still",
    r"\bwins? over\b": "overrides, takes precedence over",
    r"\bruns? side by side\b": "run concurrently",
    r"\bends? with status\b": "exits with status",
    r"\bfor ever\b": "forever",
    r"\bnobody (?:knows|could tell|can tell|says)\b": "say what is not known",
    r"\bamiss\b": "rejects, wrong",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    # Not the service that tools ask, among the names of `redact`.
    r"(?<!\bmaps )(?<![\"'])\bweather\b(?! is|\.\")": "failures outside the program",
    r"\bwhile there is hope\b": "until ...",
    r"\blast words\b": "the final response",
    r"\bas much as it likes\b": "unlimited",
    r"\bstrangers?\b": "untrusted code, other people",
    r"\b(?:is|are|was|were(?! paid for)|gets?) paid\b": "earns reward",
    r"\bhalf a character\b": "a lone surrogate",
}
"""Phrases, as patterns that ignore case, each with what to write instead."""


def texts():
    """Yield (where, text) of everything that a person may read."""
    for page, text in pages().items():
        yield page, without_code(text)
    for path in (*code_files(), *python_tests()):
        for line, text in joined(sentences(path)):
            yield (
                f"{path.relative_to(ROOT)}:{line}",
                re.sub(r'(?<=["\s])\s+|"\s+[rf]?"|\s+# ', " ", text),
            )
    for path in sorted((SRC / "insight/page/static").glob("*.*s")):
        yield str(path.relative_to(ROOT)), re.sub(r"\n\s*(?://|\*) ", " ", path.read_text("utf-8"))


def python_tests():
    """Return every Python file of the tests, but this one, whose subject the phrases are."""
    found = [
        path for folder in sorted(ROOT.glob("tests*")) for path in sorted(folder.rglob("*.py"))
    ]
    return [path for path in found if path != Path(__file__).resolve()]


def joined(tokens):
    """Yield the (line, text) of comments and strings, with what goes on in the next line."""
    last, start, parts = -1, 0, []
    for line, text in tokens:
        is_comment = text.startswith("#")
        goes_on = parts and line <= last + 1 and is_comment == parts[-1].startswith("#")
        # A string goes on in the next one if it ends with a space.
        if parts and not (goes_on and (is_comment or re.search(r"\s[\"']$", parts[-1]))):
            yield start, " ".join(parts)
            parts = []
        start, last = (start, line) if parts else (line, line)
        parts.append(text)
    yield start, " ".join(parts)


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
        ("None where\nit has one", 1),
        ("The page of which no copy exists; who asks for another one than that waits for ever.", 4),
        ("Say where it is.", 0),
    ],
)
def test_the_phrases_are_found(text, count):
    assert len(found_in(text)) == count
