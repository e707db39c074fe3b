"""Which rollouts a step learns from: the synchronous feed, and what both feeds share.

    planned groups -> rollouts -> groups without spread replaced by new ones -> what the step trains

Dynamic sampling is DAPO's (Yu et al. 2025, arXiv:2503.14476, section 3.2): groups whose advantages
are all zero are replaced, here at most `algorithm.replace_flat` times per step. What is sampled is
a function of the seed, the step and the rewards, so a killed run asks for the same again. It knows
requests, results and the run store. The asynchronous feed is in `stream.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.training.advantages import assign_credit
from rolltree.training.collect import check_some_worked, gather
from rolltree.training.config import TrainConfig
from rolltree.training.plan import replacement_requests, step_requests
from rolltree.training.starving import StarvationWatch
from rolltree.types import RolloutResult

OnProgress = Callable[[int, int, int], None]
"""(step, rollouts that are there, rollouts that are wanted so far)."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """`trained` is what the step learns from; `sampled` adds the groups that were replaced.

    `metrics` says how they came together.
    """

    trained: tuple[RolloutResult, ...]
    sampled: tuple[RolloutResult, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Feed(Protocol):
    """Where the loop gets a step's rollouts."""

    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts that step `step` trains on."""
        ...

    async def aclose(self) -> None:
        """Stop what runs."""
        ...


def has_spread(results: Sequence[RolloutResult], config: TrainConfig) -> bool:
    """Return whether credit gives any call of one group an advantage other than 0.

    A moving average does not count: it depends on the other groups, and is never 0 for long.
    """
    algorithm = config.algorithm
    policy = replace(algorithm.policy(config.train.max_seq_len), baseline="none")
    report = assign_credit(results, algorithm.resolve().credit, policy)
    return any(
        (step.get("advantage") or 0.0) != 0.0
        for state in report.trained
        for step in state.get("trajectory") or ()
    )


class SyncFeed:
    """Samples a step's rollouts when the step asks for them, and waits for all.

    Args:
        config: the run's settings.
        rollouts: plays the episodes.
        run: where they are stored.
        watch: told what is useful while groups are replaced.
        say: gets a notice when the limit of replacements is reached.
        on_progress: told how far the step's rollouts are.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollouts: RolloutEngine,
        run: Run,
        *,
        watch: StarvationWatch,
        say: Callable[[str], None],
        on_progress: OnProgress,
    ) -> None:
        self._config, self._rollouts, self._run = config, rollouts, run
        self._watch, self._say, self._on_progress = watch, say, on_progress

    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts of step `step`, stored ones included."""
        config, source = self._config, self._rollouts.source
        requests = step_requests(config, source, step)
        found = await gather(
            requests,
            self._rollouts,
            self._run,
            lambda done: self._on_progress(step, done, len(requests)),
            retry_failed=True,
        )
        check_some_worked(found.results)
        reused = {"rollout/reused_share": found.num_reused / len(requests)}
        if not config.algorithm.replace_flat:
            return StepRollouts(found.results, found.results, reused)
        self._watch.begin(step)
        async with self._watch.looking():
            replaced = await self._replace(step, by_group(found.results))
        return StepRollouts(replaced.trained, replaced.sampled, reused | dict(replaced.metrics))

    async def aclose(self) -> None:
        """Do nothing: nothing runs between steps."""

    async def _replace(
        self, step: int, planned: Sequence[tuple[RolloutResult, ...]]
    ) -> StepRollouts:
        """Ask for new groups until every planned one has a useful one in its place."""
        config, limit = self._config, self._config.algorithm.replace_flat
        useful, flat = self._split(planned)
        sampled, num_extra = list(planned), 0
        missing = len(planned) - len(useful)
        while missing and num_extra < limit:
            count = min(missing, limit - num_extra)
            requests = replacement_requests(
                config, self._rollouts.source, step, first=num_extra, count=count
            )
            before = sum(map(len, sampled))
            total = before + len(requests)

            def progress(done: int, before: int = before, total: int = total) -> None:
                self._on_progress(step, before + done, total)

            found = await gather(requests, self._rollouts, self._run, progress)
            num_extra += count
            groups = by_group(found.results)
            sampled += groups
            more, less = self._split(groups)
            useful, flat = useful + more, flat + less
            missing = len(planned) - len(useful)
        if missing:
            self._say(
                f"step {step} goes on with {missing} of {len(planned)} groups that teach nothing, "
                f"after {num_extra} replacements (algorithm.replace_flat): {self._watch.reason()}"
            )
        trained = useful + flat[len(flat) - missing :]
        return StepRollouts(
            joined(trained),
            joined(sampled),
            {"dynamic/num_replaced": float(num_extra), "dynamic/num_flat_trained": float(missing)},
        )

    def _split(
        self, groups: Sequence[tuple[RolloutResult, ...]]
    ) -> tuple[list[tuple[RolloutResult, ...]], list[tuple[RolloutResult, ...]]]:
        useful, flat = [], []
        for group in groups:
            if has_spread(group, self._config):
                useful.append(group)
                self._watch.useful()
            else:
                flat.append(group)
                self._watch.useless(group)
        return useful, flat


def by_group(results: Sequence[RolloutResult]) -> list[tuple[RolloutResult, ...]]:
    """Return the results of each group, groups in the order of their first member."""
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.request.group_id, []).append(result)
    return [tuple(group) for group in groups.values()]


def joined(groups: Sequence[Sequence[RolloutResult]]) -> tuple[RolloutResult, ...]:
    """Return the results of all groups in order."""
    return tuple(result for group in groups for result in group)
