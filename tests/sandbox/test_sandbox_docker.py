"""The Docker backend against a stand-in for `docker`: arguments and lifecycle, no engine."""

import asyncio
import json
import os
import sys

import pytest

from rolltree.sandbox import DockerBackend, Limits
from rolltree.values.errors import ConfigError, SandboxUnavailable

WEAKER = {"allow_weaker": ["disk"]}
STAND_IN = """#!{python} -I
import json, os, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
if sys.argv[1] == "run":
    line = sys.argv[sys.argv.index("some-image") + 1:]
    mount = sys.argv[sys.argv.index("--mount") + 1]
    folder = mount.split("source=")[1].split(",")[0]
    sys.exit(subprocess.run(line, cwd=folder).returncode)
"""


@pytest.fixture
def docker(tmp_path):
    program, log = tmp_path / "docker", tmp_path / "log"
    log.touch()
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)

    def calls():
        return [json.loads(line) for line in log.read_text().splitlines()]

    return str(program), calls


def option(argv, name):
    return [argv[i + 1] for i, argument in enumerate(argv) if argument == name]


async def test_a_run_is_a_container_that_is_removed(docker, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    program, calls = docker
    backend = DockerBackend(
        "some-image", allow_weaker=["disk"], docker=program, runtime="runsc", env={"A": "b"}
    )
    limits = Limits(memory_bytes=2**28, max_processes=7, max_open_files=33, cpu_s=3, wall_s=20)
    sandbox = await backend.create(limits=limits)
    await sandbox.write_file("in", "x")
    result = await sandbox.run(["sh", "-c", "cat in; echo y > out; exit 4"])
    assert (result.stdout, result.exit_code, result.level) == ("x", 4, "docker")
    assert await sandbox.read_file("out") == b"y\n"
    await sandbox.close()
    run, remove = (call["argv"] for call in calls())
    assert run[0] == "run"
    assert run[-4:] == ["some-image", "sh", "-c", "cat in; echo y > out; exit 4"]
    name = option(run, "--name")[0]
    assert remove == ["rm", "--force", name]
    assert option(run, "--network") == ["none"]
    assert option(run, "--cap-drop") == ["ALL"]
    assert option(run, "--security-opt") == ["no-new-privileges"]
    assert option(run, "--pids-limit") == ["7"]
    assert option(run, "--memory") == option(run, "--memory-swap") == [str(2**28)]
    assert option(run, "--runtime") == ["runsc"]
    assert option(run, "--pull") == ["never"]
    assert option(run, "--workdir") == ["/sandbox"]
    assert set(option(run, "--ulimit")) == {
        "nofile=33",
        "core=0",
        f"fsize={limits.disk_bytes}",
        "cpu=3",
    }
    # Every user can read arguments; but the client has its own HOME.
    assert {"A", "HOME=/sandbox"} <= set(option(run, "--env"))
    client = calls()[0]["env"]
    assert (client["A"], client["HOME"]) == ("b", os.environ["HOME"])
    assert option(run, "--user")[0].partition(":")[0] != "0"
    for flag in ("--read-only", "--rm", "--interactive", "--init"):
        assert flag in run
    assert all("HF_TOKEN" not in call["env"] for call in calls())
    assert not any("secret" in argument for argument in run)


async def test_it_is_refused_unless_unbounded_disk_use_is_accepted(docker):
    program, _ = docker
    for allowed in (False, ["processes"]):
        backend = DockerBackend("some-image", docker=program, allow_weaker=allowed)
        with pytest.raises(SandboxUnavailable, match=r"allow_weaker=\['disk'\]"):
            await backend.create()
    sandbox = await DockerBackend("some-image", docker=program, allow_weaker=True).create()
    await sandbox.close()
    assert sandbox.level.missing == ("disk",)


async def test_a_limit_removes_the_container_too(docker):
    program, calls = docker
    sandbox = await DockerBackend("some-image", docker=program, **WEAKER).create()
    result = await sandbox.run(["sleep", "30"], limits=Limits(wall_s=2.0))
    await sandbox.close()
    assert result.ended == "wall"
    assert [call["argv"][0] for call in calls()] == ["run", "rm"]


async def test_cancellation_removes_the_container_too(docker):
    program, calls = docker
    sandbox = await DockerBackend("some-image", docker=program, **WEAKER).create()
    work = asyncio.create_task(sandbox.run(["sleep", "30"]))
    while not calls():  # noqa: ASYNC110  a file sends no events
        await asyncio.sleep(0.02)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await sandbox.close()
    assert [call["argv"][0] for call in calls()] == ["run", "rm"]


async def test_python_and_sessions(docker):
    program, _ = docker
    sandbox = await DockerBackend(
        "some-image", allow_weaker=["disk"], docker=program, python=sys.executable
    ).create()
    assert (await sandbox.run_python("print(6 * 7)")).stdout == "42\n"
    session = sandbox.python_session()
    await session.run("a = 1")
    assert (await session.run("a + 1")).stdout == "2\n"
    await sandbox.close()


async def test_death_by_signal_is_read_from_the_exit_code(docker):
    program, _ = docker
    sandbox = await DockerBackend("some-image", docker=program, **WEAKER).create()
    result = await sandbox.run(["sh", "-c", "exit 137"])
    await sandbox.close()
    assert (result.ended, result.signal) == ("signal", 9)


def test_settings(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="no docker client"):
        DockerBackend()
    with pytest.raises(ConfigError, match="not an image name"):
        DockerBackend("--privileged", docker="/bin/true")
