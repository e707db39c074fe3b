"""Agents from PyPI, unmodified and in processes of their own, become trajectories."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest
from agents_kit import (
    RIGHT,
    WRONG,
    calling,
    causes,
    check_recorded,
    continues,
    num_answers,
    play,
)

import rolltree as rt
from rolltree.testing import ScriptedClient

BOTH = pytest.mark.parametrize("how", ["whole", "streamed"])
TOKEN_DELAY_S = 0.0005  # so that a streamed answer comes in pieces


# -- mini-swe-agent ------------------------------------------------------------------------------

COMMANDS = [
    "ls && cat add.py",
    "python -c 'import add; print(add.add(2, 3))'",
    "sed -i 's/a - b/a + b/' add.py",
    "python -c 'import add; print(add.add(2, 3))'",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat add.py",
]


def engineer(messages):
    done = num_answers(messages)
    return calling(("bash", {"command": COMMANDS[done]}), content=f"Step {done + 1}.")


async def test_mini_swe_agent_fixes_a_repository(agents_python, tested, tmp_path):
    (tmp_path / "add.py").write_text(WRONG)
    async with rt.gateway(ScriptedClient(engineer)) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "mini_swe", "add() subtracts.")
        assert said == {"exit_status": "Submitted", "submission": (tmp_path / "add.py").read_text()}
        check = [sys.executable, "-c", "import add; assert add.add(2, 3) == 5"]
        assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
        assert len(s.trajectory) == len(COMMANDS)
        assert s.breaks == ()
        assert continues(s) == [None, 0, 1, 2, 3]
        tested("mini-swe-agent", "chat", s, "fixed a file")


def slip(messages):
    """Forget to call the tool once, and name an unknown one: the agent says what was wrong."""
    done = num_answers(messages)
    if messages[-1]["role"] == "user" and done == 0 and len(messages) == 2:
        return "I have no idea."
    if len(messages) == 3:
        return calling(("shell", {"command": "ls"}))
    return calling(("bash", {"command": COMMANDS[-1].replace("add.py", "/dev/null")}))


async def test_mini_swe_agent_drops_what_it_could_not_read(agents_python, tmp_path):
    async with rt.gateway(ScriptedClient(slip)) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "mini_swe", "Do nothing.")
        assert said["exit_status"] == "Submitted"
        check_recorded(s)
        # It keeps its complaint without the answer that this is about: the history is another one.
        assert len(s.trajectory) == 3
        assert len(s.breaks) == 2


# -- openai-agents -------------------------------------------------------------------------------


def shop(messages):
    """The clerk looks up, hands off; the specialist counts and answers."""
    tool = messages[-1]["content"] if messages[-1]["role"] == "tool" else ""
    if "You look things up." in messages[0]["content"]:
        if "shelf" in tool:
            return calling(("transfer_to_counter", {}))
        return calling(("look_up", {"item": "bolts"}), content="Let me look.")
    return f"There are {tool}." if tool == "42" else calling(("count", {"shelf": 7}))


@BOTH
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_hands_off(agents_python, tested, tmp_path, api, how):
    client = ScriptedClient(shop, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "handoff", api, how)
        assert said == {"answer": "There are 42.", "agent": "Counter"}
        # The specialist has another system prompt and other tools: one break, at the hand-off.
        assert causes(s) == ["system_or_tools_changed"]
        assert continues(s) == [None, 0, None, 2]
        tested("openai-agents", api, s, "used a tool, and handed off to another agent")


# -- smolagents and LangGraph --------------------------------------------------------------------


def adder(messages):
    tool = messages[-1]
    if "42" in tool["content"]:
        return calling(("final_answer", {"answer": "42"}))
    return calling(("add", {"a": 17, "b": 25}))


@BOTH
async def test_smolagents_loop(agents_python, tested, tmp_path, how):
    client = ScriptedClient(adder, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "smol_loop", how)
        assert str(said["answer"]) == "42"
        assert len(s.trajectory) == 2
        tested("smolagents", "chat", s, "used a tool")


def graph_adder(messages):
    if messages[-1]["role"] == "tool":
        return f"It is {messages[-1]['content']}."
    return calling(("add", {"a": 17, "b": 25}))


@BOTH
async def test_langgraph_loop(agents_python, tested, tmp_path, how):
    client = ScriptedClient(graph_adder, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "langgraph_loop", how)
        assert said == {"answer": "It is 42."}
        assert s.breaks == ()
        assert continues(s) == [None, 0]
        tested("LangGraph", "chat", s, "used a tool")


# -- pydantic-ai ---------------------------------------------------------------------------------


def forecaster(messages):
    last = messages[-1]
    city = "Geneva" if any("Geneva" in str(each["content"]) for each in messages) else "Bern"
    if last["role"] == "tool" and last["content"].isdigit():
        return calling(("final_result", {"city": city, "degrees": int(last["content"])}))
    return calling(("measure", {"city": city}), content="I shall measure.")


@BOTH
async def test_pydantic_ai_over_anthropics_protocol(agents_python, tested, tmp_path, how):
    client = ScriptedClient(forecaster, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "pydantic_loop", how)
        bern, geneva = {"city": "Bern", "degrees": 12}, {"city": "Geneva", "degrees": 18}
        assert said == {"answers": [bern, geneva]}
        assert s.breaks == ()
        assert continues(s) == [None, 0, 1, 2]
        tested("pydantic-ai", "messages", s, "used a tool, and gave an answer of a type, twice")


# -- crewai, autogen -----------------------------------------------------------------------------


async def test_crewai(apart, tested, tmp_path):
    # Its telemetry is OpenTelemetry's.
    quiet = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
    async with rt.gateway(ScriptedClient(graph_adder)) as g, g.session() as s:
        said = await play(apart("crewai"), s, tmp_path, "crew_loop", **quiet)
        assert said == {"answer": "It is 42."}
        assert s.breaks == ()
        assert continues(s) == [None, 0]
        tested("crewai", "chat", s, "used a tool")


def audited(messages):
    return "Right. DONE" if "You check" in messages[0]["content"] else graph_adder(messages)


async def test_autogen_team(agents_python, tested, tmp_path):
    async with rt.gateway(ScriptedClient(audited)) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "autogen_team")
        assert said["said"][1:] == [["clerk", "It is 42."], ["auditor", "Right. DONE"]]
        # The clerk reflects on what its tool returned without being offered it.
        assert causes(s) == ["system_or_tools_changed"]
        assert continues(s) == [None, None, None]
        tested("autogen", "chat", s, "two agents in turns; the first used a tool")


# -- agno and Strands Agents ---------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_agno(agents_python, tested, tmp_path, api, how):
    client = ScriptedClient(graph_adder, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "agno_loop", api, how)
        assert said == {"answer": "It is 42."}
        assert causes(s) == []
        assert continues(s) == [None, 0]
        tested("agno", api, s, "used a tool")


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_strands_agents(apart, tested, tmp_path, api):
    async with rt.gateway(ScriptedClient(graph_adder)) as g, g.session() as s:
        said = await play(apart("strands"), s, tmp_path, "strands_loop", api)
        assert said == {"answer": "It is 42."}
        assert causes(s) == []
        assert continues(s) == [None, 0]
        tested("Strands Agents", api, s, "used a tool")


# -- dspy ----------------------------------------------------------------------------------------


def in_fields(messages):
    """Answer as dspy reads it: by fields, each below its name."""
    if "next_thought" not in messages[0]["content"]:
        fields = {"reasoning": "The tool says it.", "answer": "42"}
    elif "observation_0" in messages[-1]["content"]:
        fields = {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": "{}"}
    else:
        arguments = json.dumps({"a": 17, "b": 25})
        fields = {"next_thought": "Add.", "next_tool_name": "add", "next_tool_args": arguments}
    said = [f"[[ ## {name} ## ]]\n{text}\n" for name, text in fields.items()]
    return "\n".join([*said, "[[ ## completed ## ]]"])


async def test_dspy_react(agents_python, tested, tmp_path):
    async with rt.gateway(ScriptedClient(in_fields)) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "dspy_react")
        assert said == {"answer": "42"}
        # It writes what happened so far into one message, which is a new prompt each time.
        assert continues(s) == [None, None, None]
        tested("dspy", "chat", s, "used a tool")


# -- aider and OpenHands' SDK --------------------------------------------------------------------


def editor(messages):
    """Edit a line that the file does not have, and then the right one."""
    old = "x - y" if num_answers(messages) == 1 else "a - b"  # its prompt has an example
    block = f"<<<<<<< SEARCH\n    return {old}\n=======\n    return a + b\n>>>>>>> REPLACE"
    return f"add.py\n```python\n{block}\n```\n"


async def test_aider(aider, tested, work):
    async with rt.gateway(ScriptedClient(editor)) as g, g.session() as s:
        await aider(s)
        assert (work / "add.py").read_text() == RIGHT
        # It moves its rules, which end its prompt, behind the answer that it complains about.
        assert causes(s) == ["history_rewritten"]
        tested("aider", "chat", s, "fixed a file at the second try")


def hands(messages):
    edit = {"command": "str_replace", "path": "add.py", "old_str": "a - b", "new_str": "a + b"}
    folder = re.search(r"in (/\S+)$", messages[1]["content"])[1]
    return [
        calling(("terminal", {"command": "cat add.py"})),
        calling(("file_editor", {**edit, "path": f"{folder}/add.py"})),
        calling(("finish", {"message": "Fixed."})),
    ][num_answers(messages)]


async def test_openhands_sdk(apart, tested, tmp_path):
    (tmp_path / "add.py").write_text(WRONG)
    async with rt.gateway(ScriptedClient(hands)) as g, g.session() as s:
        said = await play(
            apart("openhands"), s, tmp_path, "openhands_loop", f"Fix add() in {tmp_path}"
        )
        assert said == {"status": "finished"}
        assert (tmp_path / "add.py").read_text() == RIGHT
        assert s.breaks == ()
        assert continues(s) == [None, 0, 1]
        tested("OpenHands SDK", "chat", s, "fixed a file")


# -- patterns ------------------------------------------------------------------------------------


def summer(messages):
    """Add 1 to 5, one number a call; a summary says how far it is."""
    text = messages[-1]["content"]
    known = [each["content"] for each in messages if each["role"] == "tool"]
    if known:
        total = int(known[-1])
    elif "sums were" in text:
        total = int(text.split("; ")[-1].strip("."))
    else:
        total = 1
    number = {1: 2, 3: 3, 6: 4, 10: 5}.get(total)
    return "It is 15." if number is None else calling(("add", {"a": total, "b": number}))


async def test_a_history_that_the_agent_compacts_is_one_break(agents_python, tmp_path):
    async with rt.gateway(ScriptedClient(summer)) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "compaction")
        assert said == {"answer": "It is 15."}
        check_recorded(s)
        assert causes(s) == ["compaction"]
        assert continues(s) == [None, 0, 1, None, 3]


def team(messages):
    system, last = messages[0]["content"], messages[-1]
    if "You lead." in system:
        if last["role"] == "tool":
            return "The harbour."
        asked = [("ask_ann", {"input": "lake"}), ("ask_bob", {"input": "harbour"})]
        return calling(*asked)
    if last["role"] == "tool":
        return f"{last['content']} fathoms"
    return calling(("measure", {"place": last["content"]}))


async def test_sub_agents_in_parallel_in_one_session(agents_python, tmp_path):
    client = ScriptedClient(team, delay_s=0.2)
    async with rt.gateway(client) as g, g.session() as s:
        said = await play(agents_python, s, tmp_path, "parallel")
        assert said == {"answer": "The harbour."}
        check_recorded(s)
        assert len(s.trajectory) == 6
        found = continues(s)
        # The lead's second call and each sub-agent's second continue the first; they overlapped.
        assert found[:3] == [None, None, None]
        assert set(found[3:5]) == {1, 2}
        assert found[5] == 0


async def test_a_client_that_asks_again_is_answered_once(agents_python, tmp_path):
    # Longer than the client waits: it hangs up, and asks again.
    client = ScriptedClient(["Roses are red."], delay_s=3600)
    async with rt.gateway(client) as g, g.session() as s:

        async def hurry():
            while not s.num_cancelled:
                await asyncio.sleep(0.01)
            client.delay_s = 0.0

        said, _ = await asyncio.gather(play(agents_python, s, tmp_path, "impatient", "3"), hurry())
        assert said == {"answer": "Roses are red."}
        check_recorded(s)
        assert len(s.trajectory) == 1
        assert s.num_cancelled == len(client.calls) - 1
