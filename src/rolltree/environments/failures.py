"""What ended a rollout, and in which phase: an exception as data.

It knows exceptions and the phases of `ErrorRecord`. It knows nothing about states. It leaves out
time limits and cancellation, which the rollout engine tells apart.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from rolltree.errors import ModelError, record_error
from rolltree.types import ErrorRecord

Phase: TypeAlias = Literal["setup", "model", "environment"]
_PHASE = "rolltree_phase"


class in_phase:  # noqa: N801  (a context manager that reads as a phrase)
    """`with in_phase("model"):` notes on an exception that leaves the block where it arose."""

    __slots__ = ("phase",)

    def __init__(self, phase: Phase) -> None:
        self.phase: Phase = phase

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not hasattr(error, _PHASE):
            setattr(error, _PHASE, self.phase)


def failure_of(error: Exception) -> ErrorRecord:
    """Return an exception as data. Without a noted phase it is "environment"."""
    if isinstance(error, ModelError):
        return record_error(error, "model")
    phase: Phase = getattr(error, _PHASE, "environment")
    return record_error(error, phase)
