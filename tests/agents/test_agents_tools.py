"""Tool use within a turn: scopes, what goes wrong, time limits, and the shot clock."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from rolltree.agents import ReActAgent, ToolAgent
from rolltree.environments.rubrics import run_inline
from rolltree.environments.tools import ToolUnavailable
from rolltree.testing import FaultyClient, ScriptedAnswer, ScriptedClient
from rolltree.values.errors import BadResponse, ConfigError
from rolltree.values.steps import AgentStep, ParseResult, ToolAnswer
from rolltree.values.types import FinishReason
from wait_kit import until


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def delegate(task: str) -> str:
    """Give a task to somebody else."""
    raise AssertionError("the protocol answers this one")


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def agent_of(*script: Any, tools: Any = (add,), **settings: Any) -> ToolAgent:
    client = ScriptedClient(list(script))
    agent = ToolAgent(client, tools=tools, external_tools=[delegate], **settings)
    agent.observe("obs")
    return agent


def told(agent: ToolAgent) -> list[str]:
    return [str(m["content"]) for m in agent.history if m["role"] == "tool"]


# The three kinds of calls


async def test_internal_calls_are_handled_by_the_agent() -> None:
    agent = agent_of(call("add", a=2, b=3), "five")
    internal, final = await agent.act()
    assert internal.action_target == "internal"
    assert internal.parse_result is not None
    assert not internal.parse_failed
    assert [(c.name, c.arguments, c.scope) for c in internal.tool_calls] == [
        ("add", {"a": 2, "b": 3}, "internal")
    ]
    assert [a.text for a in internal.tool_answers] == ["5"]
    assert (final.action_target, final.parse_result) == ("env", ParseResult("five"))
    assert (internal.turn, final.turn, agent.turn) == (0, 0, 1)
    assert final.tool_calls == ()


async def test_external_calls_go_to_the_protocol_and_the_turn_goes_on() -> None:
    agent = agent_of(call("delegate", task="x"), call("add", a=1), "done")
    (external,) = await agent.act()
    assert (external.action_target, external.parse_result) == ("external", None)
    assert external.reward == 0.0
    (asked,) = agent.waiting
    assert (asked.name, asked.arguments, asked.scope) == ("delegate", {"task": "x"}, "external")
    with pytest.raises(ValueError, match="still waits for \\['delegate'\\]"):
        await agent.act()
    completed = agent.answer([ToolAnswer(asked.call_id, "delegate", "it is 7")])
    assert completed.tool_answers[0].text == "it is 7"
    assert agent.steps == [completed]
    assert agent.waiting == ()
    steps = await agent.act()
    assert [step.action_target for step in steps] == ["internal", "env"]
    assert [step.turn for step in agent.steps] == [0, 0, 0]
    assert told(agent) == ["it is 7", "2"]


async def test_final_actions_go_to_the_world() -> None:
    agent = agent_of("go")
    (step,) = await agent.act()
    assert (step.action_target, step.parse_result) == ("env", ParseResult("go"))
    assert agent.waiting == ()


async def test_a_message_may_mix_both_scopes() -> None:
    agent = agent_of(call("delegate", task="x") + call("add", a=1) + call("nope"), "done")
    (step,) = await agent.act()
    assert step.action_target == "external"
    assert [answer.name for answer in step.tool_answers] == ["add", "nope"]
    agent.answer([ToolAnswer(agent.waiting[0].call_id, "delegate", "ok")])
    assert told(agent)[:2] == ["ok", "2"]  # in the order of the calls
    assert "no tool named 'nope'" in told(agent)[2]


async def test_external_answers_must_fit() -> None:
    agent = agent_of(call("delegate", task="x") + call("delegate", task="y"), "done")
    await agent.act()
    first, second = agent.waiting
    assert first.call_id != second.call_id
    for wrong in ([first], [first, first], [first, second, second]):
        answers = [ToolAnswer(request.call_id, "delegate", "ok") for request in wrong]
        with pytest.raises(ValueError, match="Answer each call in `waiting` once"):
            agent.answer(answers)
    agent.answer([ToolAnswer(r.call_id, "delegate", r.call_id) for r in (second, first)])
    assert told(agent) == [first.call_id, second.call_id]
    assert (await agent.act())[-1].parse_result == ParseResult("done")
    with pytest.raises(ValueError, match="once"):
        agent.answer([])


# What goes wrong is an answer


@pytest.mark.parametrize(
    ("said", "answer", "penalised"),
    [
        (call("ad", a=1), "There is no tool named 'ad'. Did you mean 'add'?", True),
        (call("add"), "wrong arguments for add", True),
        (call("add", a="x"), "wrong arguments for add", True),
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "could not be read", True),
        ("<tool_call>[]</tool_call>", "could not be read", True),
        (call("fail"), "it broke", False),
        (call("delegate"), "wrong arguments for delegate", True),
    ],
)
async def test_what_goes_wrong_is_an_answer(said: str, answer: str, penalised: bool) -> None:
    def fail() -> None:
        """Fail."""
        raise RuntimeError("it broke")

    agent = agent_of(said, "done", tools=[add, fail], bad_call_penalty=-0.5)
    first, last = await agent.act()
    assert first.action_target == "internal"
    assert first.reward == (-0.5 if penalised else 0.0)
    assert first.parse_result is not None
    assert first.parse_result.reward == first.reward  # one place: the step repeats its parser's
    assert answer in str(agent.history[-2]["content"])
    assert last.parse_result == ParseResult("done")


async def test_the_trace_of_a_raising_tool_is_kept() -> None:
    def fail() -> None:
        """Fail."""
        raise RuntimeError("it broke")

    agent = agent_of(
        call("fail"), "ok", tools=[fail], error_formatter=lambda error: type(error).__name__
    )
    step = (await agent.act())[0]
    assert told(agent) == ["RuntimeError"]
    (error,) = step.info["tool_errors"]
    assert (error["type"], error["tool"]) == ("RuntimeError", "fail")
    assert "def fail" not in error["message"]
    assert "it broke" in error["traceback"]
    assert step.record["extras"]["tool_errors"] == [error]


async def test_a_tool_that_is_gone_fails_the_turn_and_the_call_is_kept() -> None:
    async def gone() -> None:
        """Be gone."""
        raise ToolUnavailable("the server is gone")

    agent = agent_of(call("gone"), tools=[gone])
    with pytest.raises(ToolUnavailable):
        await agent.act()
    assert [step.action_target for step in agent.steps] == ["internal"]
    assert len(agent.trajectory) == 1


async def test_a_model_that_fails_in_the_middle_of_a_turn_keeps_its_first_calls() -> None:
    inner = ScriptedClient([call("add", a=1), "x"])
    agent = ToolAgent(FaultyClient(inner, [None, BadResponse("down")]), tools=[add])
    agent.observe("obs")
    with pytest.raises(BadResponse):
        await agent.act()
    assert [step.tool_answers[0].text for step in agent.steps] == ["2"]


# How tools are run


async def test_asynchronous_tools_run_side_by_side_and_plain_ones_in_order() -> None:
    order: list[str] = []
    both = asyncio.Event()

    async def one() -> str:
        """Wait for two."""
        await both.wait()
        return "one"

    async def two() -> str:
        """Free one."""
        both.set()
        return "two"

    def plain(name: str) -> str:
        """Note the name."""
        order.append(f"{name} {threading.current_thread() is threading.main_thread()}")
        return name

    @run_inline
    def quick(name: str) -> str:
        """Note the name."""
        return plain(name)

    said = "".join(
        (
            call("plain", name="a"),
            call("one") + call("two"),
            call("quick", name="b"),
            call("plain", name="c"),
        )
    )
    agent = agent_of(said, "done", tools=[one, two, plain, quick])
    step = (await agent.act())[0]
    assert [answer.text for answer in step.tool_answers] == ["a", "one", "two", "b", "c"]
    assert order == ["a False", "b True", "c False"]


async def nothing_left(before: tuple[set[str], int]) -> None:
    """Wait until there are no more threads and tasks than before."""
    await until(lambda: threads_and_tasks() == before)


def threads_and_tasks() -> tuple[set[str], int]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("rolltree-tool")}, len(asyncio.all_tasks())


async def test_tools_that_hang_are_stopped_and_leave_nothing_behind() -> None:
    ended: list[str] = []

    def spin() -> None:
        """Spin forever."""
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.append("spin")

    async def wait() -> None:
        """Wait forever."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    before = threads_and_tasks()
    agent = agent_of(call("spin") + call("wait"), "done", tools=[spin, wait], tool_limit_s=0.5)
    step, last = await agent.act()
    assert [answer.text for answer in step.tool_answers] == [
        "spin took longer than 0.5 s and was stopped.",
        "wait took longer than 0.5 s and was stopped.",
    ]
    assert [error["type"] for error in step.info["tool_errors"]] == ["ToolTimeLimit"] * 2
    assert last.parse_result == ParseResult("done")
    await nothing_left(before)
    assert sorted(ended) == ["spin", "wait"]


