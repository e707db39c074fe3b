"""The report of a rescoring: rewards, group advantages, and the rollouts that changed most.

Both runs are read from the store, a training step or a group at a time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from rolltree._helpers.finished import Finished
from rolltree.evaluation import Comparison, compare_reports, stored_report
from rolltree.insight.credit_states import credit_state
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.store.settings import without
from rolltree.training import CreditPolicy, assign_credit, load_train_config
from rolltree.training.config import REMOVED
from rolltree.values.errors import ConfigError, RolltreeError, record_error
from rolltree.values.types import RolloutResult

# The most rollouts that a report holds: those whose reward changed most.
NUM_KEPT = 100

Place: TypeAlias = tuple[str, int]  # request_id, trajectory_index


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """One rollout whose reward has changed; None stands for no reward."""

    request_id: str
    trajectory_index: int
    phase: str
    agent: str
    before: float | None
    after: float | None
    advantage_before: float | None = None
    advantage_after: float | None = None

    @property
    def place(self) -> Place:
        """The rollout's name."""
        return self.request_id, self.trajectory_index

    @property
    def difference(self) -> float:
        """After minus before; infinite if one of them is missing."""
        if self.before is None or self.after is None:
            return math.inf
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """How the rollouts of one phase changed."""

    phase: str
    num_rollouts: int
    num_changed: int
    num_lost: int  # had a reward and have none now
    num_gained: int  # had none and have one now
    # The means, paired by example; None if no example has a reward in both.
    rewards: Comparison | None


@dataclass(frozen=True, slots=True)
class CreditChange:
    """How the new rewards change the advantages of the groups, by the run's own credit."""

    # The credit of the run's training, or GRPO's.
    name: str
    num_groups: int
    # Groups in which every advantage is 0, so that they teach nothing.
    num_flat_before: int
    num_flat_after: int
    num_rollouts: int
    # Rollouts that were reinforced and are now discouraged, or the other way round.
    num_turned: int
    # The mean of the absolute differences over the rollouts that have an advantage in both.
    mean_change: float


@dataclass(frozen=True, slots=True)
class RescoreReport(Finished):
    """The report of a rescoring; `changes` are the largest changes, at most `NUM_KEPT`."""

    source: str
    run: str
    scored_by: str
    num_rollouts: int
    num_changed: int
    num_failed: int
    failure: str | None
    # Rollouts that had failed before they were scored, so that they could not be scored.
    num_unplayed: int
    unplayed: str | None
    phases: tuple[PhaseChange, ...]
    credit: CreditChange | None
    changes: tuple[RolloutChange, ...]
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)


def rescore_report(
    source: Run, target: Run, scored_by: str, where: Mapping[str, Any], elapsed_s: float
) -> RescoreReport:
    """Compare the rollouts of a run with the same ones after rescoring."""
    before = {
        (request_id, index): (phase, agent, reward)
        for request_id, index, phase, agent, reward in source.columns(_REWARDS, **where)
    }
    phases: dict[str, Counter[str]] = {}
    kept: list[tuple[float, int, RolloutChange]] = []
    numbers = count()
    for request_id, index, phase, agent, reward in target.columns(_REWARDS, **where):
        old = before[request_id, index][2]
        changed = not _equal(old, reward)
        counts = phases.setdefault(phase, Counter())
        counts["num_rollouts"] += 1
        counts["num_changed"] += changed
        counts["num_lost"] += old is not None and reward is None
        counts["num_gained"] += old is None and reward is not None
        if changed:
            change = RolloutChange(request_id, index, phase, agent, old, reward)
            # A heap of the largest changes: 100,000 of them need not be in memory. The number keeps
            # the first of equals, and changes are never compared.
            entry = (abs(change.difference), -next(numbers), change)
            (heapq.heappush if len(kept) < NUM_KEPT else heapq.heappushpop)(kept, entry)
    failures: dict[bool, list[str]] = {True: [], False: []}
    for error_phase, errors in target.columns(("error_phase", "errors"), **where, status="error"):
        said = f"{errors[0]['type']}: {errors[0]['message']}" if errors else "unknown"
        failures[error_phase == "scoring"].append(said)
    changes = [change for _, _, change in sorted(kept, reverse=True, key=lambda entry: entry[:2])]
    credit, advantages = _credit_change(source, target, where, {each.place for each in changes})
    pairs = [advantages.get(change.place, (None, None)) for change in changes]
    return RescoreReport(
        source=str(source.path),
        run=str(target.path),
        scored_by=scored_by,
        num_rollouts=sum(counts["num_rollouts"] for counts in phases.values()),
        num_changed=sum(counts["num_changed"] for counts in phases.values()),
        num_failed=len(failures[True]),
        failure=next(iter(failures[True]), None),
        num_unplayed=len(failures[False]),
        unplayed=next(iter(failures[False]), None),
        phases=tuple(
            PhaseChange(phase, **counts, rewards=_compared(source, target, phase))
            for phase, counts in phases.items()
        ),
        credit=credit,
        changes=tuple(
            replace(change, advantage_before=before, advantage_after=after)
            for change, (before, after) in zip(changes, pairs, strict=True)
        ),
        elapsed_s=elapsed_s,
    )


