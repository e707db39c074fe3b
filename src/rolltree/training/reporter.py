"""Who wants to know how training goes: a protocol, and the reporter that says nothing.

Values only. It knows nothing about terminals and trackers, which implement it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrainStart:
    """How a run starts: `first_step` is 1, or where an earlier start left off.

    `history` holds the metrics of the steps before it, `num_parameters` what is trained.
    """

    run_path: Path
    first_step: int
    num_steps: int
    num_parameters: int
    history: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a finished run leaves: its evaluations by phase, the metrics of all steps in order.

    `model_path` is the exported model, None when `checkpoint.export` is off.
    """

    run_path: Path
    num_steps: int
    steps: tuple[Mapping[str, Any], ...]
    evaluations: Mapping[str, Mapping[str, Any]]
    model_path: Path | None


class Reporter(Protocol):
    """Called from the training loop, in its thread; what it raises ends the run."""

    def on_start(self, start: TrainStart) -> None:
        """Training begins or continues."""

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """One more rollout of a step is there; stored ones count from the start."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, its metrics are stored and the new weights are published."""

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """An evaluation is done, or was found stored by an earlier start."""

    def on_notice(self, message: str) -> None:
        """Something that a person should know, such as a step that starves; it is stored."""

    def on_end(self, report: TrainReport) -> None:
        """Training is over."""


class Silent:
    """A reporter that says nothing, and a base for reporters that say some of it."""

    def on_start(self, start: TrainStart) -> None:
        """Do nothing."""

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """Do nothing."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """Do nothing."""

    def on_notice(self, message: str) -> None:
        """Do nothing."""

    def on_end(self, report: TrainReport) -> None:
        """Do nothing."""
