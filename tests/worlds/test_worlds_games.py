"""PettingZoo's and TextArena's games by text."""

import random

import numpy as np
import pettingzoo
import pytest

from rolltree.agents import Agent
from rolltree.agents.protocol_env import ProtocolEnvironment
from rolltree.agents.protocols import MultiAgentSyncProtocol
from rolltree.agents.worlds import (
    BAD_ACTION,
    ParallelGame,
    ParallelWorld,
    StepOutcome,
    TextArenaWorld,
    TurnGame,
    TurnWorld,
    board_text,
)
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.values.steps import ParseResult

HANDS = ["rock", "paper", "scissors"]
TIC_TAC_TOE = board_text(lambda row, column: 3 * row + column)


def hands(**settings):
    return ParallelGame(
        "classic/rps-v2",
        world_args={"max_cycles": 2},
        to_text=lambda seen, agent: f"{agent} saw {[*HANDS, 'nothing'][int(seen)]}",
        action_names=HANDS,
        **settings,
    )


# Everybody at once


def test_everybody_acts_at_once():
    game = hands()
    assert game.possible_agents == ["player_0", "player_1"]
    first = game.reset(seed=1)
    assert first == {
        "player_0": ("player_0 saw nothing", {}),
        "player_1": ("player_1 saw nothing", {}),
    }
    outcomes = game.step({"player_0": "Rock!", "player_1": 1})
    assert outcomes["player_0"] == StepOutcome("player_0 saw paper", -1.0)
    assert outcomes["player_1"] == StepOutcome("player_1 saw rock", 1.0)
    assert game.agents == ["player_0", "player_1"]
    last = game.step({"player_0": "paper", "player_1": "paper"})
    assert {outcome.truncated for outcome in last.values()} == {True}  # the game's own limit
    assert {outcome.terminated for outcome in last.values()} == {False}
    assert game.agents == []


def test_an_agent_without_an_action_does_the_idle_action():
    game = hands(idle_action=0)
    game.reset(seed=1)
    outcomes = game.step({"player_1": "lizard"})
    assert outcomes["player_0"] == StepOutcome("player_0 saw rock")
    assert outcomes["player_1"].info == {BAD_ACTION: "say one of: rock, paper, scissors"}


def test_without_an_idle_action_the_game_waits_for_everybody():
    game = hands()
    game.reset(seed=1)
    (told,) = game.step({"player_0": "rock", "player_1": "lizard"}).items()
    assert told[0] == "player_1"
    assert told[1].info == {BAD_ACTION: "say one of: rock, paper, scissors"}
    (told,) = game.step({"player_0": "rock"}).items()
    assert told[1].info == {BAD_ACTION: "the game needs an action from every agent"}
    # Nothing has changed.
    outcomes = game.step({"player_0": "rock", "player_1": "paper"})
    assert outcomes["player_0"] == StepOutcome("player_0 saw paper", -1.0)


@pytest.mark.parametrize("idle", ["lizard", 3, 1.5])
def test_an_idle_action_that_the_game_cannot_take_is_refused_when_it_is_made(idle):
    with pytest.raises(ConfigError, match="idle_action"):
        hands(idle_action=idle)


def test_an_idle_action_may_be_given_as_text():
    game = hands(idle_action="rock")
    game.reset(seed=1)
    assert game.step({"player_1": "paper"})["player_0"] == StepOutcome("player_0 saw paper", -1.0)


def test_a_malformed_answer_has_a_reward():
    def answer(messages):
        return "hm" if len(messages) % 4 == 1 else "I take rock"

    agents = {name: lambda: Agent(parser=as_hand) for name in ("player_0", "player_1")}
    env = ProtocolEnvironment(
        MultiAgentSyncProtocol(agents, max_steps=8), lambda row: hands(), num_train=0, num_eval=4
    )
    states = env.evaluate_sync(ScriptedClient(answer)).state
    assert [state["error"] for state in states] == [None] * 8
    assert None not in [state["reward"] for state in states]


def as_hand(text):
    hand = text.rpartition(" ")[2]
    return ParseResult(hand) if hand in HANDS else ParseResult(None, -0.5, "Say a hand.")


# One after another


def play(game, moves, seed=1):
    game.reset(seed=seed)
    return [game.step(move) for move in moves]


def test_a_game_of_tic_tac_toe():
    game = TurnGame("classic/tictactoe-v3", to_text=TIC_TAC_TOE)
    game.reset(seed=1)
    assert game.current == "player_1"
    assert game.observe("player_1") == (
        "You are X.\n0 1 2\n3 4 5\n6 7 8\nLegal moves: 0, 1, 2, 3, 4, 5, 6, 7, 8"
    )
    outcomes = game.step("I take 4.")
    assert set(outcomes) == {"player_1", "player_2"}
    assert outcomes["player_2"].obs.startswith("You are X.\n0 1 2\n3 O 5\n6 7 8\nLegal moves: 0, 1")
    assert game.current == "player_2"
    end = play(game, ["0", "3", "1", "4", "2"])[-1]  # the first row
    assert end["player_1"].reward == 1.0
    assert end["player_2"].reward == -1.0
    assert end["player_1"].terminated
    assert end["player_2"].terminated
    assert end["player_2"].obs.startswith("You are X.\nO O O\nX X 5\n6 7 8")
    assert game.current is None


