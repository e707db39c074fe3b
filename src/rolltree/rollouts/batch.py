"""A batch for training from requests: rollouts, credit, samples, and what each sample is.

`generate_batch` is `RolloutEngine.generate_batch`. It knows results and samples; credit is handed
in, because it is training's. It leaves out storing: `training.collect` stores what it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rolltree.samples import SampleBatch, TruncationPolicy, build_samples
from rolltree.samples.metadata import sample_meta
from rolltree.types import ErrorRecord, RolloutResult, Sample, Scope

Credit = Callable[[Sequence[RolloutResult]], Any]
"""Writes advantages into the states of results, as `rolltree.training.assign_credit` does."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that is not in the batch, and the failures that are why."""

    group_id: str
    num_members: int
    errors: tuple[ErrorRecord, ...]


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """What became of some requests.

    `results` has one result per request, failed and dropped ones too. `batch` holds the samples,
    `meta[i]` says what sample i is: one dict per rollout in it, see `samples.metadata`.
    """

    results: tuple[RolloutResult, ...]
    batch: SampleBatch
    meta: tuple[tuple[dict[str, Any], ...], ...]
    dropped: tuple[DroppedGroup, ...]

    @property
    def samples(self) -> list[Sample]:
        """The samples."""
        return self.batch.samples

    @property
    def num_failed(self) -> int:
        """How many episodes failed."""
        return sum(result.error is not None for result in self.results)


def make_batch(
    results: Sequence[RolloutResult],
    *,
    scope: Scope = "turn",
    credit: Credit | None = None,
    whole_groups: bool = False,
    truncation: TruncationPolicy | None = None,
    max_seq_len: int | None = None,
) -> GeneratedBatch:
    """Turn results into samples; see `RolloutEngine.generate_batch`."""
    failed: dict[str, list[ErrorRecord]] = {}
    for result in results:
        if result.error is not None:
            failed.setdefault(result.request.group_id, []).append(result.error)
    dropped: list[DroppedGroup] = []
    kept = [result for result in results if result.error is None]
    if whole_groups:
        kept = [result for result in kept if result.request.group_id not in failed]
        sizes = [result.request.group_id for result in results]
        dropped = [DroppedGroup(g, sizes.count(g), tuple(e)) for g, e in failed.items()]
    if credit is not None:
        credit(kept)
    states = []
    for result in kept:
        for state in result.states:
            state.setdefault("request_id", result.request.request_id)
            if state.get("error") is None:  # a delegated rollout may have failed alone
                states.append(state)
    batch = build_samples(states, scope, truncation=truncation, max_seq_len=max_seq_len)
    meta = tuple(tuple(sample_meta(sample, states)) for sample in batch.samples)
    return GeneratedBatch(tuple(results), batch, meta, tuple(dropped))
