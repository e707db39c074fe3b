"""PettingZoo's tic-tac-toe: trained against itself, measured against a fixed opponent.

    user       12X
               4O6
               789          the free cells have numbers; X is always the player to move
    assistant  5

In training one model plays both sides. The held-out rows are games against a player who takes a
random free cell, as first and as second player in turn. PettingZoo gives 1 for a win, -1 for a
loss and for a move to a cell that is taken.
"""

from __future__ import annotations

import random
import re
from typing import Any

import rolltree as rt
from rolltree.agents import Agent
from rolltree.agents.protocols import Opponent, TurnProtocol
from rolltree.agents.worlds import TurnGame
from rolltree.environments import ProtocolEnvironment
from rolltree.values.steps import ParseResult

PLAYERS = ("player_1", "player_2")


def board(observation: Any, agent: str) -> str:
    """Return what a player sees: its own marks are X."""
    mine, theirs = (observation["observation"][:, :, side].ravel() for side in (0, 1))
    cells = ["X" if mine[cell] else "O" if theirs[cell] else str(cell + 1) for cell in range(9)]
    return "\n".join("".join(cells[row : row + 3]) for row in (0, 3, 6))


def world(row: Any = None) -> TurnGame:
    return TurnGame("classic/tictactoe-v3", to_text=board, to_action=lambda text: int(text) - 1)


def cell(text: str) -> ParseResult:
    said = text.strip()
    return ParseResult(said if re.fullmatch("[1-9]", said) else None, obs="Say 1 to 9.")


def chance(seed: int) -> Any:
    """Return a player who takes a random free cell."""
    rng = random.Random(seed)
    return lambda seen: rng.choice(re.findall("[1-9]", seen))


def player() -> Agent:
    return Agent(parser=cell)


class Duel(ProtocolEnvironment):
    """A game against itself, or for one seat against an `Opponent`: the row says which."""

    def __init__(self, seats: dict[str, TurnProtocol], **settings: Any) -> None:
        super().__init__(seats["both"], world, **settings)
        self.games = {
            seat: ProtocolEnvironment(protocol, world, num_train=1, num_eval=1)
            for seat, protocol in seats.items()
        }

    async def rollouts(self, input: rt.RolloutInput, *rest: Any, **named: Any) -> list[rt.State]:
        return await self.games[input["info"]["seat"]].rollouts(input, *rest, **named)


def load_environment(num_train: int = 1000, num_eval: int = 200) -> rt.Environment:
    """Return the game: training against itself, evaluation against chance."""

    def protocol(**players: Any) -> TurnProtocol:
        return TurnProtocol(players, max_steps=9, stop_on_parse_error=True)

    one, two = PLAYERS
    seats = {
        "both": protocol(player_1=player, player_2=player),
        one: protocol(player_1=player, player_2=Opponent(chance)),
        two: protocol(player_1=Opponent(chance), player_2=player),
    }
    return Duel(
        seats,
        dataset=[{"prompt": [], "info": {"seat": "both"}}] * num_train,
        eval_dataset=[{"prompt": [], "info": {"seat": PLAYERS[n % 2]}} for n in range(num_eval)],
    )


def teacher(seed: int) -> Any:
    """Return a player for the warm-up, who takes any free cell."""
    rng = random.Random(seed)
    return lambda messages: rng.choice(re.findall("[1-9]", messages[-1]["content"]))


WARM_UP = {"num_games": 600, "num_steps": 200, "batch_size": 32, "lr": 2e-3}