_REWARDS = ("request_id", "trajectory_index", "phase", "agent", "reward")


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _compared(source: Run, target: Run, phase: str) -> Comparison | None:
    try:
        return compare_reports(stored_report(source, phase), stored_report(target, phase))
    except ConfigError:  # nothing was scored in both
        return None


# -- advantages ----------------------------------------------------------------------------------


def _credit_change(
    source: Run, target: Run, where: Mapping[str, Any], wanted: set[Place]
) -> tuple[CreditChange | None, dict[Place, tuple[float | None, float | None]]]:
    """Return what changed in the advantages, and the advantages of the wanted rollouts."""
    name, policy = _credit_of(source)
    advantages: dict[Place, tuple[float | None, float | None]] = {}
    num_groups = num_flat_before = num_flat_after = num_rollouts = num_turned = 0
    total = 0.0
    for unit in _units(source, where):
        old, new = (_for_credit(run, {**where, **unit}) for run in (source, target))
        before, after = (_advantages(results, name, policy) for results in (old, new))
        groups: dict[str, list[Place]] = {}
        for result in old:
            places = groups.setdefault(result.request.group_id, [])
            places += [(result.request.request_id, at) for at in range(len(result.states))]
        for places in groups.values():
            num_groups += 1
            num_flat_before += not any(before.get(place) for place in places)
            num_flat_after += not any(after.get(place) for place in places)
        for place in before.keys() | after.keys():
            one, other = before.get(place), after.get(place)
            if place in wanted:
                advantages[place] = (one, other)
            if one is not None and other is not None:
                num_rollouts += 1
                num_turned += one * other < 0
                total += abs(other - one)
    if not num_groups:
        return None, advantages
    mean = total / max(1, num_rollouts)
    return CreditChange(
        name, num_groups, num_flat_before, num_flat_after, num_rollouts, num_turned, mean
    ), advantages


def _credit_of(run: Run) -> tuple[str, CreditPolicy]:
    """Return the credit of a training run; GRPO's for any other run."""
    if run.meta.get("kind") == "train":
        try:
            algorithm = load_train_config(without(run.config, REMOVED)).algorithm
            return algorithm.resolve().credit, algorithm.policy(None)
        except RolltreeError:  # settings of another version
            pass
    return "grpo", CreditPolicy()


def _units(run: Run, where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a filter for each unit that credit is assigned to: training steps, or else groups.

    A unit is read from the store when its turn comes, so memory holds one of each run at a time.
    """
    steps: dict[tuple[str, int], None] = {}
    groups: dict[tuple[str, str], None] = {}
    for phase, step, group in run.columns(("phase", "train_step", "group_id"), **where):
        if step is None:
            groups[phase, group] = None
        else:
            steps[phase, step] = None
    # Held-out evaluations of a training run have no credit: only what was trained counts there.
    if steps:
        return [{"phase": phase, "train_step": step} for phase, step in steps]
    return [{"phase": phase, "group_id": group} for phase, group in groups]


def _for_credit(run: Run, where: Mapping[str, Any]) -> list[RolloutResult]:
    """Return results with the fields that credit reads; unscored rollouts count as failed."""
    unscored = record_error(ValueError("no reward"), "scoring")
    results = []
    for result in decode_results(run.rollouts(**where), tokens=False):
        states = tuple(map(credit_state, result.states))
        for state in states:
            if state.get("error") is None and state.get("reward") is None:
                state["error"] = unscored
        results.append(RolloutResult(result.request, states, result.error))
    return results


def _advantages(
    results: list[RolloutResult], credit: str, policy: CreditPolicy
) -> dict[Place, float | None]:
    places = [
        (result.request.request_id, index)
        for result in results
        for index in range(len(result.states))
    ]
    first = assign_credit(results, credit, policy).first_advantages(results)
    return {place: first.get(place) for place in places}
