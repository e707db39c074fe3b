"""Which tasks a step trains on: a pure function of the run's seed and the step's number.

Nothing here depends on what was drawn before, so a run that was killed asks for exactly the same
episodes again. It knows requests and their seeds. It leaves out curricula.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rolltree.errors import ConfigError
from rolltree.rollouts import (
    GroupStrategy,
    RolloutSource,
    derive_seed,
    example_request,
    resolve_sampling,
)
from rolltree.training.config import TrainConfig
from rolltree.types import RolloutRequest, SamplingParams

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

    No example comes again before every other one has come, also across steps.

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
