"""Feeds, which give the loop the rollouts of each step, synchronously or asynchronously.

`SyncFeed` samples a step's groups when the step asks for them. With dynamic sampling (DAPO, Yu et
al. 2025, arXiv:2503.14476, section 3.2) groups whose advantages are all zero are replaced, at most
`algorithm.dynamic_sampling_max` times per step.

`StreamFeed` samples while the trainer steps. Groups are started in the order of the plan, so that
`started <= (version + 1 + async_steps) * groups_per_step + dropped` (AReaL, Fu et al. 2025,
arXiv:2505.24298, equation 3). A step takes the oldest complete groups, so one slow rollout does not
delay it. Before a step trains, a `batch` event stores which groups it takes and which were dropped;
a killed run trains the steps after its checkpoint again from that ledger.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.training.advantages import GroupCredit, by_group, credit_group
from rolltree.training.batches import newest_version, staleness_limit
from rolltree.training.config import TrainConfig
from rolltree.training.no_signal_warning import NoSignalWarning
from rolltree.training.plan import (
    Collected,
    forked_at,
    gather,
    replacement_requests,
    step_requests,
    stored_results,
    until_enough,
)
from rolltree.values.errors import TrainingError
from rolltree.values.types import RolloutRequest, RolloutResult

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


class Feed(ABC):
    """A source of each step's rollouts.

    Args:
        config: the run's settings.
        rollouts: runs the rollouts.
        run: where rollouts, and the ledger of a `StreamFeed`, are stored.
        warning: counts groups with and without reward variance.
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
        warning: NoSignalWarning,
        notify: Callable[[str], None],
        on_progress: OnProgress,
    ) -> None:
        self._config, self._rollouts, self._run = config, rollouts, run
        self._warning, self._notify, self._on_progress = warning, notify, on_progress

    @abstractmethod
    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts that step `step` trains on; the weights are version `step - 1`.

        Raises:
            TrainingError: too many rollouts failed, or the store lacks one that the ledger names.
        """

    async def aclose(self) -> None:
        """Cancel the rollouts in flight; finished ones are stored."""
        return

    async def _gather(
        self,
        requests: Sequence[RolloutRequest],
        on_progress: Callable[[int], None] = lambda num_done: None,
        beside: Group = (),
    ) -> Collected:
        return await gather(
            requests,
            self._rollouts,
            self._run,
            on_progress,
            max_failed_share=self._config.train.max_failed_share,
            beside=beside,
        )


def credit_of(group: Group, config: TrainConfig) -> GroupCredit:
    """Return the credit of one group, without the averages of the run.

    The moving-average baseline depends on other groups and is rarely exactly 0. Without it, a
    group's signal depends only on its own rewards.
    """
    algorithm = config.algorithm
    policy = algorithm.policy(config.train.max_seq_len)
    return credit_group(group, algorithm.resolve().credit, policy)


class SyncFeed(Feed):
    """Samples a step's rollouts when the step asks for them, and waits for all."""

    async def next(self, step: int) -> StepRollouts:
        """Return the rollouts of step `step`, stored ones included."""
        config, source = self._config, self._rollouts.source
        requests = step_requests(config, source, step)

        async def sample() -> Collected:
            return await self._gather(
                requests, lambda done: self._on_progress(step, done, len(requests))
            )

        async def again() -> Group:
            return (await sample()).results

        collected = await sample()
        results = await until_enough(collected.results, again, config, self._notify)
        reused = {"rollout/reused_share": collected.num_reused / len(requests)}
        is_replayed = collected.num_reused == len(requests)
        if not config.algorithm.dynamic_sampling_max:
            credit = tuple(credit_of(group, config) for group in by_group(results))
            return StepRollouts(results, results, credit, reused, is_replayed)
        self._warning.begin(step)
        async with self._warning.watching():
            replaced = await self._replace(step, by_group(results))
        metrics = reused | dict(replaced.metrics)
        return replace(replaced, metrics=metrics, is_replayed=is_replayed)

    async def _replace(self, step: int, planned: Sequence[Group]) -> StepRollouts:
        """Replace groups without signal until none is left or the limit is reached."""
        config, limit = self._config, self._config.algorithm.dynamic_sampling_max
        useful, flat = self._split(planned)
        sampled, num_extra = list(planned), 0
        missing = len(planned) - len(useful)
        while missing and num_extra < limit:
            count = min(missing, limit - num_extra)
            requests = replacement_requests(
                config, self._rollouts.source, step, first=num_extra, count=count
            )
            # Judged with the useful groups so far: one bad group beside seven good ones does not
            # stop the step, and a start after a kill decides the same (design/0016).
            beside = joined([each.results for each in useful])
            again = partial(self._again, step, requests, sum(map(len, sampled)), beside)
            results = await until_enough(await again(), again, config, self._notify, beside)
            num_extra += count
            groups = by_group(results)
            sampled += groups
            more, less = self._split(groups)
            useful, flat = useful + more, flat + less
            missing = len(planned) - len(useful)
        if missing:
            # Counted anew over all of them: a useful group starts the counts again.
            self._warning.begin(step)
            for each in flat:
                self._warning.no_signal(each.results)
            self._notify(
                f"step {step} trains on {missing} of {len(planned)} groups without reward "
                f"variance, after {num_extra} replacements (algorithm.dynamic_sampling_max): "
                f"{self._warning.reason(len(sampled))}"
            )
        # The step keeps its planned size, filled up with the newest flat groups. `flat[-missing:]`
        # would be all of them if none is missing.
        trained = useful + flat[len(flat) - missing :]
        return StepRollouts(
            joined([each.results for each in trained]),
            joined(sampled),
            tuple(trained),
            {"dynamic/num_replaced": float(num_extra), "dynamic/num_flat_trained": float(missing)},
        )

    async def _again(
        self, step: int, requests: Sequence[RolloutRequest], num_before: int, beside: Group
    ) -> Group:
        """Run replacements of a step that has sampled `num_before` rollouts already."""
        total = num_before + len(requests)
        collected = await self._gather(
            requests, lambda done: self._on_progress(step, num_before + done, total), beside
        )
        return collected.results

    def _split(self, groups: Sequence[Group]) -> tuple[list[GroupCredit], list[GroupCredit]]:
        useful, flat = [], []
        for group in groups:
            credit = credit_of(group, self._config)
            if credit.has_signal:
                useful.append(credit)
                self._warning.signal()
            else:
                flat.append(credit)
                self._warning.no_signal(group)
        return useful, flat


