"""Harbor tasks in Docker, against a stand-in for `docker` that runs commands in bubblewrap."""

import asyncio
import json
import sys

import pytest
from harbor_kit import write_tasks
from test_harbor import play

import rolltree as rt
from rolltree.sandbox import LocalBackend
from rolltree.sandbox.harbor_docker import docker_reason
from rolltree.sandbox.machine import this_machine
from rolltree.values.errors import ConfigError, SandboxUnavailable

STAND_IN = """#!{python} -I
import json, os, shutil, sys, tarfile
from pathlib import Path

state, words = Path({state!r}), sys.argv[1:]
with open(state / "log", "a") as log:
    log.write(json.dumps(words) + "\\n")
root = lambda name: state / name


def values(option):
    return [words[i + 1] for i, word in enumerate(words) if word == option]


if words[0] == "info":
    print("27.0")
elif words[:2] == ["image", "inspect"]:
    sys.exit(not (state / "built").exists())
elif words[0] == "build":
    (state / "built").touch()
elif words[0] == "run":
    folder = root(values("--name")[0])
    for name in ("app", "usr", "proc", "dev"):
        (folder / name).mkdir(parents=True)
elif words[0] == "exec":
    at = words.index("sh")
    line = [{bwrap!r}, "--bind", str(root(words[at - 1])), "/", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        line += ["--symlink", f"usr/{{name}}", f"/{{name}}"]
    line += ["--dev", "/dev", "--chdir", (values("--workdir") or ["/app"])[0], "--clearenv"]
    line += ["--setenv", "PATH", "/usr/bin"]
    for pair in values("--env"):
        line += ["--setenv", *pair.split("=", 1)]
    # In its own place: a client that is killed leaves nothing that holds its output open.
    os.execv(line[0], [*line, "--die-with-parent", "--unshare-pid", *words[at:]])
elif words[0] == "cp" and words[-1] == "-":
    name, _, path = words[1].partition(":")
    file = root(name) / path.lstrip("/")
    if not os.path.lexists(file):
        sys.exit("no such file")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        archive.add(file, arcname=file.name)
elif words[0] == "cp":
    name, _, path = words[2].partition(":")
    shutil.copytree(words[1], root(name) / path.lstrip("/"), dirs_exist_ok=True)
elif words[0] == "rm":
    shutil.rmtree(root(words[-1]), ignore_errors=True)
elif words[0] != "restart":
    sys.exit("unknown")
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    bwrap = this_machine().bwrap

    async def attempt():
        await (await LocalBackend("bubblewrap").create()).close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    programs, state = tmp_path / "bin", tmp_path / "state"
    programs.mkdir()
    state.mkdir()
    program = programs / "docker"
    text = STAND_IN.format(python=sys.executable, state=str(state), bwrap=bwrap)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def calls():
        return [json.loads(line) for line in (state / "log").read_text().splitlines()]

    return calls, state


@pytest.fixture
def task(tmp_path):
    folder = write_tasks(tmp_path / "tasks", ["hello"]) / "hello"
    (folder / "environment/Dockerfile").write_text("FROM special\nRUN make\nWORKDIR /app\n")
    (folder / "task.toml").write_text(
        '[task]\nname = "kit/hello"\n[environment]\nnetwork_mode = "no-network"\ncpus = 2\n'
        'memory_mb = 256\n[environment.env]\nA = "b c"\n'
        '[agent]\nuser = "agent"\ntimeout_sec = 60.0\n'
    )
    (folder / "tests/test.sh").write_text(
        '#!/bin/sh\n[ "$(cat /app/hello.txt)" = hello ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n"
    )
    return folder


def test_a_task_that_needs_an_image_is_played_in_a_container(docker, task):
    calls, state = docker
    env = rt.HarborEnv(task)
    assert env.oracle_sync()[0].reward == 1.0
    played = play(env, "echo $A; echo hello > hello.txt")
    assert (played["error"], played["reward"]) == (None, 1.0)
    assert played["completion"][1]["content"] == "b c"
    assert played["sandbox_level"]["name"] == "docker"
    assert play(env, "echo 1 > /logs/verifier/reward.txt")["reward"] == 0.0
    # Containers are gone, and the image was built once.
    assert sorted(path.name for path in state.iterdir()) == ["built", "log"]
    assert [words[0] for words in calls()].count("build") == 1
    started = next(words for words in calls() if words[0] == "run")
    for option, value in (("--network", "none"), ("--cpus", "2.0"), ("--memory", str(2**28))):
        assert started[started.index(option) + 1] == value
    agents = [words for words in calls() if words[0] == "exec" and "--user" in words]
    assert {words[words.index("--user") + 1] for words in agents} == {"0", "agent"}
    # What the agent left running ends before the tests come.
    order = [words[0] for words in calls()]
    assert order.index("restart") < len(order) - 1


def test_a_command_that_takes_too_long_ends_with_its_processes(docker, task):
    calls, _ = docker
    state = play(rt.HarborEnv(task, command_limit_s=0.5), "sleep 600")
    assert "time limit" in state["completion"][1]["content"]
    assert [words[0] for words in calls()].count("restart") == 2


def test_an_image_that_cannot_be_built_fails_the_rollout(docker, task):
    _, state = docker
    program = state.parent / "bin" / "docker"
    program.write_text(program.read_text().replace('(state / "built").touch()', "sys.exit('no')"))
    played = play(rt.HarborEnv(task), "true")
    assert played["error"].type == "SandboxUnavailable"
    assert "cannot be built" in played["error"].message


async def test_why_there_is_no_docker(docker, task, monkeypatch):
    assert await docker_reason() == ""
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no docker client" in await docker_reason()
    with pytest.raises(ConfigError, match="no docker client"):
        await rt.HarborEnv(task, world="docker").harbor.settle()
