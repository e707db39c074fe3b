"""What an agent shows of its history, and what that does to the exact prefix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.agents import (
    Agent,
    FullDialog,
    SlidingWindow,
    SummaryCompaction,
    ToolAgent,
    TruncatedThinking,
)
from rolltree.samples import build_samples
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.values.types import State

NUM_TURNS = 6


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def say(messages: Any) -> str:
    """Answer with a thought and the number of messages seen; sum up when asked to."""
    if messages[-1]["content"].startswith("Sum"):
        return f"<summary of {len(messages) - 1}>"
    return f"<think>hm {len(messages)}</think>saw {len(messages)}"


async def play(context: Any, num_turns: int = NUM_TURNS) -> Agent:
    agent = Agent(ScriptedClient(say), system_prompt="S", context=context)
    for turn in range(num_turns):
        agent.observe(f"obs {turn}")
        await agent.act()
    return agent


def samples(agent: Agent) -> Any:
    return build_samples([State(trajectory=agent.trajectory, advantage=1.0)], "interleave")


@pytest.mark.parametrize(
    ("context", "num_breaks"),
    [
        (FullDialog(), 0),
        (TruncatedThinking(), NUM_TURNS - 1),  # one per turn after a thought
        (SlidingWindow(num_turns=3), NUM_TURNS - 3),  # one per turn once the window is full
        (SlidingWindow(num_turns=99), 0),
        (SummaryCompaction(max_tokens=10_000, request="Sum up."), 0),
    ],
)
async def test_which_strategies_break_the_prefix(context: Any, num_breaks: int) -> None:
    agent = await play(context)
    found = samples(agent)
    assert len(found.breaks) == num_breaks
    assert len(found.samples) == num_breaks + 1
    # a break costs a new sample, never a sampled token
    sampled = sum(len(step["tokens"]["completion_ids"]) for step in agent.trajectory)
    assert sum(len(sample.records) for sample in found.samples) == sampled
    assert len(agent.history) == 1 + 2 * NUM_TURNS  # nothing is forgotten by the agent itself


# Truncated thinking


def test_reasoning_before_the_last_user_message_is_not_shown() -> None:
    call = assistant("<think>b</think>\n\n", tool_calls=[{"id": "1"}], reasoning_content="r")
    history = [user("1"), call, {"role": "tool", "content": "<think>t</think>"}, user("2"), call]
    shown = TruncatedThinking().view(history)
    assert shown[1] == assistant("", tool_calls=[{"id": "1"}])
    assert shown[2] is history[2]  # only the model's own words are cut
    assert shown[4] is call  # the current turn keeps what it thought
    assert history[1] is call
    assert call["reasoning_content"] == "r"
    plain = [user("1"), assistant("no thought"), user("2")]
    assert TruncatedThinking().view(plain) == plain
    other = [user("1"), assistant("<t>a</t>b"), user("2")]
    assert TruncatedThinking(close="</t>").view(other)[1] == assistant("b")


# Sliding window


def test_a_window_keeps_the_head_and_whole_turns() -> None:
    system, tool = {"role": "system", "content": "S"}, {"role": "tool", "content": "t"}
    history = [system, user("task"), assistant("a"), user("2"), assistant("b"), tool]
    history += [assistant("c"), user("3")]
    assert SlidingWindow(3).view(history) == history
    assert SlidingWindow(1, keep_first=False).view(history) == [system, user("3")]
    assert SlidingWindow(2).view(history) == [
        system,
        user("task\n\n[...]\n\n2"),
        *history[4:],
    ]
    with pytest.raises(ConfigError, match="at least 1 turn"):
        SlidingWindow(0)


@given(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=12), st.integers(1, 4))
def test_a_window_never_starts_with_an_answer_without_its_call(
    roles: list[str], num_turns: int
) -> None:
    history = [{"role": "system", "content": "S"}]
    history += [{"role": role, "content": f"m{n}"} for n, role in enumerate(roles)]
    shown = SlidingWindow(num_turns, keep_first=False).view(history)
    starts = [n for n, role in enumerate(roles) if role == "user"]
    if len(starts) > num_turns:
        head = history[: 1 + starts[0]]
        assert shown == [*head, *history[1 + starts[-num_turns] :]]
        assert sum(m["role"] == "user" for m in shown) == num_turns
    else:
        assert shown == history


# Compaction


async def test_a_summary_is_a_model_call_that_is_recorded_and_trained() -> None:
    context = SummaryCompaction(max_tokens=100, request="Sum up.")
    agent = await play(context, num_turns=5)
    kinds = [step.info.get("kind") for step in agent.steps]
    assert kinds.count("compaction") == 2
    index = kinds.index("compaction")
    step, following = agent.steps[index : index + 2]
    assert step.action_target == "internal"
    assert step.turn == following.turn
    assert step.parse_result is not None
    summary = step.parse_result.action
    assert step.prompt[-1] == user("Sum up.")
    assert step.record["extras"]["kind"] == "compaction"
    assert following.prompt == [
        {"role": "system", "content": "S"},
        user(f"What happened so far:\n{summary}\n\nobs {following.turn}"),
    ]
    # the summary continues the exact prefix; the dialog after it starts a new path
    found = samples(agent)
    assert len(found.breaks) == 2
    assert found.samples[0].origins[0].calls == tuple(range(index + 1))
    trained = sum(len(sample.records) for sample in found.samples)
    assert trained == sum(len(s["tokens"]["completion_ids"]) for s in agent.trajectory)


async def test_a_turn_with_tools_is_summed_up_between_its_calls() -> None:
    def look() -> str:
        """Look around."""
        return "a door " * 20

    def script(messages: Any) -> str:
        if messages[-1]["content"] == "Sum up.":
            return "There is a door."
        if "door" in messages[-1]["content"] and messages[-1]["role"] == "user":
            return "open it"
        return f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call>"

    context = SummaryCompaction(max_tokens=1, request="Sum up.", summary_tokens=99)
    client = ScriptedClient(script)
    agent = ToolAgent(client, tools=[look], context=context)
    agent.observe("What do you see?")
    steps = await agent.act()
    assert [step.info.get("kind", step.action_target) for step in steps] == [
        "internal",
        "compaction",
        "env",
    ]
    assert steps[-1].prompt == [user("What happened so far:\nThere is a door.")]
    assert [call.sampling.max_tokens for call in client.calls] == [None, 99, None]
    # the summary was asked with the same tools, so it continues the prefix
    assert samples(agent).samples[0].origins[0].calls == (0, 1)
    with pytest.raises(ConfigError, match="every call"):
        SummaryCompaction(max_tokens=0)
