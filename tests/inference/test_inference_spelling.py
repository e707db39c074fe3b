"""Ids that spell another text than the server gave are refused; what decoders differ in is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference.spelling import check_messages, check_text
from rolltree.inference.vocabulary import Vocabulary
from rolltree.testing import ByteTokenizer
from rolltree.values.errors import TokenError

VOCABULARY = Vocabulary(ByteTokenizer())
END = 258
ACCENT = list("é".encode())


def ids(*parts: str | int) -> np.ndarray:
    found: list[int] = []
    for part in parts:
        found += part.encode() if isinstance(part, str) else [part]
    return np.array(found, np.int32)


@pytest.mark.parametrize(
    ("sampled", "text", "stop"),
    [
        (ids("12", END), "12", ()),
        (ids("12", END), "12<|im_end|>", ()),  # special tokens are spelled out
        (ids("12", 257, "x", END), "12x", ()),  # or skipped, also in the middle
        (ids(" 12 , or 13 . It is n't", END), "12, or 13. It isn't", ()),  # spaces are cleaned up
        (ids("a", 257, "b", END), "a b", ()),  # and put between special tokens
        (ids("caf", ACCENT[0]), "caf", ()),  # a character that is cut is held back
        (ids("caf", ACCENT[0]), "caf\ufffd", ()),
        (
            ids("a", 0xFF, 0xFE, "b", END),
            "a\ufffdb",
            (),
        ),  # bytes that are not text, one mark or two
        (ids(ACCENT[1], "t\u00e9", END), "\u00e9t\u00e9", ()),  # the prompt began this character
        (ids("12\nQ: 3"), "12", ("\nQ:",)),
        (ids("12\nQ:"), "12\nQ:", ("\nQ:",)),  # include_stop_str_in_output
        (ids("12\n"), "12", ("\n",)),
        (ids("STOP"), "", ("STOP",)),
        (ids(END), "", ()),
    ],
)
def test_what_decoders_differ_in_is_no_difference(
    sampled: np.ndarray, text: str, stop: tuple[str, ...]
) -> None:
    check_text(VOCABULARY, sampled, text, stop, where="the server")


@pytest.mark.parametrize(
    ("sampled", "text", "stop"),
    [
        (ids("21", END), "12", ()),
        (ids(" 4squared", END), "4 squared", ()),
        (ids("a ,b", END), "a, b", ()),
        (ids("a\nb", END), "a b", ()),
        (ids("12", END), "", ()),
        (ids("12", END), "123", ()),
        (ids("123", END), "12", ()),
        (ids("12 and more", END), "12", ("Q:",)),  # cut, and not by that
        (ids("12", END), "Paris", ("P",)),
        (ids(ACCENT[1], "ab", END), "\u00e9ac", ()),
        (ids(END), "12", ()),
    ],
)
def test_another_text_is_refused(sampled: np.ndarray, text: str, stop: tuple[str, ...]) -> None:
    with pytest.raises(TokenError, match="not known what the model sampled"):
        check_text(VOCABULARY, sampled, text, stop, where="the server")


@given(st.text(max_size=20), st.booleans(), st.integers(0, 40))
def test_an_honest_server_is_never_refused(text: str, ends: bool, size: int) -> None:
    sampled = VOCABULARY.encode(text)[:size]
    if ends:
        sampled = np.append(sampled, END)
    said = VOCABULARY.tokenizer.decode(sampled.tolist(), skip_special_tokens=True)
    check_text(VOCABULARY, sampled, said.rstrip("\ufffd"), where="the server")


def test_messages_are_looked_for_in_the_ids() -> None:
    prompt, sampled = ids(257, "user\n7 + 5 =", END), ids("<think>\nsum\n</think>\n 12", END)
    asked = {"role": "user", "content": "7 + 5 = "}
    answer = {"role": "assistant", "content": "12", "reasoning_content": "sum"}

    def check(**fields: object) -> None:
        given = {"asked": asked, "answer": answer, **fields}
        check_messages(VOCABULARY, prompt, sampled, where="call 3", **given)  # type: ignore[arg-type]

    check()
    check(asked=None)
    check(asked={"role": "user", "content": [{"type": "text", "text": "other"}]})
    check(asked={"role": "tool", "content": "rewritten by the template"})
    check(answer={"role": "assistant", "content": None})
    for fields in (
        {"asked": {"role": "user", "content": "5 + 7 ="}},
        {"answer": {"role": "assistant", "content": "21"}},
        {"answer": {"role": "assistant", "content": "12", "reasoning_content": "product"}},
    ):
        with pytest.raises(TokenError, match="call 3 has the message"):
            check(**fields)
