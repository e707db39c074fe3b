"""Rollouts that are sampled while the trainer steps: the asynchronous feed.

Groups are started in the order of the plan, as long as `started <= (version + 1 + async_steps) *
groups_per_step + dropped` (the staleness control of AReaL, Fu et al. 2025, arXiv:2505.24298,
equation 3). A step takes the oldest groups that are complete, so one slow episode delays nobody; an
episode goes on while weights change, and each of its tokens knows its version.

Before a step trains, the run store gets a `batch` event with the groups that it takes and those
that were dropped. That ledger is what a killed run continues from: steps after the checkpoint are
trained again from the same stored rollouts, so the weights and their version numbers come back;
groups that no step took are taken now; what was in flight is sampled again. It knows requests,
results and the store. It leaves out the weights.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from rolltree.errors import TrainingError
from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.training.collect import check_some_worked, gather, stored_results
from rolltree.training.config import TrainConfig
from rolltree.training.feed import OnProgress, StepRollouts, has_spread, joined
from rolltree.training.plan import step_requests
from rolltree.training.staleness import newest_version, staleness_limit
from rolltree.training.starving import StarvationWatch
from rolltree.types import RolloutRequest, RolloutResult

LEDGER = "batch"
Group = tuple[RolloutResult, ...]


class StreamFeed:
    """Keeps groups in flight and hands out the oldest complete ones.

    Args:
        config: the run's settings; `train.async_steps` is at least 1.
        rollouts: plays the episodes.
        run: where rollouts and the ledger are stored.
        watch: told what is useful while a step waits.
        on_progress: told how far the rollouts of the next step are.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollouts: RolloutEngine,
        run: Run,
        *,
        watch: StarvationWatch,
        on_progress: OnProgress,
    ) -> None:
        self._config, self._rollouts, self._run = config, rollouts, run
        self._watch, self._on_progress = watch, on_progress
        size = config.algorithm.group_size
        self._slots = asyncio.Semaphore(max(1, rollouts.max_concurrent // size))
        self._ledger = {e.step: e.data for e in run.events(LEDGER) if e.step is not None}
        self._taken = {
            group for data in self._ledger.values() for group in (*data["groups"], *data["dropped"])
        }
        self._plan = _planned(config, rollouts)
        self._num_started = 0
        self._order: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[Group]] = {}
        self._complete: dict[str, Group] = {}
        self._dropped: dict[str, str] = {}  # since the last step: group -> why
        self._num_dropped = sum(len(data["dropped"]) for data in self._ledger.values())

    async def next(self, step: int) -> StepRollouts:
        """Return what step `step` trains on; the weights are version `step - 1`.

        Raises:
            TrainingError: every rollout failed, or the store lacks one that the ledger names.
        """
        if step in self._ledger:
            return self._again(step)
        self._watch.begin(step)
        async with self._watch.looking():
            chosen = await self._wait(step)
        results = joined(chosen)
        check_some_worked(results)
        names = [group[0].request.group_id for group in chosen]
        dropped = dict(self._dropped)
        sampled = (*results, *joined([self._complete[name] for name in dropped]))
        self._record(step, names, dropped)
        for name in (*names, *dropped):
            del self._complete[name], self._order[name]
        self._dropped.clear()
        return StepRollouts(results, sampled, self._metrics(chosen, dropped))

    async def aclose(self) -> None:
        """Cancel what is in flight; what was complete is stored."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    async def _wait(self, step: int) -> list[Group]:
        """Return the oldest complete groups of a step, as many as it takes."""
        wanted = self._config.algorithm.groups_per_step
        while True:
            self._start_more(step)
            self._judge(step)
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
        bound = (step + self._config.train.async_steps) * section.groups_per_step
        while self._num_started < bound + self._num_dropped:
            requests = next(self._plan)
            self._num_started += 1
            name = requests[0].group_id
            if name not in self._taken:
                self._order[name] = self._num_started
                task = asyncio.create_task(self._play(requests), name=f"group-{name}")
                self._running[name] = task

    async def _play(self, requests: Sequence[RolloutRequest]) -> Group:
        async with self._slots:
            found = await gather(requests, self._rollouts, self._run, retry_failed=True)
        return found.results

    def _judge(self, step: int) -> None:
        """Take in what has ended, and drop what the step cannot learn from."""
        for name, task in list(self._running.items()):
            if task.done():
                del self._running[name]
                self._complete[name] = task.result()
                self._note(name, self._why_dropped(self._complete[name], step))
        for name, group in self._complete.items():
            if name not in self._dropped and _is_stale(group, step, self._config):
                self._note(name, "stale")

    def _why_dropped(self, group: Group, step: int) -> str | None:
        if _is_stale(group, step, self._config):
            return "stale"
        flat = Counter(self._dropped.values())["flat"]
        limit = self._config.algorithm.replace_flat
        useful = has_spread(group, self._config)
        if useful:
            self._watch.useful()
        else:
            self._watch.useless(group)
        return None if useful or flat >= limit else "flat"

    def _note(self, name: str, why: str | None) -> None:
        if why is not None:
            self._dropped[name] = why
            self._num_dropped += 1

    def _record(self, step: int, names: Sequence[str], dropped: dict[str, str]) -> None:
        data = {"groups": list(names), "dropped": dropped}
        self._run.add_event(LEDGER, data, step=step)
        self._taken.update(names, dropped)

    def _again(self, step: int) -> StepRollouts:
        """Return the rollouts that step `step` took before the run was killed."""
        data = self._ledger[step]
        groups = {name: self._stored(name) for name in (*data["groups"], *data["dropped"])}
        results = joined([groups[name] for name in data["groups"]])
        metrics = self._metrics([groups[name] for name in data["groups"]], data["dropped"])
        return StepRollouts(results, joined(list(groups.values())), metrics)

    def _stored(self, name: str) -> Group:
        _, planned, _ = name.split("/")
        requests = [
            request
            for request in step_requests(self._config, self._rollouts.source, int(planned))
            if request.group_id == name
        ]
        stored = stored_results(requests, self._run)
        if len(stored) < len(requests) or not requests:
            raise TrainingError(
                f"{self._run.path} says that a step was trained on the group {name}, and does not "
                "hold all of its rollouts, so the step cannot be trained again. Was the run "
                "directory changed? Continue from a copy, or start another run directory."
            )
        return tuple(stored[request.request_id] for request in requests)

    def _metrics(self, chosen: Sequence[Group], dropped: dict[str, str]) -> dict[str, float]:
        why = Counter(dropped.values())
        dynamic = {}
        if self._config.algorithm.replace_flat:
            num_flat = sum(not has_spread(group, self._config) for group in chosen)
            dynamic = {
                "dynamic/num_replaced": float(why["flat"]),
                "dynamic/num_flat_trained": float(num_flat),
            }
        return dynamic | {
            "async/num_in_flight_groups": float(len(self._running)),
            "async/num_waiting_groups": float(len(self._complete)),
            "async/num_stale_groups": float(why["stale"]),
        }


def _planned(config: TrainConfig, rollouts: RolloutEngine) -> Iterator[tuple[RolloutRequest, ...]]:
    """Yield group after group of the plan, for ever."""
    for step in itertools.count(1):
        requests = step_requests(config, rollouts.source, step)
        for _, members in itertools.groupby(requests, key=lambda request: request.group_id):
            yield tuple(members)


def _is_stale(group: Group, step: int, config: TrainConfig) -> bool:
    """Return whether no token of a group may be trained by step `step` any more."""
    newest = newest_version(group)
    return newest is not None and step - 1 - newest > staleness_limit(config)