@pytest.mark.parametrize("name", ["spin", "wait"])
async def test_a_cancelled_turn_stops_its_tools_and_keeps_its_call(name: str) -> None:
    started = threading.Event()
    ended: list[str] = []

    def spin() -> None:
        """Spin forever."""
        try:
            started.set()
            while True:
                time.sleep(0.001)
        finally:
            ended.append("spin")

    async def wait() -> None:
        """Wait forever."""
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    before = threads_and_tasks()
    agent = agent_of(call(name), "done", tools=[spin, wait])
    turn = asyncio.create_task(agent.act())
    await asyncio.to_thread(started.wait)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await nothing_left(before)
    assert ended == [name]
    assert [step.action_target for step in agent.steps] == ["internal"]


# The shot clock


async def test_the_last_call_is_told_to_answer() -> None:
    agent = agent_of(
        call("add", a=1), call("add", a=2), "done", max_tool_rounds=2, last_call="Answer now."
    )
    steps = await agent.act()
    assert [step.action_target for step in steps] == ["internal", "internal", "env"]
    assert told(agent) == ["2", "3\n\nAnswer now."]
    # the tools stay in the prompt: hiding them would break the prefix
    assert [bool(c.tools) for c in agent._client.calls] == [True] * 3


async def test_a_call_after_the_last_is_no_action() -> None:
    agent = agent_of(
        call("add", a=1),
        call("add", a=2) + call("delegate", task="x"),
        call("add", a=3),
        "next",
        max_tool_rounds=1,
        bad_call_penalty=-1.0,
    )
    steps = await agent.act()
    assert [step.action_target for step in steps] == ["internal", "env"]
    assert steps[1].parse_failed
    assert steps[1].reward == -1.0
    assert steps[1].info["parse_feedback_obs"] == agent.last_call
    assert len(steps[1].tool_calls) == 2
    assert told(agent)[1:] == ["This call was not made."] * 2  # servers want an answer to each
    agent.observe("obs")
    assert [step.action_target for step in await agent.act()] == ["internal", "env"]  # a new clock


