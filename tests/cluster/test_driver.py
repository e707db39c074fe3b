"""The driver with fake roles in real processes: restarts, stalls, scaling, its own death."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from driver_kit import driving, is_alive

from rolltree.cli import app
from rolltree.scale.cluster import driver
from rolltree.scale.cluster.beat import run_role
from rolltree.scale.cluster.state import TOKEN_FILE, read_state
from rolltree.values.errors import ClusterError
from wait_kit import until, wait_until


def run_cli(*words):
    return CliRunner().invoke(app, words)


HERE = Path(__file__).parent


async def test_a_run_ends_when_its_trainer_has_done_its_work(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        pids = [d.pid(name) for name in d.roster.roles]
        assert len(pids) == 4
        answer = await d.answer("worker-0")
        d.do("trainer", "0")
        await d.task
    assert answer["stop"] is answer["drain"] is False
    assert not [pid for pid in pids if is_alive(pid)]
    # Nothing is left that a new driver would have to clean up, and no token.
    assert read_state(tmp_path) is None
    assert not (tmp_path / TOKEN_FILE).exists()
    assert {path.name for path in (tmp_path / "logs").glob("*.log")} >= {
        *("engine-0.log", "worker-0.log", "worker-1.log", "trainer.log")
    }


async def test_the_trainer_saves_while_the_others_still_answer(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        d.do("trainer", "saves")
        d.task.cancel()
        await asyncio.gather(d.task, return_exceptions=True)
    assert (tmp_path / "trainer.saved").read_text().split() == [
        *("engine-0", "trainer", "worker-0", "worker-1")
    ]


async def test_roles_find_each_other(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()

        answer = await d.answer("worker-1")
        assert answer["head"] == "http://127.0.0.1:1/trainer"
        assert answer["engines"] == [{"name": "engine-0", "url": "http://127.0.0.1:1/engine-0"}]
        assert sorted(answer["workers"]) == ["worker-0", "worker-1"]
        assert await d.request("/config") == (200, {"run": {"dir": str(tmp_path)}})


@pytest.mark.parametrize("name", ["worker-1", "engine-0", "trainer"])
async def test_a_role_that_is_killed_is_started_again(tmp_path, name):
    async with driving(tmp_path) as d:
        await d.until_all()
        first = d.pid(name)
        d.signal(name, signal.SIGKILL)
        await d.said(f"{name} was killed by signal 9", "started again in 1 s")
        await until(lambda: d.beats(name) and d.pid(name) != first)
        assert d.role(name).restarts == 1
        d.do("trainer", "0")
        await d.task


async def test_a_role_that_never_works_ends_the_run_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "MAX_RESTARTS", 1)
    (tmp_path / "worker-0.do").write_text("early 3")
    async with driving(tmp_path) as d:
        with pytest.raises(
            ClusterError,
            match=r"(?s)worker-0 ended with status 3 2 times in a row.*this role never works",
        ):
            await d.task


async def test_a_role_that_says_it_cannot_work_ends_the_run_at_once(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        body = {"name": "trainer", "error": "ConfigError", "message": "optim.lr is -1. Change it."}
        assert (await d.request("/fail", body))[0] == 200
        with pytest.raises(
            ClusterError, match=r"trainer cannot go on .ConfigError.: optim.lr is -1"
        ):
            await d.task


async def test_a_worker_started_by_hand_that_cannot_work_is_named_and_the_run_goes_on(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        body = {"name": "worker-90", "error": "ConfigError", "message": "no package pandas."}
        # It may be told of before it has registered, and after.
        assert (await d.request("/fail", body | {"pid": 1}))[0] == 200
        by_hand = {"name": "worker-90", "kind": "worker", "url": None, "pid": 1, "host": "there"}
        await d.request("/register", by_hand)
        assert d.role("worker-90")
        assert (await d.request("/fail", body | {"pid": 1}))[0] == 200
        assert d.role("worker-90") is None
        # A name of the driver's is not taken from the process that has it.
        assert (await d.request("/fail", body | {"name": "worker-0", "pid": 1}))[0] == 200
        said = [notice for notice in d.heard.notices if "started by hand" in notice]
        assert [notice.split()[0] for notice in said] == ["worker-90", "worker-90", "worker-0"]
        assert all("no package pandas" in notice for notice in said)
        assert d.beats("worker-0")
        d.do("trainer", "0")
        await d.task


async def test_a_run_ends_when_nobody_is_left_who_can_work(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        for name in ("worker-0", "worker-1"):
            pid = d.pid(name)
            body = {"name": name, "error": "ConfigError", "message": "no pandas.", "pid": pid}
            assert (await d.request("/fail", body))[0] == 200
            d.do(name, "1")
            if name == "worker-0":
                await d.said("worker-0 cannot go on", "the run goes on with worker-1")
                await until(lambda: d.role("worker-0") is None)
                assert len(d.lives("worker-0")) == 1
                assert not d.task.done()
        with pytest.raises(ClusterError, match=r"worker-1 cannot go on .ConfigError.: no pandas"):
            await d.task


class Told:
    """A link to a driver that keeps what it is told; `config` is the config of a cluster."""

    name = "worker-0"

    def __init__(self):
        self.failures = []

    def config(self):
        return {"env": {"id": "arithmetic"}, "cluster": {}}

    def fail(self, error):
        self.failures.append(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'nowhere'", name="nowhere.deep"), "package nowhere"),
        (ImportError("cannot import name 'x' from 'json'", name="json"), "package json"),
        (ImportError("x.so: undefined symbol"), "undefined symbol"),
    ],
)
def test_a_role_that_lacks_a_package_is_not_started_again(error, said, capfd):
    def work(*_):
        raise error

    link = Told()
    assert run_role(link, work) == 1
    (failure,) = link.failures
    assert failure.startswith("ConfigError: ")
    assert said in failure
    assert sys.executable in failure
    assert "Traceback" in capfd.readouterr().err  # in the role's log
    # Ranks other than the head follow it.
    follower = Told()
    assert run_role(follower, work, ()) == 1
    assert follower.failures == []


@pytest.mark.parametrize("name", ["worker-0", "engine-0", "trainer"])
async def test_a_stopped_process_is_named_and_goes_on(tmp_path, name):
    async with driving(tmp_path) as d:
        await d.until_all()
        d.signal(name, signal.SIGSTOP)
        said = await d.said(f"{name} has not answered for", limit_s=30)
        waiting = {
            "trainer": "worker-0 and worker-1 wait for it",
            "engine-0": "trainer waits for it",
        }
        assert said.endswith(waiting.get(name, "does not get to it"))
        status = (await d.request("/status"))[1]
        assert next(r["state"] for r in status["roles"] if r["name"] == name) == "stalls"
        d.signal(name, signal.SIGCONT)
        await d.said(f"{name} goes on")
        assert len(d.lives(name)) == 1


async def test_a_loop_that_stands_still_is_told_from_a_stopped_process(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        d.do("engine-0", "stuck")
        said = await d.said("engine-0 answers, but its loop has not advanced", limit_s=120)
        assert "(engine at work)" in said
        d.do("engine-0", "go")
        await d.said("engine-0 goes on")
        # A step that takes as long as one before it is not a stall.
        d.do("engine-0", "stuck")
        await asyncio.sleep(1.5)
        assert d.role("engine-0").stall is None


async def test_scaling_a_running_one(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        assert await d.request("/scale", {"rollout_workers": 4, "engines": 2}) == (
            200,
            {"rollout_workers": 4, "engines": 2},
        )
        await until(lambda: d.beats("worker-2", "worker-3", "engine-1"))
        last = [d.pid(name) for name in ("worker-1", "worker-2", "worker-3", "engine-1")]
        await d.request("/scale", {"rollout_workers": 1, "engines": 1})
        await until(lambda: set(d.roster.roles) == {"trainer", "engine-0", "worker-0"})
        await until(lambda: not any(is_alive(pid) for pid in last))
        # Up again, with names that were used before.
        await d.request("/scale", {"rollout_workers": 2})
        await until(lambda: d.beats("worker-1"))
        assert d.role("worker-1").restarts == 0
        status, answer = await d.request("/scale", {"rollout_workers": 0})
        assert status == 400
        assert "needs at least 1" in answer["error"]
        assert not [notice for notice in d.heard.notices if "started again" in notice]


@pytest.mark.long
async def test_a_driver_that_is_killed_is_followed_by_another(tmp_path):
    said = tmp_path / "said"

    def start():
        command = [sys.executable, str(HERE / "driver_kit.py"), str(tmp_path)]
        with open(said, "w") as file:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            return subprocess.Popen(command, env=env, stderr=file)

    def lives(name):
        path = tmp_path / f"{name}.lives"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    names = ("trainer", "engine-0", "worker-0", "worker-1")
    first = start()
    wait_until(lambda: all(len(lives(name)) == 1 for name in names))
    second = start()
    assert second.wait() != 0
    assert f"driven by process {first.pid}" in said.read_text()
    token = (tmp_path / TOKEN_FILE).read_text()
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert token not in (tmp_path / "cluster.json").read_text()
    first.kill()
    first.wait()
    old = [lives(name)[0] for name in names]
    assert any(is_alive(pid) for pid in old)
    (tmp_path / "trainer.do").write_text("go")
    third = start()
    wait_until(lambda: all(len(lives(name)) == 2 for name in names))
    assert not any(is_alive(pid) for pid in old)
    (tmp_path / "trainer.do").write_text("0")
    assert third.wait(60) == 0
    assert "ended 4 processes that a killed driver of this run had left" in said.read_text()


async def test_a_role_without_its_driver_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_ORPHAN_S", "1")
    async with driving(tmp_path) as d:
        await d.until_all()
        pid = d.pid("worker-0")
        await d.driver.control.aclose()
        await until(lambda: not is_alive(pid))


async def test_what_a_role_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_CHILD", "1")
    async with driving(tmp_path) as d:
        await d.until_all()
        await until(lambda: (tmp_path / "trainer.child").exists())
        child = int((tmp_path / "trainer.child").read_text())
        assert is_alive(child)
        d.signal("trainer", signal.SIGKILL)
        await until(lambda: not is_alive(child), limit_s=10)


async def test_a_newer_process_of_a_name_replaces_the_older(tmp_path):
    async with driving(tmp_path) as d:
        await d.until_all()
        old = d.pid("worker-0")
        newer = {"name": "worker-0", "kind": "worker", "url": None, "pid": 1, "host": "elsewhere"}
        await d.request("/register", newer)
        await until(lambda: not is_alive(old))
        await d.said("worker-0 ended with status 75")


class TestTheServer:
    async def test_nothing_opens_it_but_the_token(self, tmp_path):
        async with driving(tmp_path) as d:
            await until(lambda: d.driver.control.url)
            for path, body in (
                ("/status", None),
                ("/config", None),
                ("/scale", {}),
                ("/beat", {}),
                ("/no", None),
            ):
                status, answer = await d.request(path, body, token="x" * 43)
                assert status == 401
                assert "token" in answer["error"]
            assert d.driver.control.url.startswith("http://127.0.0.1:")

    async def test_what_is_not_understood_is_refused(self, tmp_path):
        async with driving(tmp_path) as d:
            await until(lambda: d.driver.control.url)
            assert (await d.request("/scale", {"workers": 2}))[0] == 400
            assert (await d.request("/register", {"name": "x"}))[0] == 400
            beat = {
                "name": "worker-7",
                "state": "",
                "waits_for": None,
                "busy_since_s": 0,
                "metrics": {},
            }
            status, answer = await d.request("/beat", beat)
            assert status == 409
            assert "POST /register first" in answer["error"]
            note = {"name": "worker-0", "message": "3 rollouts wait."}
            assert (await d.request("/note", note))[0] == 200
            assert d.heard.notices[-1] == "worker-0: 3 rollouts wait."
            assert (await d.request("/progress", {"call": "__init__", "values": {}}))[0] == 400
            assert (await d.request("/progress", {"call": "on_step", "values": {"a": 1}}))[0] == 400


class TestTheCommand:
    async def test_status_and_scale(self, tmp_path):
        async with driving(tmp_path) as d:
            await d.until_all()
            shown = await asyncio.to_thread(run_cli, "cluster", "status", str(tmp_path))
            assert "2 rollout_workers, 1 engines" in shown.output
            row = next(line for line in shown.output.splitlines() if line.startswith("worker-0"))
            assert f":{d.pid('worker-0')}" in row
            assert "worker at work, waits for trainer" in row
            words = ("cluster", "status", str(tmp_path), "--json")
            found = json.loads((await asyncio.to_thread(run_cli, *words)).output)
            assert {role["name"] for role in found["roles"]} == set(d.roster.roles)
            assert d.driver.token not in json.dumps(found)
            words = ("cluster", "scale", str(tmp_path), "rollout_workers=3")
            scaled = await asyncio.to_thread(run_cli, *words)
            assert "rollout_workers: 3, engines: 1" in scaled.output.splitlines()
            await until(lambda: d.beats("worker-2"))
            d.do("trainer", "0")
            await d.task
        over = run_cli("cluster", "status", str(tmp_path))
        assert over.exit_code == 1
        assert f"no driver runs for {tmp_path}" in over.output

    @pytest.mark.parametrize(
        ("setting", "said"),
        [
            ("workers=3", "Did you mean 'rollout_workers'?"),
            ("engines=0", "at least 1"),
            ("engines", "Write engines=N"),
            ("engines=²", "Write engines=N"),
            (f"engines={'9' * 5000}", "Write engines=N"),
        ],
    )
    def test_what_cannot_be_scaled(self, tmp_path, setting, said):
        shown = run_cli("cluster", "scale", str(tmp_path), setting)
        assert shown.exit_code == 2
        assert said in shown.output
