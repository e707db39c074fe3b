"""The feed of an asynchronous run, which samples while the trainer steps.

Groups are started in the order of the plan, so that
`started <= (version + 1 + async_steps) * groups_per_step + dropped` (AReaL, Fu et al. 2025,
arXiv:2505.24298, equation 3). A step takes the oldest complete groups, so one slow rollout does not
delay it. Before a step trains, a `batch` event stores which groups it takes and which were dropped;
a killed run trains the steps after its checkpoint again from that ledger.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.training.advantages import GroupCredit
from rolltree.training.batches import newest_version, staleness_limit
from rolltree.training.config import TrainConfig
from rolltree.training.feeds import Feed, Group, StepRollouts, credit_of, joined
from rolltree.training.no_signal_warning import NoSignalWarning
from rolltree.training.plan import forked_at, step_requests, stored_results, until_enough
from rolltree.values.errors import TrainingError
from rolltree.values.types import RolloutRequest

LEDGER = "batch"


class StreamFeed(Feed):
    """Keeps groups in flight and hands out the oldest complete ones.

    `train.async_steps` is at least 1.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollouts: RolloutEngine,
        run: Run,
        *,
        warning: NoSignalWarning,
        **settings: Any,
    ) -> None:
        super().__init__(config, rollouts, run, **settings)
        self._warning = warning
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
