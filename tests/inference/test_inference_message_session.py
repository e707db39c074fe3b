"""The session of a client that sends messages: what it makes of a server's prompts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inference_templates import TOOLS, assistant, user

from rolltree.inference.call import Answer as ReadAnswer
from rolltree.inference.call import ModelCall, record_of
from rolltree.inference.message_session import MessageSession, read_outcome
from rolltree.inference.retry import Outcome
from rolltree.inference.token_fields import TokenFields
from rolltree.values.errors import BadResponse, TokenError
from rolltree.values.types import FinishReason, ModelResponse, SamplingParams

Answer: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def session_of(mode: Any = "auto") -> MessageSession:
    return MessageSession(TokenFields(mode, "raw", "http://x/v1"))


def answer(
    prompt: list[int] | None, completion: list[int] | None, text: str = "b", **options: Any
) -> Answer:
    """Return a chat response with vLLM's fields, and what is known of its request."""
    logprobs = None
    if completion is not None:
        logprobs = {"content": [{"token": "", "logprob": -0.5} for _ in completion]}
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": completion,
        "logprobs": logprobs,
    }
    response = {
        "choices": [choice],
        "prompt_token_ids": prompt,
        "usage": {"prompt_tokens": 11, "completion_tokens": 3},
    }
    return response, {"raw": "raw", **options}


def complete(
    session: MessageSession, messages: Any, given: Answer, **options: Any
) -> ModelResponse:
    return session.complete(*read(session._tokens, messages, given, **options))


def read(
    tokens: TokenFields, prompt: Any, given: Answer, **options: Any
) -> tuple[ModelCall, ReadAnswer]:
    """Return a call and its answer, which a client has read."""
    response, known = given
    asked = ModelCall(prompt, **options)
    outcome = Outcome(response, known.get("num_retries", 0), known.get("wait_s", 0.0))
    answer = read_outcome(outcome, asked, tokens, known.get("version", 0))
    answer.raw = known.get("raw")
    return asked, answer


def test_everything_known_is_in_the_generation() -> None:
    given = answer([1, 2], [3, 4], num_retries=2, wait_s=1.5, version=7)
    got = complete(session_of(), [user("a")], given)
    assert got.prompt_ids is not None
    assert got.completion_ids is not None
    assert got.versions is not None
    assert (got.prompt_ids.tolist(), got.completion_ids.tolist()) == ([1, 2], [3, 4])
    assert (got.versions.tolist(), got.wait_s, got.info) == ([7, 7], 1.5, {"num_retries": 2})
    assert (got.num_prompt_tokens, got.num_completion_tokens) == (2, 2)
    assert (got.raw, got.finish_reason) == ("raw", FinishReason.STOP)


def test_without_ids_the_servers_counts_are_taken() -> None:
    got = complete(session_of("off"), [user("a")], answer(None, None))
    assert (got.num_prompt_tokens, got.num_completion_tokens) == (11, 3)
    assert (got.prompt_ids, got.logprobs, got.versions, got.extends) == (None,) * 4


def test_a_prompt_that_begins_with_the_earlier_ids_extends() -> None:
    session = session_of()
    first = complete(session, [user("a")], answer([1, 2], [3, 4]))
    history = [user("a"), first.message, user("c")]
    second = complete(session, history, answer([1, 2, 3, 4, 5, 6], [7]))
    assert second.extends == first.call_id
    history += [second.message, user("d")]
    third = complete(session, history, answer([1, 2, 3, 4, 5, 6, 7], [8]))
    assert third.extends == second.call_id
    assert "rerendered" not in third.info


@pytest.mark.parametrize("prompt", [[1, 2, 3, 9, 5], [1, 2], [1, 2, 3], [0, 1, 2, 3, 4, 5]])
def test_a_prompt_that_the_server_spelled_anew_does_not(prompt: list[int]) -> None:
    session = session_of()
    first = complete(session, [user("a")], answer([1, 2], [3, 4]))
    second = complete(session, [user("a"), first.message, user("c")], answer(prompt, [7]))
    assert second.extends is None
    assert "does not begin with the earlier ids" in second.info["rerendered"]
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist() == prompt


