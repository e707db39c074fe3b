"""The shipped game: rules, the opponent, whole games, and a real model playing it."""

import random
import sys
from pathlib import Path

import pytest

import rolltree as rt
from rolltree.environments.check import check_environment_async
from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.samples import build_samples
from rolltree.testing import ScriptedClient

FOLDER = Path(__file__).parents[2] / "environments" / "tic_tac_toe"


def load(**settings):
    return rt.load_environment(str(FOLDER), num_train=20, num_eval=30, **settings)


@pytest.fixture(scope="module")
def game():
    load()
    return sys.modules["rolltree_environment_tic_tac_toe"]


def board_of(messages):
    rows = messages[-1]["content"].split("\n")[-3:]
    return "".join("." if mark.isdigit() else mark for row in rows for mark in row.split())


def perfect(game):
    def answer(messages):
        board = board_of(messages)
        best = max(game.free(board), key=lambda c: game.value(game.play(board, c, "X"), "O"))
        return f"{best + 1}"

    return answer


@pytest.mark.parametrize(
    ("board", "found"),
    [
        ("XXX......", "X"),
        ("O..O..O..", "O"),
        ("X.O.XO..X", "X"),
        ("XOXXOXOXO", "draw"),
        ("." * 9, None),
    ],
)
def test_who_has_won(game, board, found):
    assert game.winner(board) == found


def test_best_play_is_a_draw(game):
    assert game.value("." * 9, "X") == game.value("." * 9, "O") == 0
    assert game.value("XX.OO....", "X") == 1
    assert game.value("XX.OO....", "O") == -1


def test_perfect_players_never_lose(game):
    random_x = random.Random(0)
    client = ScriptedClient(lambda m: str(random_x.choice(game.free(board_of(m))) + 1))
    rewards = load(skill=1.0).evaluate_sync(client).reward
    assert max(rewards) <= 0.5
    rewards = load(skill=0.0).evaluate_sync(ScriptedClient(perfect(game))).reward
    assert min(rewards) >= 0.5
    assert rewards.count(1.0) > 20  # of 30 against random moves


def test_the_seed_decides_who_begins_and_what_the_opponent_does(game):
    def seen():
        client = ScriptedClient(perfect(game))
        load().evaluate_sync(client)
        return sorted(str(call.messages) for call in client.calls)

    first = seen()
    assert first == seen()
    begun = ["O" in str(m).partition("user")[2] for m in first if str(m).count("'user'") == 1]
    assert {True, False} == set(begun)


def test_an_illegal_move_is_told_and_may_be_corrected(game):
    def answer(messages):
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        return ["I do not know", "5", "5"][len(said)] if len(said) < 3 else perfect(game)(messages)

    state = load(skill=0.0).evaluate_sync(ScriptedClient(answer)).state[0]
    told = [m["content"] for m in state["completion"] if m["role"] == "user"]
    assert told[0].startswith("Answer with the number of one free cell.\n")
    assert any(text.startswith("5 is not free.\n") for text in told)
    assert state["terminated"]


def test_a_game_that_is_not_finished_is_truncated():
    state = load(max_turns=4).evaluate_sync(ScriptedClient(lambda m: "well")).state[0]
    assert (state["truncated"], state["truncation_reason"], state["reward"]) == (
        True,
        "max_steps",
        0,
    )


async def test_it_keeps_its_contract():
    report = await check_environment_async(load, num_examples=8)
    assert report.findings == ()


@pytest.mark.model
async def test_a_real_model_plays_and_its_tokens_train():
    """SmolLM2 on the embedded engine; every sampled token of every move is in a sample."""
    model, tokenizer = load_model("smollm2-135m")
    client = local_client(model, tokenizer, max_context=640, max_batch=4)
    environment = load(skill=0.0, max_turns=6)
    engine = RolloutEngine(environment, client)
    requests = build_requests(
        environment, "train", num_examples=1, group_size=2, sampling={"max_tokens": 4}
    )
    results = await engine.run_all(requests)
    await client.aclose()
    states = [state for result in results for state in result.states]
    assert [result.error for result in results] == [None, None]
    assert all(state["trajectory"] for state in states)
    report = build_samples(states, "interleave").report
    sampled = sum(len(step["tokens"]["completion_ids"]) for s in states for step in s["trajectory"])
    assert report["num_sampled_tokens"] == sampled > 0
    assert report["num_skipped_tokens"] == 0