async def test_external_calls_and_unreadable_ones_count_too() -> None:
    broken = "<tool_call>nonsense</tool_call>"
    agent = agent_of(call("delegate", task="x"), broken, "done", max_tool_rounds=2)
    await agent.act()
    agent.answer([ToolAnswer(agent.waiting[0].call_id, "delegate", "ok")])
    steps = await agent.act()
    assert [step.action_target for step in steps] == ["internal", "env"]
    assert agent.last_call in str(agent.history[-2]["content"])


async def test_an_answer_that_was_cut_off_calls_nothing() -> None:
    made: list[int] = []

    def note(a: int) -> None:
        """Note it."""
        made.append(a)

    cut = ScriptedAnswer(call("note", a=1) + "and", finish_reason=FinishReason.LENGTH)
    agent = agent_of(cut, "ok", tools=[note])
    (step,) = await agent.act()
    assert (step.action_target, step.parse_failed, made) == ("env", True, [])
    assert step.info["incomplete_completion"] is True
    assert told(agent) == ["This call was not made."]


# Settings and schemas


def test_settings() -> None:
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        ToolAgent(tools=[add, add])
    with pytest.raises(ConfigError, match="internal and external"):
        ToolAgent(tools=[add], external_tools=[add])
    with pytest.raises(ConfigError, match="max_tool_rounds"):
        ToolAgent(max_tool_rounds=-1)
    with pytest.raises(TypeError, match="tool_limit"):
        ToolAgent(tool_limit=3)


