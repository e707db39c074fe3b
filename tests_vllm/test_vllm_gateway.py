"""A gateway in front of a real vLLM server: token-in, streaming, and the end of a request."""

import asyncio
import json
import time

import httpx
import numpy as np
import openai
import pytest
from vllm_kit import teacher_forced, vllm_server

import rolltree as rt
from rolltree.inference import ChatRenderer, EndpointPool, OpenAIClient
from rolltree.inference.models.made import CHAT_TEMPLATE

pytestmark = pytest.mark.timeout(600)
QUESTIONS = [f"Name a thing that is number {n}." for n in range(10)]
WAYS = pytest.mark.parametrize("way", ["generate", "completions", "messages", "pool"])


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with vllm_server(folder, tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def renderer(loaded):
    return ChatRenderer(loaded[1], CHAT_TEMPLATE)


def client_of(url, renderer, way):
    options = {"logprobs_mode": "processed"}
    if way != "messages":
        options["renderer"] = renderer
    if way in ("generate", "completions"):
        options["token_endpoint"] = way
    if way == "pool":
        return EndpointPool.of([f"{url}/v1"], "m", **options)
    return OpenAIClient(f"{url}/v1", "m", **options)


def metric(url, name):
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def until(condition, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.05)


async def converse(session, *, stream):
    """Ask ten questions; return the number of pieces that each answer came in."""
    pieces, messages = [], []
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as agent:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            asked = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 16}
            if stream:
                events = await agent.chat.completions.create(**asked, stream=True)
                parts = [e.choices[0].delta.content async for e in events if e.choices]
                parts = [part for part in parts if part]
            else:
                answer = await agent.chat.completions.create(**asked)
                parts = [answer.choices[0].message.content]
            pieces.append(len(parts))
            messages.append({"role": "assistant", "content": "".join(parts)})
    return pieces


@WAYS
async def test_ten_turns_are_one_path_streamed_or_not(url, renderer, way):
    client, paths, logprobs = client_of(url, renderer, way), [], []
    for stream in (True, False):
        async with rt.gateway(client) as g, g.session() as s:
            pieces = await converse(s, stream=stream)
            tree = s.trajectory.tree
            assert tree.num_calls == len(QUESTIONS)
            if way != "messages":  # a server that renders the text again may break a prefix
                assert s.breaks == ()
                assert tree.num_tokens == tree.path_len(tree.num_calls - 1)
            paths.append([tree.path_view(call).tolist() for call in range(tree.num_calls)])
            responses = [step["response"] for step in s.trajectory]
            assert all(each.logprobs is not None for each in responses)
            logprobs.append(np.concatenate([each.logprobs for each in responses]))
            if stream:
                sizes = [each.num_completion_tokens for each in responses]
                # One piece a token, but for the end token and characters of several.
                assert sum(pieces) > 0.6 * sum(sizes)
    await client.aclose()
    assert paths[0] == paths[1]
    np.testing.assert_allclose(logprobs[0], logprobs[1], atol=1e-3)


@WAYS
async def test_hanging_up_ends_the_request_on_the_server(url, renderer, way):
    client = client_of(url, renderer, way)
    async with rt.gateway(client) as g, g.session() as s:
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key) as agent:
            await until(lambda: metric(url, "vllm:num_requests_running") == 0)
            before = metric(url, "vllm:generation_tokens_total")
            asked = [{"role": "user", "content": "Count from 1 to 1000, and write every number."}]
            stream = await agent.chat.completions.create(
                model="any", messages=asked, temperature=0, max_tokens=900, stream=True
            )
            texts = aiter(stream)
            while not (await anext(texts)).choices[0].delta.content:
                pass
            # The answer is on its way: the first piece came before the last token.
            assert await asyncio.to_thread(metric, url, "vllm:num_requests_running") == 1
            await stream.close()
            await until(lambda: metric(url, "vllm:num_requests_running") == 0)
            await until(lambda: s.num_cancelled == 1)
            sampled = metric(url, "vllm:generation_tokens_total") - before
        assert 0 < sampled < 800
        assert len(s.trajectory) == 0
    await client.aclose()


# -- answers of a form ---------------------------------------------------------------------------

NUMBER = {
    "type": "object",
    "properties": {"answer": {"enum": [12, 13]}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMS = {
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}},
        lambda text: json.loads(text)["answer"] in (12, 13),
    ),
    "structured_outputs": ({"choice": ["red", "green"]}, {"red", "green"}.__contains__),
}


@WAYS
@pytest.mark.parametrize("name", FORMS)
async def test_an_answer_has_the_form_that_the_agent_asks_for_and_its_tokens_are_exact(
    url, renderer, loaded, way, name
):
    form, fits = FORMS[name]
    client = client_of(url, renderer, way)
    async with rt.gateway(client) as g, g.session(sampling={"temperature": 1.0}) as s:
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key) as agent:
            for seed in range(4):
                answer = await agent.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "What is 7 + 5?"}],
                    max_tokens=60,
                    seed=seed,
                    extra_body={name: form},
                )
                text = answer.choices[0].message.content
                cut = answer.choices[0].finish_reason == "length"  # JSON may have many spaces
                assert cut or fits(text), text
        assert s.changed_sampling.keys() == {0, 1, 2, 3}
        for step in s.trajectory:
            response = step["response"]
            ids, logprobs = response.completion_ids.tolist(), response.logprobs
            assert len(ids) == len(logprobs)
            spelled = renderer.decode(ids)
            assert spelled.startswith(step["completion"][-1]["content"])
            # Of the distribution that was left by the form: more likely than among all tokens.
            free = teacher_forced(loaded[0], response.prompt_ids, response.completion_ids, 1.0)
            assert logprobs.sum() > free.sum()
    await client.aclose()
