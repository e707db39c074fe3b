from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import parse_response_messages, parse_response_tokens
from rolltree.inference.parse import (
    begin_answer,
    extract_finish_reason,
    extract_message,
    extract_tokens,
    extract_usage,
    read_answer,
    version_named,
)
from rolltree.inference.wire import decode_response
from rolltree.testing import ScriptedClient
from rolltree.values.errors import BadResponse, TokenError
from rolltree.values.types import FinishReason


def chat_response(**changes: Any) -> dict[str, Any]:
    """Return what vLLM answers to a chat request with return_token_ids and logprobs."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "12", "tool_calls": []},
        "finish_reason": "stop",
        "token_ids": [49, 50, 2],
        "logprobs": {
            "content": [
                {"token": "1", "logprob": -0.1},
                {"token": "2", "logprob": -0.2},
                {"token": "", "logprob": -0.3},
            ]
        },
    }
    choice.update(changes)
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return {"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": [7, 8]}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def text_response(**changes: Any) -> dict[str, Any]:
    choice = {
        "text": "12",
        "finish_reason": "length",
        "token_ids": [49, 50],
        "prompt_token_ids": [7, 8],
        "logprobs": {"tokens": ["1", "2"], "token_logprobs": [-0.1, -0.2]},
    }
    choice.update(changes)
    return {"id": "x", "choices": [choice]}


def as_object(value: Any) -> Any:
    """Return nested namespaces, as the openai client's objects look."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_object(each) for key, each in value.items()})
    return [as_object(each) for each in value] if isinstance(value, list) else value


def as_struct(value: Any) -> Any:
    import msgspec

    return decode_response(msgspec.json.encode(value))


FORMS = {"dict": lambda value: value, "object": as_object, "struct": as_struct}
in_every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@in_every_form
def test_chat_tokens(form: Any) -> None:
    found = extract_tokens(form(chat_response()), "chat")
    assert found is not None
    assert found[0].tolist() == [7, 8]
    assert found[1].tolist() == [49, 50, 2]
    assert found[0].dtype == found[1].dtype == np.int32
    assert found[2] is not None
    np.testing.assert_allclose(found[2], [-0.1, -0.2, -0.3], rtol=1e-6)


@in_every_form
def test_text_tokens(form: Any) -> None:
    found = extract_tokens(form(text_response()), "completion")
    assert found is not None
    assert found[0].tolist() == [7, 8]
    assert found[1].tolist() == [49, 50]
    assert found[2] is not None
    np.testing.assert_allclose(found[2], [-0.1, -0.2], rtol=1e-6)


@in_every_form
def test_ids_spelled_as_tokens(form: Any) -> None:
    content = [{"token": "token_id:504", "logprob": -0.1}, {"token": "token_id:2", "logprob": -1}]
    response = chat_response(token_ids=None, logprobs={"content": content})
    found = extract_tokens(form(response), "chat")
    assert found is not None
    assert found[1].tolist() == [504, 2]
    texts = {"tokens": ["token_id:1", "token_id:0"], "token_logprobs": [-0.5, -0.5]}
    found = extract_tokens(form(text_response(token_ids=None, logprobs=texts)), "completion")
    assert found is not None
    assert found[1].tolist() == [1, 0]


@in_every_form
def test_missing_ids_give_none(form: Any) -> None:
    assert extract_tokens(form(chat_response(token_ids=None)), "chat") is None
    response = chat_response()
    del response["prompt_token_ids"]
    assert extract_tokens(form(response), "chat") is None
    assert extract_tokens(form(text_response(prompt_token_ids=None)), "completion") is None


@in_every_form
def test_missing_logprobs_give_ids_only(form: Any) -> None:
    found = extract_tokens(form(chat_response(logprobs=None)), "chat")
    assert found is not None
    assert found[2] is None


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([-0.1], "3 sampled tokens came with 1"),
        ([-0.1, -0.2], "never sampled may have been appended"),
        ([-0.1, float("nan"), -0.3], "sampled token 1 is nan"),
        ([-0.1, None, -0.3], "sampled token 1 is nan"),
        ([-0.1, -0.2, 1.0], "sampled token 2 is 1.0"),
        ([-0.1, -0.2, float("-inf")], "sampled token 2 is -inf"),
    ],
)
def test_logprobs_that_contradict_the_tokens_are_refused(values: list[Any], what: str) -> None:
    content = [{"token": "t", "logprob": value} for value in values]
    with pytest.raises(TokenError, match=what):
        extract_tokens(chat_response(logprobs={"content": content}), "chat")


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**63], [2**70], [1.5]])
def test_ids_of_no_vocabulary_are_refused(ids: list[Any]) -> None:
    with pytest.raises(TokenError, match="token_ids"):
        extract_tokens(chat_response(token_ids=ids, logprobs=None), "chat")


