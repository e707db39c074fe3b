"""Programs in a sandbox: they reach the gateway and nothing else, or are refused by name."""

import asyncio
import json

import pytest
from program_kit import ASK, one, play_hurried, rows, said

import rolltree as rt
from rolltree.sandbox import Limits, LocalBackend
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError, SandboxUnavailable

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


class Slow(ScriptedClient):
    """Never answers "slow", and says of it whether it was asked, and whether nobody waits."""

    def __init__(self):
        super().__init__(lambda messages: self.state)
        self.state = "unasked"

    async def respond(self, call, memory):
        if call.prompt[-1]["content"] == "slow":
            self.state = "asked"
            try:
                await asyncio.Event().wait()
            finally:
                self.state = "left"
        return await super().respond(call, memory)


def test_a_call_ends_when_the_program_hangs_up():
    code = """
import threading
connected = socket.create_connection
kept = []
def connect(address):
    kept.append(connected(address))
    return kept[-1]
socket.create_connection = connect
threading.Thread(target=ask, args=("slow",), daemon=True).start()
def wait_for(state):
    # Each time another question: the same one, from a client that does not count its attempts,
    # could be a repetition.
    while ask(f"state {time.time()}") != state:
        time.sleep(0.01)
while not kept:
    time.sleep(0.01)
wait_for("asked")
kept[0].shutdown(socket.SHUT_RDWR)
wait_for("left")
print("seen", flush=True)
os._exit(0)
"""
    env = rt.ProgramEnv(
        COMMAND, files=agent(code), dataset=rows(1), rubric=rt.Rubric([one]), sandbox="local"
    )
    (state,) = env.evaluate_sync(Slow()).state
    assert (state["error"], state["program"]["stdout"]) == (None, "seen\n")


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
    state = play_hurried(COMMAND, files=agent("ask('q'); time.sleep(1000)"), sandbox="local")
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
