"""A tokenizer as rendering and parsing need it: text to ids and back, and which ids are special.

It works with any object that has `encode(text, add_special_tokens=False)` and `decode(ids)`, such
as transformers' fast tokenizers. Text that a tokenizer normalises is normalised here too.
Lone surrogates, which tokenizers reject, become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from rolltree._helpers.untrusted import well_formed
from rolltree.values.errors import PromptTooLong
from rolltree.values.types import IntArray

BOUNDARY = "\udfff"
"""A mark without an id, which no token crosses: a lone surrogate, so it is in no valid text."""
_LONGEST_TOKEN = 256
_REMEMBERED_STARTS = 16
"""How many texts' ids are cached: the members of a group encode the same text."""


class Tokenizer(Protocol):
    """The required methods of a tokenizer. `chat_template`, `eos_token_id` etc. are optional."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Sequence[int]:
        """Return the ids of `text`; special tokens spelled out in it become their ids."""
        ...

    @property
    def decode(self) -> Callable[..., str]:
        """A method from a list of ids to their text, special tokens spelled out."""
        ...


class Vocabulary:
    """A tokenizer with its special ids looked up once.

    `end_ids` are the tokenizer's own end tokens (`eos_token_id`, one or several). `variables` are
    the special tokens by name, as templates read them (`bos_token`, ...).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        special = {int(token) for token in getattr(tokenizer, "all_special_ids", None) or ()}
        added: Any = getattr(tokenizer, "added_tokens_decoder", None) or {}
        # Other added tokens, such as `<tool_call>`, are text that a message may contain.
        control = special | {int(i) for i, entry in added.items() if getattr(entry, "special", 0)}
        special.update(int(token) for token in added)
        self.end_ids = _ids(getattr(tokenizer, "eos_token_id", None))
        self._special = frozenset(special.union(self.end_ids))
        names: Any = getattr(tokenizer, "special_tokens_map", None) or {}
        self.variables = {name: str(text) for name, text in names.items() if _is_text(text)}
        self._exactly: dict[str, Any] = {}
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):
            self._exactly["clean_up_tokenization_spaces"] = False  # it would remove sampled spaces
        self._anchor = self._find_anchor()
        self._control = self._any_of(control.union(self.end_ids))
        # Per instance; a cache on the method would keep every tokenizer alive.
        self._start_ids = lru_cache(_REMEMBERED_STARTS)(self._encode_once)

    @cached_property
    def longest_token(self) -> int:
        """The most characters of one token; a guess if the tokenizer does not list its tokens."""
        vocabulary: Mapping[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return max(map(len, vocabulary), default=_LONGEST_TOKEN)

    def check_size(
        self, size: int, max_context: int, what: str = "characters", longest: int | None = None
    ) -> None:
        """Refuse a prompt that is certainly too long, before it is rendered and tokenized.

        `longest` is the most of it (in the unit of `size`) that one token can cover.

        Raises:
            PromptTooLong: `max_context` tokens cannot hold as much.
        """
        most = max_context * (longest or self.longest_token)
        if size > most:
            raise PromptTooLong(
                f"the prompt has {size:,} {what}, and max_context is {max_context:,} tokens, "
                f"which are at most {most:,} {what}. Shorten the prompt."
            )

    @cached_property
    def added(self) -> re.Pattern[str]:
        """The pattern of the texts of special and other added tokens."""
        return self._any_of(self._special)

    def _any_of(self, tokens: Iterable[int]) -> re.Pattern[str]:
        texts = {self.decode([token]) for token in tokens}
        # An alternation takes the first that fits.
        longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def is_special(self, token: int) -> bool:
        """Whether `token` is a control token, not text."""
        return token in self._special

    def ids_of(self, marks: Iterable[str]) -> dict[int, str]:
        """Return the marks that are one added token each, by their ids."""
        found = {mark: list(self._encode(mark)) for mark in marks}
        return {
            int(ids[0]): mark
            for mark, ids in found.items()
            if len(ids) == 1 and self.is_special(int(ids[0])) and self.decode(ids) == mark
        }

    def encode(self, text: str) -> IntArray:
        """Return the ids of `text` as they are inside a longer text, int32 `[_T]`.

        A special token is put before the text and its id dropped again, since some tokenizers
        (SentencePiece) add a space at the very start.
        """
        if not text:
            return np.empty(0, np.int32)
        if self._anchor is None:
            return np.asarray(self._encode(text), np.int32)
        anchor_text, anchor_id = self._anchor
        ids = np.asarray(self._encode(anchor_text + text), np.int32)
        # The tokenizer may join the anchor with the text.
        return ids[1:] if ids[0] == anchor_id else np.asarray(self._encode(text), np.int32)

    def encode_start(self, text: str) -> IntArray:
        """Return the ids of `text` at the start of a sequence, int32 `[_T]`, read-only."""
        return self._start_ids(text)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of `ids`, special tokens spelled out."""
        return self.tokenizer.decode([int(token) for token in ids], **self._exactly)

    def _encode_once(self, text: str) -> IntArray:
        ids = np.asarray(self._encode(text), np.int32)
        ids.setflags(write=False)
        return ids

    def without_control(self, text: str) -> str:
        """Return `text` so that control tokens which it spells out are encoded as plain text."""
        text = well_formed(text)
        # Cut after the first character, so that no token spans it.
        return self._control.sub(lambda match: f"{match[0][0]}{BOUNDARY}{match[0][1:]}", text)

    def _encode(self, text: str) -> Sequence[int]:
        first, *rest = text.split(BOUNDARY)
        ids = self.tokenizer.encode(well_formed(first), add_special_tokens=False)
        return [*ids, *(i for part in rest for i in self.encode(part).tolist())] if rest else ids

    def _find_anchor(self) -> tuple[str, int] | None:
        for token in (*self.end_ids, *sorted(self._special)):
            text = self.decode([token])
            # It has to survive decoding and encoding.
            if text and list(self._encode(text)) == [token]:
                return text, token
        return None


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (
        tuple(int(token) for token in value) if isinstance(value, list | tuple) else (int(value),)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "content")
