"""The rollouts of one step: those that are stored already, and the missing ones run now.

Each finished rollout is stored before it counts, so a killed run asks only for what is missing;
those that finish while a transaction is on its way go into the next one, together. When the source
compares the members of a group, a group is stored whole or not at all. It knows the engine and the
run store. It leaves out what is learned from a rollout.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rolltree.errors import TrainingError
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.record import decode_results, encode_result
from rolltree.store import Run
from rolltree.training.plan import PHASE
from rolltree.types import RolloutRequest, RolloutResult


@dataclass(frozen=True, slots=True)
class Collected:
    """Results in request order, and how many of them were stored by an earlier start."""

    results: tuple[RolloutResult, ...]
    num_reused: int


async def collect(
    requests: Sequence[RolloutRequest],
    engine: RolloutEngine,
    run: Run,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> Collected:
    """Do what `gather` does, for all requests of a step.

    Raises:
        TrainingError: every rollout failed; the most common error is quoted.
    """
    collected = await gather(requests, engine, run, on_progress, retry_failed=True)
    check_some_worked(collected.results)
    return collected


async def gather(
    requests: Sequence[RolloutRequest],
    engine: RolloutEngine,
    run: Run,
    on_progress: Callable[[int], None] = lambda num_done: None,
    *,
    retry_failed: bool = False,
) -> Collected:
    """Return the results of `requests`, whole groups of one step, running those not stored.

    With `retry_failed`, requests that are all stored and all failed are run again: there is nothing
    to learn from them, and what stopped them (a server that was down) may be over. `on_progress`
    gets the number of results that are there.
    """
    stored = stored_results(requests, run)
    if (
        retry_failed
        and len(stored) == len(requests)
        and all(r.error is not None for r in stored.values())
    ):
        stored = {}
    found = dict(stored)
    on_progress(len(found))
    missing = [request for request in requests if request.request_id not in stored]
    async with aclosing(engine.run_ready(missing)) as batches:
        async for batch in batches:
            rows = [row for result in batch for row in encode_result(result)]
            await asyncio.to_thread(run.add_rollouts, rows, replace_failed=True)
            found |= {result.request.request_id: result for result in batch}
            on_progress(len(found))
    results = tuple(found[request.request_id] for request in requests)
    return Collected(results, len(stored))


def stored_results(requests: Sequence[RolloutRequest], run: Run) -> dict[str, RolloutResult]:
    """Return the results of `requests` that the run holds, by request id."""
    wanted = {request.request_id for request in requests}
    groups = sorted({request.group_id for request in requests})
    rows = run.rollouts(phase=PHASE, train_step=requests[0].train_step, group_id=groups)
    results = decode_results(row for row in rows if row.request_id in wanted)
    return {result.request.request_id: result for result in results}


def check_some_worked(results: Sequence[RolloutResult]) -> None:
    """Raise unless a rollout of a step did not fail.

    Raises:
        TrainingError: every rollout failed; the most common error is quoted.
    """
    errors = [result.error for result in results if result.error is not None]
    if len(errors) < len(results):
        return
    kinds = Counter(error.type for error in errors)
    kind, count = kinds.most_common(1)[0]
    example = next(error for error in errors if error.type == kind)
    step = results[0].request.train_step
    raise TrainingError(
        f"all {len(results)} rollouts of step {step} failed, {count} of them with {kind}: "
        f"{example.message} Nothing can be learned from them. Remove the cause and start the same "
        "command again: the step is run again, and everything before it is kept."
    )