def test_other_histories_tools_and_models_do_not_extend() -> None:
    session = session_of()
    first = complete(session, [user("a")], answer([1], [2]))
    history = [user("a"), first.message, user("c")]
    given = answer([1, 2, 3], [4])
    others = [
        complete(session, [user("A"), *history[1:]], given),
        complete(session, history, given, tools=TOOLS),
        complete(session, history, given, model="other"),
        complete(session_of(), history, given),
    ]
    assert [got.extends for got in others] == [None] * 4
    assert all("rerendered" not in got.info for got in others)
    assert complete(session, history, given).extends == first.call_id


def test_a_call_without_ids_can_be_followed_by_one_with_ids() -> None:
    session = session_of()
    first = complete(session, [user("a")], answer(None, None))
    session._tokens._refused = False  # as when the server is restarted with other settings
    second = complete(session, [user("a"), first.message], answer([1, 2], [3]))
    assert second.extends is None
    assert second.completion_ids is not None


def test_text_is_a_history_of_its_own() -> None:
    given = ({"choices": [{"text": " b", "finish_reason": "length"}]}, {})
    got = complete(session_of("off"), "a", given, message_type="completion")
    assert (got.text, got.finish_reason) == (" b", FinishReason.LENGTH)
    assert got.message == assistant(" b")


def test_logprobs_of_another_distribution_are_dropped_and_ids_kept() -> None:
    got = complete(
        session_of(), [user("a")], answer([1], [2]), sampling=SamplingParams(temperature=0.5)
    )
    assert got.logprobs is None
    assert got.completion_ids is not None
    assert got.temperature == 0.5


def test_contradictions_are_errors() -> None:
    broken = answer([1], [2, 3])
    broken[0]["choices"][0]["logprobs"]["content"].pop()
    with pytest.raises(TokenError):
        complete(session_of(), [user("a")], broken)
    with pytest.raises(BadResponse):
        complete(session_of(), [user("a")], ({"choices": []}, {}))


def generated(prompt: list[int], tokens: TokenFields, given: Answer) -> ModelResponse:
    asked, answer = read(tokens, np.array(prompt, np.int32), given)
    return record_of(answer, asked)


def text_answer(**choice: Any) -> Answer:
    return {"choices": [{"text": "b", "finish_reason": "stop", **choice}]}, {"version": 2}


def test_generated_from_ids() -> None:
    tokens = TokenFields("auto", "raw", "x")
    given = text_answer(prompt_token_ids=[1, 2], token_ids=[3], logprobs={"token_logprobs": [-0.5]})
    got = generated([1, 2], tokens, given)
    assert got.completion_ids is not None
    assert got.logprobs is not None
    assert got.versions is not None
    assert (got.completion_ids.tolist(), got.logprobs.tolist()) == ([3], [-0.5])
    assert (got.versions.tolist(), got.num_prompt_tokens) == ([2], 2)
    with pytest.raises(TokenError, match="did not sample from the recorded prompt"):
        generated([9, 1, 2], tokens, given)


def test_generated_without_ids() -> None:
    tokens = TokenFields("auto", "raw", "x")
    got = generated([1, 2], tokens, text_answer())
    assert (got.text, got.prompt_ids, got.completion_ids) == ("b", None, None)
    assert got.num_prompt_tokens == 2
    assert tokens.wanted  # the next answer may have them


IDS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=6))
def test_extends_is_said_exactly_when_it_is_true(
    turns: list[tuple[list[int], list[int], bool]],
) -> None:
    session = session_of()
    messages: list[dict[str, Any]] = [user("go")]
    before: list[int] = []
    calls: list[ModelResponse] = []
    for new, completion, kept in turns:
        prompt = [*before, *new] if kept else new
        got = complete(session, messages, answer(prompt, completion))
        truly = bool(calls) and prompt[: len(before)] == before
        assert got.extends == (calls[-1].call_id if truly else None)
        assert got.prompt_ids is not None
        assert got.prompt_ids.tolist() == prompt
        before = [*prompt, *completion]
        messages += [got.message, user("on")]
        calls.append(got)
    for call, (_, completion, _) in zip(calls, turns, strict=True):
        assert call.completion_ids is not None
        assert call.completion_ids.tolist() == completion
