"""MCP tools against real servers: a stdio subprocess and a streamable HTTP one."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from env_scripts import ScriptedModel, a_request

from rolltree.agents import mcp_env
from rolltree.agents.mcp_env import MCPConnection
from rolltree.environments import MCPEnv, MCPServer
from rolltree.environments.rubrics import Rubric
from rolltree.environments.tools import ToolUnavailable
from rolltree.rollouts import RolloutEngine
from rolltree.values.errors import ConfigError
from wait_kit import wait_until

SCRIPT = str(Path(__file__).with_name("mcp_notes_server.py"))
STDIO = {"name": "notes", "command": sys.executable, "args": [SCRIPT, "stdio"]}
ROWS = [{"question": "take notes", "answer": ""}]


def calling(*calls):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"c{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


def answers(state):
    return [m["content"] for m in state["completion"] if m["role"] == "tool"]


@pytest.fixture(scope="module")
def http_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SCRIPT, "http", str(port)])

    def answers_there():
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers_there)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait()


async def test_stdio_schemas_calls_and_errors(monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-never")
    async with MCPEnv([STDIO], dataset=ROWS) as env:
        schemas = {tool["function"]["name"]: tool["function"] for tool in env.oai_tools}
        assert set(schemas) == {"add_note", "fail", "stumble", "doze", "die", "variables"}
        assert schemas["add_note"]["description"] == "Write a note down."
        assert schemas["add_note"]["parameters"]["required"] == ["text"]
        assert schemas["add_note"]["parameters"]["properties"]["times"]["type"] == "integer"
        model = ScriptedModel(
            calling(("add_note", {"text": "a", "times": 2}), ("fail", {"reason": "no paper"})),
            calling(("add_note", {"text": "b", "times": "many"}), ("variables", {})),
            "done",
        )
        state = await env.rollout(env.example("train", 0), model)
        assert state["error"] is None
        said = answers(state)
        assert said[0] == "2 notes"
        assert "no paper" in said[1]
        assert "times" in said[2]  # the server refuses the argument, and the model is told
        assert "SECRET_API_KEY" not in said[3]
        assert [error["tool"] for error in state["tool_errors"]] == ["fail", "add_note"]
        assert state["stop_condition"] == "no_tools_called"


async def test_no_arguments_of_a_model_fail_a_rollout():
    """A lone surrogate could not be sent, and an internal error counted as a dead server."""
    async with MCPEnv([STDIO], dataset=ROWS) as env:
        model = ScriptedModel(
            calling(("add_note", {"text": "\ud800"}), ("stumble", {"text": "x"})),
            calling(("add_note", {"text": "\x00\x1b[2J", "times": -1})),
            "done",
        )
        state = await env.rollout(env.example("train", 0), model)
    assert state["error"] is None
    assert "1 notes" in answers(state)
    assert "internal error at x" in answers(state)[1]


@pytest.mark.parametrize("isolated", [False, True])
async def test_a_server_that_a_call_ends_ends_a_rollout_which_counts(isolated):
    """A model could learn to end the server instead of being wrong."""
    async with MCPEnv(
        [{**STDIO, "timeout_s": 60.0}],
        isolated=isolated,
        dataset=ROWS,
        rubric=Rubric([lambda: 0.5]),
    ) as env:
        model = ScriptedModel(calling(("die", {})), "x")
        state = (await env.evaluate(model, "m")).state[0]
        assert (state["error"], state["reward"], state["truncation_reason"]) == (None, 0.5, "env")
        raised = state["environment_errors"]["environment"]
        assert raised["type"] == "ToolUnavailable"
        assert "'notes'" in raised["message"]
        # Later rollouts have a server again.
        model = ScriptedModel(calling(("add_note", {"text": "a"})), "done")
        assert answers((await env.evaluate(model, "m")).state[0]) == ["1 notes"]


async def test_a_shared_server_that_dies_between_calls_is_started_again():
    """The next call is not the cause; without a server again, the rollout has no reward."""
    async with MCPEnv([STDIO], dataset=ROWS, rubric=Rubric([lambda: 0.5])) as env:
        for _ in range(2):
            with pytest.raises(ToolUnavailable):
                await env._shared["notes"].call("die", {})
            env._shared["notes"].is_lost = False  # nobody has noticed
            model = ScriptedModel(calling(("add_note", {"text": "a"})), "done")
            state = (await env.evaluate(model, "m")).state[0]
            assert (answers(state), state["reward"]) == (["1 notes"], 0.5)
            assert state.get("environment_errors") is None
        with pytest.raises(ToolUnavailable):
            await env._shared["notes"].call("die", {})
        env._shared["notes"].is_lost = False
        env._shared["notes"].server = MCPServer("notes", "no-such-program")
        requests = [a_request(env)]
        (result,) = await RolloutEngine(env, model).run_all(requests)
        assert (result.error.type, result.error.kind) == ("ToolUnavailable", "machine")


async def test_a_busy_server_is_not_taken_for_dead():
    server = MCPServer("notes", sys.executable, args=(SCRIPT, "stdio"))
    connection = await asyncio.to_thread(MCPConnection(server).open)
    try:
        calls = [connection.call("add_note", {"text": "a"}) for _ in range(3)]
        found = await asyncio.gather(connection.is_gone(), *calls, connection.is_gone())
        assert (found[0], found[-1]) == (False, False)
    finally:
        await asyncio.to_thread(connection.close)


async def test_a_server_that_cannot_be_reached_again_fails_the_rollout():
    async with MCPEnv([{**STDIO, "timeout_s": 60.0}], dataset=ROWS) as env:
        connection = env._shared["notes"]
        connection.is_lost, connection.server = True, MCPServer("notes", "no-such-program")
        model = ScriptedModel(calling(("add_note", {"text": "a"})), "done")
        state = await env.rollout(env.example("train", 0), model)
        assert (state["error"].type, state["reward"]) == ("ToolUnavailable", None)


async def test_a_call_that_takes_too_long_is_an_answer_if_the_server_is_well():
    server = MCPServer("notes", sys.executable, args=(SCRIPT, "stdio"))
    connection = await asyncio.to_thread(MCPConnection(server).open)
    try:
        connection.server = replace(server, timeout_s=0.2)
        said, is_error = await connection.call("doze", {"seconds": 600})
    finally:
        await asyncio.to_thread(connection.close)
    assert is_error
    assert "more than 0.2 s" in said


async def test_isolated_rollouts_share_no_state_and_close_their_servers():
    model = ScriptedModel(calling(("add_note", {"text": "a"})), "done")
    async with MCPEnv([STDIO], isolated=True, dataset=ROWS) as env:
        results = await env.evaluate(model, "m", rollouts_per_example=2)
        assert [answers(state) for state in results.state] == [["1 notes"], ["1 notes"]]
        assert env._sessions == {}
    async with MCPEnv([STDIO], dataset=ROWS) as env:
        results = await env.evaluate(model, "m", rollouts_per_example=2)
        assert sorted(answers(s)[0] for s in results.state) == ["1 notes", "2 notes"]


def test_http_from_several_event_loops(http_url):
    env = MCPEnv([MCPServer("web", url=http_url)], dataset=ROWS)
    model = ScriptedModel(calling(("add_note", {"text": "a"})), "done")
    first = env.evaluate_sync(model, "m").state[0]
    second = env.evaluate_sync(model, "m").state[0]
    assert (answers(first), answers(second)) == (["1 notes"], ["2 notes"])
    for connection in env._shared.values():
        connection.close()
    third = env.evaluate_sync(model, "m").state[0]
    assert third["error"].type == "ToolUnavailable"


def test_http_with_headers_and_a_plain_function_beside_it(http_url):
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    server = MCPServer("web", url=http_url, headers={"X-Test": "1"})
    env = MCPEnv([server], tools=[double], dataset=ROWS)
    try:
        model = ScriptedModel(calling(("double", {"number": 4}), ("fail", {"reason": "r"})), "done")
        state = env.evaluate_sync(model, "m").state[0]
        assert answers(state)[0] == "8"
        assert state["error"] is None
    finally:
        for connection in env._shared.values():
            connection.close()


def test_what_cannot_be_reached():
    with pytest.raises(ToolUnavailable, match="'gone' could not be reached"):
        MCPEnv([MCPServer("gone", command="/no/such/program")], dataset=ROWS)
    with pytest.raises(ToolUnavailable, match="'closed' could not be reached"):
        MCPEnv([MCPServer("closed", url="http://127.0.0.1:9/mcp", timeout_s=20.0)], dataset=ROWS)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([], "distinct names"),
        ([STDIO, STDIO], "distinct names"),
        ([{"name": "a"}], "either a command"),
        ([{"name": "a", "command": "x", "url": "y"}], "either a command"),
        ([{"name": "a", "comand": "x"}], "unknown key 'comand'"),
        ([{"command": "x"}], "has no name"),
    ],
)
def test_wrong_settings(servers, message):
    with pytest.raises(ConfigError, match=message):
        MCPEnv(servers, dataset=ROWS)


def test_two_tools_of_one_name():
    def add_note(text: str) -> str:
        """Write."""
        return text

    with pytest.raises(ConfigError, match="two tools are named 'add_note'"):
        MCPEnv([STDIO], tools=[add_note], dataset=ROWS)


def test_a_connection_that_fails_while_it_closes_says_so(caplog):
    connection = MCPConnection(MCPServer("notes", command="unused"))
    connection._thread.start()
    connection._task = Future()
    connection._task.set_exception(OSError("broken pipe"))
    with caplog.at_level("DEBUG", "rolltree.environments"):
        connection.close()
    assert "notes" in caplog.text
    assert "broken pipe" in caplog.text
    assert not connection._thread.is_alive()


def running():
    """Return the command line of every process."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended in the meantime
            lines.append((folder / "cmdline").read_bytes().decode().rstrip("\0").split("\0"))
    return lines


