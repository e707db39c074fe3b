"""Fields, deltas and version_spans of the server, without one."""

from __future__ import annotations

import asyncio
import itertools
import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serve_kit import ADD

from rolltree.gateway.serve.app import ServerOptions
from rolltree.gateway.serve.model_server import ServedModel, choice_seeds
from rolltree.gateway.serve.requests import (
    CHAT_FIELDS,
    TEXT_FIELDS,
    check_fields,
    error_body,
    includes_usage,
    messages_of,
    parse_request,
)
from rolltree.gateway.serve.responses import (
    Responses,
    ResponseStream,
    token_usage,
    version_spans,
)
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.deltas import MessageDeltas, SettledText, TextDeltas
from rolltree.inference.engine import EngineOutput
from rolltree.inference.parse import extract_versions
from rolltree.inference.request_fields import token_in_fields
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.errors import ConfigError, PromptTooLong, TokenError
from rolltree.values.types import FinishReason, SamplingParams
from rolltree.web import limits as server_http
from rolltree.web.guard import RequestError, is_loopback
from rolltree.web.limits import object_in

RENDERER = ChatRenderer(ByteTokenizer())


class _NoEngine:
    max_context, version = 100, 0


def served_with(**options: Any) -> ServedModel:
    renderer = ChatRenderer(ByteTokenizer(), **options)
    return ServedModel(_NoEngine(), renderer, "m")  # type: ignore[arg-type]


PIECES = st.lists(
    st.sampled_from(
        [
            *("a", " b", "\n", "<think>", "</think>", "<tool_call>", '{"name": "f"}'),
            *("</tool_call>", "<", "<|", "é", "[", "</th", "  "),
        ]
    ),
    max_size=8,
)


@example(["  ", "<think>", " b"], False, "think", 1)
@given(PIECES, st.booleans(), st.sampled_from(["none", "think"]), st.integers(1, 5))
def test_deltas_add_up_to_the_message(
    pieces: list[str], with_tools: bool, reasoning: str, step: int
) -> None:
    served = served_with(tool_parser="hermes", reasoning=reasoning)
    tools: list[dict[str, Any]] | None = [{"type": "function"}] if with_tools else None
    ids = list("".join(pieces).encode())
    deltas = MessageDeltas(served.renderer, tools)
    found: dict[str, str] = {"content": "", "reasoning_content": ""}
    settled = SettledText(served.renderer, SamplingParams())
    seen = [settled.add(token) for token in ids]
    for end in range(step, len(ids), step):
        text = seen[end - 1]
        for name, part in deltas.next(text).items():
            if name in found:
                found[name] += part
    final = served.renderer.parse_text("".join(pieces), FinishReason.STOP, tools).message
    last = deltas.last(final)
    for name in found:
        found[name] += last.get(name, "")
    assert found["content"] == final["content"]
    assert found["reasoning_content"] == final.get("reasoning_content", "")
    assert len(last.get("tool_calls", [])) == len(final.get("tool_calls", []))


