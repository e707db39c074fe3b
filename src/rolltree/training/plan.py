"""The rollouts that a step needs, and collecting them: stored ones first, then the missing ones.

Tasks and seeds are a pure function of the run's seed and the step, so a run that was killed asks
for exactly the same rollouts again. Each finished rollout is stored before it counts; when the
source compares the members of a group, a group is stored whole or not at all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic

import numpy as np

from rolltree.inference.request_fields import distribution_changes
from rolltree.rollouts import (
    GroupScorer,
    GroupStrategy,
    RolloutEngine,
    RolloutSource,
    derive_seed,
    example_request,
    resolve_sampling,
)
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import run_stored
from rolltree.rollouts.settle import settle_state
from rolltree.samples.resolve import not_the_models_own
from rolltree.store import Run
from rolltree.training.config import TrainConfig
from rolltree.values.errors import ConfigError, TrainingError, as_sentence
from rolltree.values.types import RolloutRequest, RolloutResult, SamplingParams

PHASE = "train"
FORKED = "forked_from"
AWAY_LIMIT_S = 1800.0
"""How long a run waits for servers or sandboxes: longer than a machine's restart and the loading of
a large model. After it the same command continues the run, so nothing is lost."""
# Per start of the run; the next start repeats them again (design/0014).
_NUM_REPEATS = 3


def forked_at(run: Run) -> int:
    """Return the step of the checkpoint that a run began with; 0 if it is not a fork."""
    return int(run.meta.get(FORKED, {}).get("step", 0))


def training_sampling(config: TrainConfig, source: RolloutSource) -> SamplingParams:
    """Return the sampling of training rollouts: the config's fields over the source's.

    Raises:
        ConfigError: the source asks for a truncated or greedy distribution, or nothing would be
            learned from rewards.
    """
    if config.algorithm.resolve().supervised:
        raise ConfigError(
            f"the loss of algorithm.name = {config.algorithm.name!r} reads tokens only, so a model "
            "that trains on its own rollouts would learn nothing from their rewards. Fine-tune on "
            "data with rolltree.training.Trainer and supervised_states, or choose another "
            "algorithm."
        )
    sampling = resolve_sampling(source, config.sampling.as_args())
    if settings := not_the_models_own(sampling.temperature, distribution_changes(sampling)):
        raise ConfigError(
            f"{source.env_id!r} samples with {settings}. Training needs the full distribution "
            "(temperature above 0, nothing cut off, penalised or biased), because importance "
            "ratios are computed from it. Change the environment's sampling_args, or set "
            "sampling.temperature. Evaluation takes all of them."
        )
    return sampling


def task_indices(seed: int, step: int, num_groups: int, num_examples: int) -> list[int]:
    """Return the examples of step `step` (1 is the first): epochs of one shuffled order each.

    No example repeats before every other one was used, also across steps.

    >>> sorted(task_indices(0, 1, 2, 4) + task_indices(0, 2, 2, 4))
    [0, 1, 2, 3]
    """
    first = (step - 1) * num_groups
    chosen = []
    orders: dict[int, np.ndarray] = {}
    for position in range(first, first + num_groups):
        epoch, index = divmod(position, num_examples)
        if epoch not in orders:
            # Each epoch's order follows from the seed, so the step number alone is the position.
            rng = np.random.default_rng(derive_seed(seed, "order", epoch))
            orders[epoch] = rng.permutation(num_examples)
        chosen.append(int(orders[epoch][index]))
    return chosen


def step_requests(config: TrainConfig, source: RolloutSource, step: int) -> list[RolloutRequest]:
    """Return the requests of one step, group after group.

    Example: ids `train/000012/g03/0` to `train/000012/g03/7` for the fourth task of step 12.

    Raises:
        ConfigError: the source has no training data, or its sampling cannot be trained on.
    """
    num_examples = _num_examples(source)
    indices = task_indices(config.run.seed, step, config.algorithm.groups_per_step, num_examples)
    # Seeded by the place in the step, not by the example, which is repeated in later epochs.
    groups = {f"g{group:02d}": index for group, index in enumerate(indices)}
    return _requests(config, source, step, groups)


def replacement_requests(
    config: TrainConfig, source: RolloutSource, step: int, *, first: int, count: int
) -> list[RolloutRequest]:
    """Return the requests of `count` further groups of a step, from number `first` (0) on.

    Their tasks are a shuffled order of those that the step did not plan (all, if it planned all).
    Example: ids `train/000012/x00/0` to `train/000012/x00/7`.
    """
    num_examples, seed = _num_examples(source), config.run.seed
    planned = task_indices(seed, step, config.algorithm.groups_per_step, num_examples)
    # Sorted, because the order of a set does not follow from the seed.
    others = sorted(set(range(num_examples)) - set(planned)) or list(range(num_examples))
    order = np.random.default_rng(derive_seed(seed, "replacement", step)).permutation(others)
    groups = {f"x{n:02d}": int(order[n % len(order)]) for n in range(first, first + count)}
    return _requests(config, source, step, groups)


def group_name(step: int, label: str) -> str:
    """Return the id of a group of a step: `g03` is its fourth task, `x00` its first replacement."""
    return f"{PHASE}/{step:06d}/{label}"


def group_seed(run_seed: int, step: int, label: str) -> int:
    """Return the seed of the environment for a group of a step."""
    parts = ("replacement",) if label[0] == "x" else ()
    return derive_seed(run_seed, PHASE, step, *parts, int(label[1:]))


def _num_examples(source: RolloutSource) -> int:
    num_examples = source.num_examples("train")
    if num_examples < 1:
        raise ConfigError(
            f"{source.env_id!r} has no training examples, so there is nothing to learn from. Give "
            "the environment a dataset, not only an eval_dataset."
        )
    return num_examples


def _requests(
    config: TrainConfig,
    source: RolloutSource,
    step: int,
    chosen: Mapping[str, int],
) -> list[RolloutRequest]:
    """Return the requests of the groups of one step: label -> example."""
    sampling = training_sampling(config, source)
    groups = [
        example_request(
            source.env_id,
            source.example("train", index),
            group_id=group_name(step, label),
            seed=group_seed(config.run.seed, step, label),
            sampling=sampling,
            phase=PHASE,
            train_step=step,
        )
        for label, index in chosen.items()
    ]
    return GroupStrategy(config.algorithm.group_size).expand(groups)


@dataclass(frozen=True, slots=True)
class Collected:
    """Results in request order, and how many of them were stored by an earlier start."""

    results: tuple[RolloutResult, ...]
    num_reused: int


async def gather(
    requests: Sequence[RolloutRequest],
    engine: RolloutEngine,
    run: Run,
    on_progress: Callable[[int], None] = lambda num_done: None,
    *,
    max_failed_share: float | None = None,
    beside: Sequence[RolloutResult] = (),
) -> Collected:
    """Return the results of `requests`, whole groups of one step, running those not stored.

    A rollout that failed because of a server or a sandbox is run again, at most `_NUM_REPEATS`
    times per start, even if an earlier start stored it: long rollouts meet a dying server more
    often, so those that remain are the easy ones. It keeps its seeds, so the result is what it
    would have been.

    Args:
        requests: what to run.
        engine: runs it.
        run: where results are stored.
        on_progress: gets the number of results so far.
        max_failed_share: if all are stored and a larger share failed, all failed ones are run
            again, whatever their errors: the cause may be gone.
        beside: results that count in that share, too, and are not run again.
    """
    done = stored_results(requests, run)
    again = lost_rollouts(done.values(), engine.source)
    if max_failed_share is not None and len(done) == len(requests):
        failed = {name for name, result in done.items() if result.error is not None}
        num_failed = len(failed) + sum(result.error is not None for result in beside)
        if too_many(num_failed, len(requests) + len(beside), max_failed_share):
            again |= _whole_groups(failed, done.values(), engine.source)
    num_reused = len(done) - len(again)
    # Requests whose stored rows may be overwritten, even if they did not fail: in a group that is
    # compared, all members are run again.
    replaced: set[str] = set()
    for number in itertools.count():
        replaced |= again
        for name in again:
            del done[name]
        on_progress(len(done))
        missing = [request for request in requests if request.request_id not in done]
        stored = run_stored(engine, missing, run, replace_failed=True, replaced=replaced)
        # An error closes the generator at once; rollouts in flight end with it.
        async with aclosing(stored) as batches:
            async for batch in batches:
                done |= {result.request.request_id: result for result, _ in batch}
                on_progress(len(done))
        again = lost_rollouts(done.values(), engine.source)
        if not again or number == _NUM_REPEATS:
            break
        await _wait(number)
    results = tuple(done[request.request_id] for request in requests)
    # Results of rollout workers are decoded here, since long trees would block the event loop.
    await asyncio.to_thread(lambda: [result.states for result in results])
    return Collected(results, num_reused)


async def _wait(number: int) -> None:
    """Wait before failed rollouts run again for the time `number` + 1."""
    from rolltree.inference.retry import WHILE_AWAY

    await asyncio.sleep(WHILE_AWAY.wait_s(number, None))


def lost_rollouts(results: Iterable[RolloutResult], source: RolloutSource) -> set[str]:
    """Return the ids of requests to run again because a server or a sandbox failed.

    If the members of a group are compared, these are whole groups.
    """
    results = list(results)
    lost = {result.request.request_id for result in results if _is_lost(result)}
    return _whole_groups(lost, results, source)


def _is_lost(result: RolloutResult) -> bool:
    return result.error is not None and result.error.kind == "infrastructure"


def _whole_groups(
    names: set[str], results: Iterable[RolloutResult], source: RolloutSource
) -> set[str]:
    # The scores of the others were computed without the missing one (design/0014).
    if not names or not (isinstance(source, GroupScorer) and source.has_group_rewards):
        return names
    results = list(results)
    groups = {r.request.group_id for r in results if r.request.request_id in names}
    return {r.request.request_id for r in results if r.request.group_id in groups}


def stored_results(requests: Sequence[RolloutRequest], run: Run) -> dict[str, RolloutResult]:
    """Return the results of a step's `requests` that the run holds, by request id."""
    wanted = {request.request_id for request in requests}
    # By step and group, which the store has indexes for.
    groups = sorted({request.group_id for request in requests})
    rows = run.rollouts(phase=PHASE, train_step=requests[0].train_step, group_id=groups)
    results = list(decode_results(row for row in rows if row.request_id in wanted))
    # Rollouts of an older version may have rewards that are not finite numbers.
    for state in (state for result in results for state in result.states):
        settle_state(state)
    return {result.request.request_id: result for result in results}


