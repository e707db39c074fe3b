"""`OpenAIClient` over real HTTP, against the scripted server."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import numpy as np
import pytest
from inference_templates import STRIPPING, TOOLS, user

from rolltree.inference import ChatRenderer, OpenAIClient, RetryPolicy
from rolltree.testing import (
    ByteTokenizer,
    DirectTransport,
    HttpFault,
    Reply,
    Request,
    ScriptedAnswer,
    ScriptedServer,
    scripted_logprobs,
)
from rolltree.values.errors import (
    BadResponse,
    ConfigError,
    ConnectionFailed,
    PromptTooLong,
    ServerError,
    TokenError,
    UnsupportedSetting,
)
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams

FAST = RetryPolicy(max_retries=3, first_wait_s=0.001)
RENDERER = ChatRenderer(ByteTokenizer())
TOKEN_FIELDS = {"return_token_ids", "logprobs", "top_k", "min_p", "repetition_penalty"}


def client_of(server: ScriptedServer, **options: Any) -> OpenAIClient:
    options = {"retry": FAST, "token_endpoint": "completions", **options}
    return OpenAIClient(server.base_url, "scripted", **options)


async def test_a_call_brings_message_ids_and_logprobs() -> None:
    with ScriptedServer(["12"]) as server:
        client = client_of(server)
        client.version = 5
        got = await client.chat([user("7 + 5 =")], sampling=SamplingParams(max_tokens=4))
        await client.aclose()
    assert got.message == {"role": "assistant", "content": "12"}
    assert got.finish_reason == FinishReason.STOP
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == RENDERER.render([user("7 + 5 =")]).tolist()
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == [49, 50, 258]
    assert got.logprobs is not None
    assert got.logprobs.tolist() == scripted_logprobs([49, 50, 258]).tolist()
    assert got.versions is not None
    assert got.versions.tolist() == [5, 5, 5]
    assert (got.num_prompt_tokens, got.num_completion_tokens) == (len(got.prompt_ids), 3)
    assert got.id.startswith("chatcmpl-rolltree-")  # named by X-Request-Id
    assert (got.model, got.raw) == (client.model, None)
    assert got.info == {}


async def test_unset_fields_are_not_sent_and_others_are() -> None:
    with ScriptedServer(lambda _: "ok") as server:
        client = client_of(server, token_ids="off")
        await client.chat([user("a")])
        sampling = SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            max_tokens=4,
            stop=("x",),
            stop_token_ids=(3,),
            seed=11,
            extra={"user": "me", "extra_body": {"min_p": 0.1}},
        )
        await client.chat([user("a")], tools=TOOLS, sampling=sampling)
        await client.aclose()
        bodies = [request.body for request in server.requests]
    messages = [{"role": "user", "content": "a"}]
    first = {"model": "scripted", "messages": messages, "temperature": 1.0, "top_p": 1.0}
    assert bodies[0] == first
    assert bodies[1] == {
        "model": "scripted",
        "messages": messages,
        "tools": TOOLS,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 4,
        "stop": ["x"],
        "stop_token_ids": [3],
        "seed": 11,
        "user": "me",
        "min_p": 0.1,
    }


async def test_what_the_caller_says_wins_over_what_asks_for_ids() -> None:
    with ScriptedServer(lambda _: "ok") as server:
        client = client_of(server)
        sampling = SamplingParams(top_k=7, extra={"extra_body": {"repetition_penalty": 1.1}})
        await client.chat([user("a")], sampling=sampling)
        await client.aclose()
        body = server.requests[0].body
    assert body is not None
    assert (body["top_k"], body["repetition_penalty"]) == (7, 1.1)
    assert body["return_token_ids"] is True


@pytest.mark.parametrize("by_token", [False, True])
async def test_a_rollout_extends_itself(by_token: bool) -> None:
    with ScriptedServer(["12", "13", "14"]) as server:
        client = client_of(server, renderer=RENDERER if by_token else None)
        session = client.session()
        messages = [user("7 + 5 =")]
        calls = []
        for _ in range(3):
            got = await session.chat(messages)
            calls.append(got)
            messages = [*messages, got.message, user("more")]
        await client.aclose()
        paths = [request.path for request in server.requests]
    assert [call.text for call in calls] == ["12", "13", "14"]
    assert [call.extends for call in calls] == [None, calls[0].call_id, calls[1].call_id]
    for before, after in itertools.pairwise(calls):
        assert before.prompt_ids is not None
        assert before.completion_ids is not None
        assert after.prompt_ids is not None
        kept = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
        assert after.prompt_ids[: len(kept)].tolist() == kept
    assert paths == ["/v1/completions" if by_token else "/v1/chat/completions"] * 3


async def test_token_in_keeps_what_the_server_would_have_re_tokenized() -> None:
    """The model spells `é` in two ids that its tokenizer would not write; they stay."""
    odd = ByteTokenizer().encode("ok")
    with ScriptedServer(["ok", "fine"]) as server:
        client = client_of(server, renderer=RENDERER)
        session = client.session()
        first = await session.chat([user("a")], sampling=SamplingParams(max_tokens=2))
        assert first.finish_reason == FinishReason.LENGTH
        assert first.completion_ids is not None
        assert first.completion_ids.tolist() == odd
        await session.chat([user("a"), first.message, user("b")])
        await client.aclose()
        sent = server.requests[1].body
    assert sent is not None
    text = RENDERER.decode(sent["prompt"])
    assert "assistant\nok<|im_end|>\n<|im_start|>user\nb<|im_end|>" in text
    assert sent["stop_token_ids"] == [258]


async def test_tool_calls_by_message_and_by_token_are_the_same() -> None:
    text = 'Hm. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    answers = []
    with ScriptedServer(lambda _: text) as server:
        for renderer in (None, RENDERER):
            client = client_of(server, renderer=renderer)
            answers.append(await client.chat([user("2 + 3?")], tools=TOOLS))
            await client.aclose()
    by_message, by_token = answers
    assert by_message.message == by_token.message
    assert by_message.message["tool_calls"][0]["function"]["name"] == "add"
    assert by_message.finish_reason == by_token.finish_reason == FinishReason.TOOL_CALLS
    assert by_message.prompt_ids is not None
    assert by_token.prompt_ids is not None
    assert by_message.prompt_ids.tolist() == by_token.prompt_ids.tolist()


async def test_stop_strings_are_sampled_but_not_said() -> None:
    with ScriptedServer(lambda _: "12\nQ:") as server:
        for renderer in (None, RENDERER):
            client = client_of(server, renderer=renderer)
            got = await client.chat([user("a")], sampling=SamplingParams(stop=("\n",)))
            await client.aclose()
            assert got.text == "12"
            assert got.completion_ids is not None
            assert got.completion_ids.tolist() == [49, 50, 10]


@pytest.mark.parametrize("by_token", [False, True])
async def test_text_completions(by_token: bool) -> None:
    with ScriptedServer([" 12", " 13"]) as server:
        client = client_of(server, renderer=RENDERER if by_token else None)
        session = client.session()
        got = await session.chat(
            "7 + 5 =", message_type="completion", sampling=SamplingParams(max_tokens=3)
        )
        assert got.message == {"role": "assistant", "content": " 12"}
        again = await session.chat("7 + 5 = 12, and 6 + 7 =", message_type="completion")
        await client.aclose()
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == list(b"7 + 5 =")
    assert again.prompt_ids is not None
    assert again.prompt_ids.tolist() == list(b"7 + 5 = 12, and 6 + 7 =")
    assert again.extends == (got.call_id if by_token else None)


async def test_generate_takes_and_gives_ids() -> None:
    with ScriptedServer(["12"]) as server:
        client = client_of(server)
        prompt = np.array(list(b"7 + 5 ="), np.int32)
        got = await client.session().generate(GenerateRequest(prompt, SamplingParams()))
        await client.aclose()
        body = server.requests[0].body
    assert body is not None
    assert body["prompt"] == prompt.tolist()
    assert body["max_tokens"] is None  # left out, it would mean 16
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == [49, 50, 258]
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == prompt.tolist()


# Token ids: what servers without them lead to.


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("manner", ["ignore", "reject"])
async def test_a_server_without_ids_is_named_once_and_evaluated(
    manner: Any, by_token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedServer(lambda _: "12", token_ids=manner) as server:
        client = client_of(server, renderer=RENDERER if by_token else None)
        with caplog.at_level(logging.WARNING, "rolltree.inference"):
            calls = [await client.chat([user("a")]) for _ in range(3)]
        await client.aclose()
        bodies = [request.body or {} for request in server.requests]
    for got in calls:
        assert got.text == "12"
        assert got.completion_ids is None
        assert got.prompt_ids is None
        assert got.versions is None
    assert len(caplog.records) == 1
    assert "cannot be trained" in caplog.text
    # A server that rejects the fields is not sent them again; one that ignores them may not always.
    assert bool(TOKEN_FIELDS & bodies[-1].keys()) is (manner == "ignore")
    assert len(bodies) == (3 if manner == "ignore" else 4)


@pytest.mark.parametrize("by_token", [False, True])
async def test_one_answer_without_ids_does_not_cost_the_ids_of_later_ones(by_token: bool) -> None:
    def drop_ids(answer: Any) -> Any:
        answer.pop("prompt_token_ids", None)
        for name in ("token_ids", "prompt_token_ids", "logprobs"):
            answer["choices"][0].pop(name, None)
        return answer

    with ScriptedServer(lambda _: "12", faults=[HttpFault(spoil=drop_ids)]) as server:
        client = client_of(server, renderer=RENDERER if by_token else None)
        first, second = [await client.chat([user("a")]) for _ in range(2)]
        await client.aclose()
    assert (first.text, first.completion_ids) == ("12", None)
    assert second.completion_ids is not None
    assert second.completion_ids.tolist() == [49, 50, 258]
    assert second.logprobs is not None


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("endpoint", ["generate", "completions"])
async def test_an_empty_completion_is_an_answer_and_the_conversation_goes_on(
    endpoint: Any, by_token: bool
) -> None:
    empty = ScriptedAnswer("", ids=[])
    with ScriptedServer([empty, "12"], token_in=True) as server:
        renderer = RENDERER if by_token else None
        client = client_of(server, renderer=renderer, token_endpoint=endpoint)
        session = client.session()
        asked = [user("a")]
        first = await session.chat(asked)
        second = await session.chat([*asked, first.message, user("again")])
        await client.aclose()
    assert first.message == {"role": "assistant", "content": ""}
    assert first.completion_ids is not None
    assert (len(first.completion_ids), first.num_completion_tokens) == (0, 0)
    assert second.text == "12"
    assert second.extends == first.call_id


@pytest.mark.parametrize("manner", ["ignore", "reject"])
async def test_calls_side_by_side_all_find_out(manner: Any) -> None:
    with ScriptedServer(lambda _: "12", token_ids=manner, delay_s=0.02) as server:
        client = client_of(server, max_connections=3)
        calls = await asyncio.gather(*(client.chat([user("a")]) for _ in range(9)))
        await client.aclose()
    assert [call.text for call in calls] == ["12"] * 9


@pytest.mark.parametrize("manner", ["ignore", "reject"])
async def test_insisting_on_ids_fails_where_there_are_none(manner: Any) -> None:
    with ScriptedServer(lambda _: "12", token_ids=manner) as server:
        client = client_of(server, token_ids="vllm")
        with pytest.raises((UnsupportedSetting, ServerError), match=r"return_token_ids|insists"):
            await client.chat([user("a")])
        await client.aclose()


async def test_a_rejection_for_another_reason_is_told_as_it_is() -> None:
    with ScriptedServer([]) as server:
        client = client_of(server)
        with pytest.raises(ServerError, match="does not exist") as caught:
            await client.chat([user("a")], model="other")
        assert caught.value.status == 404
        with pytest.raises(ServerError, match="the script has 0 answers") as caught:
            await client.chat([user("a")])
        assert caught.value.status == 400
        assert client.tokens.wanted
        await client.aclose()


async def test_raw_logprobs_of_a_reshaped_distribution_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ScriptedServer(lambda _: "12") as server:
        client = client_of(server)
        with caplog.at_level(logging.WARNING, "rolltree.inference"):
            for _ in range(2):
                got = await client.chat([user("a")], sampling=SamplingParams(temperature=0.7))
                assert got.completion_ids is not None
                assert got.logprobs is None
        assert len(caplog.records) == 1
        assert "processed_logprobs" in caplog.text
        assert (await client.chat([user("a")])).logprobs is not None
        await client.aclose()
        honest = client_of(server, logprobs_mode="processed")
        got = await honest.chat([user("a")], sampling=SamplingParams(temperature=0.7))
        assert got.logprobs is not None
        await honest.aclose()


# Faults.


@pytest.mark.parametrize(
    "fault",
    [
        HttpFault(status=429, retry_after_s=0.02),
        HttpFault(status=500),
        HttpFault(status=503),
        HttpFault(reset=True),
        HttpFault(body="broken"),
        HttpFault(body="truncated"),
    ],
    ids=str,
)
async def test_faults_that_pass_are_retried_in_the_open(fault: HttpFault) -> None:
    with ScriptedServer(lambda _: "12", faults=[fault, fault]) as server:
        client = client_of(server)
        got = await client.chat([user("a")])
        await client.aclose()
        assert server.faults.num_faults == 2
        assert server.num_requests == 3
    assert got.text == "12"
    assert got.info["num_retries"] == 2
    assert got.wait_s >= 2 * (fault.retry_after_s or 0.0)


@pytest.mark.parametrize(
    ("fault", "error", "what"),
    [
        (HttpFault(status=500), ServerError, "answered 500"),
        (HttpFault(reset=True), ConnectionFailed, "hung up"),
        (HttpFault(body="broken"), BadResponse, "not a completion"),
        (HttpFault(body="truncated"), ConnectionFailed, "hung up"),
    ],
    ids=str,
)
async def test_faults_that_stay_are_told(fault: HttpFault, error: Any, what: str) -> None:
    with ScriptedServer(lambda _: "12", faults=lambda _: fault) as server:
        client = client_of(server)
        with pytest.raises(error, match=what) as caught:
            await client.chat([user("a")])
        await client.aclose()
        assert server.num_requests == 4
    assert caught.value.__notes__[0].startswith("4 attempts")


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_errors_that_stay_are_not_retried(status: int) -> None:
    with ScriptedServer(lambda _: "12", faults=lambda _: HttpFault(status=status)) as server:
        client = client_of(server)
        with pytest.raises(ServerError) as caught:
            await client.chat([user("a")])
        await client.aclose()
        assert server.num_requests == 1
    assert (caught.value.status, caught.value.retryable) == (status, False)


async def test_time_outs_are_retried_and_told() -> None:
    slow = HttpFault(delay_s=30.0)
    with ScriptedServer(lambda _: "12", faults=[slow, None]) as server:
        client = client_of(server, timeout_s=1.0)
        got = await client.chat([user("a")])
        assert got.info["num_retries"] == 1
        assert got.wait_s >= 1.0
        await client.aclose()
    with ScriptedServer(lambda _: "12", faults=lambda _: slow) as server:
        client = client_of(server, timeout_s=0.05, retry=RetryPolicy(max_retries=0))
        with pytest.raises(ConnectionFailed, match="no answer in time"):
            await client.chat([user("a")])
        await client.aclose()


async def test_a_server_that_is_not_there() -> None:
    with ScriptedServer(["12"]) as server:
        url = server.base_url
    client = OpenAIClient(url, "m", retry=RetryPolicy(max_retries=1, first_wait_s=0.001))
    with pytest.raises(ConnectionFailed, match="Is the server running"):
        await client.chat([user("a")])
    await client.aclose()


async def test_a_prompt_too_long_is_its_own_error() -> None:
    with ScriptedServer(lambda _: "12", context_length=30) as server:
        client = client_of(server)
        with pytest.raises(PromptTooLong, match="maximum context length is 30"):
            await client.chat([user("x" * 100)])
        assert server.num_requests == 1
        await client.chat([user("x")])
        await client.aclose()


# Keys, limits, loops.


async def test_the_key_is_sent_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-very-secret"
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(lambda _: "12", api_key=key) as server:
        client = client_of(server, api_key=key)
        assert (await client.chat([user("a")])).text == "12"
        await client.aclose()
        wrong = client_of(server, api_key="sk-wrong")
        with pytest.raises(ServerError, match="401"):
            await wrong.chat([user("a")])
        await wrong.aclose()
    leaky = ScriptedServer(["x"], faults=lambda _: HttpFault(status=403, message=f"bad {key}"))
    with leaky as server:
        client = client_of(server, api_key=key)
        with pytest.raises(ServerError) as caught:
            await client.chat([user("a")])
        await client.aclose()
    assert "[redacted]" in str(caught.value)
    assert key not in f"{client!r} {vars(client)!r} {caught.value} {caplog.text}"


@pytest.mark.parametrize("key", ["sk-1\n", "sk 1", "sk-\u00e9"])
def test_a_key_that_no_header_carries_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key has a space") as caught:
        OpenAIClient("http://x/v1", "m", api_key=key)
    assert key not in str(caught.value)


async def test_connections_are_limited_and_waiting_is_counted() -> None:
    with ScriptedServer(lambda _: "12", delay_s=0.2) as server:
        client = client_of(server, max_connections=2)
        calls = await asyncio.gather(*(client.chat([user("a")]) for _ in range(6)))
        await client.aclose()
        assert server.max_concurrent == 2
    assert max(call.wait_s for call in calls) >= 0.3
    assert min(call.wait_s for call in calls) < 0.2


def test_one_client_serves_several_event_loops() -> None:
    with ScriptedServer(lambda _: "12") as server:
        client = client_of(server)

        async def ask() -> str:
            text = (await client.chat([user("a")])).text
            await client.aclose()
            return text

        assert [asyncio.run(ask()) for _ in range(2)] == ["12", "12"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://me:pw@host/v1"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OpenAIClient(url, "m")
    assert "pw" not in str(caught.value)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        OpenAIClient("http://x/v1", "m", token_ids="vlm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'raw'"):
        OpenAIClient("http://x/v1", "m", logprobs_mode="row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model is empty"):
        OpenAIClient("http://x/v1", "")


# Answers that only other servers give, without a socket.


def mock_client(answers: list[dict[str, Any] | tuple[int, str]], **options: Any) -> OpenAIClient:
    sent: list[dict[str, Any]] = []

    async def handle(request: Request) -> Reply:
        sent.append(json.loads(request.body))
        answer = answers.pop(0)
        if isinstance(answer, tuple):
            return Reply(answer[0], answer[1].encode())
        return Reply(200, json.dumps(answer).encode())

    client = OpenAIClient(
        "http://mock/v1",
        "m",
        transport=DirectTransport(handle),
        retry=FAST,
        token_endpoint="completions",
        **options,
    )
    client.sent = sent  # type: ignore[attr-defined]
    return client


@pytest.mark.parametrize("body", [None, {"stop_token_ids": None}])
async def test_prompts_of_ids_may_have_an_empty_extra_body(body: Any) -> None:
    with ScriptedServer(["12"]) as server:
        client = client_of(server, renderer=RENDERER)
        got = await client.chat([user("a")], sampling=SamplingParams(extra={"extra_body": body}))
        await client.aclose()
    assert got.completion_ids is not None


async def test_newer_openai_models_want_max_completion_tokens() -> None:
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    refusal = (400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    client = mock_client([refusal, answer, answer], token_ids="off")
    for _ in range(2):
        await client.chat([user("a")], sampling=SamplingParams(max_tokens=5))
    await client.aclose()
    keys = [body.keys() & {"max_tokens", "max_completion_tokens"} for body in client.sent]  # type: ignore[attr-defined]
    assert keys == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]


async def test_only_chat_is_asked_with_max_completion_tokens() -> None:
    refusal = (400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    chat = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    text = {"choices": [{"text": "hi", "finish_reason": "stop"}]}
    client = mock_client([refusal, chat, text], token_ids="off")
    sampling = SamplingParams(max_tokens=5)
    await client.chat([user("a")], sampling=sampling)
    await client.chat("a", message_type="completion", sampling=sampling)
    await client.aclose()
    keys = [body.keys() & {"max_tokens", "max_completion_tokens"} for body in client.sent]  # type: ignore[attr-defined]
    assert keys == [{"max_tokens"}, {"max_completion_tokens"}, {"max_tokens"}]


async def test_calls_that_start_together_all_find_out_about_max_completion_tokens() -> None:
    together = asyncio.Barrier(3)

    async def handle(request: Request) -> Reply:
        if "max_tokens" in json.loads(request.body):
            await together.wait()
            return Reply(400, b"Use 'max_completion_tokens' instead.")
        return Reply(200, b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}')

    transport = DirectTransport(handle)
    client = OpenAIClient("http://mock/v1", "m", transport=transport, token_ids="off")
    calls = [client.chat([user("a")], sampling=SamplingParams(max_tokens=5)) for _ in range(3)]
    assert [got.text for got in await asyncio.gather(*calls)] == ["hi"] * 3
    await client.aclose()


def tool_answer(arguments: str, reason: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5},
    }


@pytest.mark.parametrize(
    ("arguments", "told", "meant"),
    [
        ("{}", "tool_calls", FinishReason.TOOL_CALLS),
        ("{}", "stop", FinishReason.TOOL_CALLS),
        ('{"a": ', "tool_calls", FinishReason.LENGTH),
        ('{"a": ', "length", FinishReason.LENGTH),
    ],
)
async def test_a_length_stop_told_as_tool_calls_is_a_length_stop(
    arguments: str, told: str, meant: FinishReason
) -> None:
    client = mock_client([tool_answer(arguments, told)], token_ids="off")
    got = await client.chat([user("a")], tools=TOOLS, sampling=SamplingParams(max_tokens=5))
    await client.aclose()
    assert got.finish_reason == meant
    assert got.num_completion_tokens == 5


async def test_parse_problems_stay_on_this_side() -> None:
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    client = mock_client([answer], token_ids="off")
    message = {"role": "assistant", "content": "b", "parse_problems": ["x"]}
    await client.chat([user("a"), message, user("c")])
    await client.aclose()
    assert client.sent[0]["messages"][1] == {"role": "assistant", "content": "b"}  # type: ignore[attr-defined]
    assert message["parse_problems"] == ["x"]


async def test_streaming_is_refused() -> None:
    client = mock_client([])
    with pytest.raises(UnsupportedSetting, match="stream"):
        await client.chat([user("a")], sampling=SamplingParams(extra={"stream": True}))
    await client.aclose()


def text_answer(**choice: Any) -> dict[str, Any]:
    ids = {"prompt_token_ids": RENDERER.render([user("a")]).tolist(), "token_ids": [49, 258]}
    logprobs = {"tokens": ["1", ""], "token_logprobs": [-0.5, -0.25]}
    whole = {"text": "1", "finish_reason": "stop", "logprobs": logprobs, **ids, **choice}
    return {"choices": [whole]}


async def test_a_stop_id_of_the_callers_is_sampled_but_not_said() -> None:
    client = mock_client([text_answer(token_ids=[49, 10])], renderer=RENDERER)
    got = await client.chat([user("a")], sampling=SamplingParams(stop_token_ids=(10,)))
    await client.aclose()
    assert got.text == "1"
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == [49, 10]
    assert client.sent[0]["stop_token_ids"] == [10, 258]  # type: ignore[attr-defined]


async def test_ids_without_logprobs_are_kept_and_not_invented() -> None:
    client = mock_client([text_answer(logprobs=None)], renderer=RENDERER)
    got = await client.chat([user("a")])
    await client.aclose()
    assert got.logprobs is None
    assert got.completion_ids is not None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"token_ids": [49]}, "1 sampled tokens came with 2 logprobs"),
        ({"prompt_token_ids": [1, 2]}, "did not sample from the recorded prompt"),
    ],
)
async def test_contradicting_answers_are_refused_and_not_retried(
    changes: dict[str, Any], what: str
) -> None:
    client = mock_client([text_answer(**changes), text_answer()], renderer=RENDERER)
    with pytest.raises(TokenError, match=what):
        await client.chat([user("a")])
    await client.aclose()
    assert len(client.sent) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "null", "1.0", "-9999.0"])
@pytest.mark.parametrize("kind", ["ids", "messages", "given ids"])
async def test_an_answer_with_unusable_logprobs_is_kept_without_them(value: str, kind: str) -> None:
    whole = text_answer()
    (choice,) = whole["choices"]
    prompt = choice["prompt_token_ids"]
    if kind == "messages":
        choice["message"] = {"role": "assistant", "content": "1"}
        entries = [{"token": "1", "logprob": -0.5}, {"token": "", "logprob": -0.25}]
        choice["logprobs"] = {"content": entries}
    body = json.dumps(whole).replace("-0.25", value)
    client = mock_client([(200, body)], renderer=RENDERER if kind == "ids" else None)
    if kind == "given ids":
        sampling = SamplingParams(max_tokens=2)
        got = await client.generate(GenerateRequest(np.array(prompt, np.int32), sampling))
    else:
        got = await client.chat([user("a")])
    await client.aclose()
    assert got.logprobs is None
    assert got.completion_ids is not None
    assert "placeholder" in got.info["unusable_logprobs"]
    assert "num_retries" not in got.info


@pytest.mark.parametrize("value", ["not base64", [[1]], "AAAA"])
async def test_an_answer_with_unusable_routed_experts_is_kept_and_not_trained(value: Any) -> None:
    client = mock_client([text_answer(routed_experts=value)], renderer=RENDERER)
    got = await client.chat([user("a")])
    await client.aclose()
    assert (got.text, got.logprobs, got.routed_experts) == ("1", None, None)
    assert "routed_experts" in got.info["unusable_logprobs"]


async def test_why_a_prompt_was_rendered_anew_is_in_the_answer() -> None:
    renderer = ChatRenderer(ByteTokenizer(STRIPPING), history="template")
    with ScriptedServer(lambda _: "R</think>A") as server:
        client = client_of(server, renderer=renderer)
        session = client.session()
        first = await session.chat([user("a")])
        second = await session.chat([user("a"), first.message, user("b")])
        await client.aclose()
    assert first.message["reasoning_content"] == "R"
    assert second.extends is None
    assert "rewrites the history" in second.info["rerendered"]
