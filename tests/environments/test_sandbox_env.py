"""`SandboxEnv` and `PythonEnv`: one sandbox per rollout, gone whatever happens."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from env_scripts import ScriptedModel, a_request

import rolltree as rt
from rolltree.environments import cleanup
from rolltree.rollouts import RolloutEngine
from rolltree.sandbox import Limits, LocalBackend, Sandbox, SandboxLevel
from rolltree.sandbox.sandbox_env import PythonEnv, SandboxEnv
from rolltree.store import Run
from rolltree.values.errors import SandboxError, SandboxUnavailable

ROWS = [{"question": "what is six times seven?", "answer": "42"}]


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answers(state):
    return [m["content"] for m in state["completion"] if m["role"] == "tool"]


@pytest.fixture
def backend(tmp_path):
    return LocalBackend(base=tmp_path)


def nothing_left(env, base):
    assert env._sandboxes == {}
    assert getattr(env, "_python_sessions", {}) == {}
    assert list(Path(base).iterdir()) == []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(base).encode() not in path.read_bytes()
        except OSError:
            continue
    return True


async def play(env, *replies):
    request = a_request(env)
    (state,) = await env.run_request(request, ScriptedModel(*replies))
    return state


async def test_shell_and_files(backend, tmp_path):
    env = SandboxEnv(sandbox=backend, dataset=ROWS)
    state = await play(
        env,
        call("bash", command="echo kept > note; cat /etc/passwd"),
        call("bash", command="cat note"),
        "42",
    )
    first, second = answers(state)
    assert "root:" not in first
    assert second == "kept"
    assert state["error"] is None
    assert state["sandbox_level"]["name"] in ("bubblewrap", "landlock")
    assert state["sandbox_level"]["missing"] == []
    name = state["sandbox_level"]["name"]
    assert [s["extras"]["sandbox_level"] for s in state["trajectory"]] == [name] * 3
    assert nothing_left(env, tmp_path)
    schema = env.oai_tools[0]["function"]
    assert schema["name"] == "bash"
    assert list(schema["parameters"]["properties"]) == ["command"]


async def test_python_with_and_without_memory(backend, tmp_path):
    code = [call("python", code="x = 6"), call("python", code="print(x * 7)"), "42"]
    stateful = PythonEnv(sandbox=backend, dataset=ROWS)
    assert answers(await play(stateful, *code)) == ["(no output)", "42"]
    per_call = PythonEnv(sandbox=backend, dataset=ROWS, stateful=False)
    first, second = answers(await play(per_call, *code))
    assert first == "(no output)"
    assert "NameError" in second
    assert "Nothing is remembered" in per_call.oai_tools[0]["function"]["description"]
    assert nothing_left(stateful, tmp_path)
    assert nothing_left(per_call, tmp_path)


async def test_a_limit_is_an_answer(backend, tmp_path):
    env = PythonEnv(sandbox=backend, dataset=ROWS, limits=Limits(wall_s=1.0))
    state = await play(env, call("python", code="while True: pass"), "42")
    assert answers(state) == [
        "[killed: the time limit is over]\n[Python was restarted: variables are gone]"
    ]
    assert state["error"] is None
    assert nothing_left(env, tmp_path)


async def test_rollouts_do_not_share(backend, tmp_path):
    env = PythonEnv(sandbox=backend, dataset=ROWS)
    write = call("python", code="import os; print(os.listdir('.')); open('mine', 'w').close()")
    states = await asyncio.gather(*(play(env, write, "42") for _ in range(3)))
    assert [answers(state) for state in states] == [["[]"]] * 3
    assert len({state["sandbox_id"] for state in states}) == 3
    assert nothing_left(env, tmp_path)


async def test_files_can_be_seen_in_a_cleanup_of_ones_own(backend):
    class Graded(SandboxEnv):
        @cleanup
        async def look(self, state):
            state["made"] = await self.sandbox_of(state).read_file("out")

    env = Graded(sandbox=backend, dataset=ROWS)
    state = await play(env, call("bash", command="printf 42 > out"), "done")
    assert state["made"] == b"42"
    with pytest.raises(SandboxError, match="no open sandbox"):
        env.sandbox_of(state)


async def test_cancellation_leaves_nothing(backend, tmp_path):
    env = PythonEnv(sandbox=backend, dataset=ROWS)
    started = asyncio.Event()
    forever = call("python", code="import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(60)")

    def reply(messages):
        started.set()
        return forever

    tasks = asyncio.all_tasks()
    work = asyncio.create_task(play(env, reply))
    await started.wait()
    await asyncio.sleep(0.5)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert nothing_left(env, tmp_path)
    assert asyncio.all_tasks() == tasks


async def test_a_time_limit_leaves_nothing(backend, tmp_path):
    env = SandboxEnv(sandbox=backend, dataset=ROWS)
    engine = RolloutEngine(env, ScriptedModel(call("bash", command="sleep 60")), time_limit_s=2.0)
    (result,) = await engine.run_all([a_request(env)])
    assert result.error is not None
    assert result.error.type == "RolloutTimeout"
    assert nothing_left(env, tmp_path)


async def test_teardown_closes_what_no_cleanup_reached(backend, tmp_path):
    env = PythonEnv(sandbox=backend, dataset=ROWS)
    state = await env.setup_state(await env.init_state(env.example("eval", 0)))
    assert len(os.listdir(tmp_path)) == 1
    assert (await env.python("1 + 1", env.sandbox_of(state))) == "2"
    await env.aclose()
    env._python_sessions.clear()
    assert nothing_left(env, tmp_path)


async def test_a_teardown_says_which_sandboxes_it_could_not_close(caplog):
    class Stuck:
        async def close(self):
            raise SandboxError("the folder is busy")

    env = PythonEnv(sandbox=Broken(False), dataset=ROWS)
    other = Broken(False)
    env._sandboxes |= {"one": Stuck(), "two": other}
    await env.aclose()
    assert other.closed == 1
    assert "the folder is busy" in caplog.text


class Broken:
    """A backend whose sandboxes fail: at once, or at the first run."""

    def __init__(self, at_once):
        self.at_once, self.closed = at_once, 0
        self.id, self.level = "broken", SandboxLevel("none")

    async def create(self, *, limits=None):
        if self.at_once:
            raise SandboxUnavailable("no isolation here")
        return self

    async def run(self, command, *, stdin="", limits=None):
        raise SandboxError("the sandbox broke")

    async def close(self):
        self.closed += 1


async def test_a_sandbox_that_fails_is_a_failed_rollout():
    env = SandboxEnv(sandbox=Broken(at_once=True), dataset=ROWS)
    state = await play(env, "42")
    assert (state["error"].type, state["error"].phase) == ("SandboxUnavailable", "setup")
    broken = Broken(at_once=False)
    env = SandboxEnv(sandbox=broken, dataset=ROWS)
    state = await play(env, call("bash", command="ls"), "42")
    assert (state["error"].type, state["error"].phase) == ("SandboxError", "environment")
    assert state["reward"] is None
    assert broken.closed == 1


async def test_what_a_model_can_cause_is_an_answer_and_no_failed_rollout(backend):
    """These were SandboxErrors: reward None, so a policy could leave the baseline by them."""

    async def show(path: str, sandbox: Sandbox) -> str:
        """Show a file."""
        return (await sandbox.read_file(path)).decode()

    env = SandboxEnv(sandbox=backend, dataset=ROWS)
    env.add_sandbox_tool(show)
    state = await play(
        env,
        call("bash", command="echo a\0b"),
        call("bash", command="echo " + "x" * 200_000),
        call("show", path="../../etc/passwd"),
        call("show", path="none"),
        "42",
    )
    assert state["error"] is None
    told = answers(state)
    assert "NUL" in told[0]
    assert "too long" in told[1]
    assert "not a path inside" in told[2]
    assert "no file 'none'" in told[3]


@pytest.mark.parametrize(
    "act", ["chmod 0 .", "mkdir .program-2.py .program-3.py", "touch \"$(printf '\\377')\""]
)
@pytest.mark.parametrize("level", ["auto", "landlock", "rlimits"])
async def test_what_code_does_to_its_sandbox_is_scored(level, act, tmp_path):
    """`chmod 0 .` failed the next call, so the rollout had no reward, and was played again."""
    tmp_path.chmod(0o755)
    made = LocalBackend(level, base=tmp_path, allow_weaker=True)
    env = PythonEnv(
        sandbox=made, dataset=ROWS, shell=True, stateful=False, rubric=rt.Rubric([zero])
    )
    state = await play(
        env,
        call("bash", command=act),
        call("bash", command="echo on"),
        call("python", code="1"),
        "0",
    )
    assert answers(state)[1] == "on"
    assert (state["error"], state["reward"]) == (None, 0.0)
    assert nothing_left(env, tmp_path)


def zero(completion):
    return 0.0


async def test_tools_of_ones_own_run_outside(backend):
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    env = SandboxEnv(sandbox=backend, dataset=ROWS, tools=[add], shell=False)
    state = await play(env, call("add", a=1, b=2), call("bash", command="ls"), "42")
    assert answers(state)[0] == "3"
    assert "no tool named 'bash'" in answers(state)[1]


async def test_the_level_is_in_the_store(backend, tmp_path):
    from rolltree.rollouts.decode import decode_results
    from rolltree.rollouts.record import encode_result

    env = PythonEnv(sandbox=backend, dataset=ROWS)
    engine = RolloutEngine(env, ScriptedModel(call("python", code="1"), "42"))
    (result,) = await engine.run_all([a_request(env)])
    with Run.create(tmp_path / "run", config={}, kind="eval") as run:
        run.add_rollouts(encode_result(result))
        (again,) = decode_results(run.rollouts())
    assert again.states[0]["sandbox_level"] == result.states[0]["sandbox_level"]
    assert again.states[0]["trajectory"][0]["extras"]["sandbox_level"] in (
        "bubblewrap",
        "landlock",
    )
