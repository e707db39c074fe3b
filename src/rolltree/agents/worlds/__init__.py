"""Worlds in which agents act by text, with an adapter for each library or protocol.

Gymnasium, PettingZoo and TextArena are imported only to make a world by its id.
"""

from rolltree.agents.worlds.gym import GymWorld, action_reader
from rolltree.agents.worlds.interface import (
    BAD_ACTION,
    CanSnapshot,
    ParallelWorld,
    TurnWorld,
    World,
    drive,
)
from rolltree.agents.worlds.open_env import OpenEnvWorld
from rolltree.agents.worlds.petting import ParallelGame, TurnGame, board_text
from rolltree.agents.worlds.textarena_game import TextArenaWorld
from rolltree.values.steps import StepOutcome

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
