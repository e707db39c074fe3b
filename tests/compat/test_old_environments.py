"""Environments written for verifiers 0.1.8, by both import styles, on the scripted server."""

import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType

import old_style_script
import pytest

import rolltree
import rolltree.verifiers
from rolltree.testing import ScriptedServer

pytest.importorskip("datasets")
pytest.importorskip("openai")
SOURCE = (Path(__file__).parent / "old_style.py").read_text(encoding="utf-8")

REWARDS = {
    "tagged": [2.5, 0.4, 0.5],
    "countdown": [3.0, 12.0],
    "tools": [1.0, 1.0, 1.0],
    "purse": [7.0],
    "judged": [1.25, 0.25],
    "numbers": [2.0, 1.0],
    "ranked": [0.0, 2.0, 1.0],
    "simulated": [1.0],
    "own_call": [1.0],
    "thinking": [2.0, 0.0],
    "grouped": [2.5, 0.4, 0.5, 2.0, 1.0],
}
# A message that begins with the second field: rolltree's XMLParser says what its documentation
# says, that no field need come first; verifiers' code wants the first one.
THEIR_REWARDS = {
    **REWARDS,
    "tagged": [2.5, 0.3, 0.5],
    "grouped": [2.5, 0.3, 0.5, 2.0, 1.0],
}
TURNS = {"countdown": [2, 2], "tools": [2, 2, 1], "purse": [2], "simulated": [2]}


def run_source(source):
    module = ModuleType("old_style_environment")
    exec(compile(source, "old_style.py", "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def changed():
    """Only the import line is changed."""
    return run_source(SOURCE.replace("import verifiers as vf", "import rolltree as vf"))


@pytest.fixture
def unchanged():
    before = {name: module for name, module in sys.modules.items() if name == "verifiers"}
    assert not before
    rolltree.verifiers.install()
    yield run_source(SOURCE)
    rolltree.verifiers.uninstall()


@pytest.fixture(scope="module")
def server():
    with ScriptedServer(old_style_script.answer) as running:
        yield running


def check(name, found, rewards):
    assert found["reward"] == pytest.approx(rewards[name])
    assert found["average"] == pytest.approx(sum(rewards[name]) / len(rewards[name]))
    assert found["turns"] == TURNS.get(name, [1] * len(rewards[name]))
    assert all(found["completed"])


@pytest.mark.parametrize("name", REWARDS)
def test_only_the_import_is_changed(name, changed, server):
    check(name, asyncio.run(changed.play(name, server.base_url)), REWARDS)


@pytest.mark.parametrize("name", REWARDS)
def test_nothing_is_changed(name, unchanged, server):
    assert unchanged.vf is importlib.import_module("rolltree.verifiers.verifiers")
    check(name, asyncio.run(unchanged.play(name, server.base_url)), THEIR_REWARDS)


def test_cleanup_ran_once_per_rollout(changed, server):
    from openai import AsyncOpenAI

    async def play():
        env = changed.countdown()
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            await env.evaluate(client, "scripted", rollouts_per_example=2)
        return env.closed

    assert sorted(asyncio.run(play())) == [0, 0, 1, 1]
