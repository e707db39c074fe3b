"""Streamed calls of `OpenAIClient`: equal to calls that are not, or not streamed at all."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from inference_templates import user

from rolltree.inference import ChatRenderer, EndpointPool, OpenAIClient, RetryPolicy
from rolltree.inference.call import ModelCall
from rolltree.inference.stream import EventReader
from rolltree.testing import ByteTokenizer, LoopbackServer, Reply, Request, scripted_logprobs
from rolltree.values.errors import BadResponse, ConnectionFailed, ServerError
from rolltree.values.types import ModelResponse, SamplingParams

FAST = RetryPolicy(max_retries=2, first_wait_s=0.001)
RENDERER = ChatRenderer(ByteTokenizer())
SAID = "<think>hm</think>seven, né"
ANSWER = [*SAID.encode(), 258]
Chunks = list[dict[str, Any]]


class Server:
    """Says `SAID`, whole or in a chunk per token; `change` makes other chunks of these.

    The n-th streamed request gets `changes[n]`, the last one again and again.
    """

    def __init__(self, *changes: Callable[[Chunks], Chunks | Reply], ids: bool = True) -> None:
        self.changes, self.ids = list(changes), ids
        self.asked: list[tuple[str, bool]] = []
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, request: Request) -> Reply:
        if request.path == "/v1/models":
            return Reply(200, b'{"data": [{"id": "m", "max_model_len": 500}]}')
        body = json.loads(request.body)
        is_token_in = request.path.startswith("/inference")
        is_chat = request.path.endswith("/chat/completions")
        params = body["sampling_params"] if is_token_in else body
        is_stream = bool(body.get("stream"))
        self.asked.append((request.path.rpartition("/")[2], is_stream))
        self.bodies.append(body)
        prompt = body.get("token_ids") or body.get("prompt")
        if prompt is None:
            prompt = RENDERER.render(body["messages"]).tolist()
        elif isinstance(prompt, str):
            prompt = list(prompt.encode())
        with_ids = self.ids and (is_token_in or bool(params.get("return_token_ids")))
        values = scripted_logprobs(ANSWER).tolist()
        is_cut = (params.get("max_tokens") or 99) < len(ANSWER)

        def part(start: int, stop: int, text: str) -> dict[str, Any]:
            ended = stop == len(ANSWER)
            made: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else None}
            if is_chat:
                made["delta" if is_stream else "message"] = {"content": text}
            elif not is_token_in:
                made["text"] = text
            if with_ids:
                ids = ANSWER[start:stop]
                made["token_ids"] = ids
                entries = [
                    {"token": f"token_id:{i}", "logprob": v}
                    for i, v in zip(ids, values[start:stop], strict=True)
                ]
                made["logprobs"] = (
                    {"content": entries}
                    if is_chat or is_token_in
                    else {"tokens": ["x"] * len(ids), "token_logprobs": values[start:stop]}
                )
            if is_token_in and ended:
                made["weight_versions"] = [{"version": "3", "start": 0, "end": len(ANSWER)}]
            return made

        assert not is_cut
        name = request.headers["x-request-id"]
        head = {"id": f"x-{name}", "model": "m"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ANSWER)}
        holder = {"prompt_token_ids": prompt} if with_ids and not is_token_in else {}
        if not is_stream:
            choice = part(0, len(ANSWER), SAID)
            (head if is_chat else choice).update(holder)  # type: ignore[arg-type]
            return Reply(200, json.dumps({**head, "choices": [choice], "usage": usage}).encode())
        chunks: Chunks = []
        if is_chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            chunks.append({**head, **holder, "choices": [first]})
        said = ""
        for at in range(len(ANSWER)):
            whole = (
                bytes(ANSWER[: at + 1]).decode("utf-8", "ignore")
                if at < len(SAID.encode())
                else SAID
            )
            choice = part(at, at + 1, whole[len(said) :])
            said = whole
            if not at and not is_chat:
                choice.update(holder)
            chunks.append({**head, "choices": [choice]})
        if body.get("stream_options", {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage})
        number = sum(streamed for _, streamed in self.asked) - 1
        if self.changes:
            changed = self.changes[min(number, len(self.changes) - 1)](chunks)
            if isinstance(changed, Reply):
                return changed
            chunks = changed
        return events(chunks)


def events(chunks: Chunks, **more: Any) -> Reply:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = "".join([": hello\n\n", *lines, "data: [DONE]\n\n"]).encode()
    return Reply(200, body, {"Content-Type": "text/event-stream; charset=utf-8"}, **more)


def client_of(http: LoopbackServer, way: str = "chat", **options: Any) -> OpenAIClient:
    options.setdefault("retry", FAST)
    if way in ("generate", "completions"):
        options |= {"renderer": RENDERER, "token_endpoint": way}
    return OpenAIClient(f"{http.url}/v1", "m", **options)


async def ask(
    client: Any, *, stream: bool = True, prompt: Any = None, **sampling: Any
) -> tuple[ModelResponse, list[dict[str, Any]]]:
    heard: list[dict[str, Any]] = []
    call = ModelCall(
        prompt or [user("2 + 5 =")],
        SamplingParams(**sampling),
        message_type="completion" if isinstance(prompt, str) else "chat",
        on_delta=heard.append if stream else None,
    )
    return await call.to(client.session()), heard


def tokens(response: ModelResponse) -> list[Any]:
    assert response.prompt_ids is not None
    assert response.completion_ids is not None
    assert response.logprobs is not None
    assert response.versions is not None
    arrays = (response.prompt_ids, response.completion_ids, response.logprobs, response.versions)
    return [array.tolist() for array in arrays]


def text_of(heard: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(delta.get(name, "") for delta in heard)


WAYS = pytest.mark.parametrize("way", ["chat", "generate", "completions"])


@WAYS
async def test_a_streamed_answer_equals_one_that_is_not(way: str) -> None:
    server = Server()
    with LoopbackServer(server) as http:
        client = client_of(http, way)
        streamed, heard = await ask(client)
        whole, silence = await ask(client, stream=False)
        await client.aclose()
    path = "completions" if way == "chat" else way
    assert server.asked[-2:] == [(path, True), (path, False)]
    assert tokens(streamed) == tokens(whole)
    same = (streamed.message, streamed.finish_reason, streamed.info)
    assert same == (whole.message, whole.finish_reason, whole.info)
    assert (streamed.num_prompt_tokens, streamed.num_completion_tokens) == (
        whole.num_prompt_tokens,
        len(ANSWER),
    )
    assert silence == []
    assert len(heard) > 10  # it came token by token
    assert text_of(heard) == streamed.text == SAID


async def test_a_text_that_is_continued_is_streamed_too() -> None:
    with LoopbackServer(Server()) as http:
        client = client_of(http)
        streamed, heard = await ask(client, prompt="2 + 5 =", max_tokens=90)
        whole, _ = await ask(client, prompt="2 + 5 =", max_tokens=90, stream=False)
        await client.aclose()
    assert tokens(streamed) == tokens(whole)
    assert text_of(heard) == SAID


async def test_a_text_without_a_limit_gets_the_contexts_before_it_is_streamed() -> None:
    server = Server()
    with LoopbackServer(server) as http:
        client = client_of(http, "completions")
        got, _ = await ask(client)
        await client.aclose()
    assert got.prompt_ids is not None
    assert server.bodies[0]["max_tokens"] == 500 - len(got.prompt_ids)


@WAYS
async def test_chunks_may_be_cut_anywhere(way: str) -> None:
    with LoopbackServer(Server(lambda chunks: events(chunks, drip_s=1e-6))) as http:
        client = client_of(http, way)
        streamed, heard = await ask(client)
        await client.aclose()
    assert streamed.text == text_of(heard) == SAID


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_found_however_they_are_cut(size: int, end: str) -> None:
    text = f"event: a{end}data: 1{end}{end}: no{end}{end}data:2{end}data:3{end}{end}data: left"
    found: list[bytes] = []
    reader = EventReader(found.append)
    content = text.encode()
    for at in range(0, len(content), size):
        reader.feed(content[at : at + size])
    assert found == [b"1", b"2\n3"]


async def test_reasoning_and_tool_calls_are_put_together() -> None:
    def change(chunks: Chunks) -> Chunks:
        deltas: list[dict[str, Any]] = [
            {"reasoning": "h"},
            {"reasoning_content": "m"},
            {"content": "I call"},
            {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "add"}}]},
            {"tool_calls": [{"index": 0, "function": {"name": None, "arguments": '{"a":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
            {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "b"}}]},
            # As some servers send them: arguments, and texts, as other data.
            {"tool_calls": {"index": 2, "id": 3, "function": {"name": "c", "arguments": {"a": 2}}}},
            {"content": [{"type": "text", "text": "."}]},
        ]
        for chunk in chunks[1:-1]:
            chunk["choices"][0]["delta"] = deltas.pop(0) if deltas else {}
        chunks[-2]["choices"][0]["finish_reason"] = "tool_calls"
        return chunks

    with LoopbackServer(Server(change)) as http:
        client = client_of(http)
        got, heard = await ask(client)
        await client.aclose()
    assert got.message == {
        "role": "assistant",
        "content": "I call.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "b", "arguments": ""}},
            {"id": "3", "type": "function", "function": {"name": "c", "arguments": '{"a": 2}'}},
        ],
    }
    assert heard == [
        *({"reasoning_content": "h"}, {"reasoning_content": "m"}),
        *({"content": "I call"}, {"content": "."}),
    ]
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == ANSWER


def without(name: str, *, start: int) -> Callable[[Chunks], Chunks]:
    def change(chunks: Chunks) -> Chunks:
        for chunk in chunks[start:]:
            for choice in chunk["choices"]:
                choice.pop(name, None)
        return chunks

    return change


@WAYS
@pytest.mark.parametrize("name", ["token_ids", "logprobs"])
async def test_chunks_without_ids_or_logprobs_are_asked_for_as_a_whole(
    way: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(without(name, start=0))
    if name == "token_ids":  # the names of tokens are ids, too
        server.changes = [
            lambda chunks: without("logprobs", start=0)(without(name, start=0)(chunks))
        ]
    with LoopbackServer(server) as http, caplog.at_level(logging.WARNING):
        client = client_of(http, way)
        first, heard = await ask(client)
        second, _ = await ask(client)
        await client.aclose()
    assert heard == []
    assert tokens(first) == tokens(second)
    assert tokens(first)[1] == ANSWER
    assert [stream for _, stream in server.asked] == [True, False, False]
    assert caplog.text.count("cannot stream exactly") == 1


async def test_a_stream_without_the_prompts_ids_is_asked_for_as_a_whole() -> None:
    def change(chunks: Chunks) -> Chunks:
        del chunks[0]["prompt_token_ids"]
        return chunks

    server = Server(change)
    with LoopbackServer(server) as http:
        client = client_of(http)
        got, heard = await ask(client)
        await client.aclose()
    assert heard == []
    assert tokens(got)[1] == ANSWER
    assert [stream for _, stream in server.asked] == [True, False]


async def test_a_server_without_ids_is_streamed_from_the_second_call_on() -> None:
    server = Server(ids=False)
    with LoopbackServer(server) as http:
        client = client_of(http)
        first, _ = await ask(client)
        await ask(client)
        await client.aclose()
    assert first.completion_ids is None
    assert [stream for _, stream in server.asked] == [True, False, False]


async def test_ids_that_end_in_the_middle_are_an_error_and_not_a_loss() -> None:
    server = Server(without("token_ids", start=25))
    server.changes.append(lambda chunks: chunks)
    changed = server.changes[0]
    server.changes[0] = lambda chunks: without("logprobs", start=25)(changed(chunks))  # type: ignore[arg-type]
    with LoopbackServer(server) as http:
        client = client_of(http)
        with pytest.raises(BadResponse, match="rest without them"):
            await ask(client)
        got, heard = await ask(client)  # as an agent does that tries again
        await client.aclose()
    assert heard == []
    assert tokens(got)[1] == ANSWER
    assert [stream for _, stream in server.asked] == [True, False]


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_refuses_to_stream_is_asked_without(status: int) -> None:
    server = Server(lambda chunks: Reply(status, b"no streams here"))
    with LoopbackServer(server) as http:
        client = client_of(http)
        got, heard = await ask(client)
        await ask(client)
        await client.aclose()
    assert (heard, got.text) == ([], SAID)
    assert [stream for _, stream in server.asked] == [True, False, False]


async def test_another_refusal_is_not_taken_for_one_of_streams() -> None:
    server = Server(lambda chunks: chunks, lambda chunks: Reply(400, b"bad field"))
    with LoopbackServer(server) as http:
        client = client_of(http)
        await ask(client)
        with pytest.raises(ServerError, match="bad field"):
            await ask(client)
        await client.aclose()
    assert [stream for _, stream in server.asked] == [True, True]


def dies(at: float) -> Callable[[Chunks], Reply]:
    def change(chunks: Chunks) -> Reply:
        reply = events(chunks)
        return replace(reply, num_sent_bytes=int(at * len(reply.body)))

    return change


@WAYS
async def test_a_server_that_dies_in_the_middle_is_not_asked_again(way: str) -> None:
    server = Server(dies(0.6))
    with LoopbackServer(server) as http:
        client = client_of(http, way)
        with pytest.raises(ConnectionFailed):
            await ask(client)
        await client.aclose()
    assert len(server.asked) == 1  # what was said could not be taken back


async def test_a_server_that_dies_before_it_said_anything_is_asked_again() -> None:
    server = Server(dies(0.01), lambda chunks: chunks)
    with LoopbackServer(server) as http:
        client = client_of(http)
        got, heard = await ask(client)
        await client.aclose()
    assert text_of(heard) == got.text == SAID
    assert got.info["num_retries"] == 1


async def test_a_stream_that_ends_without_a_finish_reason_is_not_an_answer() -> None:
    server = Server(lambda chunks: chunks[:12])
    with LoopbackServer(server) as http:
        client = client_of(http)
        with pytest.raises(BadResponse, match="finish_reason"):
            await ask(client)
        await client.aclose()
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("start", "code", "num_asked"),
    [(1, 503, 2), (1, 400, 2), (12, 503, 1), (12, 400, 1), (1, "internal_error", 2)],
)
async def test_an_error_in_the_stream_is_one_of_the_call(
    start: int, code: object, num_asked: int
) -> None:
    def change(chunks: Chunks) -> Chunks:
        return [*chunks[:start], {"error": {"message": "out of memory", "code": code}}]

    server = Server(change, lambda chunks: chunks)
    with LoopbackServer(server) as http:
        client = client_of(http)
        if num_asked == 2:
            got, _ = await ask(client)
            assert got.text == SAID
        else:
            with pytest.raises(BadResponse, match="out of memory"):
                await ask(client)
        await client.aclose()
    assert len(server.asked) == num_asked


async def test_another_requests_stream_is_refused_before_anything_is_heard() -> None:
    names: list[str] = []

    def change(chunks: Chunks) -> Chunks:
        names.append(chunks[0]["id"])
        return [{**chunk, "id": names[0]} for chunk in chunks]

    server = Server(change)
    with LoopbackServer(server) as http:
        client = client_of(http, retry=RetryPolicy(max_retries=0))
        await ask(client)
        heard: list[Any] = []
        with pytest.raises(BadResponse, match="mixes up answers"):
            await ModelCall([user("a")], on_delta=heard.append).to(client)
        await client.aclose()
    assert heard == []


async def test_a_pool_does_not_begin_an_answer_twice() -> None:
    first, second = Server(dies(0.6)), Server(dies(0.6))
    with LoopbackServer(first) as one, LoopbackServer(second) as two:
        pool = EndpointPool.of([f"{one.url}/v1", f"{two.url}/v1"], "m", retry=FAST)
        with pytest.raises(ConnectionFailed):
            await ask(pool)
        await pool.aclose()
    assert len(first.asked) + len(second.asked) == 1


async def test_a_pool_moves_on_while_nothing_was_said() -> None:
    first, second = Server(dies(0.01)), Server(dies(0.01))
    with LoopbackServer(first) as one, LoopbackServer(second) as two:
        for server in (first, second):
            server.changes.append(lambda chunks: chunks)
        pool = EndpointPool.of(
            [f"{one.url}/v1", f"{two.url}/v1"],
            "m",
            retry=RetryPolicy(first_wait_s=0.001),
            cool_down_s=0.0,
        )
        got, heard = await ask(pool)
        await pool.aclose()
    assert text_of(heard) == got.text == SAID
