"""`PromptReader`: decoding what is new of a prompt gives what decoding all of it gives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference.parse import extract_tokens
from rolltree.inference.wire import (
    PromptReader,
    call_texts,
    decode_response,
    sent_calls,
    sent_text,
)
from rolltree.values.errors import BadResponse, TokenError


def body(prompt: list[Any] | None, *, of_choice: bool = False, **more: Any) -> bytes:
    choice: dict[str, Any] = {"message": {"content": "hi"}, "text": "hi", "token_ids": [7]}
    choice["logprobs"] = {"content": [{"logprob": -0.5}], "token_logprobs": [-0.5]}
    answer: dict[str, Any] = {"choices": [choice], **more}
    (choice if of_choice else answer)["prompt_token_ids"] = prompt
    return msgspec.json.encode(answer)


def json_body(prompt: list[int]) -> bytes:
    """Return a body with integers that msgspec does not write."""
    return body([]).replace(b'"prompt_token_ids":[]', f'"prompt_token_ids":{prompt}'.encode())


def ids(reader: PromptReader, data: bytes, kind: Any = "chat") -> list[int]:
    found = extract_tokens(reader.decode(data), kind)
    assert found is not None
    return found[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("of_choice", "kind"), [(False, "chat"), (True, "completion")])
def test_a_growing_prompt_is_read_whole(of_choice: bool, kind: str) -> None:
    reader = PromptReader()
    for prompt in ([1, 23], [1, 23, 7, 4], [1, 23, 7, 4], [1, 23, 7, 4, 5, 6]):
        assert ids(reader, body(prompt, of_choice=of_choice), kind) == prompt


@pytest.mark.parametrize(
    "second",
    [[1, 234], [1, 2], [9, 23, 4], [1], [1, 23]],
    ids=["longer number", "shorter number", "other start", "shorter", "same"],
)
def test_a_prompt_that_only_looks_like_the_one_before(second: list[int]) -> None:
    reader = PromptReader()
    assert ids(reader, body([1, 23])) == [1, 23]
    assert ids(reader, body(second)) == second
    assert ids(reader, body([1, 23, 4])) == [1, 23, 4]


def test_only_what_is_new_is_decoded() -> None:
    """The known ids are not looked at again: their bytes are enough."""
    reader = PromptReader()
    reader.decode(body([1, 23]))
    reader._ids = reader._ids + 100
    assert ids(reader, body([1, 23, 4])) == [101, 123, 4]


def test_text_that_looks_like_the_field_is_not_taken_for_it() -> None:
    fake = '"prompt_token_ids":[1,23'
    reader = PromptReader()
    for prompt in ([1, 23], [1, 23, 5]):
        data = body(prompt, extra={"prompt_token_ids": [1, 23, 99]}, note=fake)
        assert ids(reader, data) == prompt
        assert ids(reader, data[:-1] + b',"z":{"prompt_token_ids":[1,23,77]}}') == prompt


@pytest.mark.parametrize("data", [b"", b"{", b'{"choices":[],"prompt_token_ids":[1,', b"\xff"])
def test_what_is_no_completion_is_refused_as_before(data: bytes) -> None:
    reader = PromptReader()
    reader.decode(body([1]))
    with pytest.raises(BadResponse) as found:
        reader.decode(data)
    with pytest.raises(BadResponse) as plain:
        decode_response(data)
    assert str(found.value) == str(plain.value)


@pytest.mark.parametrize("bad", [[-3], [2**31], [-1, 2], [2**63], [2**63, 2**64], [2**200]])
def test_ids_of_no_vocabulary_are_refused_also_later(bad: list[int]) -> None:
    reader = PromptReader()
    reader.decode(body([5]))
    for _ in range(2):
        with pytest.raises(TokenError, match="prompt_token_ids"):
            ids(reader, json_body([5, *bad]))


def test_a_prompt_without_ids_is_refused_also_later() -> None:
    reader = PromptReader()
    for prompt in ([], [1, 23], []):
        if prompt:
            assert ids(reader, body(prompt)) == prompt
            continue
        with pytest.raises(TokenError, match="no prompt ids"):
            ids(reader, body(prompt))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("closed", [True, False])
def test_json_that_is_nested_too_deeply_is_a_bad_response(opening: bytes, closed: bool) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    deep = opening * 100_000 + b"1" + closing * (100_000 * closed)
    data = body([5])[:-1] + b',"note":' + deep + b"}"
    for decode in (decode_response, PromptReader().decode):
        with pytest.raises(BadResponse, match="not a completion"):
            decode(data)


@pytest.mark.parametrize(
    ("message", "content", "arguments"),
    [
        (rb'{"content": "half \ud83d"}', "half \ufffd", None),
        (b'{"content": "half \xed\xa0\xbd"}', "half \ufffd\ufffd\ufffd", None),
        (b'{"content": "cut \xf0\x9f"}', "cut \ufffd", None),
        (
            b'{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}',
            "ab",
            None,
        ),
        (
            b'{"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}',
            None,
            '{"a": 1}',
        ),
        (
            b'{"tool_calls": [{"function": {"name": "f", "arguments": {"a": %b}}}]}'
            % (b"9" * 5000),
            None,
            '{"a": "%s"}' % ("9" * 5000),
        ),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_what_servers_write_for_a_text_is_read(
    message: bytes, content: str | None, arguments: str | None, mark: bytes
) -> None:
    (choice,) = decode_response(mark + b'{"choices": [{"message": %b}]}' % message).choices
    assert choice.message is not None
    assert sent_text(choice.message.content) == (content or "")
    calls = [call_texts(call) for call in sent_calls(choice.message.tool_calls)]
    assert calls == [("", "f", arguments)] * (arguments is not None)


def test_null_and_missing_ids_and_spaces() -> None:
    reader = PromptReader()
    assert reader.decode(body(None)).prompt_token_ids is None
    assert reader.decode(b'{"choices":[]}').prompt_token_ids is None
    assert reader.decode(b'{"choices":[], "prompt_token_ids": [1, 2]}').prompt_token_ids == [1, 2]
    assert ids(reader, body([1, 2]).replace(b",", b" ,")) == [1, 2]
    assert ids(reader, body([1, 2, 3]).replace(b",", b" ,")) == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 12), max_size=4)), max_size=8))
def test_any_history_is_read_as_without_a_reader(turns: list[tuple[int, list[int]]]) -> None:
    reader, prompt = PromptReader(), [1]
    for dropped, new in turns:
        prompt = (prompt[: len(prompt) - dropped] + new) or [1]
        data = body(prompt)
        plain = extract_tokens(decode_response(data), "chat")
        assert plain is not None
        assert ids(reader, data) == plain[0].tolist() == prompt
