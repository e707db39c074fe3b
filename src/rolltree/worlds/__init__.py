"""Worlds in which agents act by text, with an adapter for each library or protocol.

Gymnasium, PettingZoo and TextArena are imported only to make a world by its id.
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
from rolltree.worlds.open_env import OpenEnvWorld
from rolltree.worlds.petting import ParallelGame, TurnGame, board_text
from rolltree.worlds.textarena_game import TextArenaWorld

__all__ = [
    "BAD_ACTION",
    "CanSnapshot",
    "GymWorld",
    "OpenEnvWorld",
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