def test_a_server_that_used_another_prompt_is_found_out() -> None:
    sent = np.array([7, 8], np.int32)
    assert extract_tokens(text_response(), "completion", sent) is not None
    with pytest.raises(TokenError, match="did not sample from the recorded prompt"):
        extract_tokens(text_response(prompt_token_ids=[1, 7, 8]), "completion", sent)
    silent = extract_tokens(text_response(prompt_token_ids=None), "completion", sent)
    assert silent is not None
    assert silent[0].tolist() == [7, 8]


@in_every_form
def test_messages_with_reasoning_and_tool_calls(form: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    source = {"content": None, "reasoning": "hm", "tool_calls": [call]}
    message, text = extract_message(form(chat_response(message=source)), "chat")
    expected = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert message == {**expected, "tool_calls": [call]}
    assert text == ""


def test_a_mock_gives_its_content_and_no_tokens() -> None:
    mock = MagicMock()
    mock.choices = [MagicMock()]
    mock.choices[0].message.content = "12"
    mock.choices[0].finish_reason = "stop"
    assert extract_message(mock, "chat") == ({"role": "assistant", "content": "12"}, "12")
    assert extract_tokens(mock, "chat") is None
    assert extract_usage(mock) == (0, 0)


@pytest.mark.parametrize(
    ("given_reason", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("content_filter", FinishReason.CONTENT_FILTER),
        ("STOP", FinishReason.STOP),
        ("eos", FinishReason.STOP),
        ("end_turn", FinishReason.STOP),
        ("repetition", FinishReason.LENGTH),
    ],
)
def test_finish_reasons(given_reason: str, reason: FinishReason) -> None:
    assert extract_finish_reason(chat_response(finish_reason=given_reason)) == reason


@pytest.mark.parametrize("given_reason", ["error", "abort", "", None, 5, ["stop"], {}])
@pytest.mark.parametrize("form", [FORMS["dict"], FORMS["object"]], ids=["dict", "object"])
def test_an_answer_that_was_broken_off_is_an_error(form: Any, given_reason: Any) -> None:
    response = form(chat_response()) if not isinstance(given_reason, dict) else chat_response()
    choice = response["choices"][0] if isinstance(response, dict) else response.choices[0]
    if isinstance(choice, dict):
        choice["finish_reason"] = given_reason
    else:
        choice.finish_reason = given_reason
    with pytest.raises(BadResponse, match="may be incomplete"):
        extract_finish_reason(response)


def test_a_server_must_say_why_it_stopped() -> None:
    assert extract_finish_reason({"choices": [{}]}) == FinishReason.STOP  # somebody's mock
    for reason in ({}, {"finish_reason": None}, {"finish_reason": "abort"}):
        with pytest.raises(BadResponse, match="may be incomplete"):
            extract_finish_reason(as_struct({"choices": [reason]}))


@in_every_form
def test_more_ids_than_were_asked_for_are_refused(form: Any) -> None:
    many = [5] * 5000
    response = form(chat_response(token_ids=many, logprobs=None))
    assert extract_tokens(response, "chat", max_tokens=5000) is not None
    with pytest.raises(TokenError, match="5000 sampled ids to a request with max_tokens = 8"):
        extract_tokens(response, "chat", max_tokens=8)


@in_every_form
@pytest.mark.parametrize("logprobs", [None, {"content": []}])
def test_an_empty_completion_has_no_tokens(form: Any, logprobs: Any) -> None:
    empty = {"role": "assistant", "content": "", "tool_calls": []}
    response = form(chat_response(token_ids=[], logprobs=logprobs, message=empty))
    prompt, completion, values = extract_tokens(response, "chat", max_tokens=8) or ((), (), None)
    assert (list(prompt), list(completion)) == ([7, 8], [])
    assert values is not None
    assert list(values) == []
    answer = read_answer(response, "chat")
    assert (answer.text, answer.num_completion_tokens) == ("", 0)


@in_every_form
def test_a_text_whose_list_of_ids_is_empty_has_no_ids(form: Any) -> None:
    response = form(chat_response(token_ids=[], logprobs={"content": []}))
    assert extract_tokens(response, "chat") is None


@in_every_form
def test_no_prompt_ids_are_refused(form: Any) -> None:
    empty_prompt = {**chat_response(), "prompt_token_ids": []}
    with pytest.raises(TokenError, match="no prompt ids"):
        extract_tokens(form(empty_prompt), "chat")


@pytest.mark.parametrize("token", [2**31, 2**63, 2**64, 2**700])
def test_ids_beyond_every_integer_type_are_refused(token: int) -> None:
    for ids in ([token], [5, token]):
        with pytest.raises(TokenError, match="token_ids"):
            extract_tokens(chat_response(token_ids=ids), "chat")
        spelled = {"content": [{"token": f"token_id:{each}", "logprob": -1.0} for each in ids]}
        with pytest.raises(TokenError, match="token_id"):
            extract_tokens(chat_response(token_ids=None, logprobs=spelled), "chat")


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ({"content": "half \ud83d"}, "half \ufffd"),
        ({"content": "", "reasoning_content": "\udc00"}, "\ufffd"),
        ({"content": "", "tool_calls": [{"function": {"name": "\ud800"}}]}, "\ufffd"),
        ({"content": "", "tool_calls": [{"function": {"arguments": '"\ud800"'}}]}, '"\ufffd"'),
    ],
)
def test_a_lone_surrogate_that_a_model_wrote_is_replaced(message: Any, part: str) -> None:
    """Python's JSON reader, which the openai package uses, lets them pass."""
    found, _ = extract_message(chat_response(message=message), "chat")
    (call,) = found.get("tool_calls") or [{"function": {}}]
    assert part in (found["content"], found.get("reasoning_content"), *call["function"].values())
    for name in ("id", "model"):
        begin_answer({**chat_response(), name: "\ud800"})


