"""The official openai client, unmodified, against `rolltree serve` in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_kit import ADD, TOKEN, Served

openai = pytest.importorskip("openai")

Q = [{"role": "user", "content": "7 + 5 ="}]
IDS = {"return_token_ids": True}


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key=TOKEN, max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    (card,) = client.models.list()
    assert (card.id, card.owned_by, card.max_model_len) == ("taught", "rolltree", 2048)
    assert card.logprobs_mode == "processed_logprobs"


def test_chat(client: Any) -> None:
    got = client.chat.completions.create(
        model="taught",
        messages=Q,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=0,
        user="me",
        extra_body=IDS,
    )
    choice = got.choices[0]
    assert choice.message.content == "12"
    assert choice.finish_reason == "stop"
    assert choice.token_ids == [49, 50, 258]
    assert got.prompt_token_ids[:13] == [257, *b"user\n7 + 5 ="]
    assert len(got.prompt_token_ids) == got.usage.prompt_tokens
    assert got.usage.completion_tokens == 3
    content = choice.logprobs.content
    assert [entry.token for entry in content[:2]] == ["1", "2"]
    assert content[0].bytes == [49]
    assert all(-0.3 < entry.logprob <= 0 for entry in content)
    assert choice.weight_versions == [{"version": "0", "start": 0, "end": 3}]


def test_tokens_as_ids_and_no_ids_unasked(client: Any) -> None:
    options: dict[str, Any] = {"model": "taught", "messages": Q, "temperature": 0}
    got = client.chat.completions.create(
        **options, logprobs=True, extra_body={"return_tokens_as_token_ids": True}
    )
    assert [e.token for e in got.choices[0].logprobs.content] == [
        "token_id:49",
        "token_id:50",
        "token_id:258",
    ]
    assert not hasattr(got, "prompt_token_ids")
    assert not hasattr(got.choices[0], "token_ids")


def test_text_completions_of_several_prompts(client: Any) -> None:
    text = "<|im_start|>user\n7 + 5 =<|im_end|>\n<|im_start|>assistant\n"
    ids = client.chat.completions.create(
        model="taught", messages=Q, max_tokens=1, extra_body=IDS
    ).prompt_token_ids
    got = client.completions.create(
        model="taught", prompt=[text, text + "1"], temperature=0, logprobs=1, n=2, extra_body=IDS
    )
    assert [choice.text for choice in got.choices] == ["12", "12", "2", "2"]
    assert got.choices[0].prompt_token_ids == ids
    assert got.choices[2].prompt_token_ids == [*ids, 49]
    assert got.choices[0].token_ids == [49, 50, 258]
    assert len(got.choices[0].logprobs.token_logprobs) == 3
    by_id = client.completions.create(model="taught", prompt=ids, temperature=0)
    assert by_id.choices[0].text == "12"


def test_text_completions_are_short_unless_told_otherwise(client: Any) -> None:
    options: dict[str, Any] = {"model": "taught", "prompt": "zzz", "seed": 3}
    assert client.completions.create(**options).usage.completion_tokens <= 16
    longer = client.completions.create(**options, extra_body={"max_tokens": None}, stop=["\x00"])
    assert longer.usage.completion_tokens > 0


def test_seeds_and_n(client: Any) -> None:
    options: dict[str, Any] = {
        "model": "taught",
        "messages": [{"role": "user", "content": "say anything"}],
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 7,
        "extra_body": IDS,
    }
    once = client.chat.completions.create(**options)
    three = client.chat.completions.create(**options, n=3)
    again = client.chat.completions.create(**options, n=3)
    ids = [choice.token_ids for choice in three.choices]
    assert ids[0] == once.choices[0].token_ids
    assert ids == [choice.token_ids for choice in again.choices]
    assert ids[0] != ids[1] != ids[2]
    assert [choice.index for choice in three.choices] == [0, 1, 2]


def test_stop_strings_and_ids(client: Any) -> None:
    options: dict[str, Any] = {
        "model": "taught",
        "messages": [{"role": "user", "content": "count"}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.message.content == "one two three four"
    cut = client.chat.completions.create(**options, stop=" three", extra_body=IDS).choices[0]
    assert (cut.message.content, cut.finish_reason, cut.stop_reason) == (
        "one two",
        "stop",
        " three",
    )
    assert bytes(cut.token_ids) == b"one two three"
    by_id = client.chat.completions.create(**options, extra_body={"stop_token_ids": [32]})
    assert by_id.choices[0].message.content == "one"
    assert by_id.choices[0].stop_reason == 32
    short = client.chat.completions.create(**options, max_completion_tokens=4).choices[0]
    assert (short.message.content, short.finish_reason) == ("one ", "length")


def test_tool_call_and_its_answer(client: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 and 3?"}]
    options: dict[str, Any] = {"model": "taught", "temperature": 0, "tools": [ADD]}
    got = client.chat.completions.create(messages=messages, **options).choices[0]
    assert got.finish_reason == "tool_calls"
    (call,) = got.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert got.message.content is None
    messages += [
        got.message.model_dump(exclude_none=True),
        {"role": "tool", "content": "5", "tool_call_id": call.id},
    ]
    last = client.chat.completions.create(messages=messages, **options).choices[0]
    assert (last.message.content, last.finish_reason) == ("It is 5.", "stop")
    unread = client.chat.completions.create(messages=messages[:1], **options, tool_choice="none")
    assert unread.choices[0].message.tool_calls is None


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}])
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_chat_is_the_whole_answer(client: Any, n: int, options: dict[str, Any]) -> None:
    options = {
        "model": "taught",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 30,
        "n": n,
        "logprobs": True,
        "extra_body": IDS,
        **options,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, counted = chunks
    assert counted.choices == []
    assert counted.usage.completion_tokens == whole.usage.completion_tokens
    for index in range(n):
        mine = [c.choices[0] for c in parts if c.choices[0].index == index]
        expected = whole.choices[index]
        assert "".join(c.delta.content or "" for c in mine) == expected.message.content
        assert mine[0].delta.role == "assistant"
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [
            expected.finish_reason
        ]
        assert [i for c in mine for i in c.token_ids] == expected.token_ids
        logprobs = [entry.logprob for c in mine for entry in c.logprobs.content]
        np.testing.assert_allclose(
            logprobs, [entry.logprob for entry in expected.logprobs.content], atol=1e-4
        )
    assert all(len(c.choices[0].token_ids) == 1 for c in parts)  # one chunk per token
    if options["temperature"] == 0:
        assert parts[0].choices[0].delta.content == "o"
    assert parts[0].prompt_token_ids == whole.prompt_token_ids
    assert sum(hasattr(c, "prompt_token_ids") for c in parts) == n


def test_streamed_text(client: Any) -> None:
    options: dict[str, Any] = {"model": "taught", "prompt": "one two", "seed": 5, "max_tokens": 20}
    whole = client.completions.create(**options)
    parts = list(client.completions.create(**options, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    del options["seed"]
    parts = list(client.completions.create(**options, stream=True, extra_body=IDS))
    ids = [token for part in parts for token in part.choices[0].token_ids]
    assert len(ids) == 20 or ids[-1] in (256, 258)
    assert len(parts) == len(ids)


def test_streamed_text_with_a_stop_string(client: Any) -> None:
    """What may be the stop's beginning is held back, what came before it is not."""
    asked: dict[str, Any] = {"model": "taught", "messages": [{"role": "user", "content": "count"}]}
    asked |= {"temperature": 0, "stop": ["two three"]}
    parts = list(client.chat.completions.create(**asked, stream=True))
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == "one "
    assert [text for text in texts if text] == ["o", "n", "e", " "]
    assert parts[-1].choices[0].stop_reason == "two three"


