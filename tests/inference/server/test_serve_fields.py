"""Fields, deltas and version_spans of the server, without one."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from serve_kit import ADD

from rolltree.gateway.calls import AgentAnswer, AgentCall, AnswerHead, CallOrigin, answer_seeds
from rolltree.gateway.failures import failure_of_request
from rolltree.gateway.fields import includes_usage, read_fields
from rolltree.gateway.messages import checked_messages
from rolltree.gateway.openai_chat import (
    CHAT_FIELDS,
    TEXT_FIELDS,
    CompletionWriter,
    completion_usage,
    ids_in,
    read_chat,
    read_text,
    version_spans,
)
from rolltree.gateway.serve.app import ServerOptions
from rolltree.gateway.serve.model_server import ServedModel
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.deltas import MessageDeltas, SettledText, TextDeltas
from rolltree.inference.engine import EngineOutput
from rolltree.inference.parse import extract_versions
from rolltree.inference.request_fields import token_in_fields
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.errors import ConfigError, PromptTooLong, TokenError
from rolltree.values.types import FinishReason, ModelResponse, SamplingParams
from rolltree.web import limits as server_http
from rolltree.web.guard import RequestError, is_loopback
from rolltree.web.limits import object_in

RENDERER = ChatRenderer(ByteTokenizer())


class _NoEngine:
    max_context, version, extra_settings = 100, 0, ("min_p",)


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
    call = read_chat({**body, "return_token_ids": True}, served)
    writer, parts = CompletionWriter(call), list[bytes]()
    async for part in served.stream(call, CallOrigin()):
        if isinstance(part, AnswerHead):
            parts += writer.begin(part)
        else:
            parts += writer.end(part) if isinstance(part, AgentAnswer) else writer.delta(part)
    assert parts.pop() == b"data: [DONE]\n\n"
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
    served, chat = served_with(), [{"role": "user", "content": "a"}]
    body = {"model": "m", "messages": chat, "max_tokens": None, "logprobs": True, "user": "x"}
    got = read_chat(body, served)
    assert (got.sampling.max_tokens, got.options, got.n, got.stream) == (
        *(None, {"logprobs": True}),
        *(1, False),
    )
    for body, tokens in (({}, 16), ({"max_tokens": None}, None), ({"max_tokens": 3}, 3)):
        assert read_text({"prompt": "a", **body}, served).sampling.max_tokens == tokens
    # Zero further tokens, but that of the sampled one.
    assert read_text({"prompt": "a", "logprobs": 0}, served).options == {"logprobs": True}
    with pytest.raises(RequestError) as caught:
        read_text({"promt": 1}, served)
    assert caught.value.param == "promt"
    assert failure_of_request(caught.value).status == 400
    assert failure_of_request(RuntimeError("x")).status == 500


async def refuse(body: dict[str, Any]) -> None:
    served = served_with()
    await served.answers(read_text({"prompt": "a", **body}, served), CallOrigin())


@pytest.mark.parametrize(
    "body",
    [
        *({"length_penalty": True}, {"echo": 0}, {"best_of": True}, {"priority": False}),
        *({"use_beam_search": 0}, {"parallel_tool_calls": 1}, {"top_logprobs": False}),
    ],
)
async def test_true_is_not_one_and_zero_is_not_false(body: dict[str, Any]) -> None:
    (name,) = body
    with pytest.raises(RequestError, match=r"does not support|cannot be obeyed") as caught:
        await refuse(body)
    assert caught.value.param == name


def test_a_number_may_be_written_with_a_point() -> None:
    assert read_fields({"length_penalty": 1.0}, TEXT_FIELDS) == ({}, SamplingParams(), {})


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
    for more, table in (({"logprobs": 1, "stop_token_ids": [1]}, TEXT_FIELDS), ({}, CHAT_FIELDS)):
        assert not read_fields(sent | more, table)[1].extra
    params = token_in_fields(SamplingParams(max_tokens=4, seed=3, top_k=2))
    assert params["top_k"] == 2
    assert (params["seed"], params["max_tokens"], params["logprobs"]) == (3, 4, 0)


def test_cached_tokens_of_a_prompt_count_once_for_all_its_choices() -> None:
    response = ModelResponse({"role": "assistant", "content": ""}, "", FinishReason.STOP)
    # The engine computes a prompt once, so that later choices find it in the cache.
    answers = [
        AgentAnswer(
            *(AnswerHead("", "m", 0), response.message, response.finish_reason, response),
            num_prompt_tokens=size,
            num_cached_tokens=cached,
            num_completion_tokens=1,
        )
        for size, cached in [(30, 0), (30, 29), (30, 29), (8, 5), (8, 7), (8, 7)]
    ]
    usage = completion_usage(AgentCall("a", n=3, more_prompts=("b",)), answers)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (38, 6)


def test_seeds_of_choices() -> None:
    seeds = answer_seeds(5, 4)
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    assert answer_seeds(5, 2) == seeds[:2]
    assert answer_seeds(-1, 2)[0] == -1


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
    messages = checked_messages([{"role": "user", "content": "2 + 3?"}])
    assert served_with().chat_prompt(messages, [ADD]) is not None
    assert served_with(template=blind).chat_prompt(messages, None) is not None
    with pytest.raises(ConfigError, match="template of 'm' ignores tools"):
        served_with(template=blind).chat_prompt(messages, [ADD])


async def test_without_tools_a_template_sees_none() -> None:
    template = "{% if tools is none %}none{% endif %}{{ messages[0].content }}"
    served = served_with(template=template)
    for more in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
        call = read_chat({"messages": [{"role": "user", "content": "a"}], **more}, served)
        assert await served.count_tokens(call) == len("nonea")


def test_prompts() -> None:
    served = served_with()
    assert served.text_prompt("ab").tolist() == [97, 98]
    assert ids_in([5, 6], served, "prompt").tolist() == [5, 6]
    for wrong in (None, 5, [1.5], [-1], [True], [2**31], ["a", 1]):
        with pytest.raises(RequestError, match="neither a string nor a list"):
            read_text({"prompt": wrong}, served)
    several = read_text({"prompt": ["ab", [5]], "n": 2}, served)
    assert [each.prompt for each in several.singles()[:3]] == ["ab", "ab", several.more_prompts[0]]
    with pytest.raises(PromptTooLong, match="100 tokens"):
        served.text_prompt("a" * (100 * 256 + 1))
    for wrong in (None, ["hi"], [{}], [{"role": 5}], [{"role": "user", "content": [1]}]):
        with pytest.raises(RequestError, match="messages is not a list of chat messages"):
            checked_messages(wrong)
