from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference.engine import extra_of
from rolltree.inference.message_session import send_with_token_fields
from rolltree.inference.request_fields import (
    extension_fields,
    extra_fields,
    outgoing,
    samples_the_model,
    sampling_fields,
    token_in_fields,
)
from rolltree.inference.token_fields import TokenFields
from rolltree.values.errors import ServerError, UnsupportedSetting
from rolltree.values.types import SamplingParams


def fields(mode: str = "auto", logprobs_mode: str = "raw") -> TokenFields:
    return TokenFields(mode, logprobs_mode, "http://x/v1")  # type: ignore[arg-type]


def test_sampling_fields_hold_what_is_set() -> None:
    assert sampling_fields(SamplingParams(), "chat") == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_fields(SamplingParams(), "completion")["max_tokens"] is None
    sampling = SamplingParams(0.0, 0.5, 3, 7, ("a",), (4,), 9, {"extra_body": {"min_p": 0.1}})
    assert sampling_fields(sampling, "chat") == {
        "temperature": 0.0,
        "top_p": 0.5,
        "max_tokens": 7,
        "stop": ["a"],
        "seed": 9,
    }
    assert extension_fields(sampling) == {"top_k": 3, "stop_token_ids": [4], "min_p": 0.1}
    assert extra_fields(sampling) == {}


def test_an_extra_body_of_none_is_not_sent() -> None:
    sampling = SamplingParams(extra={"extra_body": None})
    assert extension_fields(sampling) == extra_fields(sampling) == extra_of(sampling) == {}
    assert samples_the_model(sampling)


def test_extra_fields_go_out_as_they_came() -> None:
    extra = {"user": "me", "tool_choice": "auto", "extra_body": {"x": 1}}
    assert extra_fields(SamplingParams(extra=extra)) == {"user": "me", "tool_choice": "auto"}
    with pytest.raises(UnsupportedSetting, match="stream"):
        extra_fields(SamplingParams(extra={"stream": True}))
    assert extra_fields(SamplingParams(extra={"stream": False})) == {"stream": False}


def test_messages_go_out_as_they_are() -> None:
    plain = {"role": "user", "content": "a", "name": "ann"}
    noted = {"role": "assistant", "content": "b", "parse_problems": ["x"], "reasoning_content": "r"}
    sent = outgoing([plain, noted])
    assert sent[0] is plain
    assert sent[1] == {"role": "assistant", "content": "b", "reasoning_content": "r"}
    assert "parse_problems" in noted


@pytest.mark.parametrize(
    ("sampling", "neutral"),
    [
        (SamplingParams(), True),
        (SamplingParams(max_tokens=5, stop=("a",), seed=3, extra={"user": "me"}), True),
        (SamplingParams(temperature=0.9), False),
        (SamplingParams(temperature=0.0), False),
        (SamplingParams(top_p=0.9), False),
        (SamplingParams(top_k=5), False),
        (SamplingParams(extra={"presence_penalty": 0.5}), False),
        (SamplingParams(extra={"extra_body": {"min_p": 0.1}}), False),
        (SamplingParams(extra={"extra_body": {"return_token_ids": True}}), True),
    ],
)
def test_when_the_models_own_distribution_is_sampled(
    sampling: SamplingParams, neutral: bool
) -> None:
    assert samples_the_model(sampling) == neutral
    assert fields().usable_logprobs(sampling) == neutral
    assert fields(logprobs_mode="processed").usable_logprobs(sampling)


def test_asking_for_ids_leaves_no_sampling_default_to_the_model_folder() -> None:
    asked = fields()
    assert asked.standard("chat") == {"logprobs": True}
    assert asked.standard("completion") == {"logprobs": 1}
    assert asked.extension() == {
        "return_token_ids": True,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    off = fields("off")
    assert (off.wanted, off.standard("chat"), off.extension()) == (False, {}, {})


def test_refused_once_is_refused_for_good() -> None:
    asked = fields()
    assert asked.may_be_refused
    asked.refuse("test")
    assert not asked.wanted
    assert not asked.may_be_refused


def test_a_server_that_gave_ids_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = fields()
    asked.prove()
    assert not asked.may_be_refused
    with caplog.at_level(logging.WARNING, "rolltree.inference"):
        asked.refuse("one answer held none")
        asked.refuse("another, too")
    assert asked.wanted
    assert len(caplog.records) == 1


def test_insisting_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnsupportedSetting, match="set token_ids = 'auto'"):
        fields("vllm").refuse("test")


class Server:
    """Answers or fails with a status, by whether ids are asked for."""

    def __init__(self, with_ids: int | None, without: int | None) -> None:
        self.outcomes = {True: with_ids, False: without}
        self.asked: list[bool] = []

    async def __call__(self, with_tokens: bool) -> str:
        self.asked.append(with_tokens)
        status = self.outcomes[with_tokens]
        if status is not None:
            raise ServerError(f"with {with_tokens}", status=status, retryable=status >= 500)
        return "answer"


async def test_a_rejection_of_the_fields_is_survived_once() -> None:
    asked, server = fields(), Server(400, None)
    assert await send_with_token_fields(asked, server) == "answer"
    assert server.asked == [True, False]
    assert not asked.wanted


@pytest.mark.parametrize(
    ("mode", "with_ids", "without", "sent"),
    [
        ("auto", 400, 400, [True, False]),  # the request itself is wrong: the first error counts
        ("auto", 404, None, [True]),
        ("auto", 500, None, [True]),
        ("vllm", 400, None, [True]),
        ("off", 400, None, [True]),
    ],
)
async def test_other_errors_are_told(
    mode: str, with_ids: int, without: int | None, sent: list[bool]
) -> None:
    asked, server = fields(mode), Server(with_ids, without)
    with pytest.raises(ServerError, match="with True"):
        await send_with_token_fields(asked, server)
    assert server.asked == sent


@given(st.floats(0, 2), st.floats(0.01, 1), st.integers(0, 50))
def test_only_neutral_settings_are_neutral(temperature: float, top_p: float, top_k: int) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    assert samples_the_model(sampling) == (temperature == 1 and top_p == 1 and top_k == 0)


def test_without_a_limit_the_token_in_endpoint_is_told_so() -> None:
    """Versions of vLLM take a missing `max_tokens` as 16; null is the rest of the context."""
    fields = token_in_fields(SamplingParams())
    assert fields["max_tokens"] is None
    assert token_in_fields(SamplingParams(max_tokens=3))["max_tokens"] == 3
