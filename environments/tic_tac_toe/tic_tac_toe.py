"""Tic-tac-toe against an opponent: an agent, a world with turns, and a player without a model.

The opponent plays perfectly with probability `skill` and at random otherwise; who begins, and what
the opponent does, follow from the episode's seed.
"""

from __future__ import annotations

import random
import re
from functools import cache

import rolltree as rt
from rolltree.agents import Agent
from rolltree.agents.protocols import Opponent, TurnProtocol
from rolltree.agents.worlds import BAD_ACTION
from rolltree.environments import ProtocolEnvironment
from rolltree.values.steps import ParseResult, StepOutcome

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
SYSTEM = "We play tic-tac-toe. You are X. Free cells have numbers. Answer with one number, no more."


def winner(board: str) -> str | None:
    """Return "X", "O", "draw", or None while the game goes on. `board` is nine of "X", "O", "."."""
    for a, b, c in LINES:
        if board[a] != "." and board[a] == board[b] == board[c]:
            return board[a]
    return None if "." in board else "draw"


@cache
def value(board: str, mover: str) -> int:
    """Return the result of best play for X: 1, 0 or -1."""
    found = winner(board)
    if found is not None:
        return {"X": 1, "O": -1, "draw": 0}[found]
    after = [value(play(board, cell, mover), "XO"[mover == "X"]) for cell in free(board)]
    return max(after) if mover == "X" else min(after)


def free(board: str) -> list[int]:
    return [cell for cell in range(9) if board[cell] == "."]


def play(board: str, cell: int, mover: str) -> str:
    return board[:cell] + mover + board[cell + 1 :]


class Board:
    """A `TurnWorld`: actions are cells 1 to 9. Winning is worth 1, a draw 0.5."""

    in_thread = False
    possible_agents = ["X", "O"]

    def __init__(self, row: rt.RolloutInput | None = None) -> None:
        self.board, self.current = "." * 9, None

    def reset(self, *, seed: int | None = None) -> None:
        self.board, self.current = "." * 9, random.Random(seed).choice("XO")

    def observe(self, agent: str) -> str:
        cells = [str(i + 1) if mark == "." else mark for i, mark in enumerate(self.board)]
        return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))

    def step(self, action: int) -> dict[str, StepOutcome]:
        me = str(self.current)
        if action - 1 not in free(self.board):
            told = f"{action} is not free."
            return {me: StepOutcome(told, info={BAD_ACTION: told})}
        self.board = play(self.board, action - 1, me)
        found = winner(self.board)
        self.current = ("XO"[me == "X"]) if found is None else None
        reward = {"X": (1.0, 0.0), "O": (0.0, 1.0), "draw": (0.5, 0.5), None: (0.0, 0.0)}[found]
        seen = [self.observe(agent) for agent in "XO"]
        return {
            agent: StepOutcome(seen[i], reward[i], terminated=found is not None)
            for i, agent in enumerate("XO")
        }

    def close(self) -> None:
        pass


def opponent(skill: float) -> Opponent:
    """Return a player of O that finds the best move with probability `skill`."""

    def make(seed: int):
        rng = random.Random(seed)

        def move(seen: str) -> int:
            board = "".join("." if mark.isdigit() else mark for mark in seen.split())
            cells = free(board)
            rng.shuffle(cells)
            if rng.random() < skill:
                cells.sort(key=lambda cell: value(play(board, cell, "O"), "X"))
            return cells[0] + 1

        return move

    return Opponent(make)


def cell(text: str) -> ParseResult:
    """Return the one number in an answer; an answer with several numbers has no action."""
    said = re.findall(r"\d+", text, re.ASCII)
    if len(said) != 1 or said[0] not in set("123456789"):
        return ParseResult(None, obs="Answer with the number of one free cell.")
    return ParseResult(int(said[0]))


def load_environment(
    skill: float = 0.5, num_train: int = 1000, num_eval: int = 100, max_turns: int = 16
) -> rt.Environment:
    """Return the game; `max_turns` counts both players' turns and illegal moves."""

    def player() -> Agent:
        return Agent(name="X", system_prompt=SYSTEM, parser=cell)

    return ProtocolEnvironment(
        TurnProtocol({"X": player, "O": opponent(skill)}, max_steps=max_turns),
        Board,
        num_train=num_train,
        num_eval=num_eval,
    )
