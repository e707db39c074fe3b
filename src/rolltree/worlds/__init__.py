"""Worlds: what agents act in, as text, one adapter per library of worlds.

The room knows Gymnasium, PettingZoo and TextArena by their interfaces and imports none of them
before it is asked for a world by its id. It knows nothing about models, agents or rewards beyond
the world's own, so it stands on one level with parsers and below agents: protocols play worlds with
agents, environments wrap single worlds. It leaves out the loop between world and agent.
"""

from rolltree.steps import StepOutcome
from rolltree.worlds.gym import GymWorld, action_reader
from rolltree.worlds.interface import (
    BAD_ACTION,
    CanSnapshot,
    ParallelWorld,
    TurnWorld,
    World,
    drive,
)
from rolltree.worlds.petting import ParallelGame, TurnGame, board_text
from rolltree.worlds.textarena_game import TextArenaWorld

__all__ = [
    "BAD_ACTION",
    "CanSnapshot",
    "GymWorld",
    "ParallelGame",
    "ParallelWorld",
    "StepOutcome",
    "TextArenaWorld",
    "TurnGame",
    "TurnWorld",
    "World",
    "action_reader",
    "board_text",
    "drive",
]