def joined(groups: Sequence[Sequence[RolloutResult]]) -> tuple[RolloutResult, ...]:
    """Return the results of all groups in order."""
    return tuple(result for group in groups for result in group)


LEDGER = "batch"


class StreamFeed(Feed):
    """Keeps groups in flight and hands out the oldest complete ones.

    `train.async_steps` is at least 1.
    """

    def __init__(
        self, config: TrainConfig, rollouts: RolloutEngine, run: Run, **settings: Any
    ) -> None:
        super().__init__(config, rollouts, run, **settings)
        size = config.algorithm.group_size
        # As many groups as the engine can run at once. The others wait, so the oldest start first.
        self._slots = asyncio.Semaphore(max(1, rollouts.max_concurrent // size))
        self._ledger = {e.step: e.data for e in run.events(LEDGER) if e.step is not None}
        # Dropped groups too: neither kind is played again.
        self._taken = {
            group for data in self._ledger.values() for group in (*data["groups"], *data["dropped"])
        }
        self._first = forked_at(run) + 1
        self._plan = _planned(config, rollouts, self._first)
        # A continued run counts through the plan from its beginning, so that order and bound are
        # those of a run that was never stopped.
        self._num_started = 0
        self._order: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[Group]] = {}
        self._complete: dict[str, Group] = {}
        self._credit: dict[str, GroupCredit] = {}
        self._dropped: dict[str, str] = {}  # since the last step: group -> why
        self._num_dropped = sum(len(data["dropped"]) for data in self._ledger.values())

    async def next(self, step: int) -> StepRollouts:
        """Return the step's rollouts: those in the ledger, or the oldest complete groups."""
        if step in self._ledger:
            return self._again(step)
        self._warning.begin(step)
        async with self._warning.watching():
            chosen = await self._wait(step)
        results = await until_enough(
            joined(chosen), lambda: self._repeat(chosen), self._config, self._notify
        )
        # After `until_enough`, which may have replaced groups in `chosen`.
        credit = tuple(map(self._credit_of, chosen))
        names = [group[0].request.group_id for group in chosen]
        dropped = dict(self._dropped)
        sampled = (*results, *joined([self._complete[name] for name in dropped]))
        # Recorded before the step trains: after a kill the same groups give the same weights again,
        # so that version numbers keep their meaning (design/0008).
        self._run.add_event(LEDGER, {"groups": names, "dropped": dropped}, step=step)
        self._taken.update(names, dropped)
        for name in (*names, *dropped):
            del self._complete[name], self._order[name]
            self._credit.pop(name, None)
        self._dropped.clear()
        return StepRollouts(results, sampled, credit, self._metrics(credit, dropped))

    async def aclose(self) -> None:
        """Cancel the groups in flight; finished rollouts are stored."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    async def _wait(self, step: int) -> list[Group]:
        """Return the oldest complete groups, as many as a step takes."""
        wanted = self._config.algorithm.groups_per_step
        while True:
            self._start_more(step)
            self._judge(step)
            # Again: each dropped group raises the bound, and with nothing in flight the wait below
            # would have nothing to wait for.
            self._start_more(step)
            ready = [group for name, group in self._complete.items() if name not in self._dropped]
            size = self._config.algorithm.group_size
            self._on_progress(step, min(len(ready), wanted) * size, wanted * size)
            if len(ready) >= wanted:
                ready.sort(key=lambda group: self._order[group[0].request.group_id])
                return ready[:wanted]
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    def _start_more(self, step: int) -> None:
        """Start planned groups up to the bound; the weights are version `step - 1`."""
        section = self._config.algorithm
        # Equation 3's `version + 1 + async_steps`, with `version = step - 1`, counted from the
        # first step that is this run's own.
        num_ahead = step + 1 - self._first + self._config.train.async_steps
        bound = num_ahead * section.groups_per_step
        while self._num_started < bound + self._num_dropped:
            requests = next(self._plan)
            self._num_started += 1
            name = requests[0].group_id
            # Taken groups count as started, too: the bound is about all groups of the run.
            if name not in self._taken:
                self._order[name] = self._num_started
                task = asyncio.create_task(self._play(requests), name=f"group-{name}")
                self._running[name] = task

    async def _play(self, requests: Sequence[RolloutRequest]) -> Group:
        async with self._slots:
            return (await self._gather(requests)).results

    async def _repeat(self, chosen: list[Group]) -> Group:
        """Run the failed rollouts of these groups again; the groups are replaced in the list."""
        plays = [self._play([result.request for result in group]) for group in chosen]
        chosen[:] = await asyncio.gather(*plays)
        self._complete |= {group[0].request.group_id: group for group in chosen}
        return joined(chosen)

    def _judge(self, step: int) -> None:
        """Collect the groups that have ended, and drop those that the step cannot learn from."""
        for name, task in list(self._running.items()):
            if task.done():
                del self._running[name]
                self._complete[name] = task.result()
                self._note(name, self._why_dropped(self._complete[name], step))
        # A complete group can become too old while it waits for its step.
        for name, group in self._complete.items():
            if name not in self._dropped and _is_stale(group, step, self._config):
                self._note(name, "stale")

    def _why_dropped(self, group: Group, step: int) -> str | None:
        if _is_stale(group, step, self._config):
            return "stale"
        # After `dynamic_sampling_max` flat groups were dropped, the next ones are trained.
        flat = Counter(self._dropped.values())["flat"]
        limit = self._config.algorithm.dynamic_sampling_max
        useful = self._credit_of(group).has_signal
        if useful:
            self._warning.signal()
        else:
            self._warning.no_signal(group)
        return None if useful or flat >= limit else "flat"

    def _credit_of(self, group: Group) -> GroupCredit:
        """Return the credit of a complete group, computed anew if its failures ran again."""
        name = group[0].request.group_id
        known = self._credit.get(name)
        if known is None or known.results is not group:
            known = self._credit[name] = credit_of(group, self._config)
        return known

    def _note(self, name: str, why: str | None) -> None:
        if why is not None:
            self._dropped[name] = why
            self._num_dropped += 1

    def _again(self, step: int) -> StepRollouts:
        """Return the rollouts that step `step` took before the run was killed."""
        data = self._ledger[step]
        groups = {name: self._stored(name) for name in (*data["groups"], *data["dropped"])}
        # The dropped groups are only read for the metrics and transcripts of the step.
        chosen = [groups[name] for name in data["groups"]]
        credit = tuple(credit_of(group, self._config) for group in chosen)
        metrics = self._metrics(credit, data["dropped"])
        return StepRollouts(joined(chosen), joined(list(groups.values())), credit, metrics, True)

    def _stored(self, name: str) -> Group:
        # `train/000012/g03` was planned for step 12. A later step may have taken it.
        _, planned, _ = name.split("/")
        requests = [
            request
            for request in step_requests(self._config, self._rollouts.source, int(planned))
            if request.group_id == name
        ]
        if not requests or len(stored := stored_results(requests, self._run)) < len(requests):
            raise TrainingError(
                f"{self._run.path} says that a step took or dropped the group {name}, but does not "
                "hold all of its rollouts, so the step cannot be trained again. Was the run "
                "directory changed? Continue from a copy, or use another run directory."
            )
        return tuple(stored[request.request_id] for request in requests)

    def _metrics(self, chosen: Sequence[GroupCredit], dropped: dict[str, str]) -> dict[str, float]:
        why = Counter(dropped.values())
        dynamic = {}
        if self._config.algorithm.dynamic_sampling_max:
            num_flat = sum(not group.has_signal for group in chosen)
            dynamic = {
                "dynamic/num_replaced": float(why["flat"]),
                "dynamic/num_flat_trained": float(num_flat),
            }
        return dynamic | {
            "async/num_in_flight_groups": float(len(self._running)),
            "async/num_waiting_groups": float(len(self._complete)),
            "async/num_stale_groups": float(why["stale"]),
        }


def _planned(
    config: TrainConfig, rollouts: RolloutEngine, first: int
) -> Iterator[tuple[RolloutRequest, ...]]:
    """Yield the groups of the plan in order, from step `first` on, forever."""
    for step in itertools.count(first):
        requests = step_requests(config, rollouts.source, step)
        for _, members in itertools.groupby(requests, key=lambda request: request.group_id):
            yield tuple(members)


def _is_stale(group: Group, step: int, config: TrainConfig) -> bool:
    """Return whether no token of a group may be trained by step `step` any more."""
    newest = newest_version(group)
    return newest is not None and step - 1 - newest > staleness_limit(config)
