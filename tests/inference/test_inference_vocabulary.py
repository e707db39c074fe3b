from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import ChatRenderer
from rolltree.inference.vocabulary import Vocabulary
from rolltree.testing import ByteTokenizer


class LeadingSpace(ByteTokenizer):
    """Adds a space at the very start of a text, as SentencePiece tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text if text.startswith("<|") else " " + text)


class Minimal:
    """Only what the interface demands."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert add_special_tokens is False
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        assert all(type(token) is int for token in ids)
        return bytes(ids).decode()


def test_ids_are_int32_arrays() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    for ids in (vocabulary.encode("ab"), vocabulary.encode_start("ab"), vocabulary.encode("")):
        assert ids.dtype == np.int32
    assert vocabulary.encode("").shape == (0,)


def test_special_ids_and_ends() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    assert [vocabulary.is_special(token) for token in (65, 256, 257, 258)] == [False] + [True] * 3
    assert vocabulary.end_ids == (258,)
    assert vocabulary.variables == {"eos_token": "<|im_end|>"}


def test_several_end_tokens_of_one_tokenizer() -> None:
    tokenizer: Any = ByteTokenizer()
    tokenizer.eos_token_id = [256, 258]
    assert Vocabulary(tokenizer).end_ids == (256, 258)
    tokenizer.eos_token_id = None
    assert Vocabulary(tokenizer).end_ids == ()


def test_a_later_piece_of_text_gets_no_space_of_its_own() -> None:
    vocabulary = Vocabulary(LeadingSpace())
    assert vocabulary.encode_start("ab").tolist() == list(b" ab")
    assert vocabulary.encode("ab").tolist() == list(b"ab")


def test_a_tokenizer_with_nothing_but_two_methods() -> None:
    vocabulary = Vocabulary(Minimal())
    assert vocabulary.end_ids == ()
    assert vocabulary.encode("ab").tolist() == [97, 98]
    assert vocabulary.decode(np.array([97, 98], np.int32)) == "ab"
    renderer = ChatRenderer(Minimal(), "{{ messages[0].content }}:")
    assert renderer.decode(renderer.render([{"role": "user", "content": "x"}])) == "x:"


def test_added_tokens_are_special() -> None:
    tokenizer: Any = ByteTokenizer()
    tokenizer.added_tokens_decoder = {300: "<tool_call>"}
    assert Vocabulary(tokenizer).is_special(300)


def test_spaces_that_were_sampled_are_not_cleaned_up() -> None:
    class Cleaning(ByteTokenizer):
        clean_up_tokenization_spaces = True

        def decode(self, ids: Any, clean_up_tokenization_spaces: bool | None = None) -> str:  # type: ignore[override]
            text = super().decode(ids)
            if clean_up_tokenization_spaces is None:
                clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
            return text.replace(" ,", ",") if clean_up_tokenization_spaces else text

    assert Vocabulary(Cleaning()).decode(list(b"a , b")) == "a , b"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), LeadingSpace()])
@given(
    first=st.text(st.characters(exclude_categories=["Cs"])),
    second=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_text_in_pieces_is_the_whole_text(
    tokenizer: ByteTokenizer, first: str, second: str
) -> None:
    vocabulary = Vocabulary(tokenizer)
    pieces = [*vocabulary.encode(first), *vocabulary.encode(second)]
    assert vocabulary.decode(pieces) == first + second
