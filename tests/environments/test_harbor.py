"""`HarborEnv`: ten tasks, their oracles, wrong solutions, cheats, and what is refused."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from harbor_kit import TASKS, write_tasks

import rolltree as rt
from rolltree.environments.check import check_environment
from rolltree.sandbox import Limits, LocalBackend, RunResult
from rolltree.sandbox.harbor_tasks import read_task, read_tasks
from rolltree.sandbox.harbor_worlds import verdict_on
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError, SandboxUnavailable


@pytest.fixture(scope="module")
def sandboxed():
    async def attempt():
        await (await LocalBackend("bubblewrap").create()).close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def call(command):
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def typing(*commands):
    """Return a model that types these commands, one a turn, and then says that it is done."""

    def reply(messages):
        turn = sum(message["role"] == "assistant" for message in messages)
        return call(commands[turn]) if turn < len(commands) else "done"

    return ScriptedClient(reply)


def play(env, *commands):
    (state,) = env.evaluate_sync(typing(*commands)).state
    return state


def answers(state):
    return [m["content"] for m in state["completion"] if m["role"] == "tool"]


def only(tasks, name, **settings):
    return rt.HarborEnv(tasks / name, world="sandbox", **settings)


def test_every_oracle_earns_its_reward(tasks, sandboxed):
    results = rt.HarborEnv(tasks, world="sandbox").oracle_sync()
    assert [(r.task, r.reward, r.problem) for r in results] == [
        (f"kit/{name}", 1.0, None) for name in sorted(TASKS)
    ]


def test_no_wrong_solution_earns_one(tasks, sandboxed):
    """The wrong scripts are typed by a model: the whole way of a rollout."""
    env = rt.HarborEnv(tasks, world="sandbox")
    wrong = {made.instruction: made.wrong for made in TASKS.values()}

    def reply(messages):
        if messages[-1]["role"] == "tool":
            return "done"
        return call(wrong[messages[-1]["content"].strip()])

    states = env.evaluate_sync(ScriptedClient(reply)).state
    assert {s["info"]["harbor_task"]: (s["error"], s["reward"]) for s in states} == {
        f"kit/{name}": (None, 0.0) for name in TASKS
    }
    assert all(s["metrics"]["judged"] == 1 for s in states)


def test_a_model_works_in_the_task_folder_and_files_stay(tasks, sandboxed):
    state = play(
        only(tasks, "sum"), "pwd; cat numbers.txt; ls /tests /solution", "echo 60 > sum.txt"
    )
    assert answers(state)[0].split() == ["/app", "10", "20", "30", "/solution:", "/tests:"] or (
        answers(state)[0].split() == ["/app", "10", "20", "30", "/tests:", "/solution:"]
    )
    assert state["reward"] == 1.0
    assert state["metrics"]["judged"] == 1.0
    assert state["harbor"]["rewards"] == {"reward": 1.0}


def test_partial_rewards_of_a_json_file(tasks, sandboxed):
    state = play(only(tasks, "partial"), "echo a > a; echo b > b")
    assert state["reward"] == pytest.approx(2 / 3)
    assert state["harbor"]["rewards"] == {"reward": pytest.approx(2 / 3), "files": 2.0}
    assert play(only(tasks, "partial", reward_key="files"), "echo a > a")["reward"] == 1.0
    with pytest.raises(ConfigError, match="reward_key"):
        only(tasks, "partial").harbor.reward_in({"speed": 1.0, "size": 2.0})


CHEATS = {
    "a reward of its own": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a reward that is read first": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "a link in the reward's place": "rm -r /sandbox/logs; ln -s /app /sandbox/logs; "
    "mkdir /app/verifier; echo '{\"reward\": 1}' > /app/verifier/reward.json",
    "folders that nobody may write": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; "
    "chmod 0 /logs/verifier /logs /tests",
    "tests of its own": "echo 'exit 0' > /tests/check.py; chmod 0400 /tests/check.py",
    "a process that waits for the tests": "(while :; do echo 1 > /logs/verifier/reward.txt; "
    "sleep 0.01; done) & sleep 0.1",
    "a module of its own in the home folder": "mkdir -p ~/.local/lib; d=$(python3 -m site "
    "--user-site); mkdir -p $d; echo 'import os; os._exit(0)' > $d/usercustomize.py",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_an_agent_cannot_write_its_own_reward(cheat, tasks, sandboxed):
    state = play(only(tasks, "hello"), CHEATS[cheat])
    assert state["error"] is None
    assert state["reward"] == 0.0, state["harbor"]


def test_tests_that_write_no_reward_are_worth_nothing_and_seen(tasks, tmp_path, sandboxed):
    task = tmp_path / "mute"
    shutil.copytree(tasks / "hello", task)
    (task / "tests/test.sh").write_text("#!/bin/bash\necho what I saw; exit 3\n")
    state = play(rt.HarborEnv(task, world="sandbox"), "true")
    assert (state["reward"], state["metrics"]["judged"]) == (0.0, 0.0)
    assert state["harbor"]["problem"] == "the tests wrote no reward"
    assert "what I saw" in state["harbor"]["output"]
    (task / "tests/test.sh").write_text("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n")
    state = play(rt.HarborEnv(task, world="sandbox"), "true")
    assert "not a finite number" in state["harbor"]["problem"]


class Left:
    """The world of an agent whose code made the tests leave this reward.json."""

    def __init__(self, data):
        self.data = data

    async def end_agent(self):
        return None

    async def add(self, folder, name):
        pass

    async def run(self, script, **settings):
        return RunResult("", "", "exit", 0)

    async def read(self, path):
        return self.data if path.endswith(".json") else None


SPOILED = {
    "an integer that no float holds": b'{"reward": 1%s}' % (b"0" * 400),
    "brackets without end": b"[" * 60_000,
    "a list": b"[1]",
    "not UTF-8": b'{"reward": 1, "\xff": 2}',
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_spoiled_reward_is_worth_nothing_and_no_failure(name, tasks):
    verdict = await verdict_on(Left(SPOILED[name]), read_task(tasks / "hello"))
    assert verdict.rewards == {}
    assert "is not a reward" in verdict.problem
    assert len(verdict.problem) < 300


async def test_a_reward_json_without_the_reward_is_worth_nothing_and_no_failure(tasks):
    left = Left(b'{"speed": 1, "size": 2}')
    found = await only(tasks, "hello").harbor.judge(left, read_task(tasks / "hello"))
    assert found["reward"] == 0.0
    assert "Pass reward_key" in found["problem"]


def test_an_agent_that_leaves_no_space_for_the_tests_is_worth_nothing(tasks, sandboxed):
    limits = Limits(disk_bytes=4 * 2**20)
    state = play(only(tasks, "hello", limits=limits), "echo hello > hello.txt; cat /dev/zero > all")
    assert (state["error"], state["reward"], state["metrics"]["judged"]) == (None, 0.0, 0.0)
    assert "does not fit" in state["harbor"]["problem"]


def test_the_task_bounds_the_agents_time(tasks, tmp_path, sandboxed):
    task = tmp_path / "slow"
    shutil.copytree(tasks / "hello", task)
    toml = (task / "task.toml").read_text()
    (task / "task.toml").write_text(toml.replace("60.0", "0.5", 1))
    state = play(rt.HarborEnv(task, world="sandbox"), "echo hello > hello.txt; sleep 60")
    assert state["truncation_reason"] == "time_limit"
    assert "time limit" in answers(state)[0]
    # What it had left is judged all the same.
    assert state["reward"] == 1.0


def test_env_check_plays_the_oracle(tasks, tmp_path, sandboxed):
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("hello", "sum"):
        shutil.copytree(tasks / name, folder / name)
    (folder / "sum/solution/solve.sh").write_text("#!/bin/bash\necho 1 > sum.txt\n")
    env = rt.HarborEnv(folder, world="sandbox")
    (found,) = asyncio.run(env.check_findings())
    assert found[0] == "oracle-fails"
    assert "kit/sum" in found[1]


@pytest.mark.long
def test_the_whole_check_of_a_task(tasks, sandboxed):
    report = check_environment(lambda: only(tasks, "hello"), num_examples=1)
    assert report.is_sound, report


# What is refused

DOCKER = {
    "RUN apt-get install -y vim": "line 3: RUN",
    "COPY --from=builder /x /y": "COPY --from",
    "ENV A=$B": "a variable",
    # What Docker may refuse, too.
    "ENV": "ENV without a value",
    "ENV A": "ENV without a value: A",
    "ENV A=1 B": "ENV without a value: A=1 B",
    "ENV A='x": "cannot read: A='x (No closing quotation)",
    "COPY 'a b": "cannot read: 'a b",
    'COPY ["a" b': 'cannot read: ["a" b',
    'COPY ["a", 3]': 'cannot read: ["a", 3]',
    f"COPY {'[' * 20_000}": "cannot read: [[",
}


@pytest.mark.parametrize("line", DOCKER, ids=lambda line: line[:20])
def test_what_a_dockerfile_needs_docker_for(line, tasks, tmp_path):
    task = tmp_path / "built"
    shutil.copytree(tasks / "hello", task)
    (task / "environment/Dockerfile").write_text(f"FROM ubuntu:24.04\nWORKDIR /app\n{line}\n")
    (need,) = read_task(task).needs_docker
    assert DOCKER[line] in need
    with pytest.raises(ConfigError, match="kit/hello: environment/Dockerfile, line 3"):
        rt.HarborEnv(task, world="sandbox")


def test_auto_without_docker_names_the_tasks_that_need_it(tasks, tmp_path, monkeypatch):
    task = tmp_path / "big"
    shutil.copytree(tasks / "hello", task)
    (task / "environment/Dockerfile").write_text("FROM nvidia/cuda:12\nWORKDIR /app\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    env = rt.HarborEnv(task)
    with pytest.raises(ConfigError, match=r"there is no docker client.*\n.*FROM nvidia/cuda:12"):
        env.oracle_sync()


REFUSED = {
    '[environment]\nos = "windows"\n': r"\[environment\] os",
    "[environment]\ngpus = 1\n": r"\[environment\] gpus",
    '[environment]\nnetwork_mode = "allowlist"\n': "allowlist",
    '[[steps]]\nname = "one"\n': r"\[\[steps\]\]",
    '[verifier]\nenvironment_mode = "separate"\n': "environment_mode",
    "[agent]\ntimeout_secs = 3\n": r"timeout_secs.*did you mean 'timeout_sec'",
    "[agent\n": "cannot be read",
    "# \xff\n": "cannot be read",
}


@pytest.mark.parametrize("part", ["instruction.md", "environment/Dockerfile"])
def test_a_text_that_is_not_utf8_is_refused_by_name(part, tasks, tmp_path):
    task = shutil.copytree(tasks / "hello", tmp_path / "asks")
    (task / part).write_bytes(b"FROM python:3.12\nRUN echo \xff\n")
    with pytest.raises(ConfigError, match=rf"(?s){part} cannot be read .*UTF-8"):
        read_task(task)


@pytest.mark.parametrize(
    ("part", "said"),
    [("task.toml", "cannot be read .*a named pipe"), ("instruction.md", "has no instruction.md")],
)
def test_a_pipe_in_a_task_is_refused(part, said, tasks, tmp_path):
    task = shutil.copytree(tasks / "hello", tmp_path / "waits")
    (task / part).unlink()
    os.mkfifo(task / part)
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        read_task(task)


@pytest.mark.parametrize("toml", REFUSED)
def test_what_is_refused_by_name(toml, tasks, tmp_path):
    task = tmp_path / "asks"
    shutil.copytree(tasks / "hello", task)
    (task / "task.toml").write_text(toml, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"(?is){REFUSED[toml]}"):
        read_task(task)


def test_folders_without_tasks_and_parts_that_are_missing(tasks, tmp_path):
    with pytest.raises(ConfigError, match="no Harbor task"):
        read_tasks(tmp_path)
    shutil.copytree(tasks / "hello", tmp_path / "one")
    (tmp_path / "one/tests/test.sh").unlink()
    with pytest.raises(ConfigError, match=r"no tests/test\.sh"):
        read_tasks(tmp_path)
    shutil.copytree(tasks / "hello", tmp_path / "one", dirs_exist_ok=True)
    shutil.copytree(tasks / "hello", tmp_path / "two")
    with pytest.raises(ConfigError, match="both named 'kit/hello'"):
        read_tasks(tmp_path)
    with pytest.raises(ConfigError, match="in tasks and in eval_tasks"):
        rt.HarborEnv(tmp_path / "one", tmp_path / "two")


def test_a_copy_of_a_file_that_is_missing(tasks, tmp_path):
    task = tmp_path / "lacks"
    shutil.copytree(tasks / "hello", task)
    (task / "environment/Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\nCOPY a.csv .\n")
    with pytest.raises(ConfigError, match=r"copies 'a\.csv', and no file there has that name"):
        read_task(task)


def test_copies_of_a_dockerfile(tasks, tmp_path):
    task = tmp_path / "copies"
    shutil.copytree(tasks / "hello", task)
    for name in ("a.csv", "b.csv", "src/c.py"):
        path = task / "environment" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (task / "environment/Dockerfile").write_text(
        "FROM python:3.12-slim\nENV A=1 B='two words'\nWORKDIR /work/here\n"
        'COPY *.csv \\\n  data/\nCOPY src /opt/src\nCOPY a.csv one.csv\nCMD ["bash"]\n'
    )
    world = read_task(task).world
    assert world.workdir == "/work/here"
    assert world.env == {"A": "1", "B": "two words"}
    assert {path: file.name for path, file in world.files} == {
        "/work/here/data/a.csv": "a.csv",
        "/work/here/data/b.csv": "b.csv",
        "/opt/src/c.py": "c.py",
        "/work/here/one.csv": "a.csv",
    }
    assert world.top_folders == ("work", "opt")


# Harbor itself


def test_harbors_own_models_read_the_tasks(tasks):
    """It needs Python 3.12 or later and harbor: `pip install harbor` in such an environment."""
    models = pytest.importorskip("harbor.models.task.task", reason="harbor is not installed")
    ours = {task.name: task for task in read_tasks(tasks)}
    for folder in sorted(tasks.iterdir()):
        assert models.Task.is_valid_dir(folder)
        theirs = models.Task(folder)
        mine = ours[theirs.name]
        assert mine.instruction == theirs.instruction
        assert mine.agent_limit_s == theirs.config.agent.timeout_sec
        assert mine.verifier_limit_s == theirs.config.verifier.timeout_sec
        assert mine.env == theirs.config.environment.env
        assert mine.solution_env == theirs.config.solution.env


def test_keys_that_harbor_knows_are_known(tasks):
    """Those of harbor 0.26's models, so that a task of its own is never called misspelled."""
    models = pytest.importorskip("harbor.models.task.config", reason="harbor is not installed")
    from rolltree.sandbox import harbor_tasks as ours

    pairs = {
        ours._File: models.TaskConfig,
        ours._Agent: models.AgentConfig,
        ours._Verifier: models.VerifierConfig,
        ours._Environment: models.EnvironmentConfig,
        ours._Solution: models.SolutionConfig,
    }
    for mine, theirs in pairs.items():
        assert set(theirs.model_fields) <= set(mine.__struct_fields__)


def test_the_kit_is_ten_tasks():
    assert len(TASKS) == 10
    assert Path(__file__).with_name("harbor_kit.py").is_file()
