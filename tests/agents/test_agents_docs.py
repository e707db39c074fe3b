"""The Python blocks of docs/agents.md run and say what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import docs_kit
from rolltree.testing import ScriptedClient


def test_the_page_of_agents(capsys: pytest.CaptureFixture[str]) -> None:
    way = ["right", "right", "down", "down", "down", "right"]
    answers = ["east", *(f"<move>{move}</move>" for move in way)]
    names: dict[str, Any] = {"client": ScriptedClient(answers)}
    assert len(docs_kit.blocks("agents.md")) == 4
    docs_kit.run("agents.md", names, slice(1))
    assert asyncio.run(names["play"](1)) == 1.0
    assert [step.reward for step in names["agent"].steps] == [-0.1, *[0.0] * 6]
    docs_kit.run("agents.md", names, slice(1, None))
    assert capsys.readouterr().out.splitlines() == [
        "ParseResult(action=4, reward=0.6, obs=None) Put your answer between <n> and </n>.",
        "['multiply', 'ask_expert']",
        "player_2 3 O 5",
    ]
    world = names["Countdown"]()
    assert world.reset() == ("3 to go", {})
    assert [world.step("x").done for _ in range(3)] == [False, False, True]
