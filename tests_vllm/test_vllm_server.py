"""rolltree's clients against a real vLLM server: ids, logprobs, weights, pauses."""

import asyncio
import itertools
from functools import partial

import httpx
import numpy as np
import pytest
from vllm_kit import (
    changed_copy,
    counting_env,
    off_by,
    rollout_off_by,
    tool_env,
    train_two_steps,
    vllm_server,
)

import rolltree as rt
from rolltree.inference import ChatRenderer, OpenAIClient, WeightTransfer, as_client
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.scale.weights import ways
from rolltree.scale.weights.publish import publish_weights, served_version
from rolltree.scale.weights.shared import SharedWeights
from rolltree.store import Run
from rolltree.values.errors import TrainingError
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams

HELLO = [{"role": "user", "content": "What is 7 + 5?"}]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with vllm_server(folder, tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def renderer(loaded):
    return ChatRenderer(loaded[1], CHAT_TEMPLATE)


@pytest.fixture
async def by_token(url, renderer):
    client = OpenAIClient(f"{url}/v1", "m", renderer=renderer, logprobs_mode="processed")
    yield client
    await client.aclose()


@pytest.fixture
async def by_message(url):
    client = OpenAIClient(f"{url}/v1", "m", token_ids="vllm", logprobs_mode="processed")
    yield client
    await client.aclose()


def servers_ids(url, messages, tools=None):
    """Return the ids that vLLM's own template and tokenizer make of a conversation."""
    body = {"model": "m", "messages": messages, "tools": tools, "add_generation_prompt": True}
    return httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]


