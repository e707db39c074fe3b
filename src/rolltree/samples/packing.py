"""Packs samples into micro-batches of a token budget, the same number of them on every rank.

A micro-batch is a tuple of samples, which `join_samples` puts side by side as one forest. Packing
is first-fit decreasing; trees over the budget are split, and the parts repeat their ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rolltree.samples.transform import blank_records, split_sample
from rolltree.values.errors import ConfigError
from rolltree.values.types import Sample

MicroBatch: TypeAlias = tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """`ranks[r][m]` is micro-batch m of rank r; every rank has the same number, which may be 0.

    Iterating yields the micro-batches of all ranks, rank by rank.

    `report`: `num_micro_batches` per rank, `num_tokens` computed, `num_repeated_tokens` of split
    trees, `num_untrained_samples` and `num_untrained_tokens` left out because nothing in them
    trains, `num_filler_batches` (one token and one record of weight 0, so that all ranks have the
    same number), `padding_waste` (unused share of the budget), `repetition_waste` (share of
    computed tokens that are repeated context) and `rank_imbalance` (tokens of the fullest rank over
    the mean, minus 1).
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    report: dict[str, float]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (batch for rank in self.ranks for batch in rank)

    def __len__(self) -> int:
        return sum(map(len, self.ranks))


def pack_samples(samples: Sequence[Sample], max_tokens: int, num_ranks: int = 1) -> PackedSamples:
    """Pack samples into micro-batches of at most `max_tokens`, balanced over `num_ranks`.

    Samples whose records all have weight 0 train nothing; they are left out and counted. The order
    of micro-batches has no effect, since normalizers are sums over all of them.

    Raises:
        ConfigError: `max_tokens` or `num_ranks` below 1.
        TokenError: one path is longer than `max_tokens`.
    """
    if max_tokens < 1 or num_ranks < 1:
        raise ConfigError(
            f"cannot pack into {num_ranks} ranks of {max_tokens} tokens; give at least 1 of each."
        )
    trained = [sample for sample in samples if (sample.records.weight != 0).any()]
    parts = [part for sample in trained for part in split_sample(sample, max_tokens)]
    # A part of a split tree may contain only masked tokens.
    parts = [part for part in parts if (part.records.weight != 0).any()]
    sizes = [part.num_tokens for part in parts]
    bins = _balance(sizes, _first_fit_decreasing(sizes, max_tokens), max_tokens, num_ranks)
    ranks = _deal(sizes, bins, num_ranks)
    batches = tuple(
        tuple(tuple(parts[index] for index in members) or (_filler(),) for members in rank)
        for rank in ranks
    )
    return PackedSamples(batches, _report(samples, trained, parts, batches, max_tokens))


def _first_fit_decreasing(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the members of each bin, such that no bin overflows and there are few bins."""
    bins: list[list[int]] = []
    room = np.empty(0, np.int64)
    # Ties are broken by index, so that all ranks get the same packs without communicating.
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fits = room >= sizes[index]
        slot = int(fits.argmax()) if fits.any() else len(bins)
        if slot == len(bins):
            bins.append([])
            room = np.append(room, max_tokens)
        bins[slot].append(index)
        room[slot] -= sizes[index]
    return bins


def _balance(
    sizes: Sequence[int], bins: list[list[int]], max_tokens: int, num_ranks: int
) -> list[list[int]]:
    """Spread the samples evenly over the next multiple of `num_ranks` bins.

    The longest sample goes first, into the emptiest bin; if that overflows, the first-fit bins stay
    and empty ones are added.
    """
    # Rounded up, because ranks with different numbers of micro-batches would wait for each other
    # forever.
    count = -(-len(bins) // num_ranks) * num_ranks
    even: list[list[int]] = [[] for _ in range(count)]
    load = np.zeros(count, np.int64)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        slot = int(load.argmin())
        # If the emptiest bin has no room, none has.
        if load[slot] + sizes[index] > max_tokens:
            return _fill_empty(bins + [[] for _ in range(count - len(bins))])
        even[slot].append(index)
        load[slot] += sizes[index]
    return even


def _fill_empty(bins: list[list[int]]) -> list[list[int]]:
    """Move samples from full bins into empty ones, so that fewer micro-batches train nothing."""
    for empty in (members for members in bins if not members):
        donor = max(bins, key=len)
        if len(donor) > 1:
            # Every other one: bins are sorted by size, so both get large and small samples.
            empty.extend(donor[1::2])
            del donor[1::2]
    return bins


def _deal(sizes: Sequence[int], bins: list[list[int]], num_ranks: int) -> list[list[list[int]]]:
    """Deal equally many bins to each rank, the heaviest first, to the lightest rank so far."""
    per_rank = len(bins) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    weight = [sum(sizes[index] for index in members) for members in bins]
    for index in sorted(range(len(bins)), key=lambda i: (-weight[i], i)):
        open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank]
        rank = min(open_ranks, key=lambda r: load[r])
        ranks[rank].append(bins[index])
        load[rank] += weight[index]
    return ranks


def _filler() -> Sample:
    """Return a sample of one token that trains nothing, since its record has weight 0."""
    ints = np.zeros(1, np.int32)
    # The temperature is not 0, because logits are divided by it.
    record = blank_records(1, temperature=np.ones(1, np.float32))
    return Sample(ints, ints, ints + 1, record, origins=(), info={"filler": True})


def _report(
    samples: Sequence[Sample],
    trained: Sequence[Sample],
    parts: Sequence[Sample],
    ranks: Sequence[Sequence[MicroBatch]],
    max_tokens: int,
) -> dict[str, float]:
    batches = [batch for rank in ranks for batch in rank]
    totals = [sum(part.num_tokens for batch in rank for part in batch) for rank in ranks]
    num_tokens = sum(totals)
    repeated = sum(int(part.info.get("num_repeated", 0)) for part in parts)
    all_tokens = sum(sample.num_tokens for sample in samples)
    return {
        "num_micro_batches": len(ranks[0]),
        "num_tokens": num_tokens,
        "num_repeated_tokens": repeated,
        "num_untrained_samples": len(samples) - len(trained),
        "num_untrained_tokens": all_tokens - sum(sample.num_tokens for sample in trained),
        "num_filler_batches": sum("filler" in batch[0].info for batch in batches),
        "padding_waste": 1.0 - num_tokens / (len(batches) * max_tokens) if batches else 0.0,
        "repetition_waste": repeated / num_tokens if batches else 0.0,
        "rank_imbalance": max(totals) * len(totals) / num_tokens - 1.0 if batches else 0.0,
    }
