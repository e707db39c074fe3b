"""The samples of one optimizer step as packs: weighted, checked, without what trains nothing.

    coefficients over all records -> drop what has no gradient -> prune -> pack within the budget

A record's coefficient becomes its weight, so the loss of a pack is a plain weighted sum and packing
changes nothing. A token's lag, its age, is the version of the weights before the step minus the
version that sampled it: per token, because weights may change during a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rolltree.samples import concat_records, pack_samples, prune_sample, take_records
from rolltree.samples.resolve import resolve_tokens
from rolltree.training.algorithms import Algorithm
from rolltree.training.coefficients import coefficients, rollout_means
from rolltree.training.config import TrainConfig
from rolltree.training.layout import NO_RECORDS, BoolArray, Forest, collate
from rolltree.values.errors import TokenError
from rolltree.values.types import Records, RolloutResult, Sample


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass: a forest, and its records' place among all records of the step.

    A filler has an empty `span` and no samples: it computes one token so that ranks stay in step.
    """

    forest: Forest
    samples: tuple[Sample, ...]
    span: slice

    @property
    def is_filler(self) -> bool:
        """Whether it trains nothing."""
        return not self.samples


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's packs of a step, and the records and samples of all ranks in pack order.

    `records.weight` is the loss coefficient. `counted` has all records that count in the
    normalizers, in the order of the samples; `num_skipped` of them have a gradient of zero for any
    model output and are not in `records`. `num_tokens` counts the tokens of one pass over the batch
    on all ranks. `is_whole`: one pack of one rank has all records, so that nothing spans packs or
    ranks; the same on every rank.
    """

    packs: tuple[Pack, ...]
    records: Records
    counted: Records
    samples: tuple[Sample, ...]
    num_skipped: int
    num_tokens: int
    is_whole: bool


def build_batch(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    max_tokens: int,
    *,
    skip_zero_advantage: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> Batch:
    """Turn samples into packs of at most `max_tokens` tokens, the same number for every rank.

    Every rank passes the same samples and gets its own packs; coefficients are those of a single
    rank.

    With `skip_zero_advantage`, rollouts whose advantages are all zero are left out after they have
    counted in the normalizers: the gradient is the same. If all advantages are zero, one rollout
    stays, so that there is something to measure.

    `Trainer.trainable` has masked what cannot be computed.

    Raises:
        TokenError: there is no loss record at all.
    """
    # Masked tokens may lack the values that a loss reads.
    used = [_select(sample, sample.records.weight != 0) for sample in samples]
    used = [sample for sample in used if len(sample.records)]
    if not used:
        raise TokenError(NO_RECORDS)
    records = concat_records([sample.records for sample in used])
    weight = coefficients(records, algorithm.aggregation, algorithm.fixed_length)
    # All terms of a rollout share one ratio, and each token moves it.
    if algorithm.over_rollout:
        weight = rollout_means(records, weight)
    # Only now, after everything has counted in the normalizers.
    keep = _with_gradient(records) if skip_zero_advantage else np.ones(len(records), np.bool_)
    edges = np.cumsum([0, *(len(sample.records) for sample in used)])
    parts = []
    for sample, first, stop in zip(used, edges[:-1], edges[1:], strict=True):
        weighted = replace(sample, records=replace(sample.records, weight=weight[first:stop]))
        parts.append(prune_sample(_select(weighted, keep[first:stop])))
    packs: list[Pack] = []
    joined: list[Records] = []
    first = num_tokens = 0
    every: list[Sample] = []
    # Every rank lays out all packs, so all know the same spans and counts without a collective.
    for owner, batches in enumerate(pack_samples(parts, max_tokens, num_ranks).ranks):
        for chosen in batches:
            forest = collate(chosen)
            real = () if chosen[0].info.get("filler") else chosen
            size = len(forest.records) if real else 0
            if owner == rank:
                packs.append(Pack(forest, real, slice(first, first + size)))
            if real:
                joined.append(forest.records)
            every.extend(real)
            first += size
            num_tokens += forest.num_tokens
    together = concat_records(joined)
    num_skipped = len(records) - len(together)
    return Batch(
        packs=tuple(packs),
        records=together,
        counted=replace(records, weight=weight),
        samples=tuple(every),
        num_skipped=num_skipped,
        num_tokens=num_tokens,
        is_whole=len(joined) == 1,
    )


def split_rollouts(samples: Sequence[Sample], num_parts: int) -> list[list[Sample]]:
    """Cut samples into at most `num_parts` mini-batches of whole rollouts, in their order.

    The cut is the same in every scope: a tree that holds rollouts of several parts comes back in
    each of them with those rollouts' records. Neighbours, such as the members of a group, stay
    together. Rollouts whose tokens are all masked are left out, as `build_batch` would.
    """
    if num_parts == 1 or not has_loss(samples):
        return [list(samples)]
    rollouts = np.unique(
        np.concatenate([s.records.rollout[s.records.weight != 0] for s in samples])
    )
    parts = []
    # By rollout, not by sample: the same cut in every scope and on every rank (design/0010).
    for chosen in np.array_split(rollouts, min(num_parts, len(rollouts))):
        kept = [_select(s, np.isin(s.records.rollout, chosen)) for s in samples]
        parts.append([sample for sample in kept if len(sample.records)])
    return parts


def has_loss(samples: Sequence[Sample]) -> bool:
    """Return whether a token of the samples is trained."""
    return any(sample.records.weight.any() for sample in samples)


def _select(sample: Sample, keep: BoolArray) -> Sample:
    return sample if keep.all() else replace(sample, records=take_records(sample.records, keep))


def _with_gradient(records: Records) -> BoolArray:
    """Return a mask of the records of rollouts with an advantage; of the first one if none has."""
    moving = np.unique(records.rollout[records.advantage != 0])
    # Keep whole rollouts, because a loss over rollouts needs all their records.
    return np.isin(records.rollout, moving if len(moving) else records.rollout[:1])


# -- staleness -----------------------------------------------------------------------------------


def staleness_limit(config: TrainConfig) -> int:
    """Return the largest lag at which a token is trained: `max_lag`, or `async_steps`."""
    section = config.train
    return section.async_steps if section.max_lag is None else section.max_lag


def mask_stale(
    samples: Sequence[Sample], version: int, max_lag: int
) -> tuple[list[Sample], dict[str, float]]:
    """Give tokens older than `max_lag` weight 0, as if they were context.

    Args:
        samples: what a step trains on.
        version: of the weights before the step.
        max_lag: the largest lag that is trained.

    Returns:
        The samples, and metrics over their trainable tokens: `async/lag_max`, `async/stale_share`
        and `async/num_stale_tokens`.
    """
    masked = []
    num_tokens = num_stale = largest = 0
    for sample in samples:
        records = sample.records
        # Per token, because weights may change in the middle of a rollout.
        lag, counts = version - records.version, records.weight != 0
        stale = counts & (lag > max_lag)
        num_tokens += int(counts.sum())
        num_stale += int(stale.sum())
        largest = max(largest, int(lag[counts].max(initial=0)))
        if stale.any():
            weight = np.where(stale, np.float32(0), records.weight)
            sample = replace(sample, records=replace(records, weight=weight))
        masked.append(sample)
    return masked, {
        "async/lag_max": float(largest),
        "async/stale_share": num_stale / max(1, num_tokens),
        "async/num_stale_tokens": float(num_stale),
    }


def newest_version(results: Sequence[RolloutResult]) -> int | None:
    """Return the highest version that sampled a token of `results`; None without any."""
    newest = None
    for result in results:
        for state in result.states:
            tree, handles = resolve_tokens(0, state["trajectory"], {})
            for handle in handles:
                versions = tree.versions(handle) if handle >= 0 else ()
                if len(versions):
                    newest = max(int(np.max(versions)), -1 if newest is None else newest)
    return newest
