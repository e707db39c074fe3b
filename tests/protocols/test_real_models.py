"""Real models on the embedded engine: a PettingZoo game, and parent and child that train."""

import asyncio
from pathlib import Path

import pytest
import torch

from rolltree.agents import Agent
from rolltree.agents.protocols import TurnProtocol
from rolltree.agents.worlds import TurnGame, board_text
from rolltree.environments import ProtocolEnvironment
from rolltree.environments.parsers.actions import by_function
from rolltree.inference import ToolCall, ToolCalls
from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.samples import build_samples
from rolltree.store import Run
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

EXAMPLE = Path(__file__).parents[2] / "examples" / "delegation"


def first_digit(text):
    """An action from whatever a small model says, so that games go on."""
    return next((int(c) for c in text if c.isdigit() and c != "9"), None)


@pytest.mark.model
async def test_two_real_models_play_a_pettingzoo_game():
    model, tokenizer = load_model("smollm2-135m")
    client = local_client(model, tokenizer, max_context=768, max_batch=4)
    system = "You play tic-tac-toe as X. Say the number of one legal move."

    def player(name):
        return lambda: Agent(name=name, system_prompt=system, parser=by_function(first_digit))

    def board(row):
        return TurnGame(
            "classic/tictactoe-v3", to_text=board_text(lambda row, column: 3 * column + row)
        )

    environment = ProtocolEnvironment(
        TurnProtocol({name: player(name) for name in ("player_1", "player_2")}, max_steps=5),
        board,
        num_train=1,
        env_id="tictactoe",
    )
    requests = build_requests(environment, "train", sampling={"max_tokens": 3})
    (result,) = await RolloutEngine(environment, client).run_all(requests)
    await client.aclose()
    assert result.error is None
    first, second = result.states
    assert (first["agent"], second["agent"]) == ("player_1", "player_2")
    assert first["trajectory"]
    assert "You are X." in first["trajectory"][0]["prompt"][-1]["content"]
    assert first["terminated"] == second["terminated"]
    if first["terminated"]:  # an illegal move loses: the two rewards are opposite or both 0
        assert first["reward"] == -second["reward"]
    else:
        assert {first["truncation_reason"], second["truncation_reason"]} == {"max_steps"}
    report = build_samples(result.states, "turn").report
    assert report["num_skipped_tokens"] == 0
    assert report["num_calls_without_logprobs"] == 0


class Watch(Silent):
    def __init__(self):
        self.steps = []

    def on_step(self, step, metrics):
        self.steps.append(metrics)


def test_the_delegation_example_in_miniature(tmp_path, monkeypatch):
    """Parent and child train through store, credit and samples; a killed run continues."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import code_book

    torch.set_num_threads(1)
    # An untrained model neither asks nor ends its answers: every first answer is taken for a call.
    monkeypatch.setattr(code_book.AskCalls, "read", asks_always)
    for name in ("parent", "child"):
        monkeypatch.setattr(code_book, name, takes_cut_answers(getattr(code_book, name)))
    environment = code_book.load_environment(num_train=20, num_eval=4)

    def config(num_steps, folder):
        return load_train_config(
            {
                "run": {"dir": str(tmp_path / folder)},
                "model": {"name": "tiny"},
                "engine": {"max_batch": 16, "max_context": 192},
                "sampling": {"max_tokens": 4},
                "algorithm": {
                    "name": "reinforce",
                    "group_size": 2,
                    "groups_per_step": 2,
                    "flow": "team",
                    "baseline": "ema",
                },
                "optim": {"lr": 1e-3},
                "train": {"num_steps": num_steps, "num_threads": 1},
                "eval": {"before": False, "after": False},
                "checkpoint": {"every": 1, "export": False},
            }
        )

    environment.rubric.rubrics["child"].add_reward_func(length, 0.1)

    def start(num_steps, folder):
        settings, watch = config(num_steps, folder), Watch()

        async def main():
            parts = build_parts(settings)
            with open_run(settings) as run:
                await run_training(settings, parts, source=environment, run=run, reporter=watch)
            await parts.client.aclose()

        asyncio.run(main())
        return watch.steps

    whole = start(3, "whole")
    assert whole[0]["train/num_records"] > 0
    assert "reward/child/mean" in whole[0]
    parts = start(1, "parts") + start(3, "parts")
    for name in ("train/loss", "train/grad_norm", "credit/average/child", "credit/average/parent"):
        assert [step[name] for step in parts] == pytest.approx(
            [step[name] for step in whole], rel=1e-3
        )
    assert whole[1]["credit/average/child"] != whole[0]["credit/average/child"]
    with Run.open(tmp_path / "parts", "r") as run:
        rows = list(run.rollouts(phase="train", blobs=False))
    assert {(row.agent, row.depth) for row in rows} == {("parent", 0), ("child", 1)}
    assert sum(row.depth == 0 for row in rows) == 3 * 4


def length(state):
    return float(len(state["result"]))


def asks_always(self, message):
    return ToolCalls("", (ToolCall("ask", '{"task": "K"}'),))


def takes_cut_answers(make):
    def made():
        agent = make()
        agent.reject_incomplete_completions = False
        return agent

    return made
