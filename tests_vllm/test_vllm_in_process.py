"""vLLM in this process: rollouts, logprobs, weights replaced in memory, and a training run."""

import asyncio

import numpy as np
import pytest
import torch
from vllm_kit import (
    changed_copy,
    counting_env,
    off_by,
    rollout_off_by,
    tool_env,
    train_two_steps,
)

import rolltree as rt
from rolltree.inference import ChatRenderer
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.scale.vllm import vllm_client
from rolltree.values.types import FinishReason, GenerateRequest, SamplingParams

HELLO = [{"role": "user", "content": "What is 7 + 5?"}]
STORY = [{"role": "user", "content": "Tell me a long story about a ship."}]
pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(loaded):
    """The trainer's model: a copy, since tests change it."""
    return changed_copy(loaded[0], noise=0.0)


@pytest.fixture(scope="module")
def client(folder, model, loaded):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    client = vllm_client(
        folder,
        model,
        loaded[1],
        renderer=ChatRenderer(loaded[1], CHAT_TEMPLATE),
        max_batch=8,
        max_context=1024,
        kv_budget_bytes=2**28,
        prefill_chunk=128,
    )
    # vLLM seeds the process and takes its threads; the trainer must not notice.
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    yield client
    asyncio.run(client.aclose())


async def play(env, client):
    args = {"temperature": 0.7, "max_tokens": 32, "seed": 5}
    states = (await env.generate(env.dataset, client, sampling_args=args)).state
    for state in states:
        assert state["error"] is None, state["error"]
        state["sampling_temperature"] = 0.7
    return states


async def test_rollouts_are_exact(client, loaded):
    states = [*await play(counting_env(), client), *await play(tool_env(), client)]
    assert len(rt.build_samples(states, "interleave").samples) == len(states)
    assert max(len(state["trajectory"]) for state in states) == 3
    for state in (states[0], states[2]):
        assert rollout_off_by(loaded[0], state) < 1e-4
    for step in states[0]["trajectory"]:
        assert set(step["tokens"]["completion_mask"]) == {1}


async def test_logprobs_are_those_of_the_distribution_sampled_from(client, loaded):
    settings = [
        SamplingParams(temperature=t, seed=s, max_tokens=16)
        for s, t in enumerate((0.0, 0.5, 1.0, 1.5))
    ]
    answers = await asyncio.gather(*(client.chat(HELLO, sampling=s) for s in settings))
    for answer in answers:
        assert off_by(loaded[0], answer) < 1e-4, answer.temperature
    certain = await client.chat(HELLO, sampling=SamplingParams(top_k=1, max_tokens=4))
    assert certain.logprobs.tolist() == [0.0] * 4


async def test_seeds_repeat_whatever_else_is_in_the_batch(client):
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=10)
    alone = await client.chat(HELLO, sampling=sampling)
    others = [client.chat(STORY, sampling=SamplingParams(max_tokens=10)) for _ in range(3)]
    again, *_ = await asyncio.gather(client.chat(HELLO, sampling=sampling), *others)
    assert again.completion_ids.tolist() == alone.completion_ids.tolist()


async def test_prompts_longer_than_a_chunk(client, loaded):
    """On a CPU vLLM dies of a request with a seed whose prompt it cuts."""
    prompts = [np.arange(100, 700, dtype=np.int32) + n for n in range(3)]
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=4)
    requests = (client.generate(GenerateRequest(prompt, sampling)) for prompt in prompts)
    for answer in await asyncio.gather(*requests):
        assert off_by(loaded[0], answer) < 1e-4


async def test_ends(client):
    sampling = SamplingParams(temperature=0.0, max_tokens=30, stop=(" find",))
    cut = await client.chat(HELLO, sampling=sampling)
    assert (cut.text, cut.finish_reason, len(cut.completion_ids)) == ("To", FinishReason.STOP, 2)
    whole = await client.chat(
        [{"role": "user", "content": "Say yes."}], sampling=SamplingParams(temperature=0.0)
    )
    assert whole.finish_reason == FinishReason.STOP
    assert int(whole.completion_ids[-1]) == client.tokenizer.eos_token_id
    assert len(whole.completion_ids) == len(whole.logprobs)
    with pytest.raises(rt.PromptTooLong):
        await client.generate(GenerateRequest(np.full(1024, 5, np.int32), SamplingParams()))


async def test_a_cancelled_request_stops_sampling(client):
    task = asyncio.ensure_future(client.chat(STORY, sampling=SamplingParams(max_tokens=900)))
    await asyncio.sleep(1.0)
    task.cancel()
    answer = await client.chat(HELLO, sampling=SamplingParams(max_tokens=3))
    assert len(answer.completion_ids) == 3
    assert not client.engine._running


async def test_weights_are_replaced_under_a_request_in_flight(client, model, loaded):
    old, engine = loaded[0], client.engine
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    before = await client.chat(HELLO, sampling=greedy)
    task = asyncio.ensure_future(
        client.chat(STORY, sampling=SamplingParams(temperature=0.0, max_tokens=60))
    )
    new = changed_copy(old)
    while not any(len(pending.ids) > 2 for pending in engine._running.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    async with engine.paused():
        held = [len(pending.ids) for pending in engine._running.values()]
        await asyncio.sleep(0.3)
        assert [len(pending.ids) for pending in engine._running.values()] == held
        model.load_state_dict(new.state_dict())
        engine.publish(9)
    after = await client.chat(HELLO, sampling=greedy)
    flown = await task
    assert held[0] > 0
    assert flown.versions.tolist() == [0] * held[0] + [9] * (len(flown.versions) - held[0])
    assert off_by(old, flown, slice(None, held[0])) < 1e-4
    assert off_by(new, flown, slice(held[0], None)) < 1e-4
    assert set(after.versions) == {9}
    assert after.text != before.text
    assert off_by(new, after) < 1e-4 < off_by(old, after)
    async with engine.paused():
        model.load_state_dict(old.state_dict())
        engine.publish(10)
    again = await client.chat(HELLO, sampling=greedy)
    assert again.completion_ids.tolist() == before.completion_ids.tolist()
    assert set(again.versions) == {10}


@pytest.mark.parametrize("ahead", [0, 1])
async def test_training_with_vllm_as_the_engine(folder, tmp_path, ahead):
    """Two optimizer steps on the real model: what the engine sampled is what the trainer scores."""
    engine = {"kind": "vllm", "max_batch": 8, "max_context": 256, "kv_budget_bytes": 2**28}
    report = await train_two_steps(
        folder,
        tmp_path / "run",
        engine,
        ahead=ahead,
        optim={"lr": 1e-5},
        train={"max_mismatch": 1e-3},
    )
    assert [step["policy/version"] for step in report.metrics] == [1.0, 2.0]
    for step in report.metrics:
        assert step["publish/probe_error"] < 1e-3
    for step in report.metrics[: 1 if ahead else 2]:
        mismatch = [value for name, value in step.items() if "mismatch" in name]
        assert mismatch
        assert all(abs(value) < 1e-3 for value in mismatch), step
