"""Tools that are more than functions, and wishes: official packages before a scripted model."""

from __future__ import annotations

import json

import anthropic
import pytest
from gateway_kit import ADD, calling, is_one_path, openai_agent

import rolltree as rt
from rolltree.inference.client_base import DelegatingClient
from rolltree.testing import ScriptedClient

PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
READ_FILE = {
    "type": "function",
    "name": "read",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [READ_FILE]}
TEXT = '*** Begin Patch\n{"a": "ä"}\n'


def patches(messages):
    """Call the custom tool, read a file when it has answered, then say what was read."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if not results:
        return calling("apply_patch", json.dumps({"input": TEXT}))
    if len(results) == 1:
        return calling("mcp__files__read", '{"path": "a"}')
    return f"It says {results[-1]}."


async def test_responses_like_those_of_codex_are_one_path():
    client = ScriptedClient(patches)
    hosted = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}]
    request = {
        "model": "gpt-5-codex",
        "instructions": "You write code.",
        "tools": [PATCH, FILES, *hosted],
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "concise"},
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "extra_body": {"client_metadata": {"installation": "x"}},
    }
    history = [{"role": "user", "content": "Fix it."}]
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        for turn in range(3):
            events = [
                event
                async for event in await agent.responses.create(
                    input=history, stream=True, **request
                )
            ]
            response = events[-1].response
            history += response.output
            for each in response.output:
                if each.type == "custom_tool_call":
                    assert (each.name, each.input) == ("apply_patch", TEXT)
                    history.append(
                        {"type": "custom_tool_call_output", "call_id": each.call_id, "output": "ok"}
                    )
                if each.type == "function_call":
                    assert (each.namespace, each.name) == ("mcp__files", "read")
                    history.append(
                        {"type": "function_call_output", "call_id": each.call_id, "output": "b"}
                    )
            if turn == 0:
                deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
                assert "".join(event.delta for event in deltas) == TEXT
        again = await agent.responses.create(input=history, **request)
        assert response.output_text == again.output_text == "It says b."
        notes, calls, one_path = s.notes, s.trajectory, is_one_path(s)
        assert s.summary()["notes"] == notes
        kept = [step["response"].info.get("notes", {}).keys() for step in calls]
    names = [tool["function"]["name"] for tool in client.calls[0].tools]
    assert names == ["apply_patch", "mcp__files__read"]
    assert "Begin Patch" in client.calls[0].tools[0]["function"]["description"]
    assert one_path
    assert len(calls) == 4
    assert notes.keys() == {
        *("tools.web_search", "tools.local_shell", "tools.image_generation"),
        *("parallel_tool_calls", "reasoning_effort", "verbosity"),
        *("reasoning.summary", "truncation"),
    }
    # Each is noted once.
    assert [len(names) for names in kept] == [8, 0, 0, 0]
    assert all(dict(call.sampling.extra) == {} for call in client.calls)


@pytest.mark.parametrize("arguments", ['{"input": 3}', '{"command": "ls"}', "{}"])
async def test_what_a_model_wrote_in_place_of_an_input_reaches_the_custom_tool(arguments):
    client = ScriptedClient([calling("apply_patch", arguments)])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        response = await agent.responses.create(model="m", input="?", tools=[PATCH])
        parsed = s.trajectory[0]["completion"][0]["tool_calls"][0]["function"]["arguments"]
    assert [each.input for each in response.output] == [parsed]


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_chats_are_one_path(stream):
    client = ScriptedClient(patches)
    custom = {
        "type": "custom",
        "custom": {
            "name": "apply_patch",
            "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": ".*"}},
        },
    }
    history = [{"role": "user", "content": "Fix it."}]
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        asked = {"model": "m", "tools": [custom, ADD], "stream": stream}
        made = await agent.chat.completions.create(messages=history, **asked)
        if stream:
            (call,) = [
                call
                async for chunk in made
                for choice in chunk.choices
                for call in choice.delta.tool_calls or ()
            ]
        else:
            (call,) = made.choices[0].message.tool_calls
        found = call.model_dump()
        assert (found["type"], found["custom"]) == (
            "custom",
            {"name": "apply_patch", "input": TEXT},
        )
        sent_back = {"id": call.id, "type": "custom", "custom": found["custom"]}
        history += [
            {"role": "assistant", "content": None, "tool_calls": [sent_back]},
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        await agent.chat.completions.create(messages=history, **{**asked, "stream": False})
        assert is_one_path(s)


async def test_tools_that_anthropic_runs_are_left_out_with_a_note(tmp_path):
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {
            "name": "add",
            "input_schema": {"type": "object"},
            "strict": True,
            "defer_loading": True,
            "input_examples": [{"a": 1}],
        },
    ]
    client = ScriptedClient(["yes", "no"])
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    async with rt.gateway(client, directory=tmp_path) as g:
        s = g.session("a")
        key = s.api_key
        async with anthropic.AsyncAnthropic(base_url=s.root_url, api_key=key) as agent:
            await agent.messages.create(**asked, extra_body={"tools": tools})
        notes = s.notes
    assert [tool["function"]["name"] for tool in client.calls[0].tools] == ["add"]
    wanted = {"tools.web_search_20250305", "tools.bash_20250124"}
    assert notes.keys() == wanted | {"strict", "defer_loading", "input_examples"}
    # A gateway that was started again knows them, and notes none twice.
    async with rt.gateway(client, directory=tmp_path) as g:
        s = g.sessions["a"]
        assert s.notes == notes
        async with anthropic.AsyncAnthropic(base_url=s.root_url, api_key=key) as agent:
            await agent.messages.create(**asked, extra_body={"tools": tools})
        assert "notes" not in s.trajectory[1]["response"].info


class FromAfar(DelegatingClient):
    """A model whose server renders the prompts itself."""

    clients = ()


async def test_wishes_reach_a_server_that_renders_prompts_itself():
    client = ScriptedClient(["yes"])
    async with rt.gateway(FromAfar(client)) as g, g.session() as s, openai_agent(s) as agent:
        await agent.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "?"}],
            reasoning_effort="low",
            parallel_tool_calls=False,
            prediction={"type": "content", "content": "yes"},
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        # The scripted model has a template, which does not read the name.
        assert s.notes.keys() == {"chat_template_kwargs.enable_thinking"}
    assert dict(client.calls[0].sampling.extra) == {
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
