"""The pytest plugin: a recorded rollout is a regression test of its environment."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import rolltree as rt
from rolltree.testing.replay import recorded_of

ENV = """
import rolltree as rt

class Echo(rt.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": "WORD " + messages[-1]["content"]}]

def load_environment():
    return Echo(dataset=[{"question": "q", "answer": "a"}] * 3, env_id="echo", max_turns=2)
"""
TESTS = """
import pytest
from old_env import load_environment

@pytest.mark.recorded("run", env="old_env.py")
def test_all(replayed):
    assert replayed.num_replayed == 2

@pytest.mark.recorded("run", rollouts=["eval/echo/1/0"], env=load_environment)
def test_one(replayed):
    assert replayed.is_equal

@pytest.mark.recorded("run", num=1, env="new_env.py")
def test_changed(replayed):
    pass

@pytest.mark.recorded("run", where={"status": "ok"}, num=2, env="new_env.py", ignore=["you \\\\w+"])
def test_ignored(replayed):
    pass
"""


def test_each_recorded_rollout_is_a_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in (("old_env", "you said"), ("new_env", "you wrote")):
        (tmp_path / f"{name}.py").write_text(ENV.replace("WORD", word))
    with rt.Run.create("run") as run:
        env = rt.load_environment("old_env.py")
        rt.evaluate(env, rt.ScriptedClient(["a", "b"]), run=run)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["rolltree.testing.replay"]')
    (tmp_path / "test_recorded.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-rA", "--strict-markers", "-p", "no:cacheprovider"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    ended = {line for line in done.stdout.splitlines() if " test_recorded.py::" in line}
    passed = [f"test_all[eval/echo/{index}/0]" for index in range(3)]
    passed += ["test_one[eval/echo/1/0]"]
    passed += [f"test_ignored[eval/echo/{index}/0]" for index in range(2)]
    assert {line for line in ended if line.startswith("PASSED")} == {
        f"PASSED test_recorded.py::{name}" for name in passed
    }
    assert len(ended) == len(passed) + 1
    assert done.returncode == 1
    for line in (
        "eval/echo/0/0: DIFFERENT, 1 of 2 recorded calls",
        "    recorded: you said a",
        "    live:     you wrote a",
    ):
        assert line in done.stdout.splitlines()
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (None, "does not say what is recorded"),
        (
            pytest.Mark("recorded", ("run",), {"nam": 3}, _ispytest=True),
            "unexpected keyword argument 'nam'",
        ),
        (pytest.Mark("recorded", ("run", "more"), {}, _ispytest=True), "too many values"),
    ],
)
def test_a_wrong_marker_is_named(tmp_path, marker, why):
    item = SimpleNamespace(
        name="test_it", path=tmp_path / "test_it.py", get_closest_marker=lambda name: marker
    )
    with pytest.raises(pytest.UsageError, match=why):
        recorded_of(item)
