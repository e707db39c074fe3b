"""Every way in which rolltree's `verifiers` is meant to differ: the rows of docs/compat.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One row of the table.

    Attributes:
        verifiers: what verifiers 0.1.8 does; the first cell of the row.
        here: what happens here; the second cell.
        path: a pattern of the fields it explains; the whole path must match.
        holds: whether a pair of values is what the row says.
        cases: a pattern of the cases it may show in.
    """

    verifiers: str
    here: str
    path: str
    holds: Callable[[Any, Any], bool] = lambda real, ours: True
    cases: str = ".*"

    def covers(self, case: str, path: str, real: Any, ours: Any) -> bool:
        """Return whether this row explains a difference."""
        return bool(
            re.fullmatch(self.cases, case)
            and re.fullmatch(self.path, path)
            and self.holds(real, ours)
        )


DIFFERENCES: tuple[Difference, ...] = ()
