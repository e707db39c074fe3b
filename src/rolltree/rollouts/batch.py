"""Training samples of the results of some requests: `RolloutEngine.generate_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from rolltree.rollouts.engine import RolloutEngine
from rolltree.samples import (
    DEFAULT_SCOPE,
    SampleBatch,
    TruncationEffect,
    TruncationPolicy,
    build_samples,
    sample_meta,
)
from rolltree.values.types import ErrorRecord, RolloutRequest, RolloutResult, Sample, Scope, State


class CreditAssigned(Protocol):
    """The result of credit assignment: the states to train on, and an advantage per call."""

    @property
    def trained(self) -> Sequence[State]:
        """The states to train on."""

    @property
    def advantages(self) -> Sequence[NDArray[Any]]:
        """The advantages of each trained state, `[num_calls]`."""

    @property
    def effects(self) -> Sequence[TruncationEffect]:
        """What truncation does to each trained state."""


Credit = Callable[[Sequence[RolloutResult]], CreditAssigned]
"""Turns results into advantages, as `rolltree.training.assign_credit` does."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that was left out of the batch because of the failures in `errors`."""

    group_id: str
    num_members: int
    errors: tuple[ErrorRecord, ...]


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """The outcome of some requests.

    `results` has one result per request, including failed and dropped ones. `batch` holds the
    samples, and `meta[i]` one dict per rollout in sample i; see `sample_meta`.
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
        """Number of episodes that failed."""
        return sum(result.error is not None for result in self.results)


async def generate_batch(
    engine: RolloutEngine,
    requests: Iterable[RolloutRequest],
    *,
    scope: Scope = DEFAULT_SCOPE,
    credit: Credit | None = None,
    whole_groups: bool = False,
    truncation: TruncationPolicy | None = None,
    max_seq_len: int | None = None,
) -> GeneratedBatch:
    """Run all requests and return training samples with their metadata.

    A failed episode does not affect the others. `whole_groups` drops the groups that it leaves
    incomplete, and `GeneratedBatch.dropped` lists them. A call whose tokens contradict
    themselves is left out alone, and `GeneratedBatch.batch.skipped` lists it.

    Args:
        requests: the requests to run.
        scope: how trajectories become samples; see `build_samples`.
        credit: computes the advantages, for example `partial(assign_credit, credit="grpo")`.
            Without it, the advantages of the states and steps are used, or 0 if they have none
            (`num_calls_without_advantage` counts these calls).
        whole_groups: leave out groups with a failed member.
        truncation: what to do with truncated episodes; default: what `credit` decided.
        max_seq_len: cut every path to this many tokens.
    """
    results = await engine.run_all(requests)
    failed: dict[str, list[ErrorRecord]] = {}
    for result in results:
        if result.error is not None:
            failed.setdefault(result.request.group_id, []).append(result.error)
    dropped: list[DroppedGroup] = []
    kept = [result for result in results if result.error is None]
    if whole_groups:
        # A group that lost a member has a different baseline than intended, and the members that
        # are left are the easier ones (design/0014-dying-servers.md).
        kept = [result for result in kept if result.request.group_id not in failed]
        sizes = [result.request.group_id for result in results]
        dropped = [DroppedGroup(g, sizes.count(g), tuple(e)) for g, e in failed.items()]
    states: Sequence[State] = []
    for result in kept:
        for state in result.states:
            state.setdefault("request_id", result.request.request_id)
    # A delegated rollout may have failed although its episode did not.
    if credit is None:
        states = [s for result in kept for s in result.states if s.get("error") is None]
        batch = build_samples(
            states, scope, truncation=truncation, max_seq_len=max_seq_len, skip_invalid=True
        )
    else:
        credited = credit(kept)
        states = credited.trained
        batch = build_samples(
            states,
            scope,
            advantages=credited.advantages,
            truncation=credited.effects if truncation is None else truncation,
            max_seq_len=max_seq_len,
            skip_invalid=True,
        )
    meta = tuple(tuple(sample_meta(sample, states)) for sample in batch.samples)
    return GeneratedBatch(tuple(results), batch, meta, tuple(dropped))
