"""Text completions without `max_tokens`: how many tokens fit, and what the version is."""

import asyncio
import json

import numpy as np
import pytest

from rolltree.inference import ChatRenderer, OpenAIClient, RetryPolicy
from rolltree.testing import ByteTokenizer, DirectTransport, Reply
from rolltree.values.errors import PromptTooLong
from rolltree.values.types import GenerateRequest, SamplingParams


def reply(content, status=200):
    return Reply(status, json.dumps(content).encode())


class Server:
    """Answers as vLLM does, and remembers what it was asked."""

    def __init__(self, *, models=None, count=None, default=16):
        self.models, self.count, self.default = models, count, default
        self.asked = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request):
        path = request.path
        body = json.loads(request.body) if request.body else None
        self.asked.append((path, body))
        if path == "/v1/models" and self.models is not None:
            return reply(self.models)
        if path == "/tokenize" and self.count is not None:
            return reply({"count": self.count, "tokens": []})
        if path == "/v1/completions":
            await self.gate.wait()
            size = self.default if body["max_tokens"] is None else 1
            choice = {
                "text": "a" * size,
                "finish_reason": "length" if body["max_tokens"] is None else "stop",
                "token_ids": [ord("a")] * size,
                "logprobs": {"token_logprobs": [-0.5] * size},
                "prompt_token_ids": [0, 1, 2],
            }
            if isinstance(body["prompt"], list):
                choice["prompt_token_ids"] = body["prompt"]
            return reply({"choices": [choice]})
        return reply({"error": "no such path"}, 404)

    def limits(self):
        return [body["max_tokens"] for path, body in self.asked if path == "/v1/completions"]

    def paths(self):
        return [path for path, _ in self.asked]


MODELS = {"data": [{"id": "other", "max_model_len": 7}, {"id": "m", "max_model_len": 100}]}


def client_of(server, **options):
    transport = DirectTransport(server)
    retry = RetryPolicy(max_retries=0)
    return OpenAIClient("http://test/v1", "m", transport=transport, retry=retry, **options)


def request(size, **sampling):
    return GenerateRequest(np.arange(size, dtype=np.int32), SamplingParams(**sampling))


async def test_ids_fill_the_context_and_the_server_is_asked_once():
    server = Server(models=MODELS)
    client = client_of(server)
    for size in (3, 10):
        await client.generate(request(size))
    assert server.limits() == [None, 97, 90]
    assert server.paths().count("/v1/models") == 1
    assert "/tokenize" not in server.paths()


async def test_a_string_is_measured_by_the_server():
    server = Server(models=MODELS, count=40)
    got = await client_of(server).chat("some text", message_type="completion")
    assert server.limits() == [None, 60]
    assert len(got.completion_ids) == 1
    assert ("/tokenize", {"model": "m", "prompt": "some text"}) in server.asked


@pytest.mark.parametrize(
    "server_settings",
    [
        {},
        {"models": {"data": [{"id": "m"}]}},
        {"models": {"data": [{"id": "another", "max_model_len": 9}]}},
        {"models": {"unexpected": 1}},
        {"models": MODELS},  # no /tokenize
        {"models": MODELS, "count": 100},  # nothing fits: the server says so better
    ],
)
async def test_without_a_known_limit_the_servers_default_applies(server_settings):
    server = Server(**server_settings)
    got = await client_of(server).chat("some text", message_type="completion")
    assert server.limits() == [None]
    assert len(got.completion_ids) == 16


async def test_a_server_that_fills_the_context_is_asked_nothing():
    server = Server(models=MODELS, default=40)
    got = await client_of(server).generate(request(3))
    assert len(got.completion_ids) == 40
    assert server.paths() == ["/v1/completions"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(kind, monkeypatch):
    server = Server(models=MODELS)
    client = client_of(server, renderer=ChatRenderer(ByteTokenizer()))

    def tokenize(text):
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(client.renderer.vocabulary, "_encode", tokenize)
    text = "word " * 1_000_000
    prompt = text if kind == "completion" else [{"role": "user", "content": text}]
    for _ in range(2):
        with pytest.raises(PromptTooLong, match=r"5,000,000 characters.*max_context is 100 "):
            await client.chat(prompt, message_type=kind)
    assert server.paths() == ["/v1/models"]


@pytest.mark.parametrize("models", [None, {"data": [{"id": "m", "max_model_len": 10**9}]}])
async def test_a_large_prompt_that_may_fit_is_sent(models):
    server = Server(models=models)
    client = client_of(server, renderer=ChatRenderer(ByteTokenizer()))
    await client.chat("word " * 50_000, message_type="completion", sampling={"max_tokens": 4})
    assert server.limits() == [4]


async def test_a_given_limit_asks_nothing():
    server = Server(models=MODELS)
    await client_of(server).generate(request(3, max_tokens=4))
    assert server.limits() == [4]
    assert server.paths() == ["/v1/completions"]


async def test_a_token_without_a_reported_version_has_that_of_its_request():
    server = Server(models=MODELS)
    client = client_of(server)
    client.version = 3
    server.gate.clear()
    task = asyncio.ensure_future(client.generate(request(3, max_tokens=4)))
    while not server.limits():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    client.version = 4  # published while the request is in flight
    server.gate.set()
    assert (await task).versions.tolist() == [3]
    assert (await client.generate(request(3, max_tokens=4))).versions.tolist() == [4]
