"""The recipe of `code_book.py`: a half-competent player to learn from, then GRPO on delegation.

python examples/run.py delegation
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from code_book import expert, load_environment

__all__ = ["WARM_UP", "load_environment", "teacher"]


def teacher(seed: int) -> Any:
    """Return a player who asks wrongly, knows half of the book, and passes on wrongly."""
    return expert({"ask": 0.2, "book": 0.5, "tell": 0.2}, seed)


WARM_UP = {"num_games": 900, "num_steps": 240, "batch_size": 30, "lr": 2e-3}