class _Caller(_NoEngine):
    """Samples two tool calls at once."""

    ids = np.frombuffer(b'Both.<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2, np.uint8)

    def submit(self, request: Any, tell: Any) -> Future[EngineOutput]:
        ids, values = self.ids.astype(np.int32), np.zeros(len(self.ids), np.float32)
        output = EngineOutput(ids, values, ids * 0, FinishReason.STOP, None, 3, 0, 0.0, values)
        done: Future[EngineOutput] = Future()
        done.set_result(output)
        return done


async def test_each_tool_call_of_a_stream_has_its_own_chunk() -> None:
    """As from OpenAI and vLLM: some clients read only the first call of a chunk."""
    renderer = ChatRenderer(ByteTokenizer(), tool_parser="hermes")
    served = ServedModel(_Caller(), renderer, "m")  # type: ignore[arg-type]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [ADD], "stream": True}
    asked = check_fields({**body, "return_token_ids": True}, CHAT_FIELDS, "m")
    request = parse_request(asked, chat=True, body=body)
    stream = ResponseStream(Responses(served, request), [np.array([1, 2, 3], np.int32)])
    parts = [part async for part in stream.events()][:-1]
    choices = [json.loads(part.removeprefix(b"data: "))["choices"][0] for part in parts]
    calls = [[call["index"] for call in each["delta"].get("tool_calls", [])] for each in choices]
    assert calls == [[0], [1]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [each["finish_reason"] for each in choices] == [None, "tool_calls"]
    assert [i for each in choices for i in each["token_ids"]] == _Caller.ids.tolist()


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_settled_text_is_never_taken_back(text: str, stop: list[str]) -> None:
    ids, sampling = list(text.encode()), SamplingParams(stop=tuple(stop))
    settled = SettledText(RENDERER, sampling)
    seen = [settled.add(token) for token in ids]
    for shorter, longer in itertools.pairwise(seen):
        assert longer.startswith(shorter)
    assert all(text.startswith(each) for each in seen)
    if not stop and text:
        assert seen[-1] == text


def test_settled_text_decodes_only_what_is_new() -> None:
    decoded = []

    class Counting(ByteTokenizer):
        def decode(self, ids: Any, **options: Any) -> str:
            decoded.append(len(ids))
            return super().decode(ids, **options)

    settled = SettledText(ChatRenderer(Counting()), SamplingParams())
    decoded.clear()
    for token in "sixteen times as long, \u00e4 and \u20ac included".encode() * 16:
        text = settled.add(token)
    assert text == "sixteen times as long, \u00e4 and \u20ac included" * 16
    assert max(decoded) < 8


def test_text_that_changes_is_not_given_twice() -> None:
    deltas = TextDeltas()
    assert [deltas.next("ab"), deltas.next("abc"), deltas.next("x"), deltas.next("abcd")] == [
        "ab",
        "c",
        "",
        "d",
    ]


@given(st.lists(st.integers(0, 3), max_size=12))
def test_spans_say_what_the_versions_are(versions: list[int]) -> None:
    array = np.array(sorted(versions), np.int32)
    choice = {"weight_versions": version_spans(array)}
    assert extract_versions(choice, len(array), 9).tolist() == array.tolist()


def test_versions_without_numbers_or_spans() -> None:
    labelled = {"weight_versions": [{"version": "default", "start": 0, "end": 2}]}
    assert extract_versions(labelled, 2, 5).tolist() == [5, 5]
    assert extract_versions({}, 3, 4).tolist() == [4, 4, 4]
    for broken in (
        [{"version": "1", "start": 1, "end": 2}],
        [{"version": "1", "start": 0, "end": 1}],
        [{"version": "1", "start": 0, "end": 3}],
    ):
        with pytest.raises(TokenError, match="staleness"):
            extract_versions({"weight_versions": broken}, 2, 0)


def test_fields_become_a_request() -> None:
    body = {"model": "m", "messages": [], "max_tokens": None, "logprobs": True, "user": "x"}
    got = parse_request(check_fields(body, CHAT_FIELDS, "m"), chat=True, body=body)
    assert (got.sampling.max_tokens, got.logprobs, got.n, got.stream) == (None, True, 1, False)
    for body, tokens in (({}, 16), ({"max_tokens": None}, None), ({"max_tokens": 3}, 3)):
        got = parse_request(check_fields(body, TEXT_FIELDS, "m"), chat=False, body=body)
        assert got.sampling.max_tokens == tokens
    got = parse_request(check_fields({"logprobs": 0}, TEXT_FIELDS, "m"), chat=False, body={})
    assert got.logprobs  # zero further tokens, but that of the sampled one
    with pytest.raises(RequestError) as caught:
        check_fields({"promt": 1}, TEXT_FIELDS, "m")
    assert caught.value.param == "promt"
    assert error_body(caught.value)[0] == 400
    assert error_body(RuntimeError("x"))[0] == 500


@pytest.mark.parametrize(
    "body",
    [
        *({"length_penalty": True}, {"echo": 0}, {"best_of": True}, {"priority": False}),
        *({"use_beam_search": 0}, {"parallel_tool_calls": 1}, {"top_logprobs": False}),
    ],
)
def test_true_is_not_one_and_zero_is_not_false(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="does not support"):
        check_fields(body, TEXT_FIELDS, "m")


def test_a_number_may_be_written_with_a_point() -> None:
    assert check_fields({"length_penalty": 1.0}, TEXT_FIELDS, "m") == {"length_penalty": 1.0}


def test_null_in_stream_options_is_not_given_and_a_text_is_no_flag() -> None:
    assert not includes_usage({"stream_options": {"include_usage": None}})
    with pytest.raises(RequestError, match="include_usage = 'no' is neither true nor false"):
        includes_usage({"stream_options": {"include_usage": "no"}})


CODE = "{[" * 150 + '\\"\\\\'
TEXTS = {
    "plain": CODE,
    "quote at the end": CODE + '"',
    "quote at the beginning": '\\"' + CODE,
    "backslash at the end": CODE + "\\",
    "quotes": CODE + '"' * 7 + CODE,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_brackets_in_texts_are_not_objects_and_lists(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_http, "MAX_CONTAINERS", 200)
    body = {"prompt": text, text: [text] * 2}
    assert object_in(json.dumps(body).encode()) == body
    most = json.dumps({text: [[]] * 198}).encode()
    assert object_in(most) == {text: [[]] * 198}
    # Whatever follows what the decoder reads hides nothing before it.
    for end in (b"", b'"', b'\\"'):
        with pytest.raises(RequestError, match="more than 200 objects and lists"):
            object_in(json.dumps({"a": text, text: [{}] * 199}).encode() + end)


def test_half_of_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert object_in(rb'{"a\udc00": ["\ud800", "\ud83d\ude00"]}') == {
        "a\ufffd": ["\ufffd", "\U0001f600"]
    }
    for content in (rb'{"a": "\ud800"', rb'["\ud800"]', rb'{"a": "\ud80"}', b'{"\\ud800": "\xff"}'):
        with pytest.raises(RequestError, match="JSON"):
            object_in(content)


def test_every_field_that_clients_send_is_known() -> None:
    """What `OpenAIClient` asks of vLLM, and the token-in endpoint's parameters."""
    sent = {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    check_fields(sent | {"logprobs": 1, "stop_token_ids": [1]}, TEXT_FIELDS, "m")
    check_fields(sent | {"logprobs": True}, CHAT_FIELDS, "m")
    params = token_in_fields(SamplingParams(max_tokens=4, seed=3, top_k=2))
    assert params["top_k"] == 2
    assert (params["seed"], params["max_tokens"], params["logprobs"]) == (3, 4, 0)


def test_cached_tokens_of_a_prompt_count_once_for_all_its_choices() -> None:
    ids, values = np.zeros(1, np.int32), np.zeros(1, np.float32)
    # The engine computes a prompt once, so that later choices find it in the cache.
    outputs = [
        EngineOutput(ids, values, ids, FinishReason.STOP, None, size, cached, 0.0)
        for size, cached in [(30, 0), (30, 29), (30, 29), (8, 5), (8, 7), (8, 7)]
    ]
    usage = token_usage([np.zeros(30, np.int32), np.zeros(8, np.int32)], outputs)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (38, 6)


def test_seeds_of_choices() -> None:
    seeds = choice_seeds(5, 4)
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    assert choice_seeds(5, 2) == seeds[:2]
    assert choice_seeds(-1, 2)[0] == -1


def test_who_may_be_served() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.9.9.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "example.org", "10.0.0.1")))
    ServerOptions("0.0.0.0", 80, "token", allow_remote=True)
    for options in ({"token": "t"}, {"allow_remote": True}):
        with pytest.raises(ConfigError):
            ServerOptions("0.0.0.0", 80, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["token", "admin_token"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_token_is_refused(host: str, name: str) -> None:
    options: dict[str, Any] = {"token": "t", "allow_remote": True, name: ""}
    with pytest.raises(ConfigError, match="is empty"):
        ServerOptions(host, **options)


def test_tools_that_the_template_ignores_are_refused_as_in_process() -> None:
    blind = "{% for message in messages %}{{ message.content }}{% endfor %}"
    messages = messages_of([{"role": "user", "content": "2 + 3?"}])
    assert served_with().chat_prompt(messages, [ADD]) is not None
    assert served_with(template=blind).chat_prompt(messages, None) is not None
    with pytest.raises(ConfigError, match="template of 'm' ignores tools"):
        served_with(template=blind).chat_prompt(messages, [ADD])


def test_prompts() -> None:
    served = served_with()
    assert served.text_prompt("ab").tolist() == [97, 98]
    assert served.text_prompt([5, 6]).tolist() == [5, 6]
    for wrong in (None, 5, [1.5], [-1], [True], [2**31], ["a", 1]):
        with pytest.raises(TokenError):
            served.text_prompt(wrong)
    with pytest.raises(PromptTooLong, match="100 tokens"):
        served.text_prompt("a" * (100 * 256 + 1))
    for wrong in (None, ["hi"], [{}], [{"role": 5}], [{"role": "user", "content": [1]}]):
        with pytest.raises(RequestError, match="messages is not a list of chat messages"):
            messages_of(wrong)
    assert asyncio.run(served.sample([], SamplingParams())) == []
