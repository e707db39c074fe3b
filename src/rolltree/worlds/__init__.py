"""Worlds in which agents act by text, with an adapter for each library or protocol.

Gymnasium, PettingZoo and TextArena are imported only to make a world by its id.
"""

from rolltree.steps import StepOutcome as StepOutcome
from rolltree.worlds.gym import GymWorld as GymWorld
from rolltree.worlds.gym import action_reader as action_reader
from rolltree.worlds.interface import BAD_ACTION as BAD_ACTION
from rolltree.worlds.interface import CanSnapshot as CanSnapshot
from rolltree.worlds.interface import ParallelWorld as ParallelWorld
from rolltree.worlds.interface import TurnWorld as TurnWorld
from rolltree.worlds.interface import World as World
from rolltree.worlds.interface import drive as drive
from rolltree.worlds.open_env import OpenEnvWorld as OpenEnvWorld
from rolltree.worlds.petting import ParallelGame as ParallelGame
from rolltree.worlds.petting import TurnGame as TurnGame
from rolltree.worlds.petting import board_text as board_text
from rolltree.worlds.textarena_game import TextArenaWorld as TextArenaWorld
