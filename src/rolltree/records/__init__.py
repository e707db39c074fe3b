"""What one does with stored runs: read them as tables, audit, rescore, replay and compare them.

Everything here reads through the store. Only what says so needs an environment, a model or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree.lazy import loader

if TYPE_CHECKING:
    from rolltree.records.read import RunData as RunData
    from rolltree.records.read import read_run as read_run
    from rolltree.records.table import Column as Column
    from rolltree.records.table import Table as Table

__all__ = ["Column", "RunData", "Table", "read_run"]
__getattr__ = loader(__name__, {"read": "RunData read_run", "table": "Column Table"})
