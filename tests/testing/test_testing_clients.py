from __future__ import annotations

import asyncio
from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.testing import (
    ByteTokenizer,
    FaultRow,
    FaultyClient,
    ScriptedAnswer,
    ScriptedClient,
    scripted_logprobs,
)
from rolltree.values.errors import BadResponse, ConnectionFailed, TokenError
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams

ASK = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_bytes_and_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("hé<|im_end|>!") == [104, 0xC3, 0xA9, 258, 33]
    assert tokenizer.decode([104, 0xC3, 0xA9, 258, 33]) == "hé<|im_end|>!"
    assert tokenizer.decode([104, 258], skip_special_tokens=True) == "h"
    assert len(tokenizer) == tokenizer.vocab_size == 259
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 258)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(st.lists(st.integers(0, 258)))
def test_every_list_of_ids_has_a_text(ids: list[int]) -> None:
    assert isinstance(ByteTokenizer().decode(ids), str)


async def test_answers_in_a_row_with_exact_tokens() -> None:
    client = ScriptedClient(["12", "13"], version=4)
    first, second = await client.chat(ASK), await client.chat(ASK)
    assert [first.text, second.text] == ["12", "13"]
    assert first.completion_ids is not None
    assert first.completion_ids.tolist() == [49, 50, 258]
    assert first.logprobs is not None
    assert first.logprobs.tolist() == scripted_logprobs([49, 50, 258]).tolist()
    assert first.versions is not None
    assert first.versions.tolist() == [4, 4, 4]
    with pytest.raises(BadResponse, match="2 answers and was asked for one more"):
        await client.chat(ASK)


async def test_every_session_meets_the_same_model() -> None:
    client = ScriptedClient(["12", "13"])
    for _ in range(2):
        session = client.session()
        first = await session.chat(ASK)
        second = await session.chat([*ASK, first.message, *ASK])
        assert [first.text, second.text] == ["12", "13"]
        assert second.extends == first.call_id
    assert len(client.calls) == 4
    assert client.calls[3].prompt is not None
    assert client.calls[3].messages[1] == {"role": "assistant", "content": "12"}


async def test_functions_answer_any_prompt() -> None:
    client = ScriptedClient(lambda messages: str(len(messages)))
    assert (await client.chat(ASK)).text == "1"
    assert (await client.chat("four", message_type="completion")).text == "4"

    async def slowly(messages: object) -> str:
        await asyncio.sleep(0)
        return "later"

    assert (await ScriptedClient(slowly).chat(ASK)).text == "later"


async def test_messages_and_full_answers() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 2}'}}
    message = {"role": "assistant", "content": "Hm. ", "tool_calls": [call]}
    cut = ScriptedAnswer("12", FinishReason.LENGTH)
    odd = ScriptedAnswer("", ids=[1, 2], logprobs=[-1.0, -2.0])
    session = ScriptedClient([message, cut, odd]).session()
    got = await session.chat(ASK, tools=TOOLS)
    assert got.finish_reason == FinishReason.TOOL_CALLS
    assert got.message["content"] == "Hm."
    assert got.message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    got = await session.chat(ASK)
    assert got.completion_ids is not None
    assert (got.finish_reason, got.completion_ids.tolist()) == (FinishReason.LENGTH, [49, 50])
    got = await session.chat(ASK)
    assert got.completion_ids is not None
    assert got.logprobs is not None
    assert (got.completion_ids.tolist(), got.logprobs.tolist()) == ([1, 2], [-1.0, -2.0])


async def test_wrong_logprobs_are_refused_as_from_any_engine() -> None:
    client = ScriptedClient([ScriptedAnswer("12", logprobs=[-1.0])])
    with pytest.raises(TokenError):
        await client.chat(ASK)


@pytest.mark.parametrize(
    ("sampling", "ids", "text", "reason"),
    [
        (SamplingParams(max_tokens=2), [49, 50], "12", FinishReason.LENGTH),
        (SamplingParams(max_tokens=4), [49, 50, 51, 258], "123", FinishReason.STOP),
        (SamplingParams(stop=("2",)), [49, 50], "1", FinishReason.STOP),
        (SamplingParams(stop_token_ids=(50,)), [49, 50], "1", FinishReason.STOP),
        (SamplingParams(max_tokens=1, stop=("2",)), [49], "1", FinishReason.LENGTH),
    ],
)
async def test_limits_and_stops_are_obeyed(
    sampling: SamplingParams, ids: list[int], text: str, reason: FinishReason
) -> None:
    for got in (
        await ScriptedClient(["123"]).chat(ASK, sampling=sampling),
        await ScriptedClient(["123"]).generate(GenerateRequest(np.array([7], np.int32), sampling)),
    ):
        assert got.completion_ids is not None
        assert (got.completion_ids.tolist(), got.text, got.finish_reason) == (ids, text, reason)


async def test_generate_decodes_the_prompt_for_functions() -> None:
    client = ScriptedClient(lambda prompt: prompt + "!")
    request = GenerateRequest(np.array([104, 105], np.int32), SamplingParams())
    assert (await client.session().generate(request)).text == "hi!"
    await client.aclose()
    assert client.is_closed


def test_made_up_logprobs_tell_tokens_apart() -> None:
    values = scripted_logprobs(range(16))
    assert len(set(values.tolist())) == 16
    assert values.max() < 0
    assert values.dtype == np.float32


async def test_faults_come_in_order_across_sessions() -> None:
    client = FaultyClient(
        ScriptedClient(lambda _: "ok"), [None, ConnectionFailed("gone"), 0.05, None]
    )
    assert (await client.session().chat(ASK)).text == "ok"
    with pytest.raises(ConnectionFailed, match="gone"):
        await client.session().chat(ASK)
    start = monotonic()
    assert (await client.chat(ASK)).text == "ok"
    assert monotonic() - start >= 0.05
    request = GenerateRequest(np.array([7], np.int32), SamplingParams())
    assert (await client.generate(request)).text == "ok"
    assert (await client.chat(ASK)).text == "ok"
    assert (client.faults.num_calls, client.faults.num_faults) == (5, 2)
    assert client.model == "scripted"


async def test_faults_by_number() -> None:
    client = FaultyClient(
        ScriptedClient(lambda _: "ok"),
        lambda number: ConnectionFailed(str(number)) if number % 2 else None,
    )
    await client.chat(ASK)
    with pytest.raises(ConnectionFailed, match="1"):
        await client.chat(ASK)
    await client.chat(ASK)


@given(st.lists(st.one_of(st.none(), st.integers())), st.integers(0, 20))
def test_a_row_of_faults_ends(faults: list[int | None], num_calls: int) -> None:
    row = FaultRow(faults)
    got = [row.next() for _ in range(num_calls)]
    assert got == [*faults, *[None] * num_calls][:num_calls]
    assert row.num_faults == sum(fault is not None for fault in got)