@pytest.mark.parametrize(
    ("calls", "name", "arguments"),
    [
        ([{"function": {"name": "f", "arguments": {"a": "\u00e9"}}}], "f", '{"a": "\u00e9"}'),
        ([{"function": {"name": "f", "arguments": [1]}}], "f", "[1]"),
        ([{"function": {"name": "f", "arguments": []}}], "f", "[]"),
        ([{"function": {"name": "f", "arguments": 7}}], "f", "7"),
        ([{"function": {"name": "f", "arguments": None}}], "f", ""),
        ([{"function": {"arguments": "{}"}}], "", "{}"),
        ([{"function": {"name": 5, "arguments": "{}"}}], "5", "{}"),
        ([{"function": "f"}], "", ""),
        ({"function": {"name": "f", "arguments": "{}"}}, "f", "{}"),
        (['{"function": {"name": "f", "arguments": "{}"}}'], "f", "{}"),
        (["[" * 100_000], "", "[" * 100_000),
        (["{"], "", "{"),
        (["\ud800"], "", "\ufffd"),
        ([[1]], "", "[1]"),
        ([None], "", ""),
    ],
)
def test_odd_tool_calls_are_calls_that_the_model_can_be_told_about(
    calls: Any, name: str, arguments: str
) -> None:
    message = {"content": "", "tool_calls": calls}
    sent = json.dumps({"choices": [{"message": message}]})
    for response in (chat_response(message=message), decode_response(sent.encode())):
        (call,) = extract_message(response, "chat")[0]["tool_calls"]
        assert call["function"] == {"name": name, "arguments": arguments}
        assert call["id"] == "call_0"


