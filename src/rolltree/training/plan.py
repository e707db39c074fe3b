"""The rollouts that a step asks for, and getting them: stored ones first, missing ones now.

Tasks and seeds are a pure function of the run's seed and the step, so a run that was killed asks
for exactly the same rollouts again. Each finished rollout is stored before it counts; when the
source compares the members of a group, a group is stored whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from rolltree.errors import ConfigError, TrainingError
from rolltree.rollouts import (
    GroupStrategy,
    RolloutEngine,
    RolloutSource,
    derive_seed,
    example_request,
    resolve_sampling,
)
from rolltree.rollouts.record import decode_results, run_stored
from rolltree.store import Run
from rolltree.training.config import TrainConfig
from rolltree.types import RolloutRequest, RolloutResult, SamplingParams

PHASE = "train"


def training_sampling(config: TrainConfig, source: RolloutSource) -> SamplingParams:
    """Return how training rollouts are sampled: the config's fields over the source's.

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
    if sampling.top_p != 1.0 or sampling.top_k != 0 or sampling.temperature <= 0:
        raise ConfigError(
            f"{source.env_id!r} samples with temperature {sampling.temperature}, top_p "
            f"{sampling.top_p} and top_k {sampling.top_k}. Training needs the full distribution "
            "(top_p 1, top_k 0, temperature above 0), because importance ratios are computed from "
            "it. Change the environment's sampling_args, or set sampling.temperature."
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
            rng = np.random.default_rng(derive_seed(seed, "order", epoch))
            orders[epoch] = rng.permutation(num_examples)
        chosen.append(int(orders[epoch][index]))
    return chosen


def step_requests(config: TrainConfig, source: RolloutSource, step: int) -> list[RolloutRequest]:
    """Return the requests of one step, group after group.

    Example: ids `train/000012/g03/0` to `train/000012/g03/7` for the fourth task of step 12.

    Raises:
        ConfigError: the source has no training data, or sampling that cannot be trained on.
    """
    num_examples = _num_examples(source)
    indices = task_indices(config.run.seed, step, config.algorithm.groups_per_step, num_examples)
    groups = {f"g{group:02d}": (index, (group,)) for group, index in enumerate(indices)}
    return _requests(config, source, step, groups)


def replacement_requests(
    config: TrainConfig, source: RolloutSource, step: int, *, first: int, count: int
) -> list[RolloutRequest]:
    """Return the requests of `count` further groups of a step, from the `first`-th one (0) on.

    Their tasks are a shuffled order of those that the step did not plan (all, if it planned all).
    Example: ids `train/000012/x00/0` to `train/000012/x00/7`.
    """
    num_examples, seed = _num_examples(source), config.run.seed
    planned = task_indices(seed, step, config.algorithm.groups_per_step, num_examples)
    others = sorted(set(range(num_examples)) - set(planned)) or list(range(num_examples))
    order = np.random.default_rng(derive_seed(seed, "replacement", step)).permutation(others)
    groups = {
        f"x{n:02d}": (int(order[n % len(order)]), ("replacement", n))
        for n in range(first, first + count)
    }
    return _requests(config, source, step, groups)


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
    chosen: Mapping[str, tuple[int, tuple[str | int, ...]]],
) -> list[RolloutRequest]:
    """Return the requests of the groups of one step: label -> (example, what its seed is of)."""
    sampling = training_sampling(config, source)
    groups = []
    for label, (index, parts) in chosen.items():
        name = f"{PHASE}/{step:06d}/{label}"
        groups.append(
            example_request(
                source.env_id,
                source.example("train", index),
                group_id=name,
                seed=derive_seed(config.run.seed, PHASE, step, *parts),
                sampling=sampling,
                phase=PHASE,
                train_step=step,
            )
        )
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
    async with aclosing(run_stored(engine, missing, run, replace_failed=True)) as batches:
        async for batch in batches:
            found |= {result.request.request_id: result for result, _ in batch}
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
