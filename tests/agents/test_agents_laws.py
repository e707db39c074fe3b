"""Laws of agents, over random episodes: nothing is lost, trained twice or out of order."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltree.agents import (
    FullDialog,
    ReActAgent,
    SlidingWindow,
    SummaryCompaction,
    ToolAgent,
    TruncatedThinking,
)
from rolltree.environments.parsers import tagged
from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.samples import build_samples
from rolltree.testing import ByteTokenizer, ScriptedAnswer, ScriptedClient, ScriptedServer
from rolltree.values.steps import AgentStep, ToolAnswer
from rolltree.values.types import FinishReason, State

CONTEXTS = [
    FullDialog(),
    TruncatedThinking(),
    SlidingWindow(2),
    SlidingWindow(1, keep_first=False),
    SummaryCompaction(max_tokens=150, request="Sum up.", summary_tokens=9),
]


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def ask(question: str) -> str:
    """Ask somebody else."""
    raise AssertionError("the protocol answers this one")


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SAYINGS: list[Any] = [
    "<a>go</a>",
    "no action",
    "<think>hm</think><a>ok</a>",
    "",
    call("add", a=1),
    "<think>x</think>" + call("add", a="one"),
    call("ask", question="why") + call("add", a=2),
    call("ask", question="why"),
    call("nothing"),
    "<tool_call>broken</tool_call>" + call("add", a=3),
    'Action: add\nAction Input: {"a": 1}\nObservation: 5',
    "Action: add",
    ScriptedAnswer("cut " + call("add", a=1), FinishReason.LENGTH),
    ScriptedAnswer("cut", FinishReason.LENGTH),
]
EPISODES = st.fixed_dictionaries(
    {
        "script": st.lists(st.sampled_from(SAYINGS), min_size=60, max_size=60),
        "context": st.sampled_from(CONTEXTS),
        "kind": st.sampled_from([ToolAgent, ReActAgent]),
        "rounds": st.integers(0, 3),
        "turns": st.integers(1, 5),
    }
)


async def play(agent: ToolAgent, num_turns: int) -> list[AgentStep]:
    told: list[AgentStep] = []
    for turn in range(num_turns):
        agent.observe(f"obs {turn}")
        while True:
            told.extend(await agent.act())
            if not agent.waiting:
                break
            told[-1] = agent.answer(
                [ToolAnswer(request.call_id, request.name, "because") for request in agent.waiting]
            )
    return told


@given(EPISODES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_episode(episode: dict[str, Any]) -> None:
    client = ScriptedClient(episode["script"])
    agent = episode["kind"](
        client,
        tools=[add],
        external_tools=[ask],
        parser=tagged("a", reward=1.0, penalty=-0.5),
        context=episode["context"],
        max_tool_rounds=episode["rounds"],
        bad_call_penalty=-0.25,
    )
    told = asyncio.run(play(agent, episode["turns"]))
    # each call is one step, told once, in order
    assert told == agent.steps
    assert [step.record for step in told] == list(agent.trajectory)
    turns = [step.turn for step in told]
    assert turns == sorted(turns)
    assert sorted(set(turns)) == list(range(episode["turns"]))
    for turn in range(episode["turns"]):
        steps = [step for step in told if step.turn == turn]
        assert [s.action_target == "env" for s in steps] == [False] * (len(steps) - 1) + [True]
        rounds = [s for s in steps[:-1] if s.info.get("kind") is None]
        assert len(rounds) <= episode["rounds"]
    for step in told:
        # the three kinds of calls
        assert (step.parse_result is None) == (step.action_target == "external")
        assert step.parse_failed == ("parse_feedback_obs" in step.info)
        if step.parse_result is not None:
            assert step.reward == step.parse_result.reward
        # a call is answered exactly once, in order, unless it came in a final answer
        if step.action_target != "env":
            assert [a.call_id for a in step.tool_answers] == [c.call_id for c in step.tool_calls]
    # what the model was sent is what the tree holds, and each sampled token trains exactly once
    for made, step in zip(client.calls, told, strict=True):
        assert made.prompt is not None
        tokens = step.record["tokens"]
        assert tokens is not None
        assert tokens["prompt_ids"] == made.prompt.ids.tolist()
    sampled = sum(len(step.record["tokens"]["completion_ids"]) for step in told)  # type: ignore[index]
    state = State(trajectory=agent.trajectory, advantage=1.0)
    for scope in ("step", "turn", "interleave", "tree"):
        batch = build_samples([state], scope)  # type: ignore[arg-type]
        assert sum(len(sample.records) for sample in batch.samples) == sampled, scope
    if isinstance(episode["context"], FullDialog):
        assert build_samples([state], "interleave").breaks == ()


async def test_over_http_the_prefix_holds_too() -> None:
    """A server that is sent token ids: the turns are one sample there as well."""

    def model(prompt: Any) -> str:  # gets the decoded ids
        asked_by = prompt.split("<|im_start|>")[-2].partition("\n")[0]
        return call("add", a=len(prompt) % 7) if asked_by == "user" else "<a>go</a>"

    with ScriptedServer(model) as server:
        client = OpenAIClient(server.base_url, "scripted", renderer=ChatRenderer(ByteTokenizer()))
        agent = ToolAgent(client, tools=[add], parser=tagged("a"))
        told = await play(agent, 4)
        await client.aclose()
    assert [step.action_target for step in told] == ["internal", "env"] * 4
    state = State(trajectory=agent.trajectory, advantage=1.0)
    (sample,) = build_samples([state], "interleave").samples
    text = ByteTokenizer().decode(sample.ids.tolist())
    assert text.count("<tool_call>{") == 4 + 1  # and once where the tools are explained