@pytest.mark.parametrize("value", [10**5000, {1, 2}, nested(5000)], ids=["long", "set", "deep"])
def test_arguments_that_json_does_not_hold_are_a_text(value: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"a": value}}}
    found, _ = extract_message(chat_response(message={"content": "", "tool_calls": [call]}), "chat")
    assert found["tool_calls"][0]["function"]["arguments"].startswith("(")


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"text": "b"}], "tool_calls": {}}, "ab", None),
        ({"content": [{"type": "thinking"}]}, '[{"type": "thinking"}]', None),
        ({"content": {"a": 1}, "reasoning": {"summary": "s"}}, '{"a": 1}', '{"summary": "s"}'),
        ({"content": [], "reasoning_content": [], "reasoning": {}}, "", None),
        ({"content": 7, "tool_calls": []}, "7", None),
    ],
)
def test_odd_contents_are_texts(message: Any, content: str, reasoning: str | None) -> None:
    sent = json.dumps({"choices": [{"message": message}]})
    for response in (chat_response(message=message), decode_response(sent.encode())):
        found, text = extract_message(response, "chat")
        assert (found["content"], text) == (content, content)
        assert found.get("reasoning_content") == reasoning
        assert "tool_calls" not in found


@pytest.mark.parametrize("count", [-1, 2**31, 2**700, 10**400])
def test_counts_that_no_model_has_are_refused(count: int) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        with pytest.raises(BadResponse, match="usage"):
            extract_usage({"usage": {name: count}})


def test_prompt_ids_that_the_servers_own_count_contradicts_are_refused() -> None:
    response = {**chat_response(), "prompt_token_ids": [1, 7, 8]}
    with pytest.raises(TokenError, match="counts 2 prompt tokens, but it reports 3"):
        read_answer(as_struct(response), "chat")
    assert read_answer(as_struct({**response, "usage": None}), "chat").num_prompt_tokens == 3


@pytest.mark.parametrize("label", ["2147483648", "9" * 5000])
def test_versions_that_no_training_step_gave_are_refused(label: str) -> None:
    assert version_named("17", 3) == version_named(17, 3) == 17
    assert version_named("default", 3) == version_named(None, 3) == 3
    with pytest.raises(TokenError, match="weight version"):
        version_named(label, 0)


@pytest.mark.parametrize("response", [{}, {"choices": []}, {"choices": None}, None, "text"])
def test_an_answer_without_choices_is_an_error(response: Any) -> None:
    with pytest.raises(BadResponse, match="no choices"):
        extract_message(response, "chat")


def test_a_text_answer_is_not_a_chat_answer() -> None:
    with pytest.raises(BadResponse, match="no message"):
        extract_message(text_response(), "chat")


async def test_the_functions_of_spec_1() -> None:
    assert await parse_response_messages(chat_response(), "chat") == [
        {"role": "assistant", "content": "12"}
    ]
    assert await parse_response_messages(text_response(), "completion") == "12"
    tokens = await parse_response_tokens(chat_response(), "chat")
    assert tokens is not None
    assert tokens["completion_logprobs"] == pytest.approx([-0.1, -0.2, -0.3])
    del tokens["completion_logprobs"]  # type: ignore[misc]
    assert tokens == {
        "prompt_ids": [7, 8],
        "prompt_mask": [0, 0],
        "completion_ids": [49, 50, 2],
        "completion_mask": [1, 1, 1],
    }
    assert await parse_response_tokens(chat_response(logprobs=None), "chat") is None
    assert await parse_response_tokens(chat_response(token_ids=None), "chat") is None


async def test_a_generation_is_a_response_too() -> None:
    response = await ScriptedClient(["12"]).chat([{"role": "user", "content": "7+5"}])
    assert await parse_response_messages(response, "chat") == [response.message]
    assert await parse_response_messages(response, "completion") == "12"
    tokens = await parse_response_tokens(response, "chat")
    assert tokens is not None
    assert tokens["completion_ids"] == [49, 50, 258]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"choices": 3}', b'{"choices": [{"token_ids": ["a"]}]}', b"\xff", b"[]", b"NaN"],
)
def test_bytes_that_are_no_completion_are_bad_responses(body: bytes) -> None:
    with pytest.raises(BadResponse, match="not a completion in JSON"):
        decode_response(body)


@given(st.binary(max_size=60))
def test_no_bytes_crash_the_decoder(body: bytes) -> None:
    with pytest.raises(BadResponse, match="not a completion"):
        decode_response(body)