def too_many(num_failed: int, num: int, max_failed_share: float) -> bool:
    """Return whether so many of a step's `num` rollouts failed that it must not be trained."""
    # Even with a share of 1, not all may fail: nothing would be left to learn from.
    return num_failed > max_failed_share * num or num_failed == num


async def until_enough(
    results: tuple[RolloutResult, ...],
    again: Callable[[], Awaitable[tuple[RolloutResult, ...]]],
    config: TrainConfig,
    notify: Callable[[str], None],
    beside: Sequence[RolloutResult] = (),
) -> tuple[RolloutResult, ...]:
    """Return a step's results once a small enough share of them and of `beside` failed.

    That is at most `train.max_failed_share`. While servers or sandboxes fail too many, wait, longer
    each time, and call `again`, which runs the failed ones again and returns the new results.

    Raises:
        TrainingError: other failures are too many, or `AWAY_LIMIT_S` passed.
    """
    began = monotonic()
    for number in itertools.count():
        step = (*beside, *results)
        problem = _why_not(step, config.train.max_failed_share)
        if problem is None:
            return results
        num_lost = sum(map(_is_lost, results))
        num_failed = sum(result.error is not None for result in step)
        # Even if every lost rollout works in the end, the other failures stop the step.
        hopeless = too_many(num_failed - num_lost, len(step), config.train.max_failed_share)
        if not num_lost or hopeless or monotonic() - began >= AWAY_LIMIT_S:
            raise TrainingError(problem)
        if not number:
            notify(
                f"step {results[0].request.train_step} waits: servers or sandboxes failed "
                f"{num_lost} of its {len(results)} rollouts. They are run again until they work, "
                f"for at most {AWAY_LIMIT_S:g} s."
            )
        # `gather` has already waited `_NUM_REPEATS` times.
        await _wait(number + _NUM_REPEATS)
        results = await again()
    raise AssertionError("unreachable: the loop returns or raises")


def _why_not(results: Sequence[RolloutResult], max_failed_share: float) -> str | None:
    """Return why a step must not be trained on these results; the most common error is quoted."""
    errors = [result.error for result in results if result.error is not None]
    if not too_many(len(errors), len(results), max_failed_share):
        return None
    # The most common error is the likely cause; the first one may be chance.
    kinds = Counter(error.type for error in errors)
    kind, count = kinds.most_common(1)[0]
    example = next(error for error in errors if error.type == kind)
    step = results[0].request.train_step
    which, why = f"all {len(results)}", "Nothing can be learned from them."
    if len(errors) < len(results):
        which = f"{len(errors)} of {len(results)}"
        why = (
            "Rollouts that end early fail less, so training on the others would favour the easy "
            f"ones (train.max_failed_share is {max_failed_share:g})."
        )
    return (
        f"{which} rollouts of step {step} failed, {count} of them with {kind}: "
        f"{as_sentence(example.message)} {why} Remove the cause and start the same command "
        "again: what failed is run again, and everything before it is kept."
    )
