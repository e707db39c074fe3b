"""Programs that are forked from a process with their modules: as if each had been started."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from program_kit import PYTHON, one, play, rows, said, script, wait_for_death

import rolltree as rt
from rolltree.sandbox.warm import split_command
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError

LOOK = """
import random
print(ask(sys.argv[1]), sys.argv[1:], sys.stdin.read(), os.getcwd() == os.environ["HOME"])
print(globals().get("__file__"))
print(sorted(os.environ), __name__, sys.path[:1] if not sys.flags.isolated else [])
open("made.txt", "w").write("text")
print("warned", file=sys.stderr)
sys.exit(3)
"""


def outcome(program, **settings):
    """Return what is stored of a program, without what differs from run to run."""
    (state,) = play(program, **settings)
    assert state["error"] is None
    found = {
        name: re.sub("rolltree-sandbox-[^/]*", "FOLDER", value) if type(value) is str else value
        for name, value in state["program"].items()
    }
    for name in ("wall_s", "cpu_s", "peak_memory_bytes", "folder"):
        del found[name]
    return found


@pytest.fixture
def seen(tmp_path):
    """A module that notes each import, and how to find it."""
    (tmp_path / "seen.py").write_text(
        f"import os\nhere = []\nopen({str(tmp_path / 'imports')!r}, 'a').write('x')\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [
        [*script(LOOK), "{question}", "more"],
        [sys.executable, "-u", "agent.py", "{question}"],
        [sys.executable, "agent.py", "{question}"],
        [sys.executable, "-m", "agent", "{question}"],
        script("ask('question 0')\ndef fail():\n    raise KeyError('k')\nfail()"),
        [sys.executable, "fails.py"],
        script("ask('question 0')\nraise SystemExit('a message')"),
        script("ask('question 0')\nimport atexit\natexit.register(print, 'at exit')"),
        script("ask('question 0')\nos.kill(os.getpid(), 15)"),
        script("import threading\nthreading.Thread(target=ask, args=['question 0']).start()"),
        script("print(ask('question 0'), flush=True)\nwhile True: print('x' * 1000)"),
    ],
    ids=range(11),
)
def test_a_forked_program_is_what_a_started_one_is(program):
    settings = {
        "stdin": "read",
        "collect": ["*.txt"],
        "env": {"OWN": "{question}"},
        "max_output_bytes": 10_000,
        "tail_bytes": 1000,
        "files": {"agent.py": script(LOOK)[-1], "fails.py": script("ask('question 0'); 1 / 0")[-1]},
    }
    cold = outcome(program, **settings)
    assert outcome(program, preload=["json", "socket"], **settings) == cold


def test_modules_are_imported_once_and_shared_by_nobody(seen, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(seen))
    code = """
import random, seen, tempfile
seen.here.append(1)
pipes = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)}
held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")]
assert all(each in pipes for each in held if "pipe" in each or "socket" in each), held
print(ask(sys.argv[1]), len(seen.here), tempfile.gettempdir() == os.getcwd(), random.random())
"""
    program = [sys.executable, "-c", script(code)[-1], "{question}"]
    states = play(program, num=4, preload=["seen", "tempfile"], pass_env=["PYTHONPATH"])
    lines = [state["program"]["stdout"].split() for state in states]
    assert [line[:4] for line in lines] == [["answer", str(n), "1", "True"] for n in range(4)]
    assert len({line[4] for line in lines}) == 4  # random numbers
    assert (seen / "imports").read_text() == "x"


def test_what_a_forked_program_leaves_is_killed_even_if_it_kills_its_supervisors(tmp_path):
    pids = tmp_path / "pids"
    code = f"""
ask("question 0")
supervisor = os.getppid()
guard = int(open(f"/proc/{{supervisor}}/stat").read().rpartition(")")[2].split()[1])
if not os.fork():
    os.setsid()
    open({str(pids)!r}, "a").write(f"{{os.getpid()}} ")
    time.sleep(1000)
open({str(pids)!r}, "a").write(f"{{os.getpid()}} ")
while len(open({str(pids)!r}).read().split()) < 2: time.sleep(0.01)
os.kill(guard, 9)
os.kill(supervisor, 9)
time.sleep(1000)
"""
    (state,) = play(script(code), preload=["json"])
    assert state["program"]["ended"] == "lost"
    wait_for_death(pids.read_text().split())


def test_a_time_limit_ends_a_forked_program_and_a_killed_process_is_started_again(tmp_path):
    env = rt.ProgramEnv(
        [
            *script("ask(sys.argv[1])\nif sys.argv[1] == 'question 0': time.sleep(1000)"),
            "{question}",
        ],
        dataset=rows(2),
        rubric=rt.Rubric([one]),
        preload=["json"],
        time_limit_s=3.0,
    )

    async def run():
        async with env:
            first = await env.evaluate(ScriptedClient(said))
            os.kill(env._zygote._process.pid, 9)
            wait_for_death([env._zygote._process.pid])
            second = await env.evaluate(ScriptedClient(said))
            pid = env._zygote._process.pid
        return first, second, pid

    first, second, pid = asyncio.run(run())
    for results in (first, second):
        assert [state["program"]["ended"] for state in results.state] == ["time", "exit"]
    wait_for_death([pid])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('not here')", "seen cannot be imported .ValueError: not here"),
        ("import sys; sys.exit(3)", "seen cannot be imported .SystemExit: 3"),
        ("import os; os._exit(3)", "it ended with status 3"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=[9]).start()",
            "threads",
        ),
    ],
)
def test_modules_that_cannot_be_preloaded_fail_the_rollout_by_name(
    seen, monkeypatch, text, message
):
    monkeypatch.setenv("PYTHONPATH", str(seen))
    (seen / "seen.py").write_text(text)
    program = [sys.executable, "-c", "pass"]
    (state,) = play(program, preload=["seen"], pass_env=["PYTHONPATH"])
    assert (state["error"].type, state["error"].phase) == ("ConfigError", "setup")
    assert re.search(message, state["error"].message)


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        (["sh", "-c", "true"], {}, "programs in Python"),
        (["python", "-X", "dev", "agent.py"], {}, "programs in Python"),
        (["python"], {}, "programs in Python"),
        (["{question}", "agent.py"], {}, "programs in Python"),
        (["/bin/python{question}", "a.py"], {}, "the same interpreter"),
        (["python", "a.py"], {"sandbox": "local"}, "in a sandbox"),
        (["python", "a.py"], {"preload": "json"}, "a list of modules"),
        (["python", "a.py"], {"preload": [3]}, "a list of modules"),
        (["python", "a.py"], {"preload": [""]}, "a list of modules"),
    ],
)
def test_what_cannot_be_forked_is_refused(program, settings, message):
    with pytest.raises(ConfigError, match=message):
        rt.ProgramEnv(program, dataset=rows(1), **{"preload": ["json"], **settings})


def test_a_command_is_split_where_its_program_begins():
    assert split_command([*PYTHON, "x", "-m"]) == (list(PYTHON[:-1]), ["-c", "x", "-m"])
    assert split_command(["python3.12", "-u", "a.py", "-x"]) == (
        ["python3.12", "-u"],
        ["-f", "a.py", "-x"],
    )
    assert Path(PYTHON[0]).name.startswith("python")
