"""The keyword arguments of `rt.evaluate`: those of `evaluate_async`. Only type checkers read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

from rolltree.evaluation.reducers import Reducer, Settings
from rolltree.evaluation.runner import EvalProgress
from rolltree.rollouts import RolloutEngine, Split
from rolltree.store import Run
from rolltree.values.types import RolloutResult, SamplingArgs, SamplingParams


class EvalKeywords(TypedDict, total=False):
    """See `evaluate_async`."""

    num_examples: int
    rollouts_per_example: int
    sampling: SamplingArgs | SamplingParams | None
    max_concurrent: int
    seed: int
    run: Run | None
    phase: str
    split: Split
    time_limit_s: float | None
    deadline_s: float | None
    retries: int
    retry_failed: bool
    settings: Settings | None
    reducers: Mapping[str, Reducer]
    on_result: Callable[[RolloutResult], None] | None
    on_progress: Callable[[EvalProgress], None] | None
    engine: RolloutEngine | None
