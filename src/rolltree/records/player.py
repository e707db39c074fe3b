"""The player of stored rollouts: replay and rescore both send recorded requests through it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from typing import Any

from rolltree.inference.client import ModelClient
from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.rollouts.record import run_stored
from rolltree.store import Run
from rolltree.types import RolloutRequest, RolloutResult


async def play_recorded(
    source: RolloutSource,
    client: ModelClient,
    requests: Iterable[RolloutRequest],
    *,
    into: Run | None = None,
    replaced: Collection[str] = (),
    **limits: Any,
) -> AsyncGenerator[list[RolloutResult], None]:
    """Play requests and yield their results, as they finish, once they are stored in `into`.

    `source` says what playing means: an environment plays the rollout again, a scorer takes the
    stored states and scores them. `client` answers what the source asks a model. The engine is the
    one of evaluation and training, so concurrency, deadlines and failures are the same. `limits`
    are `RolloutEngine`'s, `replaced` that of `Run.add_rollouts`.
    """
    # A result is yielded once it is stored, so that a killed command never counts it twice.
    engine = RolloutEngine(source, client, **limits)
    async with aclosing(run_stored(engine, requests, into, replaced=replaced)) as batches:
        async for batch in batches:
            yield [result for result, _ in batch]
