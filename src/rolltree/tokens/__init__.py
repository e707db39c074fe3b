"""The token tree: every model call of a rollout as a path of ids in one radix tree.

`TokenTree` stores calls, `Trajectory` is the list of steps that an environment sees, `StepTokens`
the dict view between them. numpy only.
"""

from rolltree.tokens.arena import ROOT, Place, TokenArena
from rolltree.tokens.streams import PlacedStream, TokenStream
from rolltree.tokens.trajectory import Trajectory, insert_step
from rolltree.tokens.tree import CallTable, TokenTree
from rolltree.tokens.view import StepTokens

__all__ = [
    "CallTable",
    "PlacedStream",
    "Place",
    "ROOT",
    "StepTokens",
    "TokenArena",
    "TokenStream",
    "TokenTree",
    "Trajectory",
    "insert_step",
]
