"""`HarborProgramEnv`: programs that solve Harbor tasks in the task's own world."""

import asyncio
import contextlib
import sys
from pathlib import Path

import openai
import pytest
from program_kit import ASK

import rolltree as rt
from rolltree.sandbox import LocalBackend
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError, SandboxError, SandboxUnavailable

sys.path.append(str(Path(__file__).parents[1] / "environments"))
from harbor_kit import TASKS, write_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    async def attempt():
        await (await LocalBackend("bubblewrap").create()).close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    return write_tasks(tmp_path_factory.mktemp("tasks"))


async def asked(session, text):
    """Return what the session's model says to a text."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="default", messages=messages)
    return reply.choices[0].message.content


def model(messages):
    """Answer a task with the script that solves it."""
    return next(m.solve for m in TASKS.values() if m.instruction in messages[-1]["content"])


def test_a_command_works_in_the_tasks_world_and_reaches_its_model(tasks):
    code = ASK + (
        "script = ask(sys.argv[1])\n"
        "import subprocess\n"
        "subprocess.run(['sh', '-c', script], check=True)\n"
        "print(os.getcwd(), os.environ['GREETING'], os.path.exists('/tests/test.sh'))\n"
    )
    env = rt.HarborProgramEnv(
        ["python3", "-I", "-S", "{folder}/agent.py", "{question}"],
        tasks / "executable",
        files={"agent.py": code.replace("{", "{{").replace("}", "}}")},
    )
    (state,) = env.evaluate_sync(ScriptedClient(model)).state
    assert state["error"] is None
    assert state["program"]["stdout"].split() == ["/sandbox/app", "hi", "False"]
    assert (state["reward"], state["harbor"]["rewards"]) == (1.0, {"reward": 1.0})
    assert len(state["trajectory"]) == 1
    assert env.oracle_sync()[0].reward == 1.0


def test_a_function_works_through_its_shell(tasks):
    async def agent(session, state):
        ran = await env.shell_of(state).run(await asked(session, state["question"]))
        return ran.exit_code

    env = rt.HarborProgramEnv(agent, [tasks / "sum", tasks / "sort"], world="sandbox")
    states = env.evaluate_sync(ScriptedClient(model)).state
    assert [(s["error"], s["reward"], s["program"]["returned"]) for s in states] == [
        (None, 1.0, 0),
        (None, 1.0, 0),
    ]


def test_a_function_that_is_late_cannot_touch_what_is_judged(tasks):
    tried = []

    async def agent(session, state):
        await asked(session, "q")
        shell = env.shell_of(state)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        while not tried:
            try:
                await shell.run("true")
                await asyncio.sleep(0.1)
            except SandboxError as error:
                tried.append(error)
        await shell.run("echo hello > hello.txt")

    env = rt.HarborProgramEnv(agent, tasks / "hello", world="sandbox", time_limit_s=1.0)
    (state,) = env.evaluate_sync(ScriptedClient(["a"])).state
    assert (state["error"], state["reward"]) == (None, 0.0)
    assert state["truncation_reason"] == "time_limit"
    with pytest.raises(SandboxError, match="no world"):
        env.shell_of(state)


def test_what_cannot_work(tasks):
    with pytest.raises(ConfigError, match="cannot reach its model from a container"):
        rt.HarborProgramEnv(["true"], tasks, world="docker")
