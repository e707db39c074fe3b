"""Feeds, which give the loop the rollouts of each step, sampled when the step asks.

`Feed` waits for all of them. Groups without signal are replaced in `dynamic_sampling.py`, and
`stream_feed.py` samples while the trainer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.training.advantages import GroupCredit, by_group, credit_group
from rolltree.training.config import TrainConfig
from rolltree.training.plan import Collected, gather, step_requests, until_enough
from rolltree.values.types import RolloutResult

Group = tuple[RolloutResult, ...]
OnProgress = Callable[[int, int, int], None]
"""(step, rollouts done, rollouts wanted so far)."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """`trained` is what the step learns from; `sampled` adds groups replaced or dropped.

    `credit` has the credit of each group of `trained`. `metrics` describes how they were collected.
    `is_replayed`: an earlier start had stored everything that the step asks for.
    """

    trained: tuple[RolloutResult, ...]
    sampled: tuple[RolloutResult, ...]
    credit: tuple[GroupCredit, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_replayed: bool = False


class Feed:
    """Samples a step's rollouts when the step asks for them, and waits for all.

    Args:
        config: the run's settings.
        rollouts: runs the rollouts.
        run: where rollouts, and the ledger of a `StreamFeed`, are stored.
        notify: gets a notice when the limit of replacements is reached, or the step waits because
            servers or sandboxes fail.
        on_progress: called with the step, its rollouts that are done, and those wanted so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollouts: RolloutEngine,
        run: Run,
        *,
        notify: Callable[[str], None],
        on_progress: OnProgress,
    ) -> None:
        self._config, self._rollouts, self._run = config, rollouts, run
        self._notify, self._on_progress = notify, on_progress
        share = config.train.max_failed_share
        self._gather = partial(gather, engine=rollouts, run=run, max_failed_share=share)

    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts that step `step` trains on; the weights are version `step - 1`.

        Raises:
            TrainingError: too many rollouts failed, or the store lacks one that the ledger names.
        """
        config, source = self._config, self._rollouts.source
        requests = step_requests(config, source, step)

        async def sample() -> Collected:
            return await self._gather(
                requests, on_progress=lambda done: self._on_progress(step, done, len(requests))
            )

        async def again() -> Group:
            return (await sample()).results

        collected = await sample()
        results = await until_enough(collected.results, again, config, self._notify)
        reused = {"rollout/reused_share": collected.num_reused / len(requests)}
        is_replayed = collected.num_reused == len(requests)
        credit = tuple(credit_of(group, config) for group in by_group(results))
        return StepRollouts(results, results, credit, reused, is_replayed)

    async def aclose(self) -> None:
        """Cancel the rollouts in flight; finished ones are stored."""
        return


def credit_of(group: Group, config: TrainConfig) -> GroupCredit:
    """Return the credit of one group, without the averages of the run.

    The moving-average baseline depends on other groups and is rarely exactly 0. Without it, a
    group's signal depends only on its own rewards.
    """
    algorithm = config.algorithm
    policy = algorithm.policy(config.train.max_seq_len)
    return credit_group(group, algorithm.resolve().credit, policy)


def joined(groups: Sequence[Sequence[RolloutResult]]) -> tuple[RolloutResult, ...]:
    """Return the results of all groups in order."""
    return tuple(result for group in groups for result in group)
