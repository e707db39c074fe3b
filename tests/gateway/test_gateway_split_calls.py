"""An agent that sends each call of an answer as a message of its own continues the answer."""

from __future__ import annotations

import pytest

import rolltree as rt
from gateway.gateway_kit import is_one_path, openai_agent
from rolltree.gateway.messages import rejoined
from rolltree.testing import ScriptedClient

TWO = [{"function": {"name": "look", "arguments": f'{{"at": "{at}"}}'}} for at in "ab"]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("text", ["", "Let me look."])
async def test_calls_of_an_answer_that_come_back_one_by_one(text):
    """goose sends a call, its result, the next call, and its result."""
    client = ScriptedClient([{"content": text, "tool_calls": TWO}, "Seen."])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        history = [{"role": "user", "content": "Look around."}]
        reply = await agent.chat.completions.create(model="m", messages=history, tools=TOOLS)
        said = reply.choices[0].message
        for index, call in enumerate(said.tool_calls):
            one = {"role": "assistant", "content": "" if index else said.content}
            history += [
                {**one, "tool_calls": [call.model_dump()]},
                {"role": "tool", "tool_call_id": call.id, "content": f"a {index}"},
            ]
        await agent.chat.completions.create(model="m", messages=history, tools=TOOLS)
        assert s.breaks == ()
        assert is_one_path(s)


def message(*ids, text=""):
    return {"role": "assistant", "content": text, "tool_calls": [{"id": each} for each in ids]}


def result(of):
    return {"role": "tool", "tool_call_id": of, "content": "ok"}


ANSWERS = {"a": "1", "b": "1", "c": "2"}


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (
            [message("a"), result("a"), message("b"), result("b")],
            [message("a", "b"), result("a"), result("b")],
        ),
        (
            [message("a", text="Hm."), message("b"), result("a"), result("b"), message("c")],
            [message("a", "b", text="Hm."), result("a"), result("b"), message("c")],
        ),
        # Other answers, an unknown call, a text between, a call that is sent twice: as they came.
        ([message("a"), result("a"), message("c")], None),
        ([message("x"), result("x"), message("y")], None),
        ([message("a"), result("a"), message("b", text="And")], None),
        ([message("a"), {"role": "user", "content": "No."}, message("b")], None),
        ([message("a"), result("a"), message("a"), result("a")], None),
    ],
)
def test_only_calls_of_the_same_answer_are_joined(given, joined):
    before = [dict(each) for each in given]
    assert rejoined(given, ANSWERS) == (given if joined is None else joined)
    assert given == before
