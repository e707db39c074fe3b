"""Checks that sampled ids spell the text a server gave with them, and prompt ids the messages.

Otherwise ids of a different answer would be trained as if the model had sampled them here. Decoders
differ in special tokens, spaces and characters that are cut in the middle, and servers cut stop
strings off, so the comparison leaves these out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rolltree._helpers.untrusted import shorten
from rolltree.inference.vocabulary import Vocabulary
from rolltree.values.errors import TokenError
from rolltree.values.types import ChatMessage, IntArray

_BROKEN = "\ufffd"
_CLEANED = re.compile(r"\s+(?=[.,?!']|n't)|(?<=')\s+")


def check_text(
    vocabulary: Vocabulary, ids: IntArray, text: str, stop: Sequence[str] = (), *, where: str
) -> None:
    """Reject sampled ids, int32 `[_C]`, that do not spell `text`, which a `stop` string may cut.

    Raises:
        TokenError: they spell something else.
    """
    decoded = vocabulary.decode(ids)
    plain = _plain
    if vocabulary.added.search(decoded[:-1]):  # some decoders put spaces between special tokens
        plain = _without_spaces
    spelled, said = (plain(vocabulary, each) for each in (decoded, text))
    # The answer may complete a character of the prompt: only the server sees it whole.
    for shown in (said, said[1:]) if decoded.startswith(_BROKEN) else (said,):
        if shown == spelled:
            return
        is_start = spelled.startswith(shown)
        if is_start and any(plain(vocabulary, each) in spelled for each in stop):
            return
    raise TokenError(
        f"{where} answered with ids that spell {shorten(decoded, 80)!r} and with the text "
        f"{shorten(text, 80)!r}, so it is not known what the model sampled; neither is used. Does "
        "the server have a different tokenizer, or is there a proxy that mixes up answers?"
    )


def check_messages(
    vocabulary: Vocabulary,
    prompt_ids: IntArray,
    completion_ids: IntArray,
    asked: ChatMessage | None,
    answer: ChatMessage,
    *,
    where: str,
) -> None:
    """Reject ids of a call whose prompt lacks `asked`, or whose completion is not `answer`.

    `asked` is the last message of the prompt. Templates and parsers of servers change much, so
    this looks only for the content of a user's message, and for an answer's content and reasoning.

    Raises:
        TokenError: the ids do not spell one of these texts.
    """
    parts = [(completion_ids, answer.get(name)) for name in ("content", "reasoning_content")]
    if asked is not None and asked.get("role") == "user":
        parts.append((prompt_ids, asked.get("content")))
    for ids, text in parts:
        if not isinstance(text, str):
            continue
        decoded = vocabulary.decode(ids)
        # What the tokenizer itself changes (case, accents) does not count.
        encoded = vocabulary.decode(vocabulary.encode(text))
        found = _plain(vocabulary, decoded)
        if not any(_plain(vocabulary, each) in found for each in (text, encoded)):
            raise TokenError(
                f"{where} has the message {shorten(text, 80)!r}, and its ids spell "
                f"{shorten(decoded, 80)!r}, so they belong to a different prompt or answer. Does "
                "the server have a different tokenizer, or is there a proxy that mixes up answers?"
            )


def _plain(vocabulary: Vocabulary, text: str) -> str:
    """Return a text without the parts in which decoders differ, such as spaces at punctuation."""
    return _CLEANED.sub("", vocabulary.added.sub("", text).replace(_BROKEN, "").strip())


def _without_spaces(vocabulary: Vocabulary, text: str) -> str:
    return "".join(_plain(vocabulary, text).split())