def test_streamed_tool_call(client: Any) -> None:
    chunks = client.chat.completions.create(
        model="taught",
        messages=[{"role": "user", "content": "2 and 3?"}],
        tools=[ADD],
        temperature=0,
        stream=True,
    )
    deltas = [chunk.choices[0] for chunk in chunks]
    assert "".join(each.delta.content or "" for each in deltas) == ""
    (call,) = [call for each in deltas for call in each.delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert deltas[-1].finish_reason == "tool_calls"


def test_the_likeliest_tokens_come_with_their_token(client: Any) -> None:
    asked = {"model": "taught", "messages": Q, "temperature": 0, "max_tokens": 5, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=4).choices[0]
    chunks = client.chat.completions.create(**asked, top_logprobs=4, stream=True)
    parts = [each.logprobs.content for chunk in chunks for each in chunk.choices if each.logprobs]

    def named(entries: Any) -> list[tuple[str, list[str]]]:
        return [(each.token, [top.token for top in each.top_logprobs]) for each in entries]

    found = named(entry for part in parts for entry in part)
    assert found == named(whole.logprobs.content)
    assert all(len(likeliest) == 4 for _, likeliest in found)
    assert len(parts) > 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tempreature": 1}, "Did you mean 'temperature'"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"logit_bias": {"5000": 100}}, "outside the vocabulary"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_json": {"type": "odd"}}, "guided_json cannot be compiled.*Invalid type: odd"),
        ({"tool_choice": "required"}, "offers no tools"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"n": 0}, "n = 0"),
        ({"stream_options": {"every": 2}}, "include_usage"),
        ({"temperature": -1}, "temperature"),
        ({"messages": "hello"}, "messages is not a list"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"return_token_ids": "yes"}, "neither true nor false"),
    ],
)
def test_what_would_be_ignored_is_refused(client: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model="taught", messages=Q, extra_body=change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logit_bias": {"258": 100}}, ""),
        ({"logit_bias": {str(ord("Z")): 100}}, "ZZZZ"),
        ({"extra_body": {"min_tokens": 2}, "logit_bias": {"258": 100}, "max_tokens": 3}, "12"),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, "12"),
        ({"extra_body": {"repetition_penalty": 1.0, "min_p": 0.5}, "temperature": 1.0}, "12"),
    ],
)
def test_penalties_and_biases(client: Any, change: dict[str, Any], said: str) -> None:
    asked = {"model": "taught", "messages": Q, "temperature": 0, "max_tokens": 8, **change}
    got = client.chat.completions.create(**asked).choices[0].message.content
    assert got.startswith(said)
    assert said or got == ""


def test_other_errors(client: Any, served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.chat.completions.create(model="gpt-9", messages=Q)
    with pytest.raises(openai.BadRequestError, match="max_context") as caught:
        client.completions.create(model="taught", prompt=[5] * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="taught", prompt=[99999])
    with pytest.raises(openai.BadRequestError, match="neither a string nor a list"):
        client.completions.create(model="taught", prompt=[[1, -1]])
    with pytest.raises(openai.BadRequestError, match="max_context"):  # before the stream begins
        client.completions.create(model="taught", prompt=[5] * 5000, stream=True)
    with (
        openai.OpenAI(base_url=served.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError, match="bearer token"),
    ):
        other.models.list()
