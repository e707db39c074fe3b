"""Programs in a sandbox: they reach the gateway and nothing else, or are refused by name."""

import asyncio
import json

import pytest
from program_kit import ASK, one, rows, said

import rolltree as rt
from rolltree.errors import ConfigError, SandboxUnavailable
from rolltree.sandbox import Limits, LocalBackend
from rolltree.testing import ScriptedClient

COMMAND = ["python3", "-I", "-S", "agent.py", "{question}"]


def agent(code):
    """Return `files` with a program that can `ask`."""
    return {"agent.py": (ASK + code).replace("{", "{{").replace("}", "}}")}


@pytest.fixture(scope="module", autouse=True)
def needs_bubblewrap():
    async def attempt():
        await (await LocalBackend("bubblewrap").create()).close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")


def play(code, num=1, limits=None, **settings):
    env = rt.ProgramEnv(
        COMMAND,
        files=agent(code),
        dataset=rows(num),
        rubric=rt.Rubric([one]),
        sandbox="local",
        **settings,
    )
    return env.evaluate_sync(ScriptedClient(said), **(limits or {})).state


def test_a_program_in_a_sandbox_reaches_the_gateway_and_nothing_else(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "not-for-programs")
    code = """
print(ask(sys.argv[1]))
reached = []
for address in (("192.0.2.1", 80), ("1.1.1.1", 443), ("127.0.0.1", 22)):
    try:
        socket.create_connection(address, 5)
        reached.append(address)
    except OSError:
        pass
for path in ("/etc/passwd", "/root", "/home", "/proc/self/environ"):
    try:
        open(path)
        reached.append(path)
    except OSError:
        pass
print(json.dumps([reached, os.getcwd(), "MY_SECRET" in os.environ]))
open("made.txt", "w").write("made")
"""
    for state in play(code, num=4, collect=["made.txt"]):
        assert state["error"] is None, state["error"]
        answer, found = state["program"]["stdout"].splitlines()
        assert answer == state["answer"]
        assert json.loads(found) == [[], "/sandbox", False]
        assert state["program"]["files"] == {"made.txt": "made"}
        assert state["sandbox_level"]["name"] == "bubblewrap"
        assert state["sandbox_level"]["missing"] == []


def test_the_answer_is_sampled_no_longer_when_the_program_hangs_up():
    async def run():
        client = ScriptedClient(said, token_delay_s=60.0)
        env = rt.ProgramEnv(
            COMMAND,
            files=agent(
                "import threading\n"
                "asking = threading.Thread(target=ask, args=(sys.argv[1],), daemon=True)\n"
                "asking.start(); time.sleep(2); os._exit(0)"
            ),
            dataset=rows(1),
            rubric=rt.Rubric([one]),
            sandbox="local",
        )
        async with env:
            return (await env.evaluate(client)).state

    (state,) = asyncio.run(run())
    assert state["program"]["exit_status"] == 0
    assert (state["error"], len(state["trajectory"])) == (None, 0)


def test_limits_of_the_sandbox_are_scored():
    (state,) = play(
        "ask('q'); bytearray(2**30); print('unreachable')",
        sandbox_limits=Limits(wall_s=60, memory_bytes=2**28),
    )
    assert (state["error"], state["reward"]) == (None, 1.0)
    assert state["program"]["exit_status"] == 1  # MemoryError
    (state,) = play("ask('q')\nwhile True: pass", sandbox_limits=Limits(wall_s=60, cpu_s=1))
    assert (state["program"]["ended"], state["truncation_reason"]) == ("cpu", "env")
    assert state["reward"] == 1.0
    (state,) = play("ask('q'); time.sleep(1000)", time_limit_s=3)
    assert (state["program"]["ended"], state["truncation_reason"]) == ("time", "time_limit")


def test_backends_that_cannot_do_it_refuse_by_name(monkeypatch, tmp_path):
    docker = tmp_path / "docker"
    docker.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot run in DockerBackend"):
        rt.ProgramEnv(COMMAND, dataset=rows(1), sandbox="docker")
    env = rt.ProgramEnv(
        COMMAND,
        files=agent(""),
        dataset=rows(1),
        sandbox=LocalBackend("landlock", allow_weaker=True),
    )
    (state,) = env.evaluate_sync(ScriptedClient(said)).state
    assert state["error"].type == "SandboxUnavailable"
    assert "cannot let code reach one socket and nothing else" in state["error"].message
