"""A template that strips earlier reasoning: eight conversations stay eight trees, trained once.

In slime's issue 2288 every turn is rendered again, so each forks from the one before, and 8
rollouts of 8 turns become 64 samples.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import rolltree as rt
from gateway.gateway_kit import is_one_path, openai_agent
from rolltree.inference.chat import ChatRenderer
from rolltree.samples import build_samples
from rolltree.testing import ScriptedClient
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.types import State

NUM_ROLLOUTS, NUM_TURNS = 8, 8
STRIPPING = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.user = m %}{% endfor %}"
    "{% set now = namespace(on=false) %}"
    "{% for m in messages %}{% if m is sameas last.user %}{% set now.on = true %}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and now.on %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's habit: reasoning is rendered after the last question only."""


async def converse(session, rollout, *, keeps_reasoning, compacts=False):
    """Have one agent ask; its history has the reasoning of earlier answers, or not."""
    async with openai_agent(session) as agent:
        messages = [{"role": "user", "content": f"rollout {rollout}"}]
        for turn in range(NUM_TURNS):
            reply = await agent.chat.completions.create(model="m", messages=messages)
            message = reply.choices[0].message
            said = {"role": "assistant", "content": message.content}
            if keeps_reasoning:
                said["reasoning_content"] = message.reasoning_content
            messages += [said, {"role": "user", "content": f"question {turn}"}]
            if compacts and turn == NUM_TURNS // 2:
                messages = [{"role": "user", "content": "So far: nothing."}, messages[-1]]


async def rollouts_of(**habits):
    """Return eight rollouts, each with its own reward, of agents that work at the same time."""

    def think(messages):
        return f"<think>{len(messages)} so far</think>answer {len(messages)}"

    renderer = ChatRenderer(ByteTokenizer(), STRIPPING, reasoning="think")
    states = []

    async def play(gateway, number):
        async with gateway.session() as session:
            await converse(session, number, **habits)
        state = State(trajectory=session.trajectory, request_id=f"r{number}", reward=number / 8)
        for step in session.trajectory:
            step["advantage"] = number - 3.5
        states.append(state)
        return session

    async with rt.gateway(ScriptedClient(think, renderer=renderer)) as gateway:
        plays = [play(gateway, number) for number in range(NUM_ROLLOUTS)]
        return states, await asyncio.gather(*plays)


def trained_tokens(samples):
    """Count how often each sampled token is trained: by rollout, call and place in its answer."""
    return Counter(
        place
        for sample in samples
        for place in zip(
            sample.records.rollout.tolist(),
            sample.records.call.tolist(),
            sample.records.offset.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("keeps_reasoning", [True, False])
async def test_eight_rollouts_are_eight_trees(keeps_reasoning):
    states, sessions = await rollouts_of(keeps_reasoning=keeps_reasoning)
    assert all(is_one_path(session) for session in sessions)
    assert len(build_samples(states, "tree").samples) == NUM_ROLLOUTS
    assert len(build_samples(states, "step").samples) == NUM_ROLLOUTS * NUM_TURNS


@pytest.mark.parametrize("compacts", [False, True])
async def test_the_loss_is_that_of_every_call_by_itself(compacts):
    torch = pytest.importorskip("torch")
    from rolltree.training import Trainer, load_train_config
    from rolltree.training.batches import build_batch

    states, sessions = await rollouts_of(keeps_reasoning=False, compacts=compacts)
    assert [len(session.breaks) for session in sessions] == [int(compacts)] * NUM_ROLLOUTS
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = load_train_config({"train": {"max_mismatch": 1e9, "max_tokens": 4096}})
    model, _ = rt.load_model("tiny")
    worker = Trainer(model.double(), config)
    losses, trained = {}, {}
    for scope in ("tree", "step"):
        samples = build_samples(states, scope).samples
        trained[scope] = trained_tokens(samples)
        losses[scope] = worker._gradients(build_batch(samples, worker.algorithm, 4096)).loss
    sampled = sum(
        len(step["response"].completion_ids) for state in states for step in state["trajectory"]
    )
    assert trained["tree"] == trained["step"]
    assert set(trained["tree"].values()) == {1}
    assert trained["tree"].total() == sampled
    assert abs(losses["tree"]) > 1e-2
    print(losses)
    assert losses["tree"] == pytest.approx(losses["step"], rel=1e-6)
