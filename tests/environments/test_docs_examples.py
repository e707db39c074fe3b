"""The Python blocks of the documentation run."""

import asyncio

import pytest
from env_scripts import ScriptedModel

import docs_kit


@pytest.fixture
def client():
    replies = iter(["<answer>12</answer>", "7", "2", "4"])
    return ScriptedModel(lambda messages: next(replies, "4"))


def test_environments(client, capsys):
    names = docs_kit.run("environments.md", {"client": client})
    assert capsys.readouterr().out.splitlines() == [
        "1.0 [{'role': 'assistant', 'content': '<answer>12</answer>'}]",
        "guessed True None",
        "['found', 'longest', 'length', 'polite']",
        "['amount']",
        "market 6",
    ]
    played = asyncio.run(names["parity"].evaluate(ScriptedModel("It is even."), "m"))
    assert {0.0, 1.0} >= set(played.reward)
    assert all(state["terminated"] for state in played.state)
    assert [m["content"] for m in names["state"]["completion"]][1::2] == [
        "lower",
        "higher",
        "right",
    ]
    assert names["state"]["reward"] == 1.0


def test_rollouts(capsys):
    import rolltree as rt

    env = rt.SingleTurnEnv(
        dataset=[{"question": "q", "answer": "4"}],
        rubric=rt.Rubric([lambda completion, answer: float(completion[-1]["content"] == answer)]),
    )
    names = docs_kit.run("rollouts.md", {"client": ScriptedModel("4"), "env": env})
    results = asyncio.run(names["run"]())
    assert [result.states[0]["reward"] for result in results] == [1.0]
    assert len(capsys.readouterr().out.splitlines()) == 4
    engine = rt.RolloutEngine(names["Coin"](), ScriptedModel("Heads!"))
    result = asyncio.run(engine.run_all(names["build_requests"](names["Coin"](), "eval")))[0]
    assert result.error is None
    assert result.states[0]["completion"][0]["content"] == "Heads!"