def test_a_text_that_is_no_action_keeps_the_turn_and_an_illegal_move_is_the_games_to_judge():
    game = TurnGame("classic/tictactoe-v3", to_text=TIC_TAC_TOE)
    game.reset(seed=1)
    bad = game.step("the middle")
    assert bad == {
        "player_1": StepOutcome(
            "Invalid action: say an integer", info={BAD_ACTION: "say an integer"}
        )
    }
    assert game.current == "player_1"
    game.step(4)
    outcomes = game.step(4)  # taken
    assert (outcomes["player_2"].reward, outcomes["player_1"].reward) == (-1.0, 0.0)
    assert outcomes["player_2"].terminated
    assert game.current is None


def test_rewards_of_a_game_add_up_to_what_the_game_says():
    """Random legal play: per-step outcomes against the game's own cumulative rewards."""
    for seed in range(5):
        game = TurnGame("classic/connect_four-v3", to_text=board_text(), snapshots="deepcopy")
        other = pettingzoo.make("aec", "classic/connect_four-v3")
        other.reset(seed=seed)
        game.reset(seed=seed)
        told = dict.fromkeys(game.possible_agents, 0.0)
        theirs = dict.fromkeys(game.possible_agents, 0.0)
        rng = np.random.default_rng(seed)
        while game.current is not None:
            agent = game.current
            assert agent == other.agent_selection
            legal = np.flatnonzero(other.observe(agent)["action_mask"])
            move = int(rng.choice(legal))
            assert f"Legal moves: {', '.join(map(str, legal))}" in game.observe(agent)
            for name, outcome in game.step(str(move)).items():
                told[name] += outcome.reward
            other.step(move)
        for agent in list(other.agents):
            theirs[agent] = float(other._cumulative_rewards[agent])
        assert told == theirs
        assert sorted(told.values()) in ([-1.0, 1.0], [0.0, 0.0])


def test_a_game_is_saved_and_restored():
    game = TurnGame("classic/tictactoe-v3", to_text=TIC_TAC_TOE, snapshots="deepcopy")
    play(game, ["4", "0"])
    saved = game.snapshot()
    first = game.step("8")["player_2"].obs
    for _ in range(2):
        game.restore(saved)
        assert game.current == "player_1"
        assert game.step("8")["player_2"].obs == first


def test_games_are_made_by_id_or_by_hand():
    with pytest.raises(ConfigError, match="Did you mean 'classic/tictactoe-v3'"):
        TurnGame("classic/tictacto-v3")
    with pytest.raises(ConfigError, match="no parallel world"):
        ParallelGame("classic/tictactoe-v3")
    made = pettingzoo.make("parallel", "classic/rps-v2")
    parallel: ParallelWorld = ParallelGame(made, action_names=HANDS)
    assert parallel.env is made
    turns: TurnWorld = TurnGame("classic/tictactoe-v3")
    assert turns.possible_agents == ["player_1", "player_2"]


# TextArena


def guess(game, moves):
    return [(o.obs, o.reward, o.terminated) for o in map(game.step, moves)]


def test_a_text_arena_game_and_its_own_random_numbers():
    game = TextArenaWorld("GuessTheNumber-v0")
    before = random.getstate()
    obs, _ = game.reset(seed=5)
    assert "Guess" in obs
    assert game.step("[10]").obs
    assert random.getstate() == before
    again = TextArenaWorld("GuessTheNumber-v0")
    assert again.reset(seed=5)[0] == obs
    said = []
    for number in range(1, 21):
        outcome = again.step(f"[{number}]")
        said.append(outcome)
        if outcome.done:
            break
    assert said[-1].terminated
    assert 0.0 <= said[-1].reward <= 1.0
    assert "You are playing" not in "".join(outcome.obs for outcome in said)


def test_a_text_arena_game_is_saved_with_its_random_numbers():
    game = TextArenaWorld("GuessTheNumber-v0", snapshots="deepcopy")
    game.reset(seed=5)
    game.step("[1]")
    saved = game.snapshot()
    first = guess(game, ["[2]", "[3]"])
    game.restore(saved)
    assert guess(game, ["[2]", "[3]"]) == first


def test_a_text_that_makes_a_game_raise_is_an_empty_move():
    game, other = TextArenaWorld("GuessTheNumber-v0"), TextArenaWorld("GuessTheNumber-v0")
    game.reset(seed=3)
    other.reset(seed=3)
    outcome = game.step(f"[{'9' * 5000}]")  # more digits than `int` reads
    assert outcome.obs.endswith(other.step("").obs[-40:])
    assert not outcome.done
    assert "number" in game.step("[5]").obs


def test_a_game_that_is_over_before_it_begins():
    class Forfeit:
        """Player 1 begins, and whatever it does ends the game."""

        def reset(self, num_players, seed):
            pass

        def get_observation(self):
            return 1, "your move"

        def step(self, action):
            return True, {"reason": "Player 1 made an invalid move."}

        def close(self):
            return {0: 1.0, 1: -1.0}, {}

    game = TextArenaWorld(Forfeit, opponents=[lambda observation: "[99]"])
    with pytest.raises(ConfigError, match=r"before player 0 could move .Player 1 made an invalid"):
        game.reset(seed=1)


def test_a_random_number_generator_is_given_back_after_a_failure():
    def broken(observation):
        raise RuntimeError("the opponent fell ill")

    game = TextArenaWorld("TicTacToe-v0", opponents=[broken])
    game.reset(seed=5)
    before = random.getstate()
    with pytest.raises(RuntimeError, match="fell ill"):
        game.step("[4]")
    assert random.getstate() == before
    assert TextArenaWorld("GuessTheNumber-v0").reset(seed=1)  # and the lock is free
