"""The real model on the embedded engine plays worlds that nobody here wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rolltree.agents import Agent, ReActAgent, SummaryCompaction, ToolAgent
from rolltree.agents.worlds import BAD_ACTION, GymWorld, StepOutcome, TextArenaWorld, drive
from rolltree.environments.parsers import by_function, one_of
from rolltree.inference.local import LocalClient, local_client
from rolltree.inference.models import load_model
from rolltree.samples import build_samples
from rolltree.values.types import ChatMessage, State

pytestmark = pytest.mark.model
GREEDY = {"temperature": 0.0, "max_tokens": 6}
LAKE = ["left", "down", "right", "up"]
NUM_TURNS = 2


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def client(smollm2: Any) -> Iterator[LocalClient]:
    client = local_client(*smollm2, name="smollm2", max_context=1024, max_batch=4)
    yield client
    asyncio.run(client.aclose())


def shots(*texts: str) -> list[ChatMessage]:
    """Return questions and answers in turn, to be shown before the game."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def frozen_lake() -> tuple[Any, Agent, list[ChatMessage]]:
    world = GymWorld(
        "FrozenLake-v1",
        to_text="render",
        action_names=LAKE,
        world_args={"render_mode": "ansi", "is_slippery": False},
    )
    agent = Agent(
        system_prompt="You walk on a frozen lake to G. Answer with left, down, right or up.",
        parser=one_of(LAKE, reward=0.125, penalty=-0.125),
    )
    rest = "FHFH\nFFFH\nHFFG"
    return world, agent, shots(f"S[F]FF\n{rest}", "right", f"SF[F]F\n{rest}", "down")


def blackjack() -> tuple[Any, Agent, list[ChatMessage]]:
    def ask(seen: Any) -> str:
        return f"You have {seen[0]}. The dealer shows {seen[1]}. Stick or hit?"

    world = GymWorld("Blackjack-v1", to_text=ask, action_names=["stick", "hit"])
    agent = Agent(parser=one_of(["stick", "hit"]))
    return world, agent, shots(ask((20, 4)), "stick", ask((8, 10)), "hit")


def guess_the_number() -> tuple[Any, Agent, list[ChatMessage]]:
    def guess(text: str) -> str | None:
        numbers = "".join(letter if letter.isdigit() else " " for letter in text).split()
        return f"[{numbers[-1]}]" if numbers else None

    agent = Agent(parser=by_function(guess))
    first = shots("Guess a number from 1 to 20.", "[10]", "The target number is higher.", "[15]")
    return TextArenaWorld("GuessTheNumber-v0"), agent, first


async def play(make: Any, client: LocalClient) -> tuple[Agent, list[StepOutcome]]:
    """Play a few turns: the loop of a protocol, as short as it can be."""
    world, agent, messages = make()
    agent.reset(client=client, sampling=GREEDY, seed=1, messages=messages)
    obs, _ = await drive(world.reset, seed=1)
    outcomes: list[StepOutcome] = []
    for _ in range(NUM_TURNS):
        agent.observe(obs)
        parsed = (await agent.act())[-1].parse_result
        assert parsed is not None
        if parsed.failed:
            obs = str(parsed.obs)
            continue
        outcomes.append(await drive(world.step, parsed.action))
        obs = outcomes[-1].obs
        if outcomes[-1].done:
            break
    await drive(world.close)
    return agent, outcomes


def check_tokens(agent: Agent, num_samples: int = 1) -> tuple[Any, ...]:
    """Each call continues the one before, and each sampled token trains once."""
    found = build_samples([State(trajectory=agent.trajectory, advantage=1.0)], "interleave")
    assert len(found.samples) == num_samples
    sampled = [token for step in agent.trajectory for token in step["tokens"]["completion_ids"]]
    trained = [token for sample in found.samples for token in sample.records.target.tolist()]
    assert trained == sampled
    return tuple(found.samples)


async def test_smollm2_plays_three_worlds_side_by_side(client: LocalClient, smollm2: Any) -> None:
    makes = [frozen_lake, blackjack, guess_the_number]
    for agent, outcomes in await asyncio.gather(*(play(make, client) for make in makes)):
        assert outcomes  # the model found its moves by itself
        assert BAD_ACTION not in outcomes[0].info
        assert len(agent.steps) <= NUM_TURNS
        (sample,) = check_tokens(agent)
        with torch.no_grad():
            ids = torch.tensor(sample.ids)[None].long()
            best = smollm2[0](ids, use_cache=False).logits[0].argmax(-1)
        # sampled greedily: each token is the one that the model says in one plain forward pass
        assert best[sample.records.source].tolist() == sample.records.target.tolist()


async def test_smollm2_uses_a_tool_and_sums_up(client: LocalClient) -> None:
    """Its template knows no tools: calls are text. The summary is one of its own calls."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    context = SummaryCompaction(max_tokens=280, summary_tokens=12)
    agent = ReActAgent(client, tools=[add], max_tool_rounds=1, context=context)
    example = shots(
        "What is 1 + 1?",
        'Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 1}',
        "Observation: 2",
        "Thought: I know.\nFinal Answer: 2",
    )
    agent.reset(sampling={"temperature": 0.0, "max_tokens": 32}, messages=example)
    agent.observe("What is 17 + 25?")
    steps = await agent.act()
    assert [step.action_target for step in steps][-1] == "env"
    internal = [step for step in steps if step.tool_answers]
    assert internal[0].tool_answers[0].text == "42"
    agent.observe("What is 3 + 4?")
    kinds = [step.info.get("kind") for step in await agent.act()]
    assert kinds[0] == "compaction"
    assert len(agent.steps[len(steps)].record["tokens"]["completion_ids"]) <= 12
    check_tokens(agent, num_samples=2)


async def test_a_model_of_noise_breaks_nothing() -> None:
    """Untrained bytes, often no text at all: what was sampled stays as it was sampled."""
    model, tokenizer = load_model("tiny")
    client = local_client(model, tokenizer, name="tiny", max_context=1024, max_batch=2)

    def look() -> str:
        """Look around."""
        return "a wall"

    agent = ToolAgent(client, tools=[look], parser=one_of(["wall"]))
    agent.reset(sampling={"temperature": 1.0, "max_tokens": 12}, seed=3)
    for turn in range(6):
        agent.observe(f"turn {turn}")
        await agent.act()
    await client.aclose()
    batch = build_samples([State(trajectory=agent.trajectory, advantage=1.0)], "interleave")
    assert (len(batch.samples), batch.breaks) == (1, ())
    (sample,) = batch.samples
    with torch.no_grad():
        logits = model(torch.tensor(sample.ids)[None].long(), use_cache=False).logits[0]
    records = sample.records
    exact = logits.float().log_softmax(-1).numpy()[records.source, records.target]
    np.testing.assert_allclose(records.logprob, exact, atol=1e-4)
    assert any(step.info.get("incomplete_completion") for step in agent.steps)
