r"""`MathRubric`: compares the answer in `\boxed{...}` with the reference, as mathematics.

Answers are compared in worker processes (`math_worker`), which are killed if they take too long.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rolltree._helpers.workers import WorkerCallError, WorkerDied, WorkerPool
from rolltree.environments.parsers import MaybeThinkParser, Parser, extract_boxed_answer
from rolltree.environments.rubrics.functions import RewardFunc
from rolltree.environments.rubrics.rubric import Rubric
from rolltree.values.errors import ConfigError
from rolltree.values.types import Messages, State

MAX_ANSWER_CHARS = 2000
MEMORY_BYTES = 2 * 2**30


class MathRubric(Rubric):
    r"""A rubric with the reward function `correct_answer`, of weight 1.

    It is 1 if the parser's answer means the same as the row's `answer` (for math-verify, `\frac12`
    is `0.5`), else 0. An answer that takes too long to compare, or is longer than 2,000 characters,
    is wrong, and `state["math_gave_up"]` is true. A reference answer that cannot be read is an
    error: the reward is None.

    Args:
        funcs, weights: further functions, as in `Rubric`.
        parser: finds the answer; by default in the last `\boxed{...}` after the reasoning. Without
            a box there is no answer.
        time_limit_s: the most seconds for one comparison.

    Raises:
        ConfigError: the `math-verify` package is missing.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        *,
        time_limit_s: float = 5.0,
    ) -> None:
        self.require_package()
        super().__init__(funcs, weights, parser or MaybeThinkParser(boxed_or_nothing))
        self._pool = _pool(time_limit_s)
        self.add_reward_func(self.correct_answer)

    @staticmethod
    def require_package() -> None:
        """Raise ConfigError if the `math-verify` package is missing."""
        if find_spec("math_verify") is None:
            raise ConfigError(
                "a MathRubric needs the `math-verify` package. Install it with "
                "`pip install rolltree[math]`."
            )

    def correct_answer(
        self, parser: Parser, completion: Messages, answer: Any, state: State
    ) -> float:
        """Return 1.0 if the completion's answer means the same as the reference, else 0.0."""
        given = parser.parse_answer(completion)
        given = "" if given is None else str(given).strip()
        gold = str(answer).strip()
        if not given:
            return 0.0
        # Most right answers are written like the reference, and need no worker.
        if given == gold:
            return 1.0
        # A real answer is never that long, and sympy would spend the whole time limit on it.
        if len(given) > MAX_ANSWER_CHARS:
            state["math_gave_up"] = True
            return 0.0
        try:
            reply = self._pool.call([gold, given])
        except (WorkerDied, WorkerCallError):
            # The worker was killed, or sympy cannot handle the answer.
            state["math_gave_up"] = True
            return 0.0
        if "unreadable" in reply:
            # The reference is wrong, not the model: the reward is None for all rollouts, not 0.
            raise ConfigError(reply["unreadable"])
        return float(reply["equal"])


def boxed_or_nothing(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`, or "" without one."""
    return extract_boxed_answer(text) if "\\boxed{" in text else ""


def boxed_answers_are_equal(gold: str, given: str, *, time_limit_s: float = 15.0) -> bool:
    r"""Return whether two answers mean the same, each put into a `\boxed{...}` as it is.

    Raises:
        WorkerDied, WorkerCallError: it took too long, or math-verify gave up.
    """
    return bool(_pool(time_limit_s, "compare_boxed").call([gold, given]))


@functools.cache
def _pool(time_limit_s: float, function: str = "answer") -> WorkerPool:
    # Only a few: comparisons are short, and each process has sympy in memory.
    num_workers = min(4, os.cpu_count() or 1)
    return WorkerPool(
        f"rolltree.environments.rubrics.math_worker:{function}",
        limit_s=time_limit_s,
        # Wall time would fail right answers on a busy machine.
        counts_cpu=True,
        memory_bytes=MEMORY_BYTES,
        max_workers=num_workers,
        max_idle=num_workers,
    )