def tokens_sampled(url):
    """Return how many tokens the server has sampled since it was started."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(ln.split()[-1]) for ln in lines if ln.startswith("vllm:generation_tokens_total")
    )


async def play(env, client, **args):
    args = {"temperature": 0.7, "max_tokens": 40, **args}
    states = (await env.generate(env.dataset, client, sampling_args=args)).state
    for state in states:
        assert state["error"] is None, state["error"]
        state["sampling_temperature"] = args["temperature"]
    return states


def check_ids(url, renderer, states, tools, *, by_token):
    """Every prompt is what the server itself makes of the messages, id for id, wherever the
    model's own tokens are those that the tokenizer would have chosen; always the same text.
    """
    num_calls = num_equal = 0
    for state in states:
        for step in state["trajectory"]:
            ours = step["tokens"]["prompt_ids"]
            theirs = servers_ids(url, step["prompt"], tools)
            assert renderer.decode(ours) == renderer.decode(theirs)
            num_calls += 1
            num_equal += ours == theirs
        if by_token:
            for before, after in itertools.pairwise(state["trajectory"]):
                whole = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
                assert after["tokens"]["prompt_ids"][: len(whole)] == whole
        first = state["trajectory"][0]["tokens"]["prompt_ids"]
        assert first == servers_ids(url, state["trajectory"][0]["prompt"], tools)
    if not by_token:
        assert num_equal == num_calls
    return num_calls, num_equal


async def test_multi_turn_rollouts_by_token(url, renderer, by_token, loaded):
    states = await play(counting_env(), by_token)
    assert [len(state["trajectory"]) for state in states] == [3, 3]
    check_ids(url, renderer, states, None, by_token=True)
    batch = rt.build_samples(states, "interleave")
    assert len(batch.samples) == len(states)  # every rollout is one path
    for state in states:
        assert rollout_off_by(loaded[0], state) < 1e-4


async def test_multi_turn_rollouts_by_message(url, renderer, by_message, loaded):
    states = await play(counting_env(), by_message)
    check_ids(url, renderer, states, None, by_token=False)
    for state in states:
        assert rollout_off_by(loaded[0], state) < 1e-4


@pytest.mark.parametrize("way", ["by_token", "by_message"])
async def test_tool_rollouts(way, url, renderer, loaded, by_token, by_message):
    client = by_token if way == "by_token" else by_message
    env = tool_env()
    states = await play(env, client, seed=5)
    check_ids(url, renderer, states, env.oai_tools, by_token=way == "by_token")
    answers = [
        message["content"]
        for state in states
        for message in state["trajectory"][-1]["prompt"][len(env.few_shot) :]
        if message["role"] == "tool"
    ]
    assert "22" in answers or "17" in answers or "47" in answers  # a tool was really called
    assert rollout_off_by(loaded[0], states[0]) < 1e-4


async def test_logprobs_are_those_of_the_distribution_sampled_from(by_token, loaded):
    settings = [
        SamplingParams(temperature=t, seed=s, max_tokens=24)
        for s, t in enumerate((0.0, 0.5, 1.0, 1.5))
    ]
    answers = await asyncio.gather(*(by_token.chat(HELLO, sampling=s) for s in settings))
    for answer in answers:
        assert off_by(loaded[0], answer) < 1e-4, answer.temperature
    certain = await by_token.chat(HELLO, sampling=SamplingParams(top_k=1, max_tokens=4))
    assert certain.logprobs.tolist() == [0.0] * 4  # raw ones would be below 0


async def test_raw_logprobs_of_another_distribution_are_dropped(url, renderer):
    client = OpenAIClient(f"{url}/v1", "m", renderer=renderer)  # says: raw
    warm = await client.chat(HELLO, sampling=SamplingParams(temperature=0.7, max_tokens=3))
    plain = await client.chat(HELLO, sampling=SamplingParams(max_tokens=3))
    await client.aclose()
    assert warm.completion_ids is not None
    assert warm.logprobs is None
    assert plain.logprobs is not None


async def test_seeds_and_endpoints_agree(url, renderer, by_token):
    """The token-in endpoint and completions sample the same from the same ids and seed."""
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    request = GenerateRequest(renderer.render(HELLO), sampling)
    older = OpenAIClient(f"{url}/v1", "m", renderer=renderer, token_endpoint="completions")
    answers = [
        await by_token.chat(HELLO, sampling=sampling),
        await older.chat(HELLO, sampling=sampling),
        await by_token.generate(request),
    ]
    await older.aclose()
    for answer in answers[1:]:
        assert answer.completion_ids.tolist() == answers[0].completion_ids.tolist()
        assert np.abs(answer.logprobs - answers[0].logprobs).max() < 1e-4
        assert answer.text == answers[0].text


async def test_stop_strings_and_ids(by_token, by_message):
    for client in (by_token, by_message):
        sampling = SamplingParams(temperature=0.0, max_tokens=30, stop=(" find",))
        answer = await client.chat(HELLO, sampling=sampling)
        assert answer.finish_reason == FinishReason.STOP
        assert answer.text == "To"
        assert len(answer.completion_ids) == len(answer.logprobs) == 2


async def test_without_max_tokens_an_answer_ends_where_the_model_ends_it(by_token, renderer):
    """VLLM takes a missing or null max_tokens of /v1/completions as 16."""
    ask = [{"role": "user", "content": "Count from 1 to 20, one number per line."}]
    request = GenerateRequest(renderer.render(ask), SamplingParams(temperature=0.0, stop=("19",)))
    answers = [
        await by_token.chat(ask, sampling=request.sampling),
        await by_token.generate(request),
    ]
    for answer in answers:
        assert len(answer.completion_ids) > 16
        assert answer.finish_reason == FinishReason.STOP


async def test_a_prompt_over_the_context(by_token, by_message):
    long = [{"role": "user", "content": "word " * 1200}]
    for client in (by_token, by_message):
        with pytest.raises(rt.PromptTooLong):
            await client.chat(long, sampling=SamplingParams(max_tokens=4))


async def test_the_official_client(url, loaded):
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as official:
        client = as_client(official, "m")
        answer = await client.chat(HELLO, sampling=SamplingParams(max_tokens=8))
    assert answer.versions.tolist() == [0] * len(answer.completion_ids)
    assert off_by(loaded[0], answer) < 1e-4


@pytest.fixture(scope="module")
def published(loaded, tmp_path_factory):
    """Other weights on disk, and the model that has them."""
    model = changed_copy(loaded[0])
    path = tmp_path_factory.mktemp("weights")
    model.save_pretrained(path)
    return model, path


@pytest.fixture
async def publish(by_token, published, folder, loaded):
    """Publish other weights, or the old ones, in one of the ways."""
    transfer = WeightTransfer([by_token])
    shared = SharedWeights()

    async def publish(way, which, version):
        model, path = published if which == "new" else (loaded[0], folder)
        if way == "disk":
            await publish_weights([by_token], path, version)
        elif way == "shared":
            shared.write(model.named_parameters())
            await publish_weights([by_token], shared.path, version)
        else:
            await transfer.publish(model.named_parameters(), version)

    yield publish
    await transfer.aclose()
    shared.close()


@pytest.mark.parametrize("way", ["disk", "transfer", "shared"])
async def test_weights_are_replaced_also_under_a_request_in_flight(
    url, by_token, publish, loaded, published, way
):
    """Pause, load, resume."""
    old, new = loaded[0], published[0]
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    before = await by_token.chat(HELLO, sampling=greedy)
    first = int(before.versions[0])
    assert set(before.versions) == {first}
    story = [{"role": "user", "content": "Tell me a long story about a ship."}]
    counted = tokens_sampled(url)
    flying = asyncio.ensure_future(
        by_token.chat(story, sampling=SamplingParams(temperature=0.0, max_tokens=300))
    )
    while tokens_sampled(url) < counted + 5:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await publish(way, "new", first + 3)
    assert await served_version(by_token.server) == str(first + 3)
    after = await by_token.chat(HELLO, sampling=greedy)
    assert set(after.versions) == {first + 3}
    assert after.text != before.text
    assert off_by(new, after) < 1e-4 < off_by(old, after)
    flown = await flying
    late = flown.versions == first + 3
    num_old = int((~late).sum())
    expected = [first] * num_old + [first + 3] * (len(late) - num_old)
    assert flown.versions.tolist() == expected
    assert 0 < num_old < len(late)
    assert off_by(new, flown, late) < 1e-4
    assert off_by(old, flown, ~late) < 1e-4
    await publish(way, "old", first + 4)
    again = await by_token.generate(GenerateRequest(before.prompt_ids, greedy))
    assert set(again.versions) == {first + 4}
    assert again.completion_ids.tolist() == before.completion_ids.tolist()


async def test_a_transfer_that_fails_leaves_a_server_that_the_next_one_renews(
    by_token, published, loaded
):
    """Half a model, a trainer that was killed, and then all of it."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    transfer = WeightTransfer([by_token], bucket_bytes=8 * 2**20)
    some = list(published[0].named_parameters())[:100]
    version = by_token.version
    with pytest.raises(rt.ModelError, match=r"parameters were not sent, .* among.*left paused"):
        await transfer.publish(some, 90)
    assert by_token.version == version
    await by_token.server.post("/start_weight_update", {}, bytes, at_root=True)  # and no more
    await transfer.publish(loaded[0].named_parameters(), 91)
    answer = await by_token.chat(HELLO, sampling=greedy)
    assert set(answer.versions) == {91}
    assert off_by(loaded[0], answer) < 1e-4
    await transfer.aclose()