def test_a_server_that_hangs_while_it_starts_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.05)
    monkeypatch.setattr("mcp.client.stdio.FORCE_KILL_TIMEOUT", 0.05)
    # It ignores the end of its input, and what it is asked politely.
    program = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(600)\n"
    )
    started = str(tmp_path / "started")
    server = MCPServer("mute", sys.executable, args=("-c", program, started), timeout_s=1.0)
    with pytest.raises(ToolUnavailable, match="'mute' could not be reached"):
        MCPEnv([server], dataset=ROWS)
    assert Path(started).exists()
    assert not [words for words in running() if started in words]


def test_a_connection_that_takes_too_long_to_close_is_cancelled_and_cleans_up(monkeypatch):
    cleaned = []

    async def entered(stack, server):
        async def leave():
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.01)
                cleaned.append(server.name)

        stack.push_async_callback(leave)

    monkeypatch.setattr(mcp_env, "_enter", entered)
    monkeypatch.setattr(mcp_env, "_CLOSE_S", 0.1, raising=False)
    connection = MCPConnection(MCPServer("slow", command="unused")).open()
    connection.close()
    assert cleaned == ["slow"]
    assert not connection._thread.is_alive()


def test_a_program_that_forgets_to_close_ends_and_takes_its_server_with_it():
    program = (
        "import sys, rolltree as rt\n"
        f"server = {{'name': 'n', 'command': sys.executable, 'args': [{SCRIPT!r}, 'stdio']}}\n"
        "env = rt.MCPEnv([server], dataset=[{'question': 'q'}])\n"
        "print(len(env.oai_tools))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "6")
    assert "Traceback" not in done.stderr
    assert not [words for words in running() if words[-2:] == [SCRIPT, "stdio"]]