async def test_external_tools_may_be_schemas() -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"q": {}}, "required": ["q"]},
        },
    }
    client = ScriptedClient([call("search"), call("search", q="x", extra=1), "done"])
    agent = ToolAgent(client, external_tools=[schema])
    agent.observe("obs")
    steps = await agent.act()
    assert [step.action_target for step in steps] == ["internal", "external"]
    assert "wrong arguments for search" in told(agent)[0]
    assert agent.waiting[0].arguments == {"q": "x", "extra": 1}
    assert client.calls[0].tools == (schema,)
    with pytest.raises(ConfigError, match="no function name"):
        ToolAgent(external_tools=[{"type": "function"}])


# ReAct


def react(*script: str, **settings: Any) -> ReActAgent:
    agent = ReActAgent(ScriptedClient(list(script)), tools=[add], **settings)
    agent.observe("2 + 3?")
    return agent


async def acted(agent: ReActAgent) -> list[AgentStep]:
    return await agent.act()


async def test_react_thinks_acts_and_observes() -> None:
    agent = react(
        'Thought: add\nAction: add\nAction Input: {"a": 2,\n"b": 3}\nObservation: 6',
        "Thought: I know\nFinal Answer: <5>",
        system_prompt="Compute.",
    )
    internal, final = await acted(agent)
    assert internal.tool_answers[0].text == "5"
    assert agent.history[-2] == {"role": "user", "content": "Observation: 5"}
    assert final.parse_result == ParseResult("<5>")
    assert "Observation: 6" not in str(agent.history)  # invented, and cut off
    first = agent._client.calls[0]
    assert first.tools == ()
    assert first.sampling.stop == ("\nObservation:",)
    head = str(first.messages[0]["content"])
    assert head.startswith("Compute.\n\nYou can use these tools:\n- add({")
    assert "Add two numbers." in head


@pytest.mark.parametrize(
    ("said", "observed"),
    [
        ("Action: add", "Observation: Your tool call could not be read: an Action needs a line"),
        ("Action: add\nAction Input: two and 3", "arguments of add are not valid JSON"),
        ('Action: ad\nAction Input: {"a": 1}', "Did you mean 'add'?"),
        ('Action: add\nAction Input: {"a": 1} and so on\nAction: x', "Observation: 2"),
    ],
)
async def test_react_answers_what_cannot_be_read(said: str, observed: str) -> None:
    agent = react(said, "Final Answer: ok")
    steps = await acted(agent)
    assert [step.action_target for step in steps] == ["internal", "env"]
    assert observed in str(agent.history[-2]["content"])


async def test_react_after_the_last_call_is_told_once() -> None:
    action = 'Action: add\nAction Input: {"a": 1}'
    agent = react(action, action, max_tool_rounds=1)
    steps = await acted(agent)
    assert [step.action_target for step in steps] == ["internal", "env"]
    assert steps[1].parse_failed
    assert [m["role"] for m in agent.history] == ["system", *["user", "assistant"] * 2]
    assert str(agent.history).count(agent.last_call) == 1


async def test_react_without_an_action_is_an_answer() -> None:
    (step,) = await acted(react("five"))
    assert step.parse_result == ParseResult("five")
    (step,) = await acted(react('Final Answer: 5\nAction: add\nAction Input: {"a": 1}'))
    assert step.action_target == "env"


async def test_react_without_tools_is_a_plain_agent() -> None:
    agent = ReActAgent(ScriptedClient(["x"]))
    agent.observe("obs")
    assert [m["role"] for m in agent.history] == ["user"]
    assert (await agent.act())[0].parse_result == ParseResult("x")
