"""Rollouts that workers in other processes play, for the training loop and evaluation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.rollouts.record import Stored
from rolltree.rollouts.requests import GroupScorer, with_tools
from rolltree.rollouts.wire import request_encoder
from rolltree.scale.cluster.broker import Broker, ItemOutcome, Offer
from rolltree.store import Run
from rolltree.values.errors import ConfigError
from rolltree.values.types import RolloutRequest, RolloutResult


class RemoteRollouts(RolloutEngine):
    """Takes the place of a `RolloutEngine`: the broker hands out requests and stores results.

    Args:
        source: the environment, which the workers load, too.
        client: the head's own client of the engines, for calls outside of rollouts.
        broker: serves the workers.
        run: the run that stores the results; requests cannot belong to a different one.
        max_concurrent: rollouts in flight at least, until workers report how many they can play.
    """

    def __init__(
        self,
        source: RolloutSource,
        client: object,
        broker: Broker,
        run: Run,
        *,
        max_concurrent: int,
    ) -> None:
        super().__init__(source, client, max_concurrent=max_concurrent)
        self._broker, self._run = broker, run

    async def run_ready(
        self, requests: Iterable[RolloutRequest]
    ) -> AsyncGenerator[list[RolloutResult], None]:
        """Do what `RolloutEngine.run_ready` does; the results are stored, too."""
        async with aclosing(self.run_stored(requests, self._run)) as batches:
            async for batch in batches:
                yield [result for result, _ in batch]

    async def run_stored(
        self,
        requests: Iterable[RolloutRequest],
        run: Run | None,
        *,
        replace_failed: bool = False,
        replaced: Collection[str] = (),
    ) -> AsyncGenerator[list[Stored], None]:
        """Yield results with their rows (without blobs), as soon as they are stored.

        Raises:
            ConfigError: a request cannot leave this process, or `run` is a different run.
        """
        if run is not self._run:
            raise ConfigError(
                "rollout workers store their results in the run that they work for, but a "
                "different run was given. Evaluate without [cluster]."
            )
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Sequence[ItemOutcome]]()

        def done(outcomes: Sequence[ItemOutcome]) -> None:
            # The loop may be closed if the result is not needed any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.put_nowait, outcomes)

        items, is_open, num_open = self._items(requests), dict[str, int](), 0
        again, encode = frozenset(replaced), request_encoder()
        try:
            while True:
                # Twice as many as workers can play, so that no worker has to wait.
                window = max(self.max_concurrent, 2 * self._broker.num_slots)
                offers = list[Offer]()
                while num_open < window and (members := next(items, None)) is not None:
                    item_id = members[0].request_id
                    encoded = tuple(map(encode, members))
                    offers.append(Offer(item_id, members, encoded, done, replace_failed, again))
                    is_open[item_id] = len(members)
                    num_open += len(members)
                if not is_open:
                    return
                self._broker.offer(offers)
                outcomes = list(await arrived.get())
                while not arrived.empty():
                    outcomes += arrived.get_nowait()
                for outcome in outcomes:
                    num_open -= is_open.pop(outcome.item_id)
                    if outcome.error is not None:
                        raise outcome.error
                yield [pair for outcome in outcomes for pair in outcome.stored]
        finally:
            self._broker.withdraw(is_open)

    def _items(self, requests: Iterable[RolloutRequest]) -> Iterator[tuple[RolloutRequest, ...]]:
        """Yield the requests of each item: a single one, or a group if its members are compared."""
        source: Any = self.source
        if isinstance(source, GroupScorer) and source.has_group_rewards:
            listed = sorted(requests, key=lambda request: request.group_id)
            checked = with_tools(listed, source, self.client)
            for _, members in itertools.groupby(checked, key=lambda request: request.group_id):
                yield tuple(members)
            return
        for request in with_tools(requests, source, self.client):
            yield (request,)