@pytest.mark.parametrize("way", [{"publish": way} for way in ("auto", "transfer", "disk")])
async def test_training_against_a_server(url, folder, tmp_path, way):
    """Two asynchronous steps, in every way; the version is verified by a probe."""

    async def check(pool):
        assert await served_version(pool.clients[0].server) == "2"

    engine = {"kind": "servers", "urls": [f"{url}/v1"], "served_model": "m", **way}
    report = await train_two_steps(folder, tmp_path / "run", engine, ahead=1, after=check)
    assert len(report.metrics) == 2
    assert all(step["publish/probe_error"] < 1e-3 for step in report.metrics)
    if way == {"publish": "auto"}:
        with Run.open(tmp_path / "run", "r") as run:
            said = [event.data["message"] for event in run.events("notice")]
        assert f"{url}: weights go by shared memory." in said


async def test_a_reload_that_leaves_a_layer_as_it_was_stops_the_run(
    url, folder, tmp_path, monkeypatch
):
    """One layer of 30, at a learning rate of 1e-5."""
    engine = {"kind": "servers", "urls": [f"{url}/v1"], "served_model": "m"}
    engine["publish"] = "disk"
    leaves_one = partial(publish_weights, method="reload_all_but_one_layer")
    monkeypatch.setattr(ways, "publish_weights", leaves_one)
    with pytest.raises(TrainingError, match=r"version 1 .* it serves other weights"):
        await train_two_steps(folder, tmp_path / "run", engine, ahead=0, optim={"lr": 1e-5})
